"""hf_import, hf_export and llmc_import as programs, without Hugging Face's libraries (test/interop has those): what they refuse,
and that the command that an import ends with is one that works. A vocabulary may be smaller than that of any tokenizer."""
import json, math, os, re, shutil
import numpy as np
import pytest
from suite import REFERENCE, TOKENS, assert_refused, command, once, program, rest, succeeds, train, trained

INITIAL = f"{REFERENCE}/initial"
SMALL = "--model d1 --heads 2 --channels 16 --seq-len 16 --batch-size 8 --lr 3e-3 --warmup-steps 2"


def token_file(vocabulary):
    """700 tokens, the model of which has something to learn."""
    tokens = np.array([20240520, 1, 700] + [0] * 253, "<i4").tobytes() + (np.arange(700) ** 2 % vocabulary).astype("<u2").tobytes()
    return once(f"700 of {vocabulary} tokens", lambda place: (place / "tokens.bin").write_bytes(tokens)) / "tokens.bin"


def small(vocabulary, *options, start=trained):
    path = token_file(vocabulary)
    return start("single", f"--data {path} --val-data {path} --tokenizer= --vocab-size {vocabulary}", SMALL, *options)


def learned(vocabulary):
    return small(vocabulary, "--steps 20 --sample-every 5 --eval-every 20")


def run(tool, *arguments):
    return succeeds([program(tool)], *arguments).out


def refused(place, tool, source, *patterns, options=()):
    """The tool refuses this source, and leaves nothing."""
    assert_refused(command([program(tool), source, place / "none", *options], timeout=60), *patterns)
    assert not [*place.glob("*none*")]


# ---- there and back ----
VOCABULARIES = pytest.mark.parametrize("vocabulary", [2, 50, 256])


@VOCABULARIES
def test_a_vocabulary_smaller_than_any_tokenizers_trains_without_one(vocabulary):
    run = learned(vocabulary)
    first, *_, last = run.series("val_loss")
    assert first > 0.6 * math.log(vocabulary) and last < 0.95 * math.log(vocabulary)
    assert set(run.series("val_loss_per_byte")) == {None}


@VOCABULARIES
def test_an_import_trains_by_the_command_that_it_names(vocabulary, tmp_path):
    checkpoint = learned(vocabulary).checkpoint()
    run("hf_export", checkpoint, tmp_path / "hf")
    said = run("hf_import", tmp_path / "hf", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    options = re.search("^to train from it: (.*)", said, re.M)[1]
    trained("single", options.replace("TOKENS.bin", str(token_file(vocabulary))), "--seq-len 16 --batch-size 8 --steps 2")


@pytest.mark.parametrize("options, patterns", [
    ("--data README.md", ["README.md", "without a --tokenizer"]), ("--vocab-size 0", ["--vocab-size", "not 0"]),
    ("--tokenizer bytes", ["257 tokens", "only 50", "--tokenizer= "])], ids=["text", "no_vocabulary", "tokenizer_too_large"])
def test_without_a_tokenizer_the_error_says_what_works(options, patterns):
    assert_refused(small(50, options, start=train), *patterns)


# ---- hf_import and hf_export ----
@pytest.fixture
def hf(tmp_path):
    """Our reference model, as hf_export writes it."""
    run("hf_export", INITIAL, tmp_path / "hf")
    return tmp_path / "hf"


def test_an_import_of_257_tokens_names_no_tokenizer(hf, tmp_path):
    assert f"to train from it: --init-from {tmp_path}/plain\n" in run("hf_import", hf, tmp_path / "plain")


# ---- the tokenizer of an export ----
@pytest.fixture
def vocabulary(tmp_path):
    (tmp_path / "text").write_text("so many words, so many tokens " * 99)
    run("train_bpe", "--vocab-size", 300, "--out", tmp_path / "bpe", tmp_path / "text")
    return tmp_path / "bpe"


def export_of_a_run(tmp_path, tokenizer):
    """A checkpoint of a run with this tokenizer."""
    succeeds([program("train_gpt2_single"), "--data", tmp_path / "text", "--tokenizer", tokenizer, "--out", tmp_path / "out"],
             SMALL, "--steps 1 --val-data= --sample-every 0")
    return tmp_path / "out/step_00000001"


def test_an_export_has_the_tokenizer_of_its_run_and_begins_texts_as_the_run_does(vocabulary, tmp_path):
    checkpoint = export_of_a_run(tmp_path, vocabulary)
    assert f"tokenizer of the run, {vocabulary}" in run("hf_export", checkpoint, tmp_path / "hf")
    for file in "vocab.json", "merges.txt": assert (tmp_path / "hf" / file).read_bytes() == (vocabulary / file).read_bytes()
    settings = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True and settings["bos_token"] == "<|endoftext|>"
    config, numbers = (json.loads((tmp_path / f"hf/{name}.json").read_text()) for name in ("config", "vocab"))
    assert config["bos_token_id"] == numbers["<|endoftext|>"] > 256
    assert "no tokenizer" in run("hf_export", checkpoint, tmp_path / "without", "--tokenizer=")
    assert not (tmp_path / "without/vocab.json").exists()
    vocabulary.rename(tmp_path / "elsewhere")
    refused(tmp_path, "hf_export", checkpoint, "bpe.*state.json.*--tokenizer")
    run("hf_export", checkpoint, tmp_path / "given", "--tokenizer", tmp_path / "elsewhere")
    assert (tmp_path / "given/merges.txt").exists()


def test_an_export_has_no_tokenizer_of_its_run_that_does_not_fit_or_has_no_merges_and_says_so(tmp_path):
    """Token files of llm.c do not name their tokenizer, and the default one, of bytes, is not that of 300 tokens."""
    def exported(vocabulary, *options):
        data = token_file(vocabulary)
        run = trained("single", f"--data {data} --val-data= --vocab-size {vocabulary}", SMALL, "--steps 1 --sample-every 0",
                      *options)
        return run.checkpoint(), tmp_path / f"hf{vocabulary}"
    checkpoint, hf = exported(300)
    assert "with no tokenizer: that of the run, bytes, has 257 tokens, the model 300; --tokenizer adds one\n" in run("hf_export",
                                                                                                                     checkpoint, hf)
    assert not (hf / "vocab.json").exists() and json.loads((hf / "config.json").read_text())["bos_token_id"] == 299
    run("hf_export", checkpoint, tmp_path / "given", "--tokenizer bytes")  # who names it wants it
    assert (tmp_path / "given/vocab.json").exists()
    for name in "llmc.bin", "llmc":
        tokens = b"".join(bytes([1, b]) for b in range(256)) + b"\x0d<|endoftext|>"
        (tmp_path / name).write_bytes(np.array([20240328, 2, 257, 256] + [0] * 252, "<i4").tobytes() + tokens)
        checkpoint, hf = exported(257, "--tokenizer", tmp_path / name)
        assert f"with no tokenizer: that of the run, {tmp_path / name}, has no merges to export; --tokenizer adds one\n" in run("hf_export", checkpoint, hf)
        assert not (hf / "vocab.json").exists()
        shutil.rmtree(hf)
        refused(tmp_path, "hf_export", checkpoint, "has no merges to export; give the vocab.json",
                options=["--tokenizer", tmp_path / name])


def test_an_export_of_a_run_on_bytes_has_their_tokenizer_and_one_without_a_run_says_that_it_has_none(vocabulary, tmp_path):
    assert "tokenizer of the run, bytes" in run("hf_export", export_of_a_run(tmp_path, "bytes"), tmp_path / "hf")
    assert len(json.loads((tmp_path / "hf/vocab.json").read_text())) == 257
    assert "no tokenizer" in run("hf_export", INITIAL, tmp_path / "initial")
    assert not (tmp_path / "initial/vocab.json").exists()


def last_value(path, data):
    path.write_bytes(path.read_bytes()[:-4] + data)


@pytest.mark.parametrize("data, value", [(b"\0\0\xc0\x7f", "nan"), (b"\0\0\x80\xff", "-inf")], ids=["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused(hf, tmp_path, data, value):
    last_value(hf / "model.safetensors", data)
    refused(tmp_path, "hf_import", hf, "model.safetensors", "tensor 'transformer", f"is {value}", "download it again")


# ---- weights that are too large for 16 bits ----
@pytest.fixture
def large(hf, tmp_path):
    """Returns a function that makes a checkpoint of the reference model, with given values as the last weights of two tensors."""
    def make(*values):
        data = (hf / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        head, data = json.loads(data[8:begin]), bytearray(data)
        for name, value in zip(("wte.weight", "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.weight"), values):
            end = begin + head[f"transformer.{name}"]["data_offsets"][1]
            data[end - 4:end] = np.array([value], "<f4").tobytes()
            begin -= 4 # of one tensor the last two
        (hf / "model.safetensors").write_bytes(data)
        run("hf_import", hf, tmp_path / "large")
        return tmp_path / "large"
    return make


# The largest numbers that are rounded down are just below 65520 and 3.3961775e38.
@pytest.mark.parametrize("dtype, fits, values, choose", [
    ("fp16", 65519.99, (1e5, -65520, 1e38), "bf16 or fp32"), ("bf16", 3.3961e38, (3.4e38, -3.4e38, 3.4e38), "fp32")])
def test_an_export_refuses_weights_that_would_be_infinite(dtype, fits, values, choose, large, hf, tmp_path):
    checkpoint = large(*values)
    refused(tmp_path, "hf_export", checkpoint, f"large: 3 of its weights are too large for {dtype}, the first of them in tensor "
            f"'wte'; choose {choose}$", options=["--dtype", dtype])
    run("hf_export", checkpoint, tmp_path / "fine", "--dtype fp32")
    shutil.rmtree(checkpoint)
    run("hf_export", large(0, fits, -fits), tmp_path / "also", "--dtype", dtype)


@pytest.mark.parametrize("name, ranks, precision, value", [
    ("single", None, "fp16", 1e5), ("single", None, "bf16", 3.4e38), ("ddp", 2, "bf16", 3.4e38), rest("zero", 2, "bf16", 3.4e38),
    rest("fsdp", 2, "bf16", 3.4e38)])
def test_a_run_refuses_weights_that_would_be_infinite(name, ranks, precision, value, large, tmp_path):
    options = f"--data {TOKENS} --val-data= --seq-len 16 --batch-size 8 --total-batch-size 0 --sample-every 0 --steps 0"
    out = tmp_path / "out"
    how = " --zero-stage 3" * (name == "zero")
    says = f"2 of its weights are too large for {precision}, the first of them in tensor 'h.1.fc.weight'; choose "
    init = ["--init-from", large(0, value, -value)]
    assert_refused(command([program(f"train_gpt2_{name}", precision)], options, how, init, ranks=ranks), says)
    assert command([program("train_gpt2_single")], options, init, ["--out", out]).status == 0
    again = command([program(f"train_gpt2_{name}", precision)], options, how, "--resume", ["--out", out], ranks=ranks)
    assert_refused(again, f"step_00000000: {says}")


@pytest.mark.parametrize("member, patterns", [
    # 1e-5 in fp32
    ({"layer_norm_epsilon": 1.00001e-5}, ["is 1.00001e-05; only 1e-05"]), ({"layer_norm_epsilon": 9.999999747378752e-06}, None),
    ({"quantization_config": {"load_in_8bit": True}}, ["quantization_config", "dequantize"]),
    ({"quantization_config": None}, None)],
    ids=["epsilon_in_the_sixth_digit", "epsilon_in_fp32", "quantised", "not_quantised"])
def test_members_of_config_json(hf, tmp_path, member, patterns):
    (hf / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | member))
    if patterns: refused(tmp_path, "hf_import", hf, "config.json", *patterns)
    else: run("hf_import", hf, tmp_path / "fine")


@pytest.mark.parametrize("make, kind", [(os.mkfifo, "pipe"), (os.mkdir, "folder")], ids=["pipe", "folder"])
@pytest.mark.parametrize("tool, file", [("hf_import", "config.json"), ("hf_import", "model.safetensors"),
                                        ("hf_export", "state.json"),
                                        ("hf_export", "model.safetensors"), ("hf_export", "vocab.json"), ("llmc_import", "")])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, tool, file, make, kind):
    source = tmp_path / "source"
    if tool == "hf_import": run("hf_export", INITIAL, source)
    elif tool == "hf_export" and file != "vocab.json": shutil.copytree(INITIAL, source)
    elif file: source.mkdir()
    (source / file).unlink(missing_ok=True)
    make(source / file)
    if file != "vocab.json": refused(tmp_path, tool, source, f"{file or 'source'}: is a {kind}, not a file")
    else: refused(tmp_path, tool, INITIAL, f"vocab.json: is a {kind}", options=["--tokenizer", source])


@pytest.mark.parametrize("tool", ["hf_import", "hf_export"])
def test_nothing_is_written_or_removed_through_a_link(hf, tmp_path, tool):
    source, mine, empty = hf if tool == "hf_import" else INITIAL, tmp_path / "mine", tmp_path / "empty"
    mine.mkdir()
    empty.mkdir()
    (mine / "file").write_text("mine")
    (tmp_path / ".tmp_made").symlink_to(mine)
    (tmp_path / "link").symlink_to(empty)
    run(tool, source, tmp_path / "made")
    assert not (tmp_path / ".tmp_made").is_symlink() and (mine / "file").read_text() == "mine"
    assert_refused(command([program(tool), source, tmp_path / "link"]), "link is there already and is not an empty folder")
    assert (tmp_path / "link").is_symlink() and [*empty.iterdir()] == []


# ---- llmc_import ----
@pytest.fixture
def llmc(tmp_path):
    """A model of 1 layer, 2 heads, 8 channels, 50 tokens padded to 128, 16 positions, all zeros, as llm.c stores it."""
    numbers = np.array([20240326, 3, 16, 50, 1, 2, 8, 128] + [0] * (248 + 2040), "<i4")
    (tmp_path / "model.bin").write_bytes(numbers.tobytes())
    return tmp_path / "model.bin"


def test_a_model_of_llmc_trains_without_a_tokenizer_as_the_import_says(llmc, tmp_path):
    assert "--tokenizer= --data TOKENS.bin" in run("llmc_import", llmc, tmp_path / "from_llmc")
    small(50, f"--steps 2 --sample-every 0 --init-from {tmp_path}/from_llmc --channels 8")


@pytest.mark.parametrize("change, pattern", [
    (lambda x: x[:1023], "model.bin: has 1023 bytes, less than the 1024"),
    (lambda x: x[:2048] + b"\0\0\xc0\x7f" + x[2052:], "model.bin: tensor 'wte' has a value that is nan")], ids=["short", "nan"])
def test_a_broken_model_of_llmc_is_refused(llmc, tmp_path, change, pattern):
    llmc.write_bytes(change(llmc.read_bytes()))
    refused(tmp_path, "llmc_import", llmc, pattern)
