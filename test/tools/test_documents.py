"""Links between documents lead to files and headings that exist, every number has an origin, and quotes that programs no longer
print are found (dev/docs.py)."""
import json, re, sys
from pathlib import Path
import pytest
from dev.docs import DOCUMENTS, as_quoted
from suite import ROOT, assert_refused, assert_says, command, succeeds


# ---- links ----
def text_lines(document):
    """(number, line) of what does not stand between fences."""
    fenced = False
    for number, line in enumerate(Path(document).read_text().splitlines(), 1):
        if line.startswith("```"): fenced = not fenced
        elif not fenced: yield number, line


def anchors(document):
    """Those of its headings, as GitHub makes them."""
    found = []
    for _, line in text_lines(document):
        if title := re.match(r"#+ +(.*?) *$", line):
            found.append(re.sub(r"[^\w\- ]", "", title[1].lower()).replace(" ", "-"))
    return {f"{x}-{found[:i].count(x)}" if x in found[:i] else x for i, x in enumerate(found)}


def links(document):
    """(line's number, link) of a document's links within this repository."""
    for number, line in text_lines(document):
        # code is no link, but a link's text may be code
        if not re.search(r"\[[^\]]*`[^\]]*\]\(", line): line = re.sub(r"`[^`]*`", "", line)
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            if not re.match("https?:|mailto:", link): yield number, link


def test_every_link_to_a_file_or_heading_of_this_repository_leads_somewhere():
    listed = command("git ls-files *.md --cached --others --exclude-standard")
    if listed.status: pytest.skip("this is no git repository")
    documents = [path for x in listed.out.splitlines() if (path := ROOT / x).exists()]
    checked = [(document, *link) for document in documents for link in links(document)]
    assert len(checked) > 100
    for document, number, link in checked:
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{document}:{number}: {link}: there is no such file"
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), f"{document}:{number}: {link}: there is no such heading"


def test_notebooks_are_kept_without_outputs():
    notebooks = [json.loads(path.read_text()) for path in (ROOT / "doc").glob("*.ipynb")]
    cells = [cell for notebook in notebooks for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


def test_documents_show_the_pictures_that_their_script_draws(tmp_path):
    succeeds(sys.executable, "-m dev.tools.collectives", tmp_path)
    shown = "".join(path.read_text() for path in [*(ROOT / "doc").glob("*.md"), ROOT / "README.md"]).replace("](doc/", "](")
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (ROOT / "doc" / drawn.name).read_text() and f"]({drawn.name})" in shown, drawn.name


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall("^### (.*)", (ROOT / "doc/glossary.md").read_text(), re.M)
    assert len(terms) > 50 and terms == sorted(terms, key=str.lower)


# ---- numbers ----
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_number_of_a_document_stands_in_a_result_a_formula_or_a_source(document):
    succeeds(sys.executable, ["dev/docs.py", "--missing", document])


def test_a_document_whose_numbers_are_not_checked_is_refused():
    assert_refused(command(sys.executable, "dev/docs.py doc/gpu.md"), "doc/gpu.md is not one of the documents")


def test_every_stored_result_has_a_page():
    text = "".join((ROOT / page).read_text() for page in ["README.md", *DOCUMENTS])
    unnamed = [file.name for file in (ROOT / "doc/results").iterdir() if f"doc/results/{file.name}" not in text]
    assert not unnamed


NUMBERS = """\
# A page
<!-- from printf 'a 1.50\\nb 2.25\\n' -->

    a 1.50
    b 2.25

A and b take 3.75 ms, 60 % for b. It is 1.50 in section 2.5. Others found 40 GB (table 3).
<!-- numbers: 3.75 = 1.50 + 2.25; 60 = 100 * 2.25 / 3.75 -->
"""


@pytest.mark.parametrize("old, new, says", [
    ("", "", None), ("b 2.25\n\n", "b 2.26\n\n", "gives other numbers: b 2.26"), ("for b", "or 61 %", "61 % has no origin"),
    ("60 = ", "60 = 2 * ", "60 is quoted, but .* is 120"), ("1.50 + 2.25", "1.50 + 2.26", "2.26 stands in no block"),
    ("3.75 = 1.50 + 2.25;", "", "3.75 ms has no origin"), ("3.75 ms", "4.75 ms", "3.75 is not in this section"),
    ("60 = 100 * 2.25 / 3.75", "60: doc/glossary.md", "doc/glossary.md does not say 60"),
    ("(table 3)", "(the table)", "40 GB has no origin"),
    ("60 = 100 * 2.25 / 3.75", "60", "no = and no colon")])
def test_a_number_without_an_origin_or_with_a_wrong_one_is_found(old, new, says, tmp_path):
    document = tmp_path / "page.md"
    assert old in NUMBERS
    document.write_text(NUMBERS.replace(old, new, 1))
    run = command(sys.executable, ["dev/docs.py", document])
    assert run.status == (says is not None), run
    assert_says(run.said, says or r"3.75 ms  <- = 1.50 \+ 2.25")


@pytest.mark.parametrize("text, largest, too_large", [
    ("1.2", 1.25, 1.2501), ("1,200", 1250, 1251), ("17", 17.5, 17.51), ("1.2e-3", 0.00125, 0.001251), ("1e3", 1500, 1501)])
def test_a_quoted_number_may_be_rounded_as_it_is_written(text, largest, too_large):
    assert as_quoted(largest, text) and not as_quoted(too_large, text)


# ---- what documents quote ----
TRAIN = """\
for step in 1 2 10; do echo "step $step/10 | loss $(case $step in 1) echo 5 ;; 2) echo 2.5 ;; *) echo 0.5 ;; esac) | grad norm inf | $RANDOM tok/s"; done
echo "error: rank 2 has died  [ranks.h:7]" >&2
printf 'sample after step 10:\\nThe end. 1 2\\nThe very end.\\nsaved step 10\\n'
"""
DOCUMENT = """\
Some text, and what to type:

    make everything

A run, its command in two lines:

    $ for i in 1; do
    > bash train; done; mkdir runs
    step 2/10 | loss 2.5 | grad norm inf | ...
    ...
    step 10/10 | loss 0.4 | grad norm 7.25 | ...
    error: rank 2 has died  [ranks.h:7]

What the first command made is there for the second:

    $ ls -d runs
    runs
    $ echo 7 more
    7 more

And at the end of the first

    sample after step 10:
    No end.
    1.
    saved step 10
"""


@pytest.mark.rest
def test_quotes_that_programs_no_longer_print_are_found_and_other_numbers_are_written(tmp_path):
    def git(*arguments):
        return succeeds("git -c user.name=Test -c user.email=test@example.org", *arguments, cwd=tmp_path).out

    def outputs(status, *says, options=""):
        run = command(sys.executable, [ROOT / "dev/docs.py"], "--outputs", options, "doc.md", cwd=tmp_path)
        assert (run.status != 0) == status, run
        assert_says(run.said, *says)

    document = tmp_path / "doc.md"
    for name, text in ("Makefile", "all tools:\n"), ("train", TRAIN), ("doc.md", DOCUMENT): (tmp_path / name).write_text(text)
    git("init -q .")
    git("add .")
    git("commit -q -m test")
    # other numbers are no error; changed lines are shown below the quote, and what a model wrote line by line
    outputs(0, r"^    \+ step 10/10 \| loss 0.5 \| grad norm inf \| ...$", r"^    \+ The very end.$",
            "6 quoted lines are the same, 3 have other numbers, 0 are gone", "not compared.* 3$")
    outputs(0, options="--write")
    outputs(0, "9 quoted lines are the same, 0 have other numbers, 0 are gone")
    assert git("diff --numstat") == "3\t3\tdoc.md\n"
    document.write_text(document.read_text().replace("rank 2 has died", "rank 2 has left").replace("step 2/10", "step 3/10"))
    outputs(1, r"^    \? error: rank 2 has died  \[ranks.h:7\]$", "line 12 is no longer printed", "line 9 is no longer printed")
    (tmp_path / "Makefile").write_text("all tools:\n\t@echo no >&2; false\n")
    git("commit -q -a -m test")
    outputs(1, "cannot be built")
