"""The table of all labs, from the heads of labs/*.toml."""
import re, tomllib
from html import escape

from source import link, url_of
from stages import ROOT, STAGES, chapter_number


def heads():
    """The list of each lab, in the course's order."""
    lists = {stage: ROOT / f"labs/{stage}.toml" for stage in STAGES}
    return [{"stage": stage} | tomllib.loads(path.read_text()) for stage, path in lists.items() if path.exists()]


def markup(text):
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def page(url):
    rows = ""
    for head in heads():
        chapter = head.get("chapter", "")
        where = f'<a href="{link(url, url_of(chapter))}">{chapter_number(chapter)}</a>' if chapter_number(chapter) else escape(chapter)
        rows += (f'<tr><td><code>{head["stage"]}</code></td><td>{markup(head["title"])}</td><td>{markup(head["writes"])}</td><td>{head["hours"]}</td>'
                 f'<td>{head["difficulty"]} of 5</td>'
                 f'<td>{where}</td><td>{markup(head["before"])}</td></tr>')
    guide = f'<p><a href="{link(url, "labs/index.html")}">labs/README.md</a> says how labs are graded, and has paths through them.</p>'
    return (f'<h1>Labs</h1><p>A lab is a stage without the bodies that are its lesson; you write them, and '
            f'<code>make check-lab</code> says claim by claim what holds.</p>{guide if (ROOT / "labs/README.md").exists() else ""}'
            f'<pre><code>make lab STAGE=ddp\nmake check-lab STAGE=ddp</code></pre>'
            f'<div class="wide"><table><thead><tr><th>Lab</th><th>Of</th><th>You write</th><th>Hours</th><th>Difficulty</th><th>Chapter</th>'
            f'<th>Before</th></tr></thead><tbody>{rows}</tbody></table></div>')
