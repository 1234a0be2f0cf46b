"""Tokenizers, as build/tokenize opens and uses them: every text is encoded as BPE defines it, and no broken file is accepted.
(test_sampler.c decodes; test/tools/test_tokenize.py has what is a document.)"""
import json, random, struct
import pytest
from suite import ROOT, command, program, rest

EOT = b"<|endoftext|>"
BYTES = [bytes([b]) for b in range(256)]
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
CHARACTER = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)} # of a byte, in both files


@pytest.fixture(autouse=True, params=[False, rest(True)], ids=["plain", "debug"])
def encode(request, tmp_path, monkeypatch):
    """encode(spec, text): the run, which leaves out.bin in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def run(spec, text=b"text"):
        (tmp_path / "text").write_bytes(text)
        return command([ROOT / program("tokenize", debug=request.param), "--tokenizer", spec], "--out out.bin text", cwd=".",
                       env={"ASAN_OPTIONS": "exitcode=99:detect_leaks=1"}, timeout=120)
    return run


def tokens(run):
    """What was written: the end of text, and the text's tokens."""
    assert run.status == 0, run
    data = open("out.bin", "rb").read()
    eot, *found = struct.unpack(f"<{len(data) // 2 - 512}H", data[1024:])
    return eot, found


def fingerprint(): return open("out.bin", "rb").read(20)[12:]


def assert_error(run, *phrases):
    """One line that has all phrases; nothing is written."""
    __tracebackhide__ = True
    assert run.status == 1 and run.err.startswith("error: ") and run.err.count("\n") == 1, run
    for phrase in phrases: assert phrase in run.err, run


# ---- vocabularies: tokens by their ids, and merges as pairs of ids ----
def text_form(token): return "".join(CHARACTER[b] for b in token)


def write_merges(text, end="\n"): open("merges.txt", "w", newline="").write(text + end)


def write_json(vocabulary, pairs=()):
    """vocab.json, in whose order ids mean nothing, and merges.txt."""
    ids = {text_form(token): i for i, token in reversed([*enumerate(vocabulary)])}
    json.dump(ids, open("vocab.json", "w"), separators=(",", ":"), ensure_ascii=False)
    write_merges("\n".join(["#version: 0.2", *(" ".join(text_form(vocabulary[i]) for i in pair) for pair in pairs)]))


def write_bin(vocabulary, eot, path="t.bin"):
    whole = struct.pack("<256i", 20240328, 2, len(vocabulary), eot, *[0] * 252) + b"".join(bytes([len(x)]) + x for x in vocabulary)
    open(path, "wb").write(whole)
    return whole


def merged(*pairs):
    """The bytes, what these pairs make, and the end of text."""
    vocabulary = [*BYTES]
    for left, right in pairs: vocabulary.append(vocabulary[left] + vocabulary[right])
    return [*vocabulary, EOT]


HE, LL, HELL, SPACE_W, OR, HELLO, END = range(256, 263) # tokens of this small vocabulary
PAIRS = [(ord("h"), ord("e")), (ord("l"), ord("l")), (HE, LL), (ord(" "), ord("w")), (ord("o"), ord("r")), (HELL, ord("o"))]
SMALL = merged(*PAIRS)


@pytest.fixture
def small(encode): write_json(SMALL, PAIRS)


# ---- what encoding gives ----
def test_bytes_are_their_own_tokens(encode):
    text = b"".join(BYTES) + EOT
    assert tokens(encode("bytes", text)) == (256, [*text])


def test_text_merges_by_rank_whether_from_a_folder_or_from_either_kind_of_file(encode, small):
    write_bin(SMALL, END)
    encode("bytes")
    found = {fingerprint()}
    for spec in "vocab.json", ".", "t.bin", "without a version line and a last newline":
        if "without" in spec:
            write_merges(open("merges.txt").read().split("\n", 1)[1].strip("\n"), end="")
            spec = "."
        for text, want in {b"hello worlld": [HELLO, SPACE_W, OR, LL, ord("d")], b"lll": [LL, ord("l")], b"hell": [HELL],
                           b"ell": [ord("e"), LL], b"h": [ord("h")], EOT: [*EOT]}.items(): # text that spells the token is text
            assert tokens(encode(spec, text)) == (END, want)
        found.add(fingerprint())
    assert len(found) == 2 and bytes(8) not in found


@pytest.mark.parametrize("cut", [ # words with | between
    "Hello|,| world|!", "I|'ve| he|'ll| we|'d| it|'s| I|'m| don|'t| you|'re", "I|'|VE| '|twas", "a| | b", "a|  | b|\n\n | c|  ",
    "x|=|12|.|5|;", "in| 1984|,| 7", "\t|\t|if|(|x|)", " été| €|5", "你好|。",
    "a|\u00a0|\u00a0|b",     # no-break spaces are white space
    "a| \u180e",             # U+180E no longer is
    "1½Ⅷ",                   # a half and a Roman eight are numbers
    b"ok| |\xff\xfe| ok",    # what is no UTF-8 is a word of its own
    b"ok|\xe2\x82"], ids=lambda cut: cut.encode("unicode_escape").decode() if isinstance(cut, str) else repr(cut))
def test_words_are_cut_as_gpt2_cuts_them(encode, cut):
    """Any neighbours merge that lie in one word, so a word is a token."""
    words = (cut if isinstance(cut, bytes) else cut.encode()).split(b"|")
    text = b"".join(words)
    parts = {text[i:k] for i in range(len(text)) for k in range(i + 2, len(text) + 1)}
    vocabulary = [*BYTES, *sorted(parts), EOT]
    write_bin(vocabulary, len(vocabulary) - 1)
    assert [vocabulary[i] for i in tokens(encode("t.bin", text))[1]] == words


def encode_slowly(word, rank, vocabulary):
    """The definition: while any neighbours merge, the leftmost pair of the lowest rank does."""
    ids = [*word]
    while True:
        best = min(((rank[pair], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in rank), default=None)
        if best is None: return ids
        ids[best[1]:best[1] + 2] = [vocabulary.index(vocabulary[ids[best[1]]] + vocabulary[ids[best[1] + 1]])]


def test_the_fast_merge_is_the_slow_one(encode):
    """Of merges of random tokens over a few letters, so that words have many; each word comes twice, the second time from the
    cache."""
    for seed in range(20):
        r, pairs, vocabulary = random.Random(seed), [], [*BYTES]
        while len(vocabulary) < 330:
            pair = r.choices([97, 98, 99, *range(256, len(vocabulary))], k=2)
            both = vocabulary[pair[0]] + vocabulary[pair[1]]
            if len(both) > 12 or both in vocabulary: continue
            pairs.append(tuple(pair))
            vocabulary.append(both)
        if seed % 4 == 0: r.shuffle(pairs) # a merge may then make a pair of a lower rank
        write_json([*vocabulary, EOT], pairs)
        write_bin([*vocabulary, EOT], 330)
        by_bytes = {(a, b): vocabulary.index(x + y) for a, x in enumerate(vocabulary) for b, y in enumerate(vocabulary)
                    if x + y in vocabulary[256:]} if seed % 2 else None # a .bin has no other order than that of its tokens
        words = ["".join(r.choices("abc", k=r.randint(1, 40 if i % 50 else 400))) for i in range(300)]
        slowly = [encode_slowly(word.encode(), by_bytes or {pair: i for i, pair in enumerate(pairs)}, vocabulary) for word in words]
        text = "\n".join(words + words)
        want = [x for ids in slowly + slowly for x in [*ids, ord("\n")]][:-1]
        assert tokens(encode("t.bin" if seed % 2 else ".", text.encode())) == (330, want)


@pytest.mark.parametrize("stretch", [b"l", b" ", b"!", b"7", b"\xff", b"\0", b"\xffa"])
def test_long_runs_take_no_quadratic_time(encode, small, stretch):
    n = 1 << 20 # n*n steps would take hours
    text = (stretch * n)[:n]
    assert b"".join(SMALL[i] for i in tokens(encode(".", text))[1]) == text


def test_two_merges_may_make_one_token(encode):
    """As in vocabularies of Hugging Face's trainers."""
    ab, bc, abc = range(256, 259)
    pairs = [(97, 98), (98, 99), (ab, 99), (97, bc)]
    write_json([*BYTES, b"ab", b"bc", b"abc", EOT], pairs)
    assert tokens(encode(".", b"abcbc"))[1] == [abc, bc]


@pytest.mark.parametrize("added", ["<pad>", "[UNK]", "<|im_start|>", "madeupword0000", "<|endoftext|><|endoftext|>"])
def test_tokens_that_trainers_and_people_add_need_no_merge(encode, added):
    write_json([*SMALL, added.encode()], PAIRS)
    assert tokens(encode(".", b"hello"))[1] == [HELLO]


@pytest.mark.parametrize("text", ["pad", " pad", "\n\n", "<>", "12", "é", b"\xe2\x82"], ids=repr)
def test_a_token_that_text_becomes_needs_one(encode, text):
    write_json([*SMALL, text if isinstance(text, bytes) else text.encode()], PAIRS)
    assert_error(encode("."), "merges.txt", "make 1 of the vocabulary's tokens, the first of them token 263")


# ---- files that are not what they should be ----
def test_what_is_no_tokenizer_is_named(encode, tmp_path):
    for name, text in ("empty", ""), ("words.txt", "hello"): (tmp_path / name).write_text(text)
    (tmp_path / "sub").mkdir()
    for spec, *phrases in (("nothing", "nothing", "No such file", "vocab.json", "merges.txt"), ("bytes2", "bytes2", "No such file"),
                           ("empty", "empty: starts neither with {"), ("words.txt", "words.txt: starts neither with {"),
                           ("sub", "sub/vocab.json", "No such file")):
        assert_error(encode(spec), *phrases)


GOOD, NOT_TEXT = '"hell":258', "is not the byte-level text"


@pytest.mark.parametrize("old, new, says", [
    (":0}", ":0", "not valid JSON"), (":0}", ":0}}", "not valid JSON"), (GOOD, f"{GOOD},{GOOD}", "duplicate object key"),
    ('"a":97', '"aa":97', "no token is the single byte 0x61"), ("<|endoftext|>", "<|endoftexts|>", "no token <|endoftext|>"),
    (GOOD, '"hell":257', "have the same id 257"), (GOOD, '"hell":-1', "has id -1"),
    (GOOD, '"hell":263', "has id 263; the 263 tokens must have ids 0 to 262"),
    (GOOD, '"hell":99999999999999999999', "not valid JSON"), (GOOD, '"hell":258.0', "no whole number"),
    (GOOD, '"hell":"258"', "no whole number"), (GOOD, '"he ll":258', NOT_TEXT),
    (GOOD, '"":258', NOT_TEXT), (GOOD, '"你":258', NOT_TEXT), (GOOD, '"he\u0144":258', NOT_TEXT), # one past the last
    (GOOD, '"h\\u0000":258', "not valid JSON"), (None, "{}", "is not a JSON object of tokens"),
    (None, '{"a":0}', "no token is the single byte 0x00"), (None, '{"a":' + 4995 * "[", "not valid JSON")])
def test_a_broken_vocabulary_is_refused(encode, small, tmp_path, old, new, says):
    good = (tmp_path / "vocab.json").read_text()
    assert old is None or good.count(old) == 1
    (tmp_path / "vocab.json").write_text(good.replace(old, new) if old else new)
    assert_error(encode("vocab.json"), "vocab.json", says)


@pytest.mark.parametrize("merges, says", [
    ("h e\nhe\n", 'line 2: "he" is not two tokens'), ("#version: 0.2\n\nh e\n", 'line 2: "" is not two tokens'),
    ("h e x\n", 'line 1: "e x" is not in the vocabulary'), ("he l\n", 'line 1: the merge of "he l" is not in the vocabulary'),
    ("xyz l\n", 'line 1: "xyz" is not in the vocabulary'), (" l\n", 'line 1: "" is not in the vocabulary'),
    ("h \n", 'line 1: "" is not in the vocabulary'), ("h e\r\n", "line 1 ends in CR LF"),
    ("#version: 0.2\r\nh e\r\n", "line 1 ends in CR LF"), ("h e\nl l\r", "line 2 ends in CR LF"),
    ("h e\nl l\nh e\n", 'line 3: "h e" is a duplicate'), ("\udcff e\n", "is not in the vocabulary"),
    ("h \udcc4\n", "is not in the vocabulary"), ("", "its 0 merges do not make 6 of"), (None, "No such file"),
    ("h e\nl l\nhe ll\nhell o\no r\n", "make 1 of the vocabulary's tokens, the first of them token 259")], # without the fourth
    ids=repr)
def test_broken_merges_are_refused(encode, small, tmp_path, merges, says):
    if merges is None: (tmp_path / "merges.txt").unlink()
    else: (tmp_path / "merges.txt").write_bytes(merges.encode(errors="surrogateescape"))
    assert_error(encode("."), "merges.txt", says)


def test_text_cannot_be_made_into_the_end_of_text(encode):
    write_json([*BYTES, EOT[:-1], EOT], [(256, ord(">"))])
    assert_error(encode("."), "merges.txt", "line 2 merges text into <|endoftext|>")


ALLOWS, OUTSIDE = ("says it has", "bytes allow 1 to"), ("end-of-text token", "tokens 0 to 262")


@pytest.mark.parametrize("cut, at, value, says", [ # so many bytes, or less than all of them, and another value in the header
    (1023, 1, 2, ["has 1023 bytes"]), (-1, 1, 2, ["ends within token 262 of 263"]), (1, 1, 2, ["has 1 bytes after its last token"]),
    (1024, 1, 2, ["says it has 263 tokens; its 1024 bytes allow 1 to 0"]), (0, 1, 1, ["version 1", "reads version 2"]),
    *((0, 2, n, ALLOWS) for n in (0, -1, 2**31 - 1, -2**31)), *((0, 3, n, OUTSIDE) for n in (-1, 263, -2**31)),
    (0, 3, 97, ["end-of-text token is 97, which is a single byte"]), (0, 256, 0, ["token 0 is empty"])]) # 256: behind the header
def test_a_broken_tokenizer_bin_is_refused(encode, cut, at, value, says):
    bad = bytearray(write_bin(SMALL, END) + b"\0")
    struct.pack_into("<b" if at == 256 else "<i", bad, 4 * at, value)
    open("t.bin", "wb").write(bad[:cut if cut > 1 else len(bad) - 1 + cut])
    assert_error(encode("t.bin"), "t.bin", *says)


@pytest.mark.parametrize("token, bytes_, says", [(HE, b"ll", "tokens 256 and 257 are the same bytes"),
                                                 (97, b"aa", "no token is the single byte 0x61")])
def test_tokens_of_a_bin_must_be_all_bytes_and_differ(encode, token, bytes_, says):
    write_bin([bytes_ if i == token else x for i, x in enumerate(SMALL)], END)
    assert_error(encode("t.bin"), "t.bin", says)
