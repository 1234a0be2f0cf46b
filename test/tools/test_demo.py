"""The demo on a tiny model, how scripts start ranks, the tables of what programs keep and send, and plots: what is drawn is what
the metrics say."""
import os, re, shutil
import pytest
from suite import ROOT, assert_refused, assert_says, command, executable, launcher, program, succeeds

SMALL = "--model d2 --channels 16 --heads 2 --seq-len 16"


def script(name, *options, start=command, **settings):
    settings["env"] = {"BUILD": "build"} | settings.get("env", {})
    return start("sh" if name.startswith("dev/") else "python3 -m", name, *options, **settings)


def done(*arguments, **settings):
    return script(*arguments, start=succeeds, **settings)


# ---- the demo ----
def test_the_demo_trains_samples_saves_and_says_what_each_program_keeps_and_how_to_go_on(tmp_path):
    for name in "ddp", "zero", "muon": (tmp_path / f"train_gpt2_{name}").symlink_to(ROOT / program(f"train_gpt2_{name}"))
    run = done("dev/demo.sh", SMALL, "--batch-size 4 --steps 4 --eval-every 2 --eval-steps 1 --sample-every 2 --sample-tokens 8",
               ["--prompt", "It's 'so'"], env={"BUILD": tmp_path})
    assert_says(run.out, "^sample after step 4:$", "^zero       stage 3: each rank keeps 1/4 of", "^owners     matrices .* rank 3: ",
                f"^checkpoint: {tmp_path}/demo/step_00000004$", "^validation loss: .* at the end$")
    assert len(re.findall(r"^    4 (?:ddp|zero [123]) ", run.out, re.M)) == 4
    assert (tmp_path / "demo/metrics.jsonl").exists() and (tmp_path / "demo/step_00000004").is_dir()
    assert command("sh -c", [run.out.splitlines()[-1]]).status == 0 and (tmp_path / "demo/step_00000008").is_dir()


def test_a_slow_machine_trains_fewer_steps_and_says_so(tmp_path):
    for name in "ddp", "zero", "muon": (tmp_path / f"train_gpt2_{name}").symlink_to(ROOT / program(f"train_gpt2_{name}"))
    run = done("dev/demo.sh", SMALL, "--batch-size 4 --eval-steps 1 --sample-tokens 8", env={"BUILD": tmp_path, "MINUTES": 0})
    assert_says(run.out, "^a step takes 0[.]. s here, so the demo trains 10 steps, not 400; DEMO='--steps 400' trains them all$",
                "^step +10/10 ", f"^checkpoint: {tmp_path}/demo/step_00000010$", "--steps 20$")
    for minutes in "x", "1.5":
        assert_refused(script("dev/demo.sh", env={"BUILD": tmp_path, "MINUTES": minutes}), f"MINUTES .* not '{minutes}'")


# ---- how ranks are started ----
@pytest.mark.parametrize("ranks, user, version, decides", [
    (4, 0, "mpirun (Open MPI) 4.1.4",
     "mpirun --allow-run-as-root --oversubscribe --bind-to none; you are root; there are more ranks than the 2 cores"),
    (4, 1000, "mpirun (Open MPI) 5.0.11", "mpirun --oversubscribe --bind-to none; there are more ranks than the 2 cores"),
    (2, 1000, "mpirun (Open MPI) 5.0.11", "mpirun --oversubscribe --bind-to none; "),
    (4, 0, "HYDRA build details: Version: 4.0", "mpirun; ")], ids=["root", "user", "cores_enough", "another_mpi"])
def test_mpiruns_options_are_those_that_this_user_and_these_cores_need(tmp_path, ranks, user, version, decides):
    for name, says in ("mpirun", version), ("id", user), ("getconf", 2): executable(tmp_path / name, f'echo "{says}"')
    run = command("sh -c", [f'unset MPIRUN; . dev/on_ranks.sh; ranks_launcher {ranks}; echo "$launcher; $launcher_why"'],
                  env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert run.out == decides + "\n", run


def test_a_script_says_how_it_starts_ranks():
    how = " ".join(launcher())
    assert f"ranks are started by: {how} -np 1  (MPIRUN says so)\n" in done("experiments zero_memory", "--ranks 1", SMALL,
                                                                            env={"MPIRUN": how}).err


@pytest.mark.parametrize("said, patterns", [
    (None, ["there is no no_such_mpirun", "dev/setup.sh"]),
    ("attempt to run as root", ["did not start 4 ranks; make doctor", "MPIRUN=.*--oversubscribe'\nIt said:\n    attempt to run"])])
def test_a_launcher_that_does_not_start_ranks_is_quoted_after_what_helps(tmp_path, said, patterns):
    path = executable(tmp_path / "launcher", f'echo "{said}" >&2; exit 1') if said else "no_such_mpirun"
    run = script("dev/demo.sh", env={"MPIRUN": path})
    assert_refused(run, *patterns)
    assert run.err.startswith("error: ")


# ---- the tables ----
@pytest.mark.rest
def test_any_programs_can_be_put_beside_ddp_and_keep_and_send_what_the_formulas_say(tmp_path):
    """Tensor, pipeline and mixed parallelism keep what their shapes say, sharded data parallelism half, a ring all."""
    run = done("experiments zero_memory", ["--programs", "ddp zero-1 zero-3 fsdp tp pp cp 3d", "--svg", tmp_path / "programs.svg"],
               "--ranks 2 --layers 4 --channels 64 --heads 4 --seq-len 16 --batch-size 2 --total-batch-size 192")
    sent = re.findall(r"^ +2 (?:ddp|zero [13]) .* 3 +([\d.]+) +([\d.]+)$", run.out, re.M) # in 3 micro-batches
    assert len(sent) == 3 and all(0.999 <= float(x) / float(formula) <= 1.02 for x, formula in sent), run
    assert_says(run.out, "^ +2 zero 1 .* 75.0 %  75.0 % ", "^ +2 3d .* 75.0 %  75.0 % ", "^ +2 cp .* 100.0 % 100.0 % .* -$",
                r"^ +2 fsdp .* 50.\d %  50.0 % ",
                *(rf"^ +2 {name} .* [5-9][\d.]+ %  50.0 % .* -$" for name in ("tp", "pp")))
    svg = (tmp_path / "programs.svg").read_text()
    assert len(re.findall('fill="#(?!cccccc)[0-9a-f]*"', svg)) == 5 + 8 * 5  # a legend, and five kinds of eight programs
    assert ">2 ranks</text>" in svg and svg.endswith("</svg>\n")


# ---- plots ----
needs_gnuplot = pytest.mark.skipif(not shutil.which("gnuplot"), reason="there is no gnuplot")


@pytest.fixture
def runs(tmp_path):
    """Two runs with known losses: a null, a torn last line, spaces, and the run's own line with numbers that are not losses. And a
    gnuplot that keeps the numbers it was given, then draws."""
    for name in "first", "second_run", "bin", "seen": (tmp_path / name).mkdir()
    (tmp_path / "first/metrics.jsonl").write_text("""{"run":{"options":{"step":77,"loss":99},"step":78,"loss":98}}
{"step":0,"val_loss":5.5}
{"step":1,"loss":5.25,"grad_norm":44}
{"step":2,"loss":null,"grad_norm":null}
{"step": 3, "loss": 4.5e0, "grad_norm": 43}
{"step":3,"val_loss":4.75}
{"step":4,"loss":4.
""")
    (tmp_path / "second_run/metrics.jsonl").write_text('{"step":1,"loss":6.125}\n')
    executable(tmp_path / "bin/gnuplot", f'cp "$(dirname "$1")"/*.training "$(dirname "$1")"/*.validation {tmp_path}/seen && '
                                         f'exec {shutil.which("gnuplot")} "$@"')
    return tmp_path


@needs_gnuplot
def test_losses_are_plotted_as_they_are_each_run_by_its_folders_name(runs):
    env = {"PATH": f"{runs}/bin:{os.environ['PATH']}"}
    one = done("dev.plot", f"{runs}/first/metrics.jsonl", env=env)
    assert f"\nplot: {runs}/first/loss.png\n" in one.out and "first: training" in one.out
    assert (runs / "seen/1.training").read_text() == "1 5.25\n3 4.5e0\n" and (runs / "seen/1.validation").read_text() == "0 5.5\n3 4.75\n"
    both = done("dev.plot", f"{runs}/first/metrics.jsonl {runs}/second_run/metrics.jsonl {runs}/both.png", env=env)
    assert "second_run: training" in both.out and (runs / "seen/2.training").read_text() == "1 6.125\n" and not (runs / "seen/2.validation").read_text()
    for png in "first/loss.png", "both.png": assert (runs / png).read_bytes()[1:4] == b"PNG"


@needs_gnuplot
@pytest.mark.parametrize("options, pattern", [
    ("@/no_such.jsonl", "no_such.jsonl cannot be read"), ("README.md", "README.md has no losses"),
    ("@/first/metrics.jsonl /no/such/folder/a.png", "/no/such/folder/a.png was not made"),
    ("@/a.png", "no metrics.jsonl was given")])
def test_what_cannot_be_plotted_is_named(runs, options, pattern):
    assert_refused(script("dev.plot", options.replace("@", str(runs))), pattern)
