"""The experiments that make the tables of chapters 5, 6 and 9: on small models, and on programs that count wrongly."""
import re
import pytest
from suite import ROOT, TOKENS, assert_says, command, executable, program, rest, succeeds

LONG = 4

SMALL = f"--data {TOKENS} --heads 4 --channels 16 --seq-len 16 --batch-size 4"
PP = f"{SMALL} --layers 4 --total-batch-size 256"
TP = f"{SMALL} --layers 2"


def table(script, options, binary, more=[], **env):
    return succeeds(f"python3 -m experiments {script}", more, options, env={"PROGRAM": binary, **env} if binary else env).out


def skewed(folder, name, line, field):
    """A program like it whose metrics.jsonl says something else of a field in a line."""
    return executable(folder / "skewed", f"""
"{ROOT}/{program(f'train_gpt2_{name}')}" "$@" || exit 1
while [ $# -gt 1 ]; do [ "$1" = --out ] && out=$2; shift; done
[ "${{OMPI_COMM_WORLD_RANK:-0}}" != 0 ] || sed -i '{line}s/"{field}":[0-9]*/"{field}":1000/' "$out/metrics.jsonl"
""")


def test_context_parallelism_sends_and_works_what_the_formulas_say(tmp_path):
    """Of 16 tokens on two ranks the second has 36 + 64 of 136 pairs, and in zigzag both have half; pictures have their colours."""
    files = {name: tmp_path / f"{name}.svg" for name in ("svg", "ring-svg")}
    more = ["--ranks", "1 2", "--tokens", "8", *(word for name, file in files.items() for word in (f"--{name}", str(file)))]
    text = table("cp_table", f"--data {TOKENS} --heads 4 --channels 16 --layers 2 --batch-size 4", program("train_gpt2_cp"), more)
    assert re.findall(r"^ 2 +16 .* (\S+)$", text, re.M) == ["1.00", "1.47", "1.47", "1.00"]
    assert "0.25, 0.75, 1.25, 1.75" in files["svg"].read_text() and "zigzag: 4.0 mean" in files["ring-svg"].read_text()


def test_a_program_that_counts_otherwise_is_found(tmp_path):
    binary = skewed(tmp_path, "cp", 2, "comm_bytes")
    run = command("python3 -m experiments cp_table", ["--ranks", "2", "--ways", "ring"], SMALL, env={"PROGRAM": binary})
    assert run.status != 0 and re.search("attention sent", run.said), run


@pytest.mark.rest
def test_tables_of_times_are_made(tmp_path):
    text = table("pp_split", "--stages 2 --schedules 1f1b --micro 2 --times 10,12,8", None)
    assert re.search(r"9,3 \| 97.0 %", text) and len(re.findall(r"^\| 2 \|", text, re.M)) == 2
    more = ["--channels", "128 256", "--svg", tmp_path / "plot.svg"]
    text = table("tp_channels", "--rounds 1 --steps 2 --layers 1 --seq-len 16 --batch-size 2", None, more)
    picture = (tmp_path / "plot.svg").read_text()
    assert re.search(r"^\| 256 \| .* \| 4 \| .* \| 2 \| .* %", text, re.M) and picture.endswith("</svg>\n") and "nan" not in picture.lower()
