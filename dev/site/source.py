"""Source files as highlighted HTML: a line each, with an anchor, links from calls to their contracts, and links from #include to
files."""
import re, subprocess
from collections import namedtuple
from functools import lru_cache
from html import escape
from posixpath import dirname, normpath, relpath

from pygments.lexers import CLexer, TextLexer, get_lexer_for_filename
from pygments.token import STANDARD_TYPES, Comment, Name
from pygments.util import ClassNotFound

from programs import ROOT, PROGRAMS, program_file


@lru_cache
def tracked():
    """Every file that git knows."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    return frozenset(name for name in names if name and (ROOT / name).is_file())


@lru_cache
def folders():
    return frozenset(parent for name in tracked() for parent in parents(name))


def parents(name):
    while name := dirname(name): yield name


def page_of(path):
    """The page that shows a file or folder: MkDocs' name of its source."""
    if path == "README.md": return "repository.md"  # the front page is another one
    if path.endswith((".md", ".ipynb")): return path.replace(".ipynb", ".md")
    if path in folders(): return f"{path}/README.md" if f"{path}/README.md" in tracked() else f"{path}/index.md"
    return path + ".md"


def url_of(path):
    """Where that page is in the site."""
    return re.sub(r"README\.md$", "index.md", page_of(path)).removesuffix(".md") + ".html"


def link(from_url, to_url):
    return relpath(to_url, dirname(from_url) or ".")


def anchor(from_url, to_url, text):
    return f'<a href="{link(from_url, to_url)}">{text}</a>'


def markup(text):
    """Text whose `code` is between backticks, as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def wide_table(head, rows, css=""):
    """A table that scrolls by itself. head, rows: the cells as HTML."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table{css}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# --- contracts: where functions, macros and types of llmc/ are declared ---

DECLARATION = re.compile(r"^(?:static |inline |extern |typedef )*[A-Za-z_][\w ]*?[ *]+\**(\w+)\(")
CONTRACTS = ["llmc/device/device_api.h", "llmc/device/layers_api.h", "llmc/device/muon_api.h", "llmc/device/compress_api.h",
             "llmc/device/experts_api.h", "llmc/comm/comm_api.h"]
Contract = namedtuple("Contract", "path first text")  # the first line of its comment, counted from 1, and what that says


@lru_cache
def contracts():
    """{name: Contract} of what llmc/ declares for the programs. Where a name is declared more than once, a contract's header
    wins."""
    found = {}
    headers = sorted(name for name in tracked() if name.startswith("llmc/") and name.endswith(".h"))
    cpu = [name for name in headers if name.startswith("llmc/device/cpu/")]
    for path in CONTRACTS + [name for name in headers if name not in CONTRACTS + cpu] + cpu:
        text = (ROOT / path).read_text().split("\n")
        for at, line in enumerate(text):
            declared = DECLARATION.match(line) or re.match(r"#define (\w+)\(", line)
            if not declared or declared[1] in found or line.startswith(("return", "else")): continue
            first = at
            while first > 0 and text[first - 1].startswith("//") and not text[first - 1].startswith("// ---"): first -= 1
            found[declared[1]] = Contract(path, first + 1, " ".join(c[2:].strip() for c in text[first:at]))
    return found


# --- highlighting ---

Piece = namedtuple("Piece", "css text href title")


def css_of(kind):
    while kind not in STANDARD_TYPES: kind = kind.parent
    return STANDARD_TYPES[kind]


def is_c(path):
    return path.endswith((".cu", ".cuh", ".h", ".c"))


def lexer_for(path):
    if is_c(path): return CLexer(stripnl=False)
    try:
        return get_lexer_for_filename("x.sh" if path.endswith("/run") else path, stripnl=False)
    except ClassNotFound:
        return TextLexer(stripnl=False)


@lru_cache(maxsize=None)
def pieces(path):
    """The lines of a file, each a list of Pieces; links are paths of this repository with anchors, to be made relative by
    html()."""
    text = (ROOT / path).read_text(errors="replace").expandtabs(4)
    tokens = list(lexer_for(path).get_tokens(text))
    own = {m[1] for m in re.finditer(r"^(?:static |int )[^=;(\n]*?\b(\w+)\(", text, re.M)} if is_c(path) else set()
    rows = [[]]
    for at, (kind, value) in enumerate(tokens):
        href = title = None
        if is_c(path) and kind in Name:
            following = next((v for _, v in tokens[at + 1:at + 3] if not v.isspace()), "")
            contract = contracts().get(value)
            if contract and following.startswith("(") and value not in own:
                href, title = f"{url_of(contract.path)}#L{contract.first}", contract.text or None
        elif is_c(path) and kind in Comment.PreprocFile and value[1:-1] in tracked(): href = url_of(value[1:-1])
        for number, part in enumerate(value.split("\n")):
            if number: rows.append([])
            if part: rows[-1].append(Piece(css_of(kind), part, href, title))
    while rows and not rows[-1]: rows.pop()
    return rows


def html(row, url, marks=()):
    """One line as HTML for a page at url. marks: ranges of columns that a <mark> shows as changed."""
    out, at = [], 0
    for piece in row:
        cuts = sorted({at, at + len(piece.text)} | {c for mark in marks for c in mark if at < c < at + len(piece.text)})
        inner = ""
        for begin, end in zip(cuts, cuts[1:]):
            part = escape(piece.text[begin - at:end - at], quote=False)
            inner += f"<mark>{part}</mark>" if any(b <= begin and end <= e for b, e in marks) else part
        if piece.href:
            title = f' title="{escape(piece.title)}"' if piece.title else ""
            inner = f'<a href="{link(url, piece.href)}"{title}>{inner}</a>'
        out.append(f'<span class="{piece.css}">{inner}</span>' if piece.css else inner)
        at += len(piece.text)
    return "".join(out)


def page(path, url):
    """A source file's page."""
    program = next((s for s in PROGRAMS if path == program_file(s)), None)
    places = ", ".join(anchor(url, pair_url(program, s), s) for s in PROGRAMS if program and s != program)
    readers = f"<p>Side by side with {places}.</p>" if program else ""
    rows = "".join(f'<a class="ln" id="L{n}" href="#L{n}">{n}</a><code>{html(row, url)}</code>\n'
                   for n, row in enumerate(pieces(path), 1))
    return f'<h1>{escape(path)}</h1>{readers}<div class="source highlight">{rows}</div>'


def pair_url(a, b):
    a, b = sorted((a, b), key=PROGRAMS.index)
    return f"reader/{a}-{b}.html"


def folder_page(path, url, shown):
    """What is in a folder; links lead to what has a page, which `shown` names."""
    items = ""
    for name in sorted({name[len(path) + 1:].split("/")[0] for name in tracked() if name.startswith(path + "/")}):
        inner, item = f"{path}/{name}", f"<code>{escape(name)}</code>"
        items += f"<li>{anchor(url, url_of(inner), item) if inner in shown or inner.endswith('.md') else item}</li>"
    return f"<h1>{escape(path)}/</h1><ul>{items}</ul>"


def resolve(document, target):
    """A relative link of a document as a path in the repository."""
    path = normpath(f"{dirname(document)}/{target}" if dirname(document) else target)
    return path if path in tracked() or path in folders() else None
