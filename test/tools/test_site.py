"""make site: every hunk of the program reader has its note, links lead somewhere, and pages are what a reader in a browser expects.
Screenshots are kept in build/site_shots."""
import functools, re, shutil, sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit
import pytest
from suite import ROOT, TOKENS, command, once, succeeds, trained

SITE, PYTHON = ROOT / "build/site", "build/site_venv/bin/python"
LONG = 200


# ---- notes, which need Python alone ----
@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "dev/site", tmp_path / "dev/site")
    (tmp_path / "test").mkdir()
    shutil.copy(ROOT / "dev/site/programs.toml", tmp_path / "test")
    for program in ROOT.glob("train_gpt2_*.cu"): shutil.copy(program, tmp_path)
    return tmp_path


def notes(folder, start=command):
    return start([sys.executable, "dev/site/programs.py"], cwd=folder)


def test_every_hunk_of_two_neighbouring_programs_has_a_note_and_every_note_a_hunk():
    notes(ROOT, succeeds)


FORWARD = "\nstatic void gpt2_forward(GPT2* g) {"


@pytest.mark.parametrize("file, change, says", [
    ("dev/site/programs.toml", lambda x: re.sub("\nunit_release = .*", "", x, count=1),
     "zero: no note for unit_release, which differs from ddp"),
    ("dev/site/programs.toml", lambda x: x + 'no_function = "Text."\n', "cp: there is no difference in 'no_function'"),
    ("train_gpt2_zero.cu", lambda x: x.replace(FORWARD, FORWARD + " (void)g;"),
     "no note for gpt2_forward, which differs from ddp")],
    ids=["no_note", "no_difference", "new_hunk"])
def test_a_note_or_hunk_alone_is_named(copy, file, change, says):
    text = (copy / file).read_text()
    (copy / file).write_text(change(text))
    assert change(text) != text
    run = notes(copy)
    assert run.status != 0 and re.search(says, run.said), run


# ---- the program reader, which needs Pygments as well ----
def test_the_reader_shows_what_llmc_does_where_a_program_calls_it_and_of_3d_what_is_in_neither_parent(monkeypatch):
    pytest.importorskip("pygments")
    monkeypatch.syspath_prepend(ROOT / "dev/site")
    import reader, programs
    for pair, called, shown in [(("ddp", "pp"), "pipeline_slot", "pipeline_backward"),
                                (("zero", "fsdp"), "layout_group", "layout_group"),
                                (("single", "ddp"), "comm_all_reduce", "ring_step")]:
        folds = re.findall(f"<details><summary>{called} .*?</details>", reader.Page(*pair).body(), re.S)
        assert len(folds) == 1 and shown in folds[0], pair
    page, text = reader.Merged().body(), programs.lines("3d")
    assert re.findall(r'id="R(\d+)"', page) == [str(n + 1) for n in range(len(text))]
    hunks = "".join(re.findall('<section class="hunk".*?</section>', page, re.S))
    shown = {text[int(n) - 1] for n in re.findall(r'id="R(\d+)"', hunks)}
    in_a_parent = {line for parent in ("tp", "pp") for line in programs.lines(parent)}
    assert {line for line in text if line.strip()} - in_a_parent <= shown
    assert len(shown) < len(text) / 3


# ---- steppers ----
@pytest.fixture
def stepper(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "dev/site")
    import stepper
    return stepper


STEPPERS = ["ddp", "zero", "fsdp", "pp", "cp"]


@pytest.mark.parametrize("name", STEPPERS)
def test_a_stored_micro_step_is_what_the_program_does_today_in_order_and_bytes(name, stepper, tmp_path):
    """Otherwise: make programs && python3 dev/site/stepper.py"""
    ranks, options = stepper.options(name)
    run = trained(name, options.replace("data/train.bin", str(TOKENS)), "--trace", tmp_path / "trace.json", ranks=ranks)
    today, (command, events) = stepper.read(tmp_path / "trace.json"), stepper.stored()[name]
    assert stepper.order(today) == stepper.order(events) and options in command
    for some in today, events:
        assert sum(map(stepper.sent, [e for e in some if e.rank == 0 and e.issued is not None])) == run.steps[-1]["comm_bytes"]


def held(stepper, name):
    """Of each event, in order: the rank, what is new, and of each rank what it does and its buffers."""
    return [(rank, said, [(doing, buffers) for doing, buffers, _ in ranks])
            for _, rank, said, ranks in stepper.frames(name, stepper.stored()[name][1])]


def test_in_a_stepper_a_rank_computes_with_what_its_buffers_hold_and_ends_with_all_gradients(stepper):
    for name, state in ("ddp", "done"), ("zero", "shard"), ("fsdp", "shard"):
        frames = held(stepper, name)
        for _, buffers in frames[-1][2]: assert {s for _, s in [*buffers.values()][-1]} == {state}, name
        computing = [(doing.split(" ")[-1], buffers) for _, _, ranks in frames for doing, buffers in ranks
                     if re.match("(forward|backward), block", doing)]
        for block, buffers in computing if name == "fsdp" else []:
            assert f"block {block}" in [text for text, _ in buffers["gather buffers"]]
    ended = set()
    for rank, said, ranks in held(stepper, "ddp"):
        if said.endswith("has ended"): ended.add(rank)
        assert rank in ended or all(state != "done" for _, state in ranks[rank][1]["gradients"]), said
    for r in range(2):  # of FSDP: one bucket is sent while the other is filled
        assert any({"own", "flight"} == {state for _, state in ranks[r][1]["gradient buckets"][1:]} for _, _, ranks in
                   held(stepper, "fsdp"))
    for _, buffers in [rank for _, _, ranks in held(stepper, "zero") for rank in ranks]:
        assert [text.split(" ")[0] for text, _ in buffers["gather buffers"] if text] in (
            [], ["root"], ["root", "attn"], ["root", "attn", "mlp"])


def test_in_the_steppers_of_1f1b_and_ring_each_rank_holds_what_the_chapters_say(stepper):
    frames = held(stepper, "pp")
    assert [max(len(ranks[r][1]["activations"]) for _, _, ranks in frames) for r in range(4)] == [4, 3, 2, 1]
    assert not any(all_ for _, buffers in frames[-1][2] for all_ in buffers.values())
    frames = held(stepper, "cp")
    for r in range(4):
        kv = [text for _, _, ranks in frames for text, state in ranks[r][1]["keys, values"] if text and state != "flight"]
        assert [*dict.fromkeys(kv)][:2] == [f"rank {r}'s", f"rank {(r + 1) % 4}'s"] and len({*kv}) == 4
        assert frames[-1][2][r][1]["received"] == [[f"rank {r}'s", "done"]]


# ---- the pages ----
@pytest.fixture(scope="module")
def site():
    def build(place):
        run = command("make --no-print-directory site", timeout=1800)
        if re.search("could not be installed|cannot make a virtual environment", run.said):
            pytest.skip(f"the Python packages of make site cannot be had here: {re.search('error:.*', run.said)[0]}")
        assert run.status == 0, run

    once("make site", build)
    return SITE


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.path, self.anchors, self.links, self.loaded = path, set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given.get("id"), given.get("name")}
        if tag == "a" and given.get("href"): self.links.append(given["href"])
        url = given.get("src") or given.get("href")
        if tag in ("img", "script", "iframe", "source", "link") and url and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(url)


@pytest.mark.sampled("site")
def test_links_and_anchors_lead_somewhere_and_nothing_is_loaded_from_another_host(site):
    @functools.lru_cache(None)
    def file_of(folder, path):
        target = (folder / unquote(path)).resolve()
        target = target / "index.html" if target.is_dir() else target
        return target if target.exists() else None

    pages = {path: Page(path) for path in site.rglob("*.html")}
    wrong, tried = [], 0
    for path, page in pages.items():
        for url in page.links + page.loaded:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in page.loaded and parts.scheme != "data": wrong.append(f"{path}: loads {url} from another host")
                continue
            tried += 1
            target = file_of(path.parent, parts.path) if parts.path else path
            if not target: wrong.append(f"{path}: {url}: there is no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{path}: {url}: there is no such anchor")
    for sheet in *site.glob("*.css"), *site.glob("*.js"), *(site / "assets").rglob("*.css"):
        if re.search(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"](?:https?:)?//", sheet.read_text()):
            wrong.append(f"{sheet}: loads from another host")
    assert tried and not wrong, "\n".join(wrong[:40])


@pytest.mark.sampled("site")
def test_the_front_page_leads_to_every_program_its_chapter_diff_and_stepper_in_400_words(site):
    from dev.site.programs import CHAPTERS, PROGRAMS
    page = Page(site / "index.html")
    text = re.sub(r"<[^>]*>", " ", re.search("<article.*?</article>", page.path.read_text(), re.S)[0])
    assert len(text.split()) <= 400
    wanted = {"repository.html", "labs/index.html", "doc/free_gpu.html", "pictures.html"}  # the first: README, by the navigation
    for program in PROGRAMS:
        wanted |= {f"train_gpt2_{program}.cu.html", CHAPTERS[program].replace(".md", ".html")}
    for program in STEPPERS: wanted.add(CHAPTERS[program].replace(".md", ".html#one-micro-step-event-by-event"))
    assert wanted <= set(page.links), wanted - set(page.links)
    diffs = {link for link in page.links if link.startswith("reader/") and link != "reader/index.html"}
    assert len(diffs) == len(PROGRAMS) - 1


@pytest.mark.sampled("site")
def test_calls_of_llmc_lead_to_the_line_where_a_header_declares_them(site):
    """What a program calls and does not define, and what a header of llmc/ declares at the beginning of a line."""
    declared = {name for header in (ROOT / "llmc").rglob("*.h")
                for name in re.findall(r"^(?:#define |[a-z]\w*[\w *]*[ *])(\w+)\(", header.read_text(), re.M)}
    for program in ROOT.glob("train_gpt2_*.cu"):
        own = set(re.findall(r"^(?:static |int )[^=;(\n]*?\b(\w+)\(", program.read_text(), re.M))
        code = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', re.sub(r"/\*.*?\*/|//[^\n]*", "", program.read_text(), flags=re.S))
        called = [name for name in re.findall(r"\b(\w+)\(", code) if name in declared - own]
        linked = re.findall(r'<a href="(llmc/[^"#]+\.h)\.html#L(\d+)"[^>]*>(\w+)</a>', (site / f"{program.name}.html").read_text())
        assert called and sorted(called) == sorted(name for _, _, name in linked), program
        for header, line, name in set(linked):
            below = [x for x in (ROOT / header).read_text().split("\n")[int(line) - 1:] if not x.startswith("//")]
            assert re.search(rf"\b{name}\(",
                             below[0]), f"{program.name}: the link of {name} leads to {header}:{line}, which does not declare it"


@pytest.mark.sampled("site")
@pytest.mark.parametrize("what", ["load", "reader", "stepper", "pictures", "search", "plain"])
def test_in_a_browser_the_pages_are_as_a_reader_expects(site, what):
    """site/browser.py says what that is."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium: pytest.skip("there is no Chromium; sh dev/setup.sh --with-chromium installs it")
    needed = once("playwright", lambda place: (place / "status").write_text(str(command(
        PYTHON, "-m pip install -q --disable-pip-version-check -r dev/site/requirements_test.txt", timeout=900).status)))
    if command(PYTHON, "-c", ["import playwright"]).status:
        pytest.skip(f"playwright, which drives Chromium, cannot be had from PyPI here: {(needed / 'status').read_text()}")
    succeeds(PYTHON, "test/tools/site/browser.py", [chromium, SITE, "build/site_shots", what], timeout=900)
