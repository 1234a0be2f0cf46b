"""tokenize and train_bpe as programs: what they write, that they write the same again, and their errors."""
import json, os, re, subprocess, time
import numpy as np
import pytest
from suite import ROOT, assert_refused, command, environment, program, succeeds

EOT = 256
AB = [EOT, 97, 98]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Tests read and write in a folder of their own. In the end nothing there is called temporary."""
    monkeypatch.chdir(tmp_path)
    for name in "ab.txt", "-o": (tmp_path / name).write_bytes(b"ab")
    (tmp_path / "c.txt").write_bytes(b"c\377")
    (tmp_path / "empty.txt").touch()
    yield tmp_path
    assert not [*tmp_path.rglob("*tmp*")]


def tool(name, *arguments, start=command, **settings):
    return start([ROOT / program(name)], *arguments, cwd=".", **settings)


def tokenize(*arguments, text=None, out="out.bin"):
    return tool("tokenize", "--out", out, *arguments, input=text, start=succeeds)


def refused(*patterns, program="tokenize", at=("--out", "x.bin"), options="", **settings):
    """Such a run is refused, and writes nothing."""
    assert_refused(tool(program, *at, options, timeout=60, **settings), *patterns)
    assert not os.path.exists("x.bin") and not os.path.exists("y.bin")


def tokens(path="out.bin"):
    """Of a token file, whose header is as it must be."""
    data = open(path, "rb").read()
    found = np.frombuffer(data, "<u2", offset=1024)
    assert [*np.frombuffer(data, "<i4", 3)] == [20240520, 1, len(found)]
    return [*map(int, found)]


def documents(path):
    found = np.array(tokens(path))
    return sorted(bytes(x[1:].astype("u1")) for x in np.split(found, np.flatnonzero(found == EOT))[1:])


def mask(path):
    """The bits of a mask, whose header is as it must be."""
    data = open(path, "rb").read()
    count, ones = np.frombuffer(data, "<u8", 2, 8)
    bits = np.unpackbits(np.frombuffer(data, "u1", offset=64), bitorder="little")[:count]
    assert data[:8] == b"tokmask1" and len(data) == 64 + (count + 7) // 8 and bits.sum() == ones
    return [*map(int, bits)]


# ---- what is a document ----
@pytest.mark.parametrize("options, text, expected", [
    ("ab.txt empty.txt c.txt", None, [*AB, EOT, 99, 255]),  # whatever its bytes, except an empty one
    ("ab.txt -", "xy", [*AB, EOT, 120, 121]),
    ("/dev/stdin", "xy", [EOT, 120, 121]),
    ("-- -o", None, AB),
    ("--split line -", "\n\na\nb\n\n\nc", [EOT, 97, 10, 98, 10, EOT, 99]),
    ("--split line --separator --- -", "a\n--- \n---\nb\n---\n", [EOT, 97, 10, 45, 45, 45, 32, 10, EOT, 98, 10]),
    ("--split line -", "a\r\n\r\nb\r\n\r\nc\r\n", [EOT, 97, 13, 10, EOT, 98, 13, 10, EOT, 99, 13, 10]),  # as Windows writes lines
    ("--split line --separator --- -", "a\r\n---\r\nb\r\n---\r\n", [EOT, 97, 13, 10, EOT, 98, 13, 10]),
    ("--split line -", "\ufeffa\n\n\ufeffb", [EOT, 97, 10, EOT, 239, 187, 191, 98]),  # a mark is where a file begins
    ("--split line --separator --- -", "\ufeff---\na\n", [EOT, 97, 10]),
    ("ab.txt -", "\ufeffx\ufeff", [*AB, EOT, 120, 239, 187, 191]),
    ("ab.txt -", "\ufeff", AB),
    ("--split jsonl -", '\ufeff{"id": 12345678901234567890, "text": "a", "n": [-1e300, 0, 0.5e-400]}\r\n', [EOT, 97]),
    ("--split jsonl -", '{"text": "a\\n", "n": 1}\n\n{"text": ""}\n{"text": "\\u00e9\\u0000"}', [EOT, 97, 10, EOT, 195, 169, 0]),
    ("--split jsonl --field content -", '{"content": "a", "text": "b"}\n', [EOT, 97])])
def test_what_is_a_document(options, text, expected):
    tokenize(options, text=text)
    assert tokens() == expected


def test_train_bpe_separates_documents_where_tokenize_does():
    """No pair of the separator's bytes becomes a token, whatever its line ends in."""
    for end in "\n", "\r\n":
        tool("train_bpe", "--split line --separator ++++ --out v -", input=f"ab{end}++++{end}" * 9, start=succeeds)
        assert "+" not in open("v/merges.txt").read().split("\n", 1)[1], end


@pytest.mark.parametrize("text, expected", [(b"xy", [EOT, 120, 121, *AB]), (b"", AB)], ids=["text", "empty"])
def test_a_pipe_is_read_when_its_writer_comes(text, expected):
    os.mkfifo("pipe")
    with subprocess.Popen([ROOT / program("tokenize"), "--out", "out.bin", "pipe", "ab.txt"], env=environment()) as run:
        with open("pipe", "wb", 0) as pipe:
            for i in range(len(text)): pipe.write(text[i:i + 1]), time.sleep(0.1)
        assert run.wait(60) == 0 and tokens() == expected


# ---- training and validation ----
MANY = [f'{{"text": "document {i}"}}\n' for i in range(1, 301)]


def split(name, lines, fraction):
    tokenize(f"--split jsonl --val-out {name}.val.bin --val-fraction {fraction} -", out=f"{name}.train.bin", text="".join(lines))
    return documents(f"{name}.train.bin"), documents(f"{name}.val.bin")


def test_every_document_goes_to_the_side_that_its_bytes_alone_decide():
    train, val = split("many", MANY, 0.1)
    assert sorted(train + val) == sorted(json.loads(x)["text"].encode() for x in MANY) and 15 <= len(val) <= 50
    assert split("reversed", MANY[::-1], 0.1) == (train, val)
    assert sorted({*split("twice", MANY + MANY[::-1], 0.1)[1]}) == val
    larger = split("larger", MANY, 0.2)[1]
    assert {*val} < {*larger}
    split("again", MANY, 0.1)
    assert all(tokens(f"again.{side}.bin") == tokens(f"many.{side}.bin") for side in ("train", "val"))


@pytest.mark.parametrize("documents, side", [(1, "x"), (1, "y"), (5, "y")])
def test_a_side_without_documents_is_an_error_that_says_what_helps(documents, side):
    options = f"--split jsonl --val-out y.bin --val-fraction {0.999999 if side == 'x' else 0.000001} -"
    refused(f"no document is for {side}.bin, of {documents}; give more, .*--split.*--val-fraction", options=options,
            input="".join(MANY[:documents]))


def test_shards_have_the_same_tokens_in_numbered_files(here):
    tokenize("--split jsonl -", text="".join(MANY))
    whole = tokens()
    tokenize("--shard-tokens 1000 --split jsonl -", out="part.bin", text="".join(MANY))
    parts = [tokens(path) for path in sorted(here.glob("part_*.bin"))]
    assert sum(parts, []) == whole and [len(x)
                                        for x in parts[:-1]] == [1000] * (len(whole) // 1000) and not os.path.exists("part.bin")
    refused("part_000002.bin is from an earlier run", at=["--out", "part.bin"], options="--shard-tokens 2000 --split jsonl -",
            input="".join(MANY))


# ---- prompts and responses ----
PAIRS = '{"q": "ab", "a": "cd", "text": "z"}\n\n{"q": "", "a": "e\\n"}\n{"a": "g", "q": "f"}\n'
ASK = "--split jsonl --prompt-field q --response-field a"


def test_prompts_are_masked_and_responses_and_the_end_of_text_after_them_are_not():
    run = tokenize(ASK, "-", text=PAIRS)
    assert tokens() == [EOT, 97, 98, 99, 100, EOT, 101, 10, EOT, 102, 103] and mask("out.mask") == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1]
    assert "its mask: 7 tokens count in the loss\n" in run.out
    assert "out.mask: removed" in tokenize("ab.txt").out and not os.path.exists("out.mask")  # that of what was there before
    tokenize(ASK, "--shard-tokens 4 -", text=PAIRS)
    assert [mask(f"out_00000{i}.mask") for i in range(3)] == [[0, 0, 0, 1], [1, 1, 1, 1], [1, 0, 1]]


def test_both_sides_have_masks():
    tokenize(ASK, "--val-out val.bin -", text="".join(f'{{"q": "prompt {i} ", "a": "{i}."}}\n' for i in range(1, 101)))
    for side in "out", "val":
        want, spaces = [], 0
        for i, token in enumerate(tokens(f"{side}.bin")):
            if token == EOT: spaces = 0
            want.append(int(i > 0 if token == EOT else spaces == 2))
            spaces += token == ord(" ")
        assert mask(f"{side}.mask") == want and len(want) >= 20


def test_no_token_has_bytes_of_both_prompt_and_response():
    """A vocabulary with a merge across the boundary does not use it there."""
    tool("train_bpe", "--vocab-size 258 --out pair -", input="xyxyxy xyxy")
    tokenize(ASK, "--tokenizer pair -", text='{"q": "x", "a": "y"}\n{"q": "xy", "a": "xy"}\n')
    assert len(tokens()) == 6 and mask("out.mask") == [0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("line, pattern", [
    ('{"q": "1", "a"', "not valid JSON"), ('{"a": "1"}', 'no text in a field "q"; --prompt-field names another'),
    ('{"q": "1", "a": 2}', 'no text in a field "a"; --response-field names another'),
    ('{"q": "1", "a": ""}', 'empty response in its field "a".*remove the line'),
    ('{"q": "1", "q": "3", "a": "2"}', "not valid JSON")])
def test_a_line_that_is_no_pair_is_named(here, line, pattern):
    (here / "bad.jsonl").write_text(f'{{"q": "1", "a": "2"}}\n\n{line}\n')
    refused("line 3 of bad.jsonl", pattern, options=f"{ASK} bad.jsonl")
    assert not os.path.exists("x.mask")


# ---- vocabularies ----
@pytest.fixture
def corpus(here):
    (here / "corpus").write_bytes(b"".join(x.read_bytes() for x in sorted(ROOT.glob("llmc/*/*.h"))) * 8)


def test_train_bpe_makes_the_same_vocabulary_again_which_halves_the_number_of_tokens(corpus, here):
    for name in "bpe", "again": tool("train_bpe", "--vocab-size 600 --out", name, "corpus", start=succeeds)
    assert len((here / "bpe/merges.txt").read_text().splitlines()) == 344
    for file in "vocab.json", "merges.txt": assert (here / "bpe" / file).read_bytes() == (here / "again" / file).read_bytes()
    tokenize("--tokenizer bpe corpus")
    tokenize("--tokenizer bpe/vocab.json corpus", out="json.bin")
    assert tokens() == tokens("json.bin") and tokens()[0] == 599 and 2 * len(tokens()) < os.path.getsize("corpus")


def test_train_bpe_says_when_no_pairs_are_left_to_merge(here):
    run = tool("train_bpe", "--out few -", input="aaab aaab")
    assert "less than --vocab-size 4096" in run.said and (here / "few/merges.txt").read_text().split("\n")[1:] == ["a a", "a b",
                                                                                                                   "aa ab", ""]


# ---- the default data ----
def default_data(tree, place, *vocabulary, start=succeeds):
    return start("sh", [ROOT / "dev/data/default.sh", place, ROOT / program("tokenize")], *vocabulary, cwd=tree)


def files_of(path):
    """The names that the files of a side give themselves in their first lines."""
    return {name for x in documents(path) for name in re.findall(rb"\A/\*\s*(\S+)", x)}


def test_the_default_data_is_the_courses_text_with_no_program_for_validation(here):
    default_data(here, "default")
    assert len(tokens("default/train.bin")) > 1000000 and len(tokens("default/val.bin")) > 40000
    val, train = files_of("default/val.bin"), files_of("default/train.bin")
    assert b"logger.h" in val - train and b"comm.h" in train and not any(b"train_gpt2" in x for x in val)
    # With a vocabulary of its own it has less than half as many tokens.
    default_data(here, here / "own", ROOT / program("train_bpe"), 1200)
    assert 10000 < len(tokens("own/train.bin")) < len(tokens("default/train.bin")) / 2
    assert_refused(default_data(here, "ab.txt/data", start=command), "ab.txt/data cannot be made", "clone into a folder")


# ---- errors ----
@pytest.mark.parametrize("options, patterns, text", [
    ("", ["usage: tokenize"], ""), ("ab.txt nothing.txt", ["nothing.txt", "No such file"], ""),
    ("folder", ["folder is a folder", "files in it"], ""),
    ("empty.txt", ["no text"], ""), ("--outt x.bin ab.txt", ["unknown option '--outt'"], ""),
    ("--val-fraction 1 ab.txt", ["--val-fraction must be between"], ""),
    ("--out no/x.bin ab.txt", ["cannot create", "no/x.bin"], ""),
    ("--tokenizer folder ab.txt", ["folder/vocab.json: is a pipe"], ""),
    ("--split jsonl -", ["line 2 of", "field"], '{"text": "a"}\n{"text": 1}\n'),
    ("--split jsonl -", ["line 2 of", "not valid JSON"], '{"text": "a"}\n{"text": "b"\n'),
    ("--split jsonl -", ["line 1 of", "NaN", "json.dumps.*allow_nan=False"], '{"text": "a", "x": NaN}\n'),
    ("--split jsonl -", ["line 2 of", "Infinity", "json.dumps.*allow_nan=False"], '{"text": "a"}\n{"x": -Infinity, "text": "a"}\n'),
    ("--split jsonl -", ["line 1 of", "halves of surrogate pairs"], '{"text": "a\\ud83d"}\n'),
    ("--split jsonl -", ["line 1 of", "not valid JSON"], '{"text": "a", "x": 1e400e}\n'),
    ("--split jsonl -", ["line 1 of", "not valid JSON"], '{"text": "a", "x": 01e999}\n'),
    ("--split jsonl -", ["line 1 of", "duplicate"], '{"text": "a", "text": "b"}\n'),
    *((options, ["must be two fields of lines of JSON: give both, --split jsonl, and no --field"], "") for options in (
        "--split jsonl --prompt-field q ab.txt", "--prompt-field q --response-field a ab.txt", f"{ASK} --field text ab.txt",
        f"{ASK} --response-field q ab.txt"))])
def test_what_is_wrong_is_named_and_nothing_is_written(here, options, patterns, text):
    (here / "folder").mkdir()
    os.mkfifo("folder/vocab.json")
    refused(*patterns, options=options, input=text)


def test_train_bpe_refuses_a_vocabulary_smaller_than_the_bytes():
    refused("--vocab-size must be between 257", program="train_bpe", options="--vocab-size 256 ab.txt")


def test_a_vocabulary_for_which_there_is_no_space_is_an_error(corpus):
    """test/unit/test_tokens.c has token files that cannot be written."""
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 1; exec "$@"', "limited", ROOT / program("train_bpe")]
    assert_refused(command(limited, "--out folder corpus", cwd="."), "cannot write", "vocab.json")


# ---- dev/data/repeat.py ----
def test_a_repeated_document_counts_what_stands_far_back_alone_and_is_read_with_its_mask():
    after, length, n = 520, 1560, 4
    succeeds("python3", ROOT / "dev/data/repeat.py", f"r.bin {after} {length} {n}", cwd=".")
    documents, bits = np.array(tokens("r.bin")).reshape(n, length), np.array(mask("r.mask")).reshape(n, length)
    assert (documents[:, after:] == documents[:, :-after]).all() and len({*map(bytes, documents)}) == n and documents.max() < 73
    for document, counted in zip(documents, bits):
        assert np.flatnonzero(counted).tolist() == [at * after + 2*key + 1 for at in (1, 2) for key in range(8)]
        for t in np.flatnonzero(counted): # its key comes before it, and in what a short context sees nobody has the value
            assert 1 <= document[t - 1] <= 8 and document[t] not in document[t - after + 511:t]
    run = tool("train_gpt2_single", "--data r.bin --mask required --val-data= --tokenizer= --vocab-size 73 --model d1 --channels "
               f"16 --heads 2 --seq-len {length} --batch-size 1 --steps 3 --eval-every 0 --sample-every 0", start=succeeds)
    assert run.out.count("| 16 targets") == 3, run
    assert_refused(command("python3", ROOT / "dev/data/repeat.py", "x.bin 500", cwd="."),
                   "AFTER must be from 512 on and less than LENGTH, 2048; it is 500")
