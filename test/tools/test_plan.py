"""build/plan: its tables and JSON, what pages quote of them and of build/schedule, its errors, and its bytes compared with what training programs
predict and hold. (test_plan_steps.py and test_plan_mesh.py have the formulas; experiments/cluster_table.py compares its seconds
with measured ones.)"""
import functools, json, re, subprocess
import pytest
from rows import rows_of, short
from dev.lib import UNITS
from dev.plan.plans import METHODS
from suite import ROOT, TOKENS, assert_refused, assert_says, command, program, rest, succeeds, train, trained

LONG = 10

XL = "--model gpt2-xl --ranks 8 --seq-len 1024 --batch-size 4"
GPT2 = "--model gpt2 --ranks 8 --seq-len 1024 --batch-size 4"
PP4 = f"{GPT2} --pipeline-parallel 4"
# The course outline's example: 10 ms of computing and 8 of communication are 55 %.
ALL_METHODS = "--compress all --model gpt2 --ranks 4 --precision fp32 --compute-ms 10 --communication-ms 8"
EVERY_RANKS = [1 << k for k in range(13)]
NAMES = {"XL": XL, "GPT2": GPT2, "PP4": PP4, "METHODS": ALL_METHODS}


@functools.lru_cache
def said(*options):
    return succeeds(program("plan"), *options).out


def answer(*options):
    return json.loads(said("--json", *options))


def ways(*options):
    """{name: way} of dividing the work, and of the stages of one pipeline."""
    found = answer(*options)
    return {way["name"]: way for way in found["ways"] + found["stages"]}


def times(table, *options):
    """{row's name: row} of a table of times."""
    return next({row["name"]: row for row in t["rows"]} for t in answer(*options)["times"] if t["table"] == table)


# ---- what pages quote, to the digit ----
def quotes_of(page):
    """(command, lines without doubled spaces) of what a page says that plan or schedule prints, but of runs and this machine."""
    for block in re.findall(r"(?:^    .*\n)+", (ROOT / page).read_text(), re.M):
        for part in re.split(r"^    \$ ", re.sub(r"\n    >", r"\r", block), flags=re.M)[1:]:
            line, *lines = part.rstrip().split("\n")
            if re.search("build/(plan|schedule) --", line) and not re.search("--trace|--here", line):
                yield line.replace("\r", "\n"), [" ".join(x.split()) for x in lines if "..." not in x]


DOC = ROOT / "doc"
QUOTES = [(str(page.relative_to(DOC)), *quote) for page in sorted(DOC.rglob("*.md")) for quote in quotes_of(page)]


@pytest.mark.parametrize("page, command_line, lines", QUOTES, ids=lambda x: short(x) if isinstance(x, str) else "")
def test_pages_quote_what_is_printed(page, command_line, lines):
    printed = iter([" ".join(line.split()) for line in succeeds("sh -c", [command_line]).out.splitlines()])
    for line in lines: assert line in printed, line # in their order


def test_pages_quote_every_question():
    assert len(QUOTES) > 25 and sum(len(lines) for *_, lines in QUOTES) > 120
    for option in ("params", "mesh all", "mesh dp", "validate", "compress all", "pipeline-parallel", "context-parallel", "sharding",
                   "compare", "tokens", "node", "recompute"):
        assert any(f"--{option}" in line for _, line, _ in QUOTES), option


# ---- what is printed ----
@rows_of(r"""
XL => 1557611200 parameters ~ ^fits +24 GB +40 GB +80 GB +141 GB$ ~ ^  ddp +no +yes +yes +yes$ ~ ^  fsdp +yes +yes +yes +yes$
--model gpt2-xl --ranks 8 => ^step +16 x 1024 tokens in ~ ^  on the rank with most +rank 0 +rank 0 +rank 0$ ~
    ^  on the rank with least +rank 1 +rank 3 +rank 7$
--ranks 4 => ^step +16 x 128 tokens in
XL --batch-size 22 => ^  ddp +no +recomputed +recomputed +yes$
XL --batch-size 22 --gpu h100 => ^  ddp +yes$
XL --batch-size 22 --gpu h100 --reserve 6 => ^  ddp +recomputed$
GPT2 => ^split      9,3: ranks compute for 97 % .* for 76 %$ ~ ^split      4,4,4,0: .* for 80 % .* for 52 %$ ~ ^  pp 8 +yes ~
    ^cp c: c ranks share each sequence, and 4 x 1024 tokens per micro-batch; --cp ulysses, contiguous$ ~ ^  cp 4 +yes ~
    ^tp t: t ranks share .* 4 x 1024 tokens ~ ^zero-3 waits for each unit that it gathers, as train_gpt2_zero does
PP4 --schedule 1f1b => ^bytes per rank of 8 +rank 0 +rank 1 +rank 2 +rank 3$ ~ ^  blocks +4 +4 +4 +0$ ~
    ^  activations at a time +4 +3 +2 +1$
--params 1e9 --precision fp32 --ranks 4 => 4 \+ 4 \+ 8 bytes ~ total +16.0 GB +10.0 GB
--params 1e9 --ranks 64 --memory 32 --reserve 0 => ^fits, largest +32 GB ~ ^  ddp +yes +2 B ~ ^  zero-1 +yes +7.64 B ~
    ^  zero-2 +yes +14.4 B ~ ^  zero-3 +yes +128 B
--model gpt3-13b --seq-len 2048 --ranks 64 => 40 layers, 40 heads, 5120 channels, vocabulary 50257, context 2048: 12853386240
XL --gpu rtx4090 => ^ +8  does not fit: 35.5 GB of rtx4090$
XL --batch-size 8 --gpu rtx4090 --reserve 4 => ^ +8  does not fit: 29.7 GB of rtx4090; with --recompute block 11.2 GB$
--model d126 --channels 16384 --heads 128 --ranks 1024 --batch-size 1 => ^ +1024  does not fit: 6.5 TB of an h100$ ~ ^fsdp
--model d126 --channels 16384 --heads 128 --ranks 1024 --batch-size 1 --compute-ms 5 => ^ +1 .*%$
GPT2 --gpu a10 --recompute full => ^fits +a10$ ~ GFLOP per token, 125 TFLOP/s x 0.4, blocks recomputed in full$
GPT2 --total-batch-size 65536 => ^ +512  65536 tokens are no multiple of 512 x 4 x 1024
--model gpt2 --ranks 8 --total-batch-size 1024000000000 => ^ +8  7812500 micro-batches are more than the 65536 that can be planned
GPT2 --total-batch-size 1048576 => in 32 micro-batches per rank
XL --node gcp-a3-high => ^links: NVLink 4; nodes of 8 ranks and 4 interfaces: 200 Gb/s each; an update at 3.35 TB/s$ ~ ^fits +h100$
XL --node workstation --link pcie => ^links: PCIe 4.0 x16; nodes of 4 ranks and 1 interface: 10 Gb/s each
GPT2 --compress top-k => ^ddp top-k: train_gpt2_compress, from the step on ~ compressing takes no time here ~
    ^  sent per step +436 MB +70.0 MB$ ~ ^  errors +0 B +[0-9.]+ [MG]B$ ~ ^ddp top-k +ranks
METHODS --memory-bandwidth 1e11 => ^  int8 +190 MB .* 16.55 +2.04 
GPT2 --owners one => ^muon: train_gpt2_muon, ZeRO-1 to ZeRO-3; of each matrix one rank ~ ^bytes per rank of 8 +muon-1 +muon-2 +muon-3$ ~
    ^  sent per step +473 MB .* ~ ^    by the busiest rank +478 MB ~ ^  muon-3 +yes ~ ^muon-1  ranks +compute ms +Newton-Schulz
--help => ^Model and batch:$ ~ ^Links:$ ~ ^With --mesh:$
--mesh all --model gpt2 --node workstation --ranks 8 => RTX 4090 ~ ^dp=8,tp=1,pp=1 zero 1 .* dp [0-9]+ % +zero$
--mesh all --model llama3-405b --gpu h100 --ranks 8 => of which 0 fit; ~ ^bytes are estimated .*no program of this course
--mesh all --model d12 --layers 6 --channels 512 --heads 8 --vocab-size 50257 --gpu h100 --ranks 8 --seq-len 512 =>
    ^d12: 6 blocks, 512 channels, 8 heads, 50257 tokens
""", **NAMES)
def test_tables_say(options, patterns):
    assert_says(said(options), *patterns)


# ---- which ways there are, and rows of tables of times ----
@pytest.mark.parametrize("table, options, names", [
    ("tp of 8", "--model gpt2-medium --ranks 8", ["1", "2", "4", "8"]), ("ways tp", XL, ["tp 1"]), # of 25 heads
    ("tp of 8", "--model gpt2-medium --ranks 8 --sequence-parallel --batch-size 1 --seq-len 4", ["1", "2", "4"]),
    ("tp 3", "--model gpt2 --ranks 6 --tensor-parallel 3", [3 << k for k in range(11)]), ("cp of 8", GPT2, ["cp 2", "cp 4"]), # of 12
    ("cp of 8", f"{GPT2} --cp ring --cp-balance zigzag --seq-len 8", ["cp 2", "cp 4"]), # 16 chunks have no tokens
    ("cp of 6", "--model gpt2-xl --ranks 6 --cp allgather", ["cp 2"]), ("pp of 8", GPT2, ["pp 2", "pp 4", "pp 8"]),
    ("cp 8 of 8", f"{GPT2} --context-parallel 8", ["allgather", "allgather zigzag", "ring", "ring zigzag"]),
    ("cp 4", f"{GPT2} --context-parallel 4 --cp ring", EVERY_RANKS[2:]),
    ("pp of 8", "--model d3 --ranks 8", ["pp 2"]), ("pp of 6", "--model gpt2 --ranks 6", ["pp 2"]),
    ("pp 4 of 8", f"{PP4} --accumulation 8", ["gpipe", "1f1b", "interleaved 2", "zb-h1"]),
    ("pp 4 of 8", f"{PP4} --accumulation 9", ["gpipe", "1f1b", "zb-h1"]), ("pp 4", f"{PP4} --schedule 1f1b", EVERY_RANKS[2:]),
    ("ddp", XL, EVERY_RANKS), ("fsdp", "--model gpt2 --ranks 24", sorted([*EVERY_RANKS, 24])),
    ("fsdp", f"{GPT2} --sharding hybrid --shard-group 4", EVERY_RANKS[2:])], ids=short)
def test_as_many_ranks_share_a_replica_as_divide_it(table, options, names):
    found = [x for x in ways(options) if x.startswith("tp")] if table == "ways tp" else list(times(table, options))
    assert found == [*map(str, names)]


# ---- what takes longer than what ----
def seconds(options, table="ddp", row="8", field="seconds"):
    return times(table, *options.split())[row][field]


@pytest.mark.parametrize("less, more, factor", [
    ((f"{XL} --node dgx-h100", "ddp", "64"), (f"{XL} --node gcp-a3-high", "ddp", "64"), 1),
    ((f"{GPT2} --ranks 4 --tensor-parallel 4", "tp 4", "4"), # rows that are cut
     (f"{GPT2} --ranks 4 --tensor-parallel 4 --sequence-parallel", "tp 4", "4"), 1),
    # messages between nodes cost time
    ((f"{PP4} --schedule 1f1b", "pp 4", "8", "exposed"), (f"{PP4} --schedule 1f1b --ranks-per-node 1", "pp 4", "8", "exposed"), 2)],
    ids=["node", "cut-rows", "messages"])
def test_what_takes_longer(less, more, factor):
    assert 0 < factor * seconds(*less) < seconds(*more)


def test_parts_of_times_and_costs_are_what_they_should_be(tmp_path):
    assert seconds(f"{XL} --node dgx-h100", "ddp", "64") == seconds(f"{XL} --gpu h100", "ddp", "64")
    update = seconds(f"{PP4} --schedule 1f1b --memory-bandwidth 1e12", "pp 4") - seconds(f"{PP4} --schedule 1f1b", "pp 4")
    assert 1.8e-3 < update < 2e-3 and "an update at 1 TB/s" in said(PP4, "--memory-bandwidth 1e12")
    of_total = times("ddp", GPT2, "--total-batch-size 65536")
    assert 7.9 < of_total["1"]["compute"] / of_total["8"]["compute"] < 8.1
    here(tmp_path / "link.json") # a measured link between nodes is not multiplied by their interfaces
    assert len({seconds(f"{XL} --inter-link {tmp_path}/link.json {nics}", "ddp", "16") for nics in ("", "--nics 1")}) == 1
    row = times("ddp", GPT2, "--tokens 1e10 --gpu h100 --price 2")["8"]
    hours = 1e10 / row["tokens_per_s"] / 3600
    assert [row[x] / hours for x in ("hours", "gpu_hours", "kwh", "price")] == pytest.approx([1, 8, 0.7 * 8, 2 * 8], rel=1e-6)


def test_json_has_what_the_tables_have():
    j, text = answer(GPT2, "--tokens 1e10"), said(GPT2)
    assert len(j["ways"]) == 13 and len(j["times"]) == 8
    totals = iter(re.findall(r"[\d.]+ [MG]B", " ".join(re.findall(r"^  total .*", text, re.M))))
    for way in j["ways"]: assert_rounds_to(next(totals), way["bytes"]["total"], way["name"])
    assert f" {1e3 * seconds(GPT2):.2f} " in re.search(r"^ddp +ranks.*?^ +8 (.*?)$", text, re.M | re.S)[1]
    row = times("ddp", XL, "--gpu rtx4090")["8"]
    assert "does not fit" in row["why_not"] and "seconds" not in row
    assert [row["ranks"] for row in answer("--params 1e9 --ranks 24")["bytes_per_rank"]] == [1, 4, 16, 24, 64, 256, 1024]
    assert seconds(f"{GPT2} --mesh dp=2,tp=2,pp=2", "mesh", "8", "tp") > 0
    meshes = answer("--mesh all --model gpt2 --gpu h100 --ranks 8")["meshes"]
    assert any(x["why_not"] and "seconds" not in x for x in meshes if not x["fits"])
    for mesh in (x for x in meshes if x["fits"]):
        assert mesh["dp"] * mesh["tp"] * mesh["pp"] == 8 and sum(mesh["seconds_of"].values()) == pytest.approx(mesh["seconds"])


# ---- errors: the planner's own, and those of the programs that it asks ----
@rows_of(r"""
--model gpt5 => gpt5 is not known: dN .*, gpt2, .*llama3-405b
--model llama3-8b => llama3-8b has grouped queries, .* only --mesh all plans it
--model gpt2 --seq-len 2048 => longer than the 1024 positions
--heads 3 => do not divide over 3 heads
--params 1e9 --layers 3 => layers cannot be used with --params
--master off => master is for --params; give it as well
--params 1e9 --master off --precision fp32 => master is for 16 bits
--compute-ms 5 --mfu 0.5 => mfu cannot be used with --compute-ms
--accumulation 2 --total-batch-size 65536 => accumulation cannot be used with --total-batch-size
--total-batch-size 1000 => 1000 is no multiple of --seq-len 128
--link ethernet => ethernet.*nvlink5, nvlink, .*10gbit or a file
--ranks-per-node 0 --nics 3 => nics is for --ranks-per-node
--mesh dp=8 --owners one => owners cannot be used with --mesh
--mesh dp=8 --sharding grad-op => sharding cannot be used with --mesh
PP4 --accumulation 5000 => accumulation 5000: a pipeline is played with 4096
--model gpt2 --split 9,3 => split is for --pipeline-parallel or --mesh
--compress all --ranks 1 --communication-ms 5 => communication-ms 5: one rank sends nothing
--gpu tpu => gpu tpu is not known; give one of a100-40
--node dgx => node dgx is not known; give one of dgx-a100-40, .*workstation
--node dgx-h100 --gpu a100-80 => node dgx-h100 has h100, not --gpu a100-80
--memory 8 --reserve 9 => reserve 9 leaves nothing of 8 GB; lower it
--price 2 => price is for --tokens; give it as well
--compress int8 --rank 2 => rank does nothing with --compress int8
--validate --ranks 3 => ranks cannot be used with --validate
--mesh all --model gpt2 => mesh all needs a --gpu
--mesh all --gpu h100 --model gpt2 --batch-size 4 => batch-size cannot be used with --mesh all
--mesh all --gpu h100 --model llama3-8b --layers 3 => layers, --heads, .* are for models with GPT-2's blocks
--mesh all --gpu h100 --model gpt2 --seq-len 2048 => seq-len 2048 is longer than the 1024 positions of gpt2
--here --measured /no/file => /no/file: cannot be opened: .*let python3 -m dev.plan.here
--here --gpu h100 => gpu cannot be used with --here
--model gpt2 --tensor-parallel 3 => tensor-parallel 3 does not divide 8 ranks; start a multiple of 3
--model gpt2 --tensor-parallel 4 --sequence-parallel --seq-len 1 --batch-size 1 => sequence-parallel cuts .* choose a multiple of 4
--model gpt2 --context-parallel 8 --cp ulysses => divides the heads .* and 8 does not divide 12
--model gpt2 --cp-balance zigzag => leave out --cp-balance, or choose --cp allgather or ring
PP4 --schedule interleaved --accumulation 5 => takes micro-batches in groups of 4, .* a step has 5
PP4 --schedule zb-h1 --recompute block => recompute block: --schedule zb-h1 keeps all activations
PP4 --split 9,3 => split 9,3 is not auto, nor 4 numbers
--model gpt2 --mesh pp=8 --schedule interleaved => mesh pp=8 with --chunks 2 makes 16 parts of the model, more than its 12 blocks
--sharding hybrid => go together: give both or neither
--compress bf16 => compress bf16 saves nothing: this program.s gradients \(bf16\) have 16 bits already
--node-ranks 3 => node-ranks must divide the number of ranks, and 3 does not divide 8
""", **NAMES)
def test_errors(options, patterns):
    assert_refused(command(program("plan"), options), *patterns)


# ---- bytes: the training programs' own ----
MODEL = "--model d3 --heads 4 --channels 48 --seq-len 24" # units that 2 ranks cannot share without padding
RUN = f"--data {TOKENS} --val-data= --eval-every 0 --sample-every 0"
KINDS = ("parameters", "gradients", "optimizer state", "communication", "activations", "errors")


def test_a_program_answers_what_it_predicts_without_data_tokenizer_or_device():
    nothing = "--data /none --val-data /none --tokenizer /none --out /none --init-from /none"
    one = f"--predict 1048576 --model d1 --layers 4 --zero-stage 3 {nothing}"
    alone = succeeds(program("train_gpt2_zero"), one).out
    said, (rank,) = json.loads(alone), json.loads(alone)["ranks"]
    assert said["axes"] == {"tp": 1, "cp": 1, "pp": 1, "dp": 1048576}
    assert rank["bytes"]["parameters"] == 4 * (9 * 16) # 16 elements of each unit
    many = subprocess.run([ROOT / program("train_gpt2_pp"), "--predict", "-"], capture_output=True, text=True, input=f"""
--predict 8 --model gpt2 --pipeline-parallel 4 {nothing}
--predict 4 --model gpt2 --pipeline-parallel 4
--predict 8 --model gpt2 --pipeline-parallel 3""")
    of_8, of_4 = map(json.loads, many.stdout.splitlines()) # a question knows nothing of the one before
    assert [r["rank"] for r in of_8["ranks"]] == [0, 1, 2, 3] and of_8["axes"]["dp"] == 2 and of_4["axes"]["dp"] == 1
    assert [r["bytes"]["activations"] for r in of_8["ranks"]] == [r["bytes"]["activations"] for r in of_4["ranks"]]
    assert many.returncode == 1 and "error: --pipeline-parallel 3 does not divide 8 ranks" in many.stderr


def assert_rounds_to(text, number, what):
    """"12.3 MB" is this number, rounded."""
    digits, unit = text.split()
    number /= UNITS[unit]
    assert abs(float(digits) - number) <= (0.0501 if "." in digits else 0.501), f"{what}: {text} and {number}"


def both(name, options, batch, copies, micro, ranks, precision="fp32", column=None):
    """A run, and all ways that plan has of the same: what it keeps and sends must be what that column says."""
    of_run = "--compress-from 0 --recompute none --steps 2" if name == "compress" else "--steps 1"
    run = trained(name, f"{MODEL} {options} --batch-size {batch} --total-batch-size {24 * batch * copies * micro}", RUN, of_run,
                  ranks=ranks, precision=precision)
    planned = ways(*re.sub("--zero-stage [123]" if name in ("zero", "muon") else "$", "", f"{MODEL} {options}").split(),
                   f"--batch-size {batch} --accumulation {micro} --vocab-size 257 --device cpu --precision {precision} --ranks {ranks}")
    way, predicted, again = planned[column], run.about["predicted_bytes"], "--recompute block" in options
    for kind in KINDS: assert predicted.get(kind, 0) == way["bytes_recomputed" if again else "bytes"][kind], kind
    if "zigzag" in options or name == "muon": # plan has a rank that sends most, and rank 0 sends less
        by = "per rank and step" if "--owners all" in options else "a step by rank 1, most" # all round to the same MB
        assert_rounds_to(re.search(rf"^sent {by} .*\n +bytes +[0-9.]+ [kM]B +([0-9.]+ [kM]B)", run.out, re.M)[1],
                         way["sent_per_step"], "sent")
    else: assert abs(run.about["predicted_comm_bytes"] - way["sent_per_step"]) < 1, (run.about, way)
    assert "than predicted" not in run.out, run
    return run, planned


ROWS = "--tensor-parallel 2 --sequence-parallel"


@pytest.mark.parametrize("name, column, ranks, shared, micro, options", [
    ("ddp", "ddp", 2, 1, 1, ""), ("ddp", "ddp", 3, 1, 2, "--recompute block"), rest("ddp", "ddp", 1, 1, 1, ""),
    *[("zero", f"zero-{z}", 2, 1, 1, f"--zero-stage {z}") for z in (1, 2, 3)],
    *[rest("zero", f"zero-{z}", 3, 1, 2, f"--zero-stage {z} --recompute block") for z in (1, 2, 3)],
    ("fsdp", "fsdp", 3, 1, 2, "--recompute block"), ("fsdp", "fsdp", 4, 1, 2, "--sharding hybrid --shard-group 2"),
    ("bf16 fsdp", "fsdp", 2, 1, 2, "--sharding grad-op --reduce-dtype model"), ("bf16 ddp", "ddp", 2, 1, 1, ""),
    ("bf16 zero", "zero-3", 2, 1, 1, "--zero-stage 3"), ("zeropp", "zero++", 4, 1, 2, "--node-ranks 2"),
    rest("bf16 zeropp", "zero++", 2, 1, 1, "--node-ranks 1"),
    ("muon", "muon-1", 3, 1, 1, "--owners one"), rest("muon", "muon-3", 3, 1, 2, "--owners all --zero-stage 3 --recompute block"),
    *[rest(f"{precision} muon", "muon-2", 3, 1, 1, "--owners one --zero-stage 2") for precision in ("bf16", "fp16")],
    ("tp", "tp 4", 4, 4, 2, "--tensor-parallel 4 --recompute block"), ("tp", "tp 2", 4, 2, 2, ROWS),
    rest("bf16 tp", "tp 2", 4, 2, 1, ROWS),
    rest("tp", "tp 2", 2, 2, 1, f"{ROWS} --recompute block"), rest("tp", "tp 2", 4, 2, 1, "--tensor-parallel 2"),
    ("cp", "cp 2", 4, 2, 2, "--context-parallel 2 --cp ring --cp-balance zigzag --recompute block"),
    rest("cp", "cp 4", 4, 4, 1, "--context-parallel 4 --cp ulysses"),
    rest("cp", "cp 3", 3, 3, 2, "--context-parallel 3 --cp allgather"),
    rest("bf16 cp", "cp 2", 2, 2, 1, "--context-parallel 2 --cp ring"),
    rest("bf16 pp", "rank 0", 3, 3, 2, "--pipeline-parallel 3 --schedule 1f1b"),
    ("compress", "ddp top-k", 2, 1, 1, "--compress top-k"), ("compress", "ddp powersgd", 3, 1, 1, "--compress powersgd --rank 2"),
    ("compress", "ddp int8", 3, 1, 1, "--compress int8 --bucket-mb 0.02"),
    *[rest("compress", f"ddp {method}", ranks, 1, 1, f"--compress {method}") for ranks in (2, 3) for method in METHODS[1:]],
    *[rest(f"{precision} compress", "ddp int8", 2, 1, 1, "--compress int8") for precision in ("bf16", "fp16")]], ids=short)
def test_bytes_are_the_programs_own(name, column, ranks, shared, micro, options):
    *precision, program = name.split()
    both(program, options, 3, ranks // shared, micro, ranks, *precision, column=column)


def assert_same_totals(run, planned, ranks, options):
    """What the run prints of each rank is the total of its column and the workspace."""
    for column, rank in ranks.items():
        total = planned[column][kept_as(options)]["total"] + run.about["predicted_bytes"]["workspace"]
        shown = re.search(rf"^  rank {rank}  .*; ([0-9.]+ [kMG]?B)$", run.out, re.M)
        assert shown, run
        assert_rounds_to(shown[1], total, column)


def kept_as(options): return "bytes_recomputed" if "--recompute block" in options else "bytes"


@pytest.mark.parametrize("ranks, p, micro, options", [
    (4, 4, 5, "--layers 8 --split 2,3,3,0"), rest(4, 4, 6, "--layers 8 --schedule gpipe --recompute block"),
    rest(4, 2, 4, "--layers 9 --schedule interleaved --chunks 3"), rest(2, 2, 5, "--schedule gpipe"),
    rest(4, 4, 5, "--layers 8 --schedule 1f1b --recompute block"), rest(4, 4, 6, "--layers 4 --schedule zb-h1")], ids=short)
def test_bytes_of_every_stage_are_train_gpt2_pps_and_the_largest_is_exactly_what_it_needs(ranks, p, micro, options):
    options = f"--pipeline-parallel {p} {options}{'' if '--schedule' in options else ' --schedule 1f1b'}"
    run, planned = both("pp", options, 3, ranks // p, micro, ranks, column="rank 0")
    assert_same_totals(run, planned, {f"rank {q}": q for q in range(p)}, options)
    totals = [planned[f"rank {q}"][kept_as(options)]["total"] for q in range(p)]
    need = max(totals) + run.about["predicted_bytes"]["workspace"]
    recompute = "" if "--recompute" in options else "--recompute none" # which they otherwise do where memory is short
    of_run = f"{MODEL} {options} {recompute} --batch-size 3 --total-batch-size {24 * 3 * ranks // p * micro} --steps 1"
    trained("pp", of_run, RUN, f"--memory-limit {need}e-9", ranks=ranks)
    assert_refused(train("pp", of_run, RUN, f"--memory-limit {need - 8}e-9", ranks=ranks),
                   f"rank {totals.index(max(totals))}: error: out of memory")


@pytest.mark.parametrize("dp, tp, pp, micro, options, precision", [
    (2, 2, 2, 4, "--zero-stage 1 --sequence-parallel --recompute block", "fp32"), rest(2, 2, 2, 4, "--schedule zb-h1", "fp32"),
    (1, 2, 2, 4, "--schedule interleaved --chunks 2", "fp32"), rest(2, 2, 2, 4, "", "fp32"),
    rest(2, 2, 1, 2, "--zero-stage 1", "fp32"),
    rest(2, 1, 2, 3, "--zero-stage 1 --schedule gpipe --split 5,3", "fp32"), rest(1, 1, 1, 2, "", "fp32"),
    rest(1, 4, 1, 1, "--sequence-parallel", "fp32"), rest(1, 1, 4, 4, "--split 3,3,2,0", "fp32"),
    rest(2, 2, 1, 2, "--zero-stage 1 --sequence-parallel", "bf16")], ids=short)
def test_bytes_by_kind_and_axis_are_train_gpt2_3ds(dp, tp, pp, micro, options, precision):
    run, planned = both("3d", f"--layers 8 --mesh dp={dp},tp={tp},pp={pp} {options}", 4, dp, micro, dp * tp * pp, precision,
                        column="stage 0")
    for axis, sent in run.about["predicted_comm_bytes_along"].items():
        assert abs(sent - planned["stage 0"].get(f"sent_along_{axis}", 0)) < 0.51
    if pp > 1: assert_same_totals(run, planned, {f"stage {q}": q * tp for q in range(pp)}, options)


# ---- muon, whose ranks differ ----
def muon_ranks(L, T, N, is_all):
    """By hand, of d<L>: elements of a shard of every unit. And of each rank: elements of its pieces of matrices, of the matrices
    that it owns, of what AdamW updates, of what it sends and receives on the way to owners; FLOPs."""
    C, own, matrices, updated = 64 * L, 0, [], [0] * N
    block = [(6 * C, [C * C] * 4), (7 * C, [4 * C * C] * 2)] # the vectors in front, and the matrices
    def shared(begin, end, shard): return [max(0, min(end, (q + 1) * shard) - max(begin, q * shard)) for q in range(N)]
    for begin, sizes in [((384 + T + 2) * C, []), *block * L]:
        shard = -(-(begin + sum(sizes)) // (16 * N)) * 16
        own, updated = own + shard, [x + y for x, y in zip(updated, shared(0, begin, shard))]
        for n in sizes:
            matrices.append((30 * C**3 if n == C * C else 90 * C**3, n, shared(begin, begin + n, shard)))
            begin += n
    flops, held, owned, there, here = ([0] * N for _ in range(5))
    for cost, n, parts in sorted(matrices, key=lambda m: -m[0]):
        first = flops.index(min(flops))
        for q in range(N):
            owns = is_all or q == first
            held[q] += parts[q]
            there[q] += parts[q] * (N - 1 if is_all else 1 - owns)
            if owns: flops[q], owned[q], here[q] = flops[q] + cost, owned[q] + n, here[q] + n - parts[q]
    return own, list(zip(held, owned, updated, there, here, flops))


PRECISIONS = {"fp32": (4, 4), "bf16": (2, 2), "fp16": (2, 4)} # bytes of a weight, and of an element of a piece


@pytest.mark.parametrize("L, N, owners, precision", [
    *[(4, N, "one", "fp32") for N in (1, 2, 3, 4, 8)], (4, 3, "all", "fp32"), (6, 8, "one", "bf16"), (4, 30, "one", "fp16"),
    *[rest(L, N, owners, precision) for L in (4, 6) for N in (1, 2, 3, 4, 8) for owners in ("one", "all")
      for precision in PRECISIONS]], ids=short)
def test_bytes_of_muon_are_those_of_its_fullest_and_busiest_ranks(L, N, owners, precision):
    model = f"--model d{L} --seq-len 64 --batch-size 1 --vocab-size 257"
    planned = ways(f"{model} --device cpu --precision {precision} --ranks {N} --owners {owners}")
    (own, ranks), (X, Y) = muon_ranks(L, 64, N, owners == "all"), PRECISIONS[precision]
    held, owned, updated, there, here, flops = zip(*ranks)
    scratch = max(held) + max(owned) + 14 * (64 * L) ** 2 + 8 # (4C,C) of one matrix, and its work: 8C^2 and 2C^2
    sent = [x + (y if owners == "one" else 0) for x, y in zip(there, here)]
    for z in (1, 2, 3):
        way, zero = planned[f"muon-{z}"], planned[f"zero-{z}"]
        assert way["bytes"] == zero["bytes"] | {
            "parameters": X * own * (1 if z == 3 else N), "gradients": X * own * (1 if z > 1 else N),
            "optimizer state": (4 if X == 4 else 8) * own + 4 * max(updated),
            "communication": zero["bytes"]["communication"] + Y * scratch,
            "total": zero["bytes"]["total"] + Y * scratch - 4 * (own - max(updated))}
        for key, n in ("sent_per_step", max(sent)), ("sent_mean", sum(sent) / N):
            assert way[key] == pytest.approx(zero["sent_per_step"] + Y * n, abs=0.11)
    said = succeeds(f"build/predict/train_gpt2_muon.{precision} --predict {N} --owners {owners}", model)
    more = json.loads(said.out)["more"]
    assert (more["flops"], more["message"]) == (max(flops), Y * max(there + here))


# ---- this machine, and the search ----
def here(path, busbw=3e9, **more):
    """What dev.plan.here would have measured."""
    links = {name: {"alpha": 1e-5, "busbw": busbw} for name in ("all-reduce", "reduce-scatter", "all-gather")}
    path.write_text(json.dumps({"gflops": 50, "copy": 20, "mfu": 0.8, "update": 10, "ranks": 16, "collectives": links} | more))
    return f"--here --measured {path} --reserve 0.01"


@pytest.mark.parametrize("mesh, name, options", [
    ("dp=4,tp=1,pp=1 zero 2", "zero", "--zero-stage 2"), rest("dp=4,tp=1,pp=1 zero 3", "fsdp", ""),
    ("dp=2,tp=2,pp=1 zero 0", "tp", "--tensor-parallel 2 --sequence-parallel"),
    rest("dp=1,tp=1,pp=4 zero 0", "pp", "--pipeline-parallel 4"),
    rest("dp=2,tp=1,pp=2 zero 1", "3d", "--mesh dp=2,pp=2 --zero-stage 1")], ids=short)
def test_bytes_of_the_search_are_those_of_the_program_that_it_names(mesh, name, options):
    model = "--model d4 --layers 8 --heads 4 --channels 48 --seq-len 24 --total-batch-size 384" # 16 sequences
    found = next(x for x in answer(f"--mesh all {model} --ranks 4 --gpu a10 --vocab-size 257 --reserve 0.01")["meshes"] if x["name"] == mesh)
    assert found["program"] == name
    if found["chunks"] > 1: options += f" --schedule interleaved --chunks {found['chunks']}"
    recompute = "block" if found["kept"] == "inputs" else "none"
    said = json.loads(succeeds(f"build/predict/train_gpt2_{name}.bf16 --predict 4 --predict-device gpu", model, options,
                               f"--predict-gpu-memory {1e-9 * 23028 * 2**20} --batch-size {found['micro']} --recompute {recompute}").out)
    assert found["bytes"] == max(sum(rank["bytes"].values()) for rank in said["ranks"]) + 1e7 # the reserve


def test_this_machine_has_what_was_measured(tmp_path):
    measured = here(tmp_path / "here.json")
    assert_says(said(f"--model d4 {measured} --seq-len 64"), "0.05 TFLOP/s x 0.8", "^fits +cpu-here", "fp32, on a CPU",
                "update at 0.01 TB/s", f"^links: {tmp_path}/here.json")
    assert_refused(command(program("plan"), f"--model d4 {measured} --precision bf16"), "has measured fp32, not bf16")
    inside = {"ranks": 2, "collectives": json.loads((tmp_path / "here.json").read_text())["collectives"]}
    nodes = here(tmp_path / "nodes.json", 3e7, ranks=4, ranks_per_node=2, inside=inside)
    assert_says(said(f"--model d4 {nodes} --cluster --seq-len 64 --ranks 4 --node-ranks 2"),
                "^links: .*nodes.json; nodes of 2 ranks and 1 interface: .*nodes.json", "^zero\\+\\+  ranks")
    assert_says(said(f"--model gpt2 {measured}"), "^ +4096  does not fit: .* of cpu-here, which 4096 ranks share")


@pytest.mark.rest
def test_here_measures_this_machine(tmp_path):
    path = tmp_path / "here.json"
    assert command("python3 -m dev.plan.here --out", path).status == 0 and json.loads(path.read_text())["gflops"] > 0
    assert_says(said(f"--model d4 --seq-len 64 --here --measured {path} --ranks 2"), "^fits +cpu-here$")
    assert_refused(command("python3 -m dev.plan.here --ranks 1"), "a link needs two")
    assert_refused(command("python3 -m dev.plan.here --cluster", env={"CLUSTER": "/none"}), "there is no cluster: make cluster")
