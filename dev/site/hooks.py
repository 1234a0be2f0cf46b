"""MkDocs' hooks: the repository's documents and sources become pages, and so do the program reader and the pictures."""
import json
import re
import sys
from functools import partial
from pathlib import Path
from posixpath import dirname, relpath

sys.path.insert(0, str(Path(__file__).parent))

from mkdocs.structure.files import File, InclusionLevel

import merge
import pictures
import reader
import source
import stepper
import programs
from programs import CHAPTERS, ROOT, PROGRAMS, pairs, program_file

FRONT, IN_NAV = "index.markdown", ("reader/index.md", "pictures.md")
STEPPERS = {CHAPTERS[program]: program for program in stepper.RUNS}
made = {}  # the pages that are not Markdown: their HTML, by the name that MkDocs knows them by
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def documents():
    return sorted(name for name in source.tracked() if name.endswith((".md", ".ipynb")) and not name.startswith("."))


def text(document):
    """A document as Markdown: of a notebook, its cells."""
    if document.endswith(".md"): return (ROOT / document).read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads((ROOT / document).read_text())["cells"]]
    name = document.rsplit("/", 1)[-1]
    return "\n\n".join([f"```python\n{x}\n```" if kind == "code" else x for kind, x in cells]
                       + [f'<a href="{name}" download>Download this notebook, {name}</a>'])


def programs_table():
    """README's programs, each with the diff that makes it and with its stepper."""
    rows = re.findall(r"^\| \[`train_gpt2_(\w+)\.cu`\]\(\S+\) \| (.*) \| \[(\w+)\]\((\S+)\) \|$", text("README.md"), re.M)
    lines = ["| program | teaches | chapter | diff | step by step |", "|---|---|---|---|---|"]
    for program, teaches, number, chapter in rows:
        diff = reader.step_to(program)
        lines.append(f"| [{program}]({program_file(program)}.md) | {teaches} | [{number}]({chapter}) | "
                     f"{'[{}]({})'.format(*diff) if diff else ''} | "
                     f"{f'[play]({chapter}#{github_anchor(stepper.HEADING, None)})' if chapter in STEPPERS else ''} |")
    return "\n".join(lines)


def linked_sources():
    """Every file or folder that has no Markdown and that a document leads to, all that programs include, and the programs."""
    found = {program_file(s) for s in PROGRAMS} | {n for n in source.tracked() if n.startswith("llmc/") and not n.endswith(".md")}
    for document in documents():
        for _, target, _ in LINK.findall(text(document)):
            path = source.resolve(document, target)
            if path: found.add(path)
    for folder in [path for path in found if path in source.folders()]:
        found |= {n for n in source.tracked() if n.startswith(folder + "/")}
    found |= {parent for path in found for parent in source.parents(path)}
    return {path for path in found if path in source.folders()
            or not path.endswith((".md", ".ipynb", ".svg", ".safetensors", ".bin", ".jsonl"))}


def on_config(config):
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": github_anchor}
    if wrong := programs.wrong_notes():
        raise SystemExit("error: the program reader's notes are not those of today's hunks:\n" + "\n".join(wrong))
    return config


def github_anchor(title, separator):
    """A heading's anchor as GitHub makes it, which the documents' links use."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def on_files(files, config):
    def add(page, make):
        made[page] = make
        files.append(File.generated(config, page, content="", inclusion=InclusionLevel.NOT_IN_NAV))
    for document in documents():
        files.append(File.generated(config, source.page_of(document), content=text(document), inclusion=InclusionLevel.NOT_IN_NAV))
    for name in [name for name in source.tracked() if name.endswith((".svg", ".ipynb"))]:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    shown = linked_sources()
    for path in sorted(shown):
        page, url = source.page_of(path), source.url_of(path)
        if path not in source.folders(): add(page, partial(source.page, path, url))
        elif page.endswith("index.md"): add(page, partial(source.folder_page, path, url, shown))
    for left, right in pairs():
        page = reader.Page(left, right)
        add(page.url.replace(".html", ".md"), page.body)
    add(f"reader/{merge.PROGRAM}.md", reader.Merged().body)
    add("reader/index.md", partial(reader.overview, "reader/index.html"))
    add("pictures.md", pictures.page)
    return files


def rewrite(document, found):
    text, target, anchor = found.groups()
    path = source.resolve(document, target)
    if not path or path.endswith(".svg"): return found[0]
    return f"{text}({relpath(source.page_of(path), dirname(document) or '.')}{anchor or ''})"


def on_page_markdown(markdown, page, config, files):
    name = page.file.src_uri
    if name == FRONT:
        page.meta["hide"] = ["toc"]
        return markdown.replace("<!-- programs -->", programs_table())
    if name in made:
        page.meta["hide"] = ["toc"] if name in IN_NAV else ["navigation", "toc"]
        if name not in IN_NAV:
            page.meta["search"] = {"exclude": True}
            title = re.sub(r"^reader/(\w+)-(\w+)$", r"\1 beside \2", name.removesuffix(".md").removesuffix("/index"))
            page.title = re.sub(r"^reader/(\w+)$", r"\1, a merge", title)
        return ""
    fenced = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    for i in range(0, len(fenced), 2): fenced[i] = LINK.sub(partial(rewrite, name), fenced[i])
    markdown = "".join(fenced)
    if name in STEPPERS:  # after the chapter's first section
        second = [m.start() for m in re.finditer("^## ", markdown, re.M)][1]
        markdown = f"{markdown[:second]}## {stepper.HEADING}\n\n<!-- stepper -->\n\n{markdown[second:]}"
    return markdown


def unbroken(found):
    """Code within a line breaks between its words only, so not within a file's name."""
    if found[0].startswith("<pre"): return found[0]
    return "<code>" + re.sub(r"(?<!\S)\S{2,36}(?!\S)", r'<span class="word">\g<0></span>', found[1]) + "</code>"


def on_page_content(html, page, config, files):
    name = page.file.src_uri
    if name in made: return made[name]()
    html = html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    if name in STEPPERS: html = html.replace("<!-- stepper -->", stepper.html(STEPPERS[name]))
    html = re.sub(r"<pre.*?</pre>|<code>([^<]*)</code>", unbroken, html, flags=re.S)
    return f'<div class="front">{html}</div>' if name == FRONT else html


def on_post_build(config):
    # Its links are absolute, and there is no server that would show it; the site map needs an address.
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"): (Path(config.site_dir) / name).unlink(missing_ok=True)
