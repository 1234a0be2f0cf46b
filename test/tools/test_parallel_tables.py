"""The scripts of dev/bench that make the tables of chapters 5, 6 and 9: on small models, and on programs that count wrongly."""
import re
import pytest
from suite import ROOT, TOKENS, assert_says, command, executable, program, rest, succeeds

LONG = 4

SMALL = f"--data {TOKENS} --heads 4 --channels 16 --seq-len 16 --batch-size 4"
PP = f"{SMALL} --layers 4 --total-batch-size 256"
TP = f"{SMALL} --layers 2"


def table(script, options, binary, more=[], **env):
    return succeeds(f"python3 dev/bench/{script}.py", more, options, env={"PROGRAM": binary, **env} if binary else env).out


def skewed(folder, name, line, field):
    """A program like it whose metrics.jsonl says something else of a field in a line."""
    return executable(folder / "skewed", f"""
"{ROOT}/{program(f'train_gpt2_{name}')}" "$@" || exit 1
while [ $# -gt 1 ]; do [ "$1" = --out ] && out=$2; shift; done
[ "${{OMPI_COMM_WORLD_RANK:-0}}" != 0 ] || sed -i '{line}s/"{field}":[0-9]*/"{field}":1000/' "$out/metrics.jsonl"
""")


# 64 tokens of 16 channels: 4096 bytes; 4 micro-batches; the root: 384 + 16 + 2 rows, with a block of 13120 bytes in a bucket. 2 blocks have two
# sums each, forward and backward.
@pytest.mark.parametrize("script, options, rows, absent", [
    ("pp_messages", f"--ranks 3 {PP}", [
        "0 | activations, to the next stage | 4 | 4096 | 16384", "1 | gradients, to the stage before | 4 | 4096 | 16384",
        "2 | all-reduce of the root | 1 | 25728 | 25728"], "^ *2 +activations"),
    rest("pp_messages", f"--ranks 2 --schedule interleaved {PP}", [
        "0 | activations, to the next stage | 8 | 4096 | 32768", "1 | activations, to the next stage | 4 | 4096 | 16384"], "nan"),
    rest("pp_messages", f"--ranks 4 --pipeline-parallel 2 {PP}", [
        "3 | all-reduce over replicas | 1 | 38848 | 38848", "0 | activations, to the next stage | 2 | 4096 | 8192"], "nan"),
    ("tp_sums", TP, ["forward, blocks | all-reduce | 4", "backward, blocks | all-reduce | 4 | 4096 | 4096 | 16384",
                     "forward, embedding | all-reduce | 1", "head | all-gather | 1 | 1536 | 768 | 768"], "nan"),
    ("tp_sums", f"{TP} --ranks 4 --tensor-parallel 2 --sequence-parallel", [
        "backward, blocks | all-gather | 8 | 4096 | 2048", "backward, blocks | reduce-scatter | 4", ".*all-reduce, copies.*"], "nan")])
def test_messages_and_sums_are_counted(script, options, rows, absent):
    text = table(script, options, program(f"train_gpt2_{script[:2]}"))
    assert_says(text, *(f"^ *{row.replace(' | ', ' +')}( |$)" for row in rows), no=[absent])


def test_activations_and_state_are_those_of_the_formulas():
    """4 micro-batches with gpipe, 2 and 1 with 1f1b, 2 with zb-h1; with tensor parallelism a block keeps 16, 10 and 8 C."""
    text = table("pp_memory", PP, program("train_gpt2_pp"), ["--ranks", "2", "--schedules", "gpipe 1f1b zb-h1"])
    assert re.findall(r"^ *\S+ +\d+ +\S+ +(\S+)", text, re.M) == ["4", "4", "2", "1", "2", "2"]
    text = table("tp_memory", TP, program("train_gpt2_tp"), ["--tp", "1 2"])
    assert [line.split()[-4] for line in text.strip().split("\n")[1:]] == ["16", "10", "8"]


def test_context_parallelism_sends_and_works_what_the_formulas_say(tmp_path):
    """Of 16 tokens on two ranks the second has 36 + 64 of 136 pairs, and in zigzag both have half; pictures have their colours."""
    files = {name: tmp_path / f"{name}.svg" for name in ("svg", "ring-svg")}
    more = ["--ranks", "1 2", "--tokens", "8", *(word for name, file in files.items() for word in (f"--{name}", str(file)))]
    text = table("cp_table", f"--data {TOKENS} --heads 4 --channels 16 --layers 2 --batch-size 4", program("train_gpt2_cp"), more)
    assert re.findall(r"^ 2 +16 .* (\S+)$", text, re.M) == ["1.00", "1.47", "1.47", "1.00"]
    assert "0.25, 0.75, 1.25, 1.75" in files["svg"].read_text() and "zigzag: 4.0 mean" in files["ring-svg"].read_text()


@pytest.mark.rest
def test_one_rank_alone_has_the_numbers_of_one_device():
    cells = re.findall(r"^\| (.*) \| .* (\w) \|$", table("cp_equal", "--layouts 1 --steps 3", program("train_gpt2_cp")), re.M)
    assert [letter for _, letter in cells] == ["a", "a", "a", "a", "b", "b"]


@pytest.mark.parametrize("script, line, field, more, options, pattern", [
    ("cp_table", 2, "comm_bytes", ["--ranks", "2", "--ways", "ring"], SMALL, "attention sent"),
    ("pp_messages", 2, "comm_bytes", ["--ranks", "2"], PP, "has counted 1000 bytes"),
    ("tp_sums", 2, "comm_bytes", [], TP, "has counted 1000 bytes"),
    rest("pp_memory", 1, "activations", ["--ranks", "2", "--schedules", "gpipe"], PP, "has activations of 1000 bytes, by formula"),
    rest("tp_memory", 1, "gradients", ["--tp", "1 2"], TP, "by formula")], ids=["cp_table", "pp_messages", "tp_sums", "pp_memory", "tp_memory"])
def test_a_program_that_counts_otherwise_is_found(script, line, field, more, options, pattern, tmp_path):
    run = command(f"python3 dev/bench/{script}.py", more, options, env={"PROGRAM": skewed(tmp_path, script[:2], line, field)})
    assert run.status != 0 and re.search(pattern, run.said), run


@pytest.mark.rest
def test_tables_of_times_and_of_drift_are_made(tmp_path):
    text = table("pp_split", "--stages 2 --schedules 1f1b --micro 2 --times 10,12,8", None)
    assert re.search(r"9,3 \| 97.0 %", text) and len(re.findall(r"^\| 2 \|", text, re.M)) == 2
    more = ["--channels", "128 256", "--svg", tmp_path / "plot.svg"]
    text = table("tp_channels", "--rounds 1 --steps 2 --layers 1 --seq-len 16 --batch-size 2", None, more)
    picture = (tmp_path / "plot.svg").read_text()
    assert re.search(r"^\| 256 \| .* \| 4 \| .* \| 2 \| .* %", text, re.M) and picture.endswith("</svg>\n") and "nan" not in picture.lower()
    text = table("tp_drift", f"{TP} --tp 2", None, ["--at", "1 2"])
    drift = {name: float(re.split(r"[|/]", re.search(rf"^.*{name}, 2 ranks +\|.*$", text, re.M)[0])[5]) for name in ("fp32", "bf16")}
    assert drift["fp32"] < 1e-5 < drift["bf16"], text
