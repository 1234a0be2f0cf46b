"""MkDocs' hooks: the repository's documents and sources become pages, and so do the program reader and the pictures."""
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
import programs
from programs import ROOT, PROGRAMS, pairs, program_file

IN_NAV = ("reader/index.md", "pictures.md")
made = {}  # the pages that are not Markdown: their HTML, by the name that MkDocs knows them by
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def documents():
    return sorted(name for name in source.tracked() if name.endswith(".md") and not name.startswith("."))


def linked_sources():
    """Every file or folder that has no Markdown and that a document leads to, all that programs include, and the programs."""
    found = {program_file(s) for s in PROGRAMS} | {n for n in source.tracked() if n.startswith("llmc/") and not n.endswith(".md")}
    for document in documents():
        for _, target, _ in LINK.findall((ROOT / document).read_text()):
            path = source.resolve(document, target)
            if path: found.add(path)
    for folder in [path for path in found if path in source.folders()]:
        found |= {n for n in source.tracked() if n.startswith(folder + "/")}
    found |= {parent for path in found for parent in source.parents(path)}
    return {path for path in found if path in source.folders()
            or not path.endswith((".md", ".svg", ".safetensors", ".bin", ".jsonl"))}


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
        files.append(File.generated(config, document, content=(ROOT / document).read_text(), inclusion=InclusionLevel.NOT_IN_NAV))
    for picture in [name for name in source.tracked() if name.endswith(".svg")]:
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
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
    if name in made:
        page.meta["hide"] = ["toc"] if name in IN_NAV else ["navigation", "toc"]
        if name not in IN_NAV:
            page.meta["search"] = {"exclude": True}
            title = re.sub(r"^reader/(\w+)-(\w+)$", r"\1 beside \2", name.removesuffix(".md").removesuffix("/index"))
            page.title = re.sub(r"^reader/(\w+)$", r"\1, a merge", title)
        return ""
    fenced = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    for i in range(0, len(fenced), 2): fenced[i] = LINK.sub(partial(rewrite, name), fenced[i])
    return "".join(fenced)


def on_page_content(html, page, config, files):
    name = page.file.src_uri
    if name in made: return made[name]()
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def on_post_build(config):
    # Its links are absolute, and there is no server that would show it; the site map needs an address.
    for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"): (Path(config.site_dir) / name).unlink(missing_ok=True)
