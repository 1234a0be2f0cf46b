"""browser.py CHROMIUM FOLDER SHOTS CHECK - looks at the site in FOLDER with a headless browser, as a reader would who opens it from
the disk. CHECK is load, reader, stepper, pictures, search or plain. Screenshots go to the folder SHOTS."""
import json, subprocess, sys
from pathlib import Path
from playwright.sync_api import sync_playwright

chromium, site, shots, what = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]), sys.argv[4]
shots.mkdir(parents=True, exist_ok=True)
SHOWN = ["index.html", "doc/02_ddp.html", "reader/index.html", "reader/ddp-zero.html", "reader/single-3d.html",
         "pictures.html", "labs/index.html", "train_gpt2_ddp.cu.html", "llmc/comm/comm_api.h.html"]
WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 390, "height": 844}
wrong = []


def expect(holds, message):
    if not holds: wrong.append(message)


def open_page(browser, width=1200, height=900):
    """A page that notes what is wrong while it is used; page.name says what it shows."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(240000)  # where others use the cores, a large page takes its time
    page.name = ""
    page.on("console", lambda m: expect(m.type not in ("error", "warning"), f"{page.name}: console: {m.text}"))
    page.on("pageerror", lambda e: expect(False, f"{page.name}: {e}"))
    page.on("requestfailed", lambda r: expect(False, f"{page.name}: {r.url} could not be loaded"))
    page.on("request", lambda r: expect(r.url.startswith(("file:", "data:", "blob:", "about:")), f"{page.name}: asks for {r.url}"))
    return page


def show(page, name):
    page.name = name
    if "#" in name: page.goto("about:blank")  # so that a link into the same page loads it anew
    page.goto(f"file://{site}/{name}", wait_until="load")


def shot(page, name):
    page.screenshot(path=shots / name)


def load(browser):
    """Pages without errors and without other hosts, and on a telephone not wider than the screen; a few are kept as pictures. Of
    those that show a source, which one function makes, the programs and every tenth other."""
    page = open_page(browser, **NARROW)
    every = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    sources = [name for name in every if "." in Path(name).stem and not name.startswith("train_gpt2_") and name not in SHOWN]
    for name in [name for name in every if name not in sources] + sources[::10]:
        show(page, name)
        expect(page.locator("h1").count() == 1, f"{name}: has {page.locator('h1').count()} headings, not 1")
        width = page.evaluate("document.documentElement.scrollWidth")
        expect(width <= 390, f"{name}: is {width} pixels wide on a screen of 390")
        if name not in SHOWN: continue
        kept = name.replace("/", "_").removesuffix(".html")
        shot(page, f"{kept}_narrow.png")
        page.set_viewport_size(WIDE)
        for scheme in "light", "dark":
            page.evaluate("localStorage.clear()")  # it remembers the scheme of the first page
            page.emulate_media(color_scheme=scheme)
            show(page, name)
            page.wait_for_timeout(200)
            shot(page, f"{kept}_{scheme}.png")
        page.set_viewport_size(NARROW)


ROWS = """() => {
  document.querySelectorAll('.reader details').forEach((fold) => { fold.open = true; });
  return [...document.querySelectorAll('.reader .r')].map((row) => {
    const cells = [...row.children].map((cell) => cell.getBoundingClientRect());
    return [cells.length, cells[0].top, cells[2].top, cells[0].bottom, cells[2].bottom, cells[1].right, cells[3].left, cells[3].bottom - cells[3].top];
  });
}"""


def reader(browser):
    """Rows have the same top and bottom left and right, the sides do not overlap, all lines of both files are there, folds fold."""
    page = open_page(browser, **WIDE)
    for path in sorted(site.glob("reader/*-*.html")):
        name = f"reader/{path.name}"
        show(page, name)
        expect(page.locator(".reader details").count() == 0 or not page.locator(".reader details[open]").count(),
               f"{name}: equal parts are not folded")
        for number, (cells, top, other_top, bottom, other_bottom, right, left, height) in enumerate(page.evaluate(ROWS)):
            expect(cells == 4 and abs(top - other_top) < 0.5 and abs(bottom - other_bottom) < 0.5 and right <= left and height > 5,
                   f"{name}: row {number} is not aligned: {top} beside {other_top}, {bottom} beside {other_bottom}")
        for side, program in zip("LR", path.stem.split("-")):
            lines = len(Path(f"train_gpt2_{program}.cu").read_text().splitlines())
            found = page.evaluate(f"[...document.querySelectorAll('.reader .ln[id^={side}]')].map((a) => +a.id.slice(1))")
            expect(found == list(range(1, lines + 1)), f"{name}: shows {len(found)} lines of {program}, which has {lines}")
        hunks, notes = page.locator(".hunk").count(), page.locator(".hunk .note p").count()
        expect(0 < notes and hunks > 0, f"{name}: {hunks} hunks and {notes} notes")
        expect(page.locator(".reader mark").count() > 0, f"{name}: no word is marked")
    show(page, "reader/ddp-zero.html#hunk-19")
    shot(page, "reader_hunk.png")
    before = page.evaluate("scrollY")
    page.keyboard.press("j")
    page.wait_for_function(f"scrollY > {before}")  # j goes to the next hunk
    page.keyboard.press("o")
    expect(page.locator(".reader details:not([open])").count() == 0, "reader/ddp-zero.html: o does not open all folds")
    page.set_viewport_size(NARROW)
    show(page, "reader/ddp-zero.html#hunk-19")
    changed = page.locator(".reader .c").first.evaluate("(row) => [...row.querySelectorAll('code')].map((c) => "
                                                        "c.getBoundingClientRect().left)")
    expect(len(changed) == 2 and changed[0] == changed[1],
           f"reader/ddp-zero.html: on a narrow screen a row has two columns: {changed}")
    shot(page, "reader_hunk_narrow.png")


def stepper(browser):
    """One event is shown, with what each rank holds; keys, buttons, the slider and playing change it."""
    page = open_page(browser)
    for name in "doc/02_ddp.html", "doc/03_zero.html", "doc/04_fsdp.html", "doc/06_pp.html", "doc/09_cp.html":
        show(page, name)

        def expect_event(wanted, why):
            shown = page.evaluate("[...document.querySelectorAll('.stepper tbody tr')].flatMap((row, i) => row.offsetHeight ? i : [])")
            expect(shown == [wanted], f"{name}: {why} shows events {shown}, not {wanted}")
        expect_event(0, "the beginning")
        page.focus(".stepper")
        for key, wanted in ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1):
            page.keyboard.press(key)
            expect_event(wanted, key)
        page.click(".stepper button >> nth=2")
        expect_event(2, "the button")
        page.locator(".stepper input").fill("20")
        expect_event(20, "the slider")
        page.click(".stepper .play")
        page.wait_for_function("document.querySelectorAll('.stepper tbody tr')[22].offsetHeight > 0")
        page.click(".stepper .play")
        shot(page, f"stepper_{Path(name).stem}.png")


def pictures(browser):
    """The bars are as long as build/plan's numbers, and answer to the controls."""
    page = open_page(browser, height=1400)
    show(page, "pictures.html")
    for model, precision, at, ranks in (("gpt2", "fp32", 2, 4), ("gpt2-xl", "bf16", 5, 32)):
        page.select_option("[name=model]", model)
        page.select_option("[name=precision]", precision)
        page.locator("[name=ranks]").fill(str(at))
        # the slider says how many ranks it stands for
        page.wait_for_function(f"document.querySelector('output').innerText == '{ranks}'")
        page.evaluate("Promise.all(document.getAnimations().map((a) => a.finished)).then(() => true)")
        said = subprocess.run(["build/plan", "--json", "--model", model, "--precision", precision, "--ranks", str(ranks), "--gpu",
                               "h100", "-b", "4",
                               "-t", "1024", "--total-batch-size", "262144"], check=True, capture_output=True, text=True).stdout
        ways = {way["name"]: way for way in json.loads(said)["ways"]}
        bars = page.evaluate("""() => [...document.querySelectorAll('#memory .bar')].map((bar) => [bar.previousSibling.textContent,
            bar.querySelector('b').textContent, [...bar.querySelectorAll('span')].map((s) => s.getBoundingClientRect().width)])""")
        shown = {name: (label, widths) for name, label, widths in bars}
        for way, name in (("ddp", "DDP"), ("zero-1", "ZeRO 1"), ("zero-3", "ZeRO 3"), ("fsdp", "FSDP")):
            label, widths = shown[name]
            expect(abs(float(label.split()[0]) * 1e9 / ways[way]["bytes"]["total"] - 1) < 0.01,
                   f"pictures.html: {name} of {model} on {ranks} ranks is shown as {label}, plan says {ways[way]['bytes']['total']}")
            share = ways[way]["bytes"]["optimizer state"] / ways[way]["bytes"]["total"]
            expect(abs(widths[2] / sum(widths) - share) < 0.01,
                   f"pictures.html: {name}: the optimizer's part is {widths[2] / sum(widths)}, not {share}")
        shot(page, f"pictures_{ranks}_ranks.png")
    page.select_option("[name=program]", "fsdp")
    expect(page.locator("#memory .bar").count() == 1, "pictures.html: choosing a program does not show it alone")


def search(browser):
    """Search finds a chapter, also where pages are opened from the disk."""
    page = open_page(browser)
    show(page, "index.html")
    # At once: typed key by key it passes through "reduce-", which Material's search reports as an invalid query in the console.
    page.click(".md-search__input")
    page.keyboard.insert_text("reduce-scatter")
    page.keyboard.press("Shift")  # the search looks at what is there when a key is released
    page.wait_for_selector(".md-search-result__link")
    found = page.evaluate("[...document.querySelectorAll('.md-search-result__link')].map((a) => a.getAttribute('href'))")
    expect(any("doc/03_zero" in href for href in found), f"index.html: searching for reduce-scatter finds {found[:5]}")
    shot(page, "search.png")


def plain(browser):
    """Without JavaScript: text, both sides, folds that open, notes and tables."""
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(f"file://{site}/reader/single-ddp.html")
    expect(page.locator(".hunk .note p").first.is_visible(), "reader/single-ddp.html: no note without JavaScript")
    fold = page.locator(".reader details").first
    expect(not fold.locator(".r").first.is_visible(), "reader/single-ddp.html: nothing is folded without JavaScript")
    fold.locator("summary").click()
    expect(fold.locator(".r").first.is_visible(), "reader/single-ddp.html: a fold does not open without JavaScript")
    page.goto(f"file://{site}/pictures.html")
    expect(page.locator("details[open] td").first.is_visible(), "pictures.html: no table without JavaScript")
    expect(not page.locator(".controls").is_visible(), "pictures.html: there are controls that do nothing without JavaScript")
    page.goto(f"file://{site}/doc/02_ddp.html")
    expect(page.locator("article p").first.is_visible(), "doc/02_ddp.html: no text without JavaScript")
    page.click(".stepper summary")
    expect(page.locator(".stepper tbody tr").last.is_visible(), "doc/02_ddp.html: no table of events without JavaScript")
    shot(page, "plain.png")
    context.close()


with sync_playwright() as playwright:
    running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    {"load": load, "reader": reader, "stepper": stepper, "pictures": pictures, "search": search, "plain": plain}[what](running)
    running.close()
print("\n".join(wrong[:20]) or f"{what}: as it should be")
sys.exit(bool(wrong))
