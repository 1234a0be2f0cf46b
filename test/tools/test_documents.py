"""Links between documents lead to files and headings that exist, and dev/doc_outputs.pl finds quotes that programs no longer print."""
import re
from pathlib import Path
import pytest
from suite import ROOT, command


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
        if not re.search(r"\[[^\]]*`[^\]]*\]\(", line): line = re.sub(r"`[^`]*`", "", line)  # code is no link, but a link's text may be code
        for link in re.findall(r"\]\(([^)\s]+)\)", line):
            if not re.match("https?:|mailto:", link): yield number, link


def broken_links(document):
    for number, link in links(document):
        path, _, anchor = link.partition("#")
        file = document.parent / path if path else document
        if not file.exists(): yield f"{document}:{number}: {link}: there is no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file): yield f"{document}:{number}: {link}: there is no such heading"


def test_every_link_to_a_file_or_heading_of_this_repository_leads_somewhere():
    listed = command("git ls-files *.md --cached --others --exclude-standard")
    if listed.status: pytest.skip("this is no git repository")
    documents = [path for x in listed.out.splitlines() if (path := ROOT / x).exists()]
    assert sum(len([*links(x)]) for x in documents) > 100
    assert [wrong for x in documents for wrong in broken_links(x)] == []


@pytest.mark.parametrize("text, wrong", [
    ("[a](other.md) [b](other.md#two-words-a-heading) [c](other.md#twice-1) [d](https://no.such.example/x)", ""),
    ("[a](nothing.md)", "nothing.md: there is no such file"), ("[a](other.md#three-words)", "other.md#three-words: there is no such heading"),
    ("[a](#nothing)", "#nothing: there is no such heading"), ("[a](other.md#twice-2)", "other.md#twice-2: there is no such heading"),
    ("[`a`](nothing.md)", "nothing.md: there is no such file"), ("say `x[1](nothing.md)` here", "")],
    ids=["right", "file", "heading", "own_heading", "third_of_two", "text_is_code", "code"])
def test_broken_links_are_found(tmp_path, text, wrong):
    (tmp_path / "other.md").write_text("# Two words: a `heading`\n## twice\n## twice\n")
    (tmp_path / "one.md").write_text(text + "\n")
    assert [*broken_links(tmp_path / "one.md")] == [f"{tmp_path}/one.md:1: {wrong}"] * bool(wrong)


# ---- what documents quote ----
TRAIN = """\
for step in 1 2 10; do echo "step $step/10 | loss $(echo 5 $step | awk '{ print $1 / $2 }') | grad norm inf | $RANDOM tok/s"; done
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

And at the end of the first

    sample after step 10:
    No end.
    1.
    saved step 10
"""


@pytest.mark.rest
def test_quotes_that_programs_no_longer_print_are_found_and_other_numbers_are_written(tmp_path):
    def git(*arguments):
        run = command("git -c user.name=Test -c user.email=test@example.org", *arguments, cwd=tmp_path)
        assert run.status == 0, run
        return run.out

    def outputs(*arguments):
        return command("perl", [ROOT / "dev/doc_outputs.pl"], *arguments, "doc.md", cwd=tmp_path)

    document = tmp_path / "doc.md"
    for name, text in ("Makefile", "all tools:\n"), ("train", TRAIN), ("doc.md", DOCUMENT): (tmp_path / name).write_text(text)
    git("init -q .")
    git("add .")
    git("commit -q -m test")
    run = outputs()
    assert run.status == 0, run  # other numbers are no error; changed lines are shown below the quote, and what a model wrote line by line
    for line in "    + step 10/10 | loss 0.5 | grad norm inf | ...", "    + The very end.": assert line in run.said.splitlines(), run
    assert "5 quoted lines are the same, 3 have other numbers, 0 are gone" in run.said and re.search("not compared.* 3$", run.said, re.M), run
    assert outputs("--write").status == 0
    run = outputs()
    assert run.status == 0 and "8 quoted lines are the same, 0 have other numbers, 0 are gone" in run.said, run
    assert git("diff --numstat") == "3\t3\tdoc.md\n"
    document.write_text(document.read_text().replace("rank 2 has died", "rank 2 has left").replace("step 2/10", "step 3/10"))
    run = outputs()
    assert run.status != 0 and "    ? error: rank 2 has died  [ranks.h:7]" in run.said.splitlines(), run
    for number in 12, 9: assert f"line {number} is no longer printed" in run.said, run  # words that changed; a line of another step
    (tmp_path / "Makefile").write_text("all tools:\n\t@echo no >&2; false\n")
    git("commit -q -a -m test")
    run = outputs()
    assert run.status != 0 and "cannot be built" in run.said, run
