"""README.md's commands work word for word, for the user who runs this and, where that is root, for a plain user in a clone of their
own; so do the cells of the notebook for free GPUs, where there is none."""
import fcntl, json, os, pwd, re, shutil, tempfile
from pathlib import Path
import pytest
from suite import ROOT, assert_says, command, executable, session, succeeds, virtual_environment

pytestmark = pytest.mark.rest
LONG = 300


def readme(pattern):
    """README's one indented line with this pattern, without its comment."""
    lines = [x.strip() for x in re.findall(r"^    ([^$# ].*?)(?: +# .*)?$", (ROOT / "README.md").read_text(), re.M)
             if re.search(pattern, x)]
    assert len(lines) == 1, (pattern, lines)
    return lines[0]


def run_line(line, before=(), cwd=ROOT, **env):
    unset = [word for x in ("MPIRUN", "OMPI_MCA_pml", "OMPI_MCA_orte_tmpdir_base", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
             for word in ("-u", x)]
    return command("env", unset, [f"{k}={v}" for k, v in env.items()], *before, "sh -c", [line], cwd=cwd, timeout=1800)


@pytest.fixture(scope="module", params=[pytest.param(user, marks=pytest.mark.sampled(user))
                                        for user in ("this_user", "plain_user")])
def shell(request):
    """A function that runs a line in a clone: as this user in this one, or as nobody in a clone where nothing is built yet."""
    if request.param == "this_user":
        with open(session() / "make.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield run_line
        return
    if os.getuid() != 0: pytest.skip("this user is a plain one")
    with tempfile.TemporaryDirectory() as place:
        clone, home = Path(place, "clone"), Path(place, "home")
        Path(place).chmod(0o755)
        home.mkdir()
        assert command("git clone -q --no-hardlinks", ROOT, clone).status == 0
        nobody = pwd.getpwnam("nobody")
        for path in home, clone, *clone.rglob("*"): os.lchown(path, nobody.pw_uid, nobody.pw_gid)
        before = f"setpriv --reuid {nobody.pw_uid} --regid {nobody.pw_gid} --clear-groups"
        yield lambda line: run_line(line, [before], clone, HOME=home)


def test_the_demo_learns_and_plots(shell):
    run = shell(readme("make demo$|make demo  "))
    assert run.status == 0, run
    assert float(re.search(r"^validation loss: .* first, ([0-9.]*) at the end$", run.out, re.M)[1]) < 1.9, run  # nats per byte
    assert "no plot: see above" not in run.said, run


def test_the_mpirun_lines_train(shell):
    """Also for root, and on fewer cores than ranks."""
    run = shell(f"{readme('mpi_env')}; {readme('^make train_gpt2_zero && mpirun')}")
    assert run.status == 0 and re.search(r"^step 20/20 \| val loss", run.out, re.M), run


def test_ci_runs_readmes_two_commands_in_a_bare_system():
    assert re.search("^timed sh dev/bare.sh bookworm$", (ROOT / ".ci/run").read_text(), re.M)
    two = "\n".join(readme(f"make {what}$|make {what}  ") for what in ("demo", "test"))
    assert succeeds("sh dev/bare.sh --help").out.endswith(f"The default COMMAND:\n\n{two}\n")


def outputs(notebook):
    """The text that each of its cells has printed."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(output.get("text", "")) for output in cell["outputs"]) for cell in cells]


def test_the_notebook_for_free_gpus_trains_on_the_cpu_and_skips_what_needs_a_gpu(tmp_path):
    """In a clone beside it, as after its cell that makes one, and in a home where nothing is. It may install nothing."""
    jupyter = ROOT / "build/notebook_venv/bin/jupyter-execute"
    virtual_environment("build/notebook_venv", ROOT / "test/tools/notebook/requirements.txt")
    succeeds("git clone -q --no-hardlinks", ROOT, tmp_path / "shard.c")
    notebook, home, programs = tmp_path / "done.ipynb", tmp_path / "home", tmp_path / "bin"
    for folder in home, programs: folder.mkdir()
    for name in "apt-get", "nvidia-smi": executable(programs / name, "exit 1")
    shutil.copy(tmp_path / "shard.c/doc/free_gpu.ipynb", tmp_path)
    run = command([jupyter, "--timeout=900", "--output", notebook, tmp_path / "free_gpu.ipynb"], timeout=1800,
                  env={"HOME": home, "PATH": f"{programs}:{os.environ['PATH']}",
                       "CCACHE_DIR": os.environ.get("CCACHE_DIR", Path.home() / ".cache/ccache")})
    assert run.status == 0, run
    here, installed, built, single, ranks, check, page = outputs(notebook)
    assert str(tmp_path / "shard.c") in here
    assert_says(installed, "This machine", "The README's two commands")
    assert_says(built, "^0 GPUs; fp32$")
    assert_says(single, r"^step +20/20 \| ")
    assert_says(ranks, "^ranks +2, .* MPI", r"^step +20/20 \| ", "as predicted")
    assert "There is no GPU here" in check and "there is nothing to measure" in page
