"""The table of all labs, from the heads of labs/*.toml."""
import tomllib
from html import escape

from source import anchor, markup, url_of, wide_table
from stages import ROOT, STAGES, chapter_number


def heads():
    """The list of each lab, in the course's order."""
    lists = {stage: ROOT / f"labs/{stage}.toml" for stage in STAGES}
    return [{"stage": stage} | tomllib.loads(path.read_text()) for stage, path in lists.items() if path.exists()]


def row(url, head):
    chapter, number = head.get("chapter", ""), chapter_number(head.get("chapter", ""))
    where = anchor(url, url_of(chapter), number) if number else escape(chapter)
    cells = (f'<code>{head["stage"]}</code>', markup(head["title"]), markup(head["writes"]), head["hours"],
             f'{head["difficulty"]} of 5', where, markup(head["before"]))
    return "".join(f"<td>{cell}</td>" for cell in cells)


def page(url):
    titles = "".join(f"<th>{title}</th>" for title in ("Lab", "Of", "You write", "Hours", "Difficulty", "Chapter", "Before"))
    guide = f'<p>{anchor(url, "labs/index.html", "labs/README.md")} says how labs are graded, and has paths through them.</p>'
    return (f'<h1>Labs</h1><p>A lab is a stage without the bodies that are its lesson; you write them, and '
            f'<code>make check-lab</code> says claim by claim what holds.</p>{guide if (ROOT / "labs/README.md").exists() else ""}'
            f'<pre><code>make lab STAGE=ddp\nmake check-lab STAGE=ddp</code></pre>'
            f'{wide_table(titles, (row(url, head) for head in heads()))}')
