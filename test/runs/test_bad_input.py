"""Wrong options, foreign or damaged files, a full disk: each ends the run with status 1 and a message that names what is wrong,
what was found and what to do; and no good checkpoint is lost. --help, the documents and the record of a run name the same
options."""
import os, re, shutil
from pathlib import Path
import pytest
from shards import in_folder, newest
from suite import REFERENCE, ROOT, TINY, TOKENS, assert_refused, assert_says, command, launcher, program, rest, succeeds, trained

LONG = 10


def run(*options, **settings):
    return command([program("train_gpt2_single")], TINY, *options, **settings)


# ---- options, the model's shape, files ----
MORE_THAN_ONE = "--batch-size 1 --total-batch-size 0"


@pytest.mark.parametrize("options, patterns", [
    ("--frobnicate", ["unknown option '--frobnicate'", "--help"]), ("--steps ten", ["--steps", "'ten'"]),
    ("--model huge", ["--model", "huge", "gpt2-xl"]), ("--channels 15", ["--channels", "15", "2 heads"]),
    ("--total-batch-size 500", ["--total-batch-size", "500", "256"]),
    *(([f"--memory-limit={limit}"], ["--memory-limit"]) for limit in ("-1", "nan", "inf", "0.5GB", "", "1e7")),
    ("--channels 65536 --layers 256", ["[Mm]emory", "GB"]),
    (f"--model gpt2 --layers 1 --seq-len 2048 {MORE_THAN_ONE}", ["--seq-len 2048", "1024"]),
    (f"--init-from {REFERENCE}/initial --heads 4 --channels 32 --seq-len 64", ["--seq-len 64", "32"]),
    ("--vocab-size 200", ["--tokenizer", "257", "200"]),
    ("--tokenizer none.json", ["none.json"]), ("--tokenizer README.md", ["README.md"]),
    ("--data none.bin", ["--data", "none.bin"]), ("--data none*.bin", ["--data", r"none\*.bin"]),
    ("--val-data none.bin", ["--val-data", "none.bin"]),
    ("--data test", ["test: is a folder, not a file"]), ("--data build/train_gpt2_single", ["NUL"]),
    ("--data /dev/zero", ["/dev/zero: is a device, not a file"]),
    (f"--seq-len 8000 {MORE_THAN_ONE}", ["tokens.bin", "--seq-len", "8000"]),
    ("--batch-size 500 --total-batch-size 0", ["tokens.bin", "sequences", "500"]),
    ("--init-from none", ["none", "no such checkpoint"]), ("--init-from test", ["test", "state.json"]),
    ("--out README.md", ["README.md"]),
    ("--out README.md/out", ["README.md", "Not a directory"]), ("--out /proc/none", ["/proc/none"])])
def test_a_wrong_option_is_refused(options, patterns):
    assert_refused(run(options), *patterns)


# ---- the same error on several ranks ----
# Notes a rank's exit status. Rank 0 ends when all ranks have one, because mpirun then kills the others (see TOGETHER in suite.py).
# Ranks have other options by a shell of their own: mpirun's ":" makes Open MPI 5.0.7 crash.
NOTING = """if [ $OMPI_COMM_WORLD_RANK = 3 ]; then some=$OF_RANK_3; else some=$OF_OTHERS; fi
"$@" $some; echo $? >"$0.$OMPI_COMM_WORLD_RANK"; mv "$0.$OMPI_COMM_WORLD_RANK" "$0/$OMPI_COMM_WORLD_RANK"
for i in $(seq 1200); do set -- "$0"/*; [ $# -lt $OMPI_COMM_WORLD_SIZE ] || break; sleep 0.05; done
[ $OMPI_COMM_WORLD_RANK = 0 ] || sleep 10
exit 1"""


def errors_of_ranks(tmp_path, *options, **env):
    """Starts 4 ranks as a user does, except that all of them come to their end: with the first options, and rank 3 with the last.
    Returns the errors that they print, sorted, without the number of the rank that prints them."""
    line = [*launcher(), "-np", 4, "sh", "-c", NOTING, tmp_path, program("train_gpt2_zero"), *TINY.split(), "--batch-size=8"]
    different = {"OF_OTHERS": options[0], "OF_RANK_3": options[-1]}
    run = command(line, env={"SHARD_SAY_ONCE": 1, "OMP_NUM_THREADS": 1, **different, **env}, timeout=120)
    assert run.status == 1 and [(tmp_path / str(rank)).read_text() for rank in range(4)] == ["1\n"] * 4, run
    return sorted(re.findall(r"^(?:rank \d: )?error: (.*)", run.said, re.M))


def test_ranks_with_the_same_wrong_option_say_so_once(tmp_path):
    assert errors_of_ranks(tmp_path, "--frobnicate") == ["unknown option '--frobnicate'; --help lists them all"]


def test_ranks_that_have_met_say_once_that_a_file_is_missing(tmp_path):
    error, = errors_of_ranks(tmp_path, "--data none.bin")
    assert error.startswith("--data 'none.bin': there is no such file")


def test_a_rank_with_an_error_of_its_own_says_it(tmp_path):
    # ranks that differ wait so long
    number, unknown = errors_of_ranks(tmp_path, "--frobnicate", "--steps ten", SHARD_LEAVE_SECONDS=3)
    assert "--steps" in number and "--frobnicate" in unknown


def test_ranks_that_have_met_say_their_own_errors_and_once_that_another_has_left(tmp_path):
    missing, left = errors_of_ranks(tmp_path, "", "--data none.bin", SHARD_LEAVE_SECONDS=1)
    assert missing.startswith("--data 'none.bin'") and left == "rank 3 has left (its own message says why)"


# ---- files ----
# a header of 1024 bytes, then two bytes a token
GOOD, CUT = Path(TOKENS).read_bytes(), (0, 1, 4, 12, 1023, 1024, 1025, 1026, 5000, 14491)


@pytest.mark.parametrize("option, name, data, patterns", [
    ("--tokenizer", "vocab.json", b"{ this is not a vocabulary", []), ("--data", "empty.txt", b"", ["empty"]),
    ("--data", "short.txt", b"too short", ["--seq-len"]), ("--data", "fifo", None, ["is a pipe, not a file"]),
    ("--data", "fifo.bin", None, ["is a pipe"]), ("--val-data", "fifo", None, ["is a pipe"]),
    ("--tokenizer", "fifo.json", None, ["is a pipe"]), *(("--data", "cut.bin", GOOD[:length], ["tok"]) for length in CUT)])
def test_a_file_of_another_kind_or_cut_is_refused_and_no_pipe_is_waited_for(option, name, data, patterns, tmp_path):
    path = tmp_path / name
    os.mkfifo(path) if data is None else path.write_bytes(data)
    assert_refused(run(option, path), str(path), *patterns)


@pytest.mark.parametrize("offset, value, size, patterns", [
    (0, 20240521, 4, ["20240521", "20240520"]), (4, 2, 4, ["version 2", "version 1"]),
    *((8, n, 4, [f"says {n} tokens", "6734"]) for n in (7000, 100, -1, 2**31 - 1)),
    *((1024 + 2 * n, 999, 2, [f"token {n} is 999", "257"]) for n in (0, 3333, 6720))])
def test_damaged_tokens_are_refused(offset, value, size, patterns, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(GOOD[:offset] + (value % 256**size).to_bytes(size, "little") + GOOD[offset + size:])
    assert_refused(run("--steps 40 --data", tmp_path / "tokens.bin"), str(tmp_path / "tokens.bin"), *patterns)


def test_llm_cs_tokens_of_4_bytes_are_named(tmp_path):
    tokens = (20240801).to_bytes(4, "little") + (7).to_bytes(4, "little") + (8).to_bytes(4, "little") + bytes(1012 + 8 * 4)
    (tmp_path / "llama.bin").write_bytes(tokens)
    refusal = run("--data", tmp_path / "llama.bin")
    assert_refused(refusal,
                   "llama.bin: has llm.c's tokens of Llama 3, of 4 bytes each, .*2 bytes.*: make it .* with GPT-2's tokenizer")
    assert "download it again" not in refusal.err


# ---- data that do not belong together ----
QUIET = "--model d2 --heads 2 --channels 16 --seq-len 16 --batch-size 2 --steps 1 --sample-every 0"


@pytest.mark.parametrize("name, ranks", [("single", None), ("ddp", 2), *(rest(name, 2) for name in (
    "zero", "muon", "fsdp", "tp", "pp", "3d", "compress", "cp", "zeropp"))])
def test_the_default_evaluation_belongs_to_the_default_data_alone(name, ranks, tmp_path):
    (tmp_path / "data").mkdir()
    for side in "train", "val": shutil.copy(TOKENS, tmp_path / f"data/{side}.bin")

    def says(*options):
        run = succeeds([Path(program(f"train_gpt2_{name}")).resolve()], QUIET, *options, ranks=ranks, cwd=tmp_path)
        return [bool(re.search(line, run.out, re.M)) for line in (r"\| val loss ",
                                                                  r"^eval +none: --data is given without --val-data$")]
    assert says() == says("--data data/train.bin --val-data data/val.bin") == [True, False]
    assert says("--data data/train.bin") == [False, True]
    assert says("--data data/train.bin --eval-every 0") == says("--data data/train.bin --val-data=") == [False, False]


def test_tokens_of_another_tokenizer_are_refused_where_the_file_says_whose_they_are(tmp_path):
    (tmp_path / "text").write_text("so many words, so many tokens " * 99)
    succeeds([program("train_bpe"), "--vocab-size=300", "--out", tmp_path / "bpe", tmp_path / "text"])
    made = {"bytes": "bytes", "bpe": tmp_path / "bpe", "same": tmp_path / "bpe/vocab.json"}
    for name, tokenizer in made.items():
        succeeds([program("tokenize"), "--tokenizer", tokenizer, "--out", tmp_path / f"{name}.bin", tmp_path / "text"])
    headers = {name: (tmp_path / f"{name}.bin").read_bytes()[12:1024] for name in made}
    assert headers["bpe"] == headers["same"] != headers["bytes"] and all(any(x[:8]) and not any(x[8:]) for x in headers.values())

    def trains(data, tokenizer, *options):
        return command([program("train_gpt2_single"), "--data", tmp_path / f"{data}.bin", "--tokenizer", tokenizer], QUIET,
                       "--val-data=", *options)
    for name, tokenizer in made.items(): assert trains(name, tokenizer).status == 0
    assert trains("bytes", "", "--vocab-size 300").status == 0 # nothing to compare
    for data, tokenizer in ("bytes", made["bpe"]), ("bpe", "bytes"):
        assert_refused(trains(data, tokenizer, "--vocab-size 300"), f"--data .*{data}.bin: another tokenizer made its tokens",
                       "--tokenizer= ")
    assert_refused(trains("bpe", made["bpe"], ["--val-data", tmp_path / "bytes.bin"]), "--val-data .*bytes.bin: another tokenizer")
    (tmp_path / "old.bin").write_bytes((tmp_path / "bpe.bin").read_bytes()[:12] + bytes(1012)
                                       + (tmp_path / "bpe.bin").read_bytes()[1024:])
    assert trains("old", "bytes", "--vocab-size 300").status == 0 # llm.c's files do not name a tokenizer


# ---- more shards than a process may open ----
@pytest.fixture
def shards(tmp_path):
    """50 token files, each of one sequence and its last target."""
    for i in range(50): (tmp_path / f"s{i:02}.bin").write_bytes(GOOD[:8] + (17).to_bytes(4, "little") + GOOD[12:1024 + 2 * 17])
    return f"--data {tmp_path}/s*.bin"


def may_open(soft, hard, *line, ranks=None):
    """Runs a command whose processes may have `soft` files open, and may raise this limit up to `hard`."""
    return command(["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "limited", *line], ranks=ranks)


def test_more_shards_than_the_soft_limit_of_open_files_are_opened(shards):
    options = [*TINY.split(), *shards.split(), "--steps=1"]
    single, ddp = program("train_gpt2_single"), program("train_gpt2_ddp")
    for one in may_open(40, 500, single, *options), may_open(50, 500, ddp, *options, "--batch-size=8", ranks=4):
        assert one.status == 0 and "step 1/1" in one.out, one


def test_the_hard_limit_of_open_files_is_named_by_every_reader(shards, tmp_path):
    options = [*TINY.split(), *shards.split(), "--steps=1"]
    refusal = may_open(40, 40, program("train_gpt2_single"), *options)
    assert_refused(refusal, r"s\d\d.bin: cannot be opened: too many open files in this process", "ulimit -n")
    assert "download it again" not in refusal.err
    for limit in range(51, 60): # one of these leaves none for the folder of --val-data
        ended = may_open(limit, limit, program("train_gpt2_single"), *options, f"--val-data={tmp_path}/*.bin")
        assert_refused(ended, "too many open files in this process", "ulimit -n")
    tokenize = [program("tokenize"), "--out", tmp_path / "out.bin"]
    assert_refused(may_open(4, 4, *tokenize, "README.md", "LICENSE"), "cannot open LICENSE: too many open files", "ulimit -n")


# ---- checkpoints ----
FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]


def good():
    return trained("single", TINY, "--steps 2 --save-every 1")


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(good().folder, tmp_path / "out")


def resume(folder, *options):
    return in_folder(folder, "single", TINY, "--resume --steps 3", *options)


@pytest.mark.parametrize("options, patterns", [
    ("--init-from {0}", ["step_00000002"]), ("--init-from {0}/step_00000002 --layers 3", ["step_00000002", "2 layers", "3"]),
    ("--init-from {0}/step_00000002 --channels 32", ["16 channels", "32"]),
    ("--out {0} --steps 3", ["holds the checkpoints of another run", "--resume"])])
def test_another_checkpoint_is_refused(options, patterns, copy):
    assert_refused(run(options.format(copy)), *patterns)


@pytest.mark.parametrize("file", [*(f"step_00000002/{file}" for file in FILES), "metrics.jsonl"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(file, copy):
    (copy / file).unlink()
    os.mkfifo(copy / file)
    assert_refused(resume(copy), f"{file.split('/')[-1]}: is a pipe, not a file")
    if "/" in file: assert_refused(run("--init-from", copy / "step_00000002"), "is a pipe, not a file")


@pytest.mark.parametrize("name, ranks", [("single", None), ("ddp", 2), rest("pp", 2)])
def test_a_run_that_diverges_keeps_its_last_checkpoint_before(name, ranks, tmp_path):
    run = in_folder(tmp_path, name, TINY,
                    "--batch-size 8 --warmup-steps 0 --lr-schedule constant --lr 1000 --save-every 1 --keep 2 --steps 40",
                    ranks=ranks)
    assert_refused(run, "steps in a row")
    diverged = 1 + run.series("skipped").index(True)
    assert 2 < diverged < newest(tmp_path) # skipped steps were saved as well
    assert min(int(path.name[5:]) for path in tmp_path.glob("step_*")) == diverged - 2
    assert command([program(f"train_gpt2_{name}")], TINY, "--steps 0 --init-from", tmp_path / f"step_{diverged - 1:08}",
                   ranks=ranks).status == 0


def test_a_full_disk_leaves_the_existing_checkpoints(tmp_path):
    """test/kernels/check_host.py lets every file of a checkpoint have no room."""
    if command("mount -t tmpfs -o size=512k tmpfs", tmp_path).status != 0: pytest.skip("only root may mount a small disk")
    try:
        out = tmp_path / "out"
        assert in_folder(out, "single", TINY, "--steps 2 --save-every 1 --keep 0").status == 0
        before = {path: path.read_bytes() for path in out.glob("step_*/*")}
        assert_refused(in_folder(out, "single", TINY, "--resume --save-every 1 --keep 0"), str(out), "another --out|free space")
        assert [*out.glob(".tmp*")] == [] and all(path.read_bytes() == data for path, data in before.items())
        assert in_folder(out, "single", TINY, "--resume --steps", newest(out)).status == 0
    finally:
        command("umount", tmp_path)


@pytest.mark.parametrize("inodes", range(2, 9))
def test_a_file_system_without_inodes_is_not_said_to_be_full(inodes, tmp_path):
    """There are inodes for the folder, and each time for one more file: the lock, the log, a checkpoint's folder and its files."""
    if command(f"mount -t tmpfs -o size=64m,nr_inodes={inodes} tmpfs", tmp_path).status != 0:
        pytest.skip("only root may mount a small disk")
    try:
        out = tmp_path / "out"
        ended = in_folder(out, "single", TINY, "--steps 2 --save-every 1")
        assert_refused(ended, f"{out}.*No inodes left on the device .df -i.; ")
        assert not re.search("free .* MB|make it writable", ended.err)
        tools = command("build/hf_export", f"{REFERENCE}/initial", tmp_path / "hf") if inodes < 4 else None
        if tools: assert_refused(tools, "No inodes left on the device .df -i.; remove files or choose another folder")
    finally:
        command("umount", tmp_path)


OTHER_DATA = "^start +--data contains other tokens than when .*step_00000002 was saved: from sequence 64 of epoch 0 on, the order differs"


@pytest.mark.parametrize("name, ranks", [("single", None), ("ddp", 2)])
def test_other_data_on_resume_is_reported(name, ranks, copy, tmp_path):
    (tmp_path / "data").mkdir()
    shutil.copy(TOKENS, tmp_path / "data/a.bin")
    data = ["--data", tmp_path / "data/*.bin"]
    same = in_folder(copy, name, TINY, data, "--resume --steps 2", ranks=ranks)
    assert_says(same.out, "^start +step 2 of 2", no=["other tokens"])
    shutil.copy(TOKENS, tmp_path / "data/b.bin")
    other = in_folder(copy, name, TINY, data, "--resume --steps 3", ranks=ranks)
    assert other.status == 0
    assert_says(other.out, OTHER_DATA)
    assert_says(in_folder(copy, name, TINY, data, "--resume --steps 3", ranks=ranks).out, "^start +step 3 of 3",
                no=["other tokens"])


# ---- options: --help, the documents, the record ----
def options_of_help(name="single", *more):
    said = command([program(f"train_gpt2_{name}")], *more, "--help")
    assert said.status == 0 and said.err == ""
    assert max(map(len, said.out.splitlines())) <= 80
    return re.findall(r"^  (?:-\w, )?(--[a-z][a-z0-9-]*) ", said.out, re.M)[:-1] # the last one is --help


def test_a_run_records_every_option_and_nothing_else():
    recorded = good().about["options"]
    assert {f"--{name}" for name in recorded} == {*options_of_help()} and len(recorded) > 35


@pytest.mark.parametrize("name, first", [("single", "--data"), ("ddp", "--ddp"), ("zero", "--zero-stage"),
                                         ("muon", "--zero-stage"),
                                         ("fsdp", "--wrap-blocks"),
                                          ("zeropp", "--wrap-blocks"), ("tp", "--tensor-parallel"), ("pp", "--pipeline-parallel"),
                                          ("3d", "--mesh"), ("compress", "--compress"), ("cp", "--ddp")])
def test_help_begins_with_a_programs_own_options_and_suggests_what_was_meant(name, first):
    assert options_of_help(name)[0] == first
    run = command([program(f"train_gpt2_{name}")], first[:-1], 1)
    assert_refused(run, f"unknown option '{first[:-1]}'; did you mean {first}[?] --help lists them all")


@pytest.mark.parametrize("name", ["single", "ddp", "zero", "muon", "fsdp", "tp", "pp", "3d", "compress", "cp"])
def test_commands_in_the_documents_have_options_that_exist(name):
    """What follows the program's name, up to the command's end, because mpirun has options as well."""
    text = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "doc").rglob("*.md")]).replace("\\\n", "")
    commands = re.findall(rf"train_gpt2_{name}([ \"`].*)", text)
    named = {name for line in commands for name in re.findall(r"--[a-z][a-z0-9-]*",
                                                              re.sub(r"[`|;].*| (?:sh|python3) .*", "", line))}
    assert len(named) > 3 and named <= {*options_of_help(name), "--help"}
