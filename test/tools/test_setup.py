"""dev/setup.sh asks for the right packages, only for what is missing, and only where it may; dev/doctor.sh tells what works from
what does not, and which of README's commands will. Programs on the PATH stand in for a machine's, so nothing is installed."""
import os, re, shutil, tempfile
from pathlib import Path
import pytest
from suite import ROOT, assert_says, command, executable, rest
from terminal import on_terminal


class Machine:
    """A clone of the scripts, and programs that come first on the PATH."""

    def __init__(self, place):
        self.place, self.bin, self.clone, self.asked_file = place, place / "bin", place / "the clone", place / "asked"
        for folder in self.bin, self.clone / "dev": folder.mkdir(parents=True)
        self.path = f"{self.bin}:{os.environ['PATH']}"
        for script in Path(ROOT, "dev").glob("*.sh"): shutil.copy(script, self.clone / "dev")

    def needs(self, components, stand_ins=""):
        """The clone's table has only these components. Stand-ins are there unless lacks() names them; the others are probed."""
        wanted = f"{components} {stand_ins}".split()
        text = (ROOT / "dev/components.sh").read_text().replace("/usr/bin/python3", "no-such-python")
        rows = [x for x in text.splitlines() if not re.match(r"\w+ +\| [^|]+\|", x) or x.split()[0] in wanted]
        rows += [f'probe_{x}() {{ [ ! -e "$FAKES/no_{x}" ] || {{ echo "it is not here"; return 1; }}; }}'
                 for x in stand_ins.split()]
        (self.clone / "dev/components.sh").write_text("\n".join(rows) + "\n")

    def fake(self, name, script):
        executable(self.bin / name, script)

    def user(self, number, name):
        self.fake("id", f'case "$1" in -un) echo {name} ;; *) echo {number} ;; esac')

    def lacks(self, *components):
        for x in components: (self.place / f"no_{x}").touch()

    def case(self, script, needs="", stand_ins="", lacks="", fakes={}, files={}, status=0, says=(), env={}, **more):
        """A row of a table of machines: what it needs, lacks and has, and what is said. @ stands for its folder."""
        if needs or stand_ins: self.needs(needs, stand_ins)
        self.lacks(*lacks.split())
        for name, script_of in fakes.items(): self.fake(name, script_of)
        for name, text in files.items():
            (self.place / name).parent.mkdir(exist_ok=True)
            (self.place / name).write_text(text + "\n")
        return self.run(script, status, *says, **more, **{k: str(v).replace("@", str(self.place)) for k, v in env.items()})

    def run(self, script, status, *says, options="", start=command, asks=None, **env):
        """Runs setup or doctor: its status, patterns that it says, and what apt-get and pip are asked, if that is given."""
        self.asked_file.write_text("")
        at = script if "/" in script else self.clone / f"dev/{script}.sh"
        env = {"PATH": self.path, "FAKES": self.place, "NVCC": "no-such-nvcc"} | env
        run = start(["/bin/sh", at], options, env=env)
        said = run.said.replace("\r", "")
        assert run.status == status, run
        assert_says(said, *says, no=["^(E|W|ERROR): "])  # apt's and pip's words are indented, below our own
        asked = self.asked_file.read_text().splitlines()
        if asks is not None: assert asked == asks, run
        return said, asked


@pytest.fixture
def machine():
    with tempfile.TemporaryDirectory() as place: yield Machine(Path(place))


# ---- setup ----
ASKED = 'echo "$@" >> "$FAKES/asked"\n'
APT = ASKED + 'case "$1" in install) rm -f "$FAKES"/no_* ;; esac'
UPDATE, INSTALL = "update -q -o APT::Update::Error-Mode=any", "install -y -q --no-install-recommends "
JANSSON = INSTALL + "libjansson-dev"
BY_HAND = "^install these as root, in this system's way .the names are Debian's.:\n    "


def apt_says(text, when="install"):
    return ASKED + f'case "$*" in {when}*) echo "{text}" >&2; exit 100 ;; install*) rm -f "$FAKES/no_jansson" ;; esac'


@pytest.fixture
def setup(machine):
    machine.needs("compiler make", "jansson gnuplot")
    candidate = 'echo "  Candidate: ${CANDIDATE:-1.0}"'
    for name, script in (("apt-get", APT), ("sudo", "exit 1"), ("apt-cache", candidate)): machine.fake(name, script)
    machine.user(0, "root")
    return machine


NO_NETWORK = ASKED + """echo "Err:1 http://deb.debian.org/debian bookworm InRelease: Temporary failure resolving 'deb.debian.org'"
case "$1" in update) echo "E: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  Temporary failure" >&2; exit 100 ;;
    *) echo "E: Failed to fetch http://deb.debian.org/debian/pool/j.deb  Temporary failure resolving" >&2; exit 100 ;; esac"""


OLD_COMPILER = "[ \"$1\" != --version ] || { echo 'gcc (GCC) 4.8.5'; exit; }\n"
TOO_OLD = {"__builtin_mul_overflow": 'exec cc -D__builtin_mul_overflow=gcc_5_has_it "$@"'} | {
    flag: f"""case " $* " in *' {flag} '*) echo "error: unrecognized option '{flag}'" >&2; exit 1 ;; esac; exec cc "$@" """
    for flag in ("-std=c11", "-march=native", "-fopenmp")}
NO_SANITIZERS = """for out; do [ "$before" != -o ] || break; before=$out; done
[ "$before" = -o ] || exit 1
printf '#!/bin/sh\\necho LeakSanitizer has encountered a fatal error; exit 1\\n' >"$out"; chmod +x "$out" """ # as under ptrace
# Where nothing else is said, Jansson is missing, apt can install it, and in the end the status is 1.
CASES_OF_SETUP = {
    "nothing_missing": dict(lacks="", status=0, says=["^everything is here$"], asks=[]),
    "one_missing": dict(status=0, asks=[UPDATE, JANSSON], says=[
        "missing: Jansson, needed for .*: it is not here$", "everything is here now"]),
    "broken_packages": dict(apt=apt_says("E: Broken packages"), asks=[UPDATE, JANSSON], says=[
        r"^apt-get install failed:\n    E: Broken", "^still missing:\nmissing: Jansson, needed for .*: it is not here$",
        BY_HAND + "libjansson-dev$"]),
    "no_network": dict(apt=NO_NETWORK, asks=[UPDATE, JANSSON], says=[
        r"^apt-get update failed:\n    E: .*Temporary failure$", r"^apt-get install failed:\n    E: .* resolving$"]),
    "unknown_package": dict(env={"CANDIDATE": "(none)"}, asks=[UPDATE], says=["^still missing:$", BY_HAND + "libjansson-dev$"]),
    "full_disk": dict(
        lacks="jansson gnuplot", status=0, apt=apt_says("E: You don't have enough free space in /var/cache/apt/.", "*gnuplot"),
        asks=[UPDATE, JANSSON, INSTALL + "gnuplot-nox"], says=[
            r"^apt-get install failed:\n    E: You",
            r"^still missing:\nmissing: gnuplot \(optional\), needed for the plots of make demo:"]),
    "python_and_ccache": dict(
        needs="pytest", stand_ins="ccache", lacks="ccache", apt=ASKED, fakes={"python": "echo No module named xdist; exit 1"},
        env={"PYTHON": "python"}, asks=[UPDATE, INSTALL + "python3-pytest python3-pytest-xdist python3-numpy", INSTALL + "ccache"],
        says=["missing: pytest, needed for make test: No module named xdist .in a Python of your own: pip install pytest "]),
    "unknown_option": dict(options="--with-cudo", asks=[], says=[
        r"\Aerror: setup.sh has no option '--with-cudo'; --help lists its options\n\Z"]),
    "help": dict(options="--help", status=0, says=[r"^  sh dev/setup.sh --with-cuda  +", "^Exit status: "], asks=[]),
    "sanitizers_that_cannot_run": dict(
        needs="sanitizer", lacks="", fakes={"cc": NO_SANITIZERS}, env={"CC": "cc"}, status=0, asks=[], says=[
            r"^sanitizers: cannot run on this machine \(LeakSanitizer has .* error\); tests that need it are skipped$"])}
RARE_CASES_OF_SETUP = {
    "without_chromium": dict(needs="make", stand_ins="chromium", lacks="chromium", status=0, says=["^everything is here$"],
                             asks=[]),
    "with_chromium": dict(needs="make", stand_ins="chromium", lacks="chromium", options="--with-chromium", status=0,
                          says=[r"missing: Chromium \(optional\)"], asks=[UPDATE, INSTALL + "chromium"]),
    "not_gnus_make": dict(lacks="", fakes={"make": 'echo "usage: make [-BeikNnqrstWwX]" >&2; exit 2'}, says=[
        "^missing: GNU make, needed for building everything: .*/bin/make is not GNU make$"])} | {
    f"compiler_without_{lacks.strip('_-')}": dict(lacks="", fakes={"old_cc": OLD_COMPILER + script}, env={"CC": "old_cc"}, says=[
        rf"^still missing:\nmissing: C compiler, .*({lacks}|gcc_5_).*; gcc \(GCC\) 4.8.5: gcc 9 and later will do"])
    for lacks, script in TOO_OLD.items()}


@pytest.mark.parametrize("case", [*CASES_OF_SETUP, *map(rest, RARE_CASES_OF_SETUP)])
def test_setup_installs_what_is_missing_and_says_what_is_in_its_way(setup, case):
    case = dict(lacks="jansson", apt=APT, status=1) | (CASES_OF_SETUP | RARE_CASES_OF_SETUP)[case]
    setup.fake("apt-get", case.pop("apt"))
    setup.case("setup", **case)


PASSWORD = 'true 2>/dev/null </dev/tty && echo "password for ada:" && "$@"' # what sudo asks for, if there is a terminal


@pytest.mark.parametrize("sudo, start, status, says, asks", [
    (PASSWORD, command, 1, [BY_HAND + "libjansson-dev$"], []), ('exec "$@"', command, 0, [], [UPDATE, JANSSON]),
    (PASSWORD, on_terminal, 0, ["password for ada", "everything is here now"], [UPDATE, JANSSON])],
    ids=["without_a_terminal", "without_a_password", "with_a_password"])
def test_a_plain_user_installs_with_sudo_or_reads_what_to_install(setup, sudo, start, status, says, asks):
    setup.user(1000, "ada")
    setup.fake("sudo", sudo)
    setup.lacks("jansson")
    setup.run("setup", status, *says, start=start, asks=asks)


@pytest.mark.parametrize("tools", ["sudo", "apt-get apt-cache"], ids=["another_system", "no_sudo"])
def test_where_nothing_can_be_installed_one_line_lists_it(setup, tools):
    setup.user(1000, "ada")
    setup.lacks("jansson", "gnuplot")
    for name in {x.name for x in setup.bin.iterdir()} - {"id", *tools.split()}: (setup.bin / name).unlink()
    for name in "awk cat chmod cut dd dirname env grep head ls mktemp paste rm sed sh tail timeout tr uname".split():
        (setup.bin / name).symlink_to(shutil.which(name))
    names = "gcc libc6-dev make libjansson-dev gnuplot-nox$"
    said, _ = setup.run("setup", 1, BY_HAND + names, asks=[], PATH=setup.bin, CC="no-such-cc")
    assert "not found" not in said and "still missing" not in said, said


# ---- NVIDIA's libraries ----
def with_cuda(machine, version=13000):
    """An nvcc, and a Python whose pip notes what it is asked for and makes what find_cuda.sh looks for."""
    (machine.place / "toolkit/include").mkdir(parents=True, exist_ok=True)
    (machine.place / "toolkit/include/cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    machine.fake("nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"')
    machine.fake("python", """case "$*" in
        "-m pip --version" | "-m venv "*) exit ${NO_PIP:-0} ;;
        "-m pip install "*) echo "$@" >> "$FAKES/asked"
            [ -z "${PIP_ERROR:-}" ] || { echo "ERROR: $PIP_ERROR"; exit 1; }
            while [ "$1" != --target ]; do shift; done
            mkdir -p "$2/nvidia/cu13/include" "$2/nvidia/cu13/lib"
            for x in cublasLt cudnn nvrtc nccl; do touch "$2/nvidia/cu13/include/$x.h" "$2/nvidia/cu13/lib/lib$x.so.13"; done ;;
    esac""")
    return {"NVCC": machine.bin / "nvcc", "CUDA_HOME": machine.place / "toolkit", "PYTHON": machine.bin / "python"}


@pytest.mark.rest
def test_wheels_are_fetched_once_and_count_for_the_toolkits_version_only(setup):
    cuda = with_cuda(setup)
    setup.run("setup", 0, asks=[], **cuda) # nobody asked, and there is no GPU
    _, asked = setup.run("setup", 0, "about 1 GB", options="--with-cuda", **cuda)
    assert re.search(r"-m pip install .*nvidia-cublas==13.* nvidia-cudnn-cu13==.* nvidia-cuda-nvrtc==13.0.\*", asked[0])
    assert (setup.clone / "nvidia/cu13/lib/libcudnn.so.13").exists() and not (setup.clone / "nvidia.new").exists()
    setup.run("setup", 0, options="--with-cuda", asks=[], **cuda)
    setup.fake("nvidia-smi", "exit 0") # make builds for this GPU
    setup.run("setup", 0, "^fetching NVIDIA's libraries", **with_cuda(setup, version=12080))
    setup.run("setup", 0, "^--with-cuda: there is no no-such-nvcc; first install the CUDA Toolkit", options="--with-cuda", asks=[])


@pytest.mark.rest
@pytest.mark.parametrize("env, says, asks", [
    ({"PIP_ERROR": "HTTPSConnectionPool: Max retries exceeded: Temporary failure in name resolution"},
     "^pip install failed, .* make DEVICE=cuda does not work; the rest does:\n    ERROR: HTTPS", 1),
    ({"NO_PIP": "1"}, "^NVIDIA's libraries need pip: install python3-pip or python3-venv$", 0)],
    ids=["no_network", "no_pip"])
def test_without_wheels_the_rest_is_set_up(setup, env, says, asks):
    _, asked = setup.run("setup", 0, says, options="--with-cuda", **with_cuda(setup), **env)
    assert len(asked) == asks and not (setup.clone / "nvidia").exists()


# ---- doctor ----
def works(what):
    return f"^  ok  *make {what}  *works here$"


def fails(what, *names, more=""):
    return rf"^  NO  *make {what}  *does not work here: missing: {', '.join(names)} \(sh dev/setup.sh{more}\)"


BOTH = "demo", "test"
GPU = {"nvidia-smi": "exit 0", "nvcc": 'echo "cannot compile" >&2; exit 1'}
LAUNCHER = 'echo "There are not enough slots for ${2}" >&2; exit 1'
CASES = {
    "broken_header": dict(real="jansson", env={"CPATH": "@/include"}, files={"include/jansson.h": "#error broken on purpose"},
                          says=[
        "MISSING *Jansson .*broken on purpose", "get: .*libjansson-dev", *[fails(x, "Jansson") for x in BOTH]]),
    "broken_library": dict(real="onednn", files={"lib/libdnnl.so": "not a library"}, env={"LDFLAGS": "-L@/lib"}, says=[
        "MISSING *oneDNN *.*libdnnl.so", "for: matrix products"]),
    "no_cmocka": dict(lacks="cmocka", says=[works("demo"), fails("test", "cmocka")]),
    "no_compiler": dict(env={"CC": "no-such-cc"}, says=[
        "MISSING *C compiler *no no-such-cc", *[fails(x, "C compiler") for x in BOTH]]),
    "no_launcher_for_4": dict(real="mpi", fakes={"launcher": LAUNCHER}, env={"MPIRUN": "launcher"}, says=[fails("demo", "Open MPI"),
        "MISSING *Open MPI *There are not enough slots for 4; launcher does not start 4 ranks; MPIRUN may name another launcher"]),
    "optional_ones": dict(status=0, lacks="gnuplot fuzzer", says=[
        "missing *fuzzer *it is not here", "for: make fuzz", works("test"), works("demo")]),
    "sanitizers_that_cannot_run": dict(real="sanitizer", fakes={"cc": NO_SANITIZERS}, env={"CC": "cc"}, says=[
        r"^  skip *sanitizers *cannot run on this machine \(LeakSanitizer has .*\); tests that need it are skipped$"]),
    "no_gpu": dict(status=0, real="cublaslt", says=[
        "missing *cuBLASLt *no no-such-nvcc", "get: sh dev/setup.sh --with-cuda; or pip install nvidia-cublas", works("demo")]),
    "gpu_without_libraries": dict(real="nvcc cublaslt cudnn nccl", fakes=GPU, env={"NVCC": "nvcc"}, says=[
        fails(x, "CUDA toolkit", "cuBLASLt", "cuDNN", "NCCL", more=f"; or leave the GPU out: make DEVICE=cpu {x}") for x in BOTH])}
QUICK = "broken_header", "no_cmocka"


@pytest.mark.parametrize("case", [x if x in QUICK else rest(x) for x in CASES])
def test_doctor_says_what_is_lacking_and_which_commands_of_readme_work(machine, case):
    case = dict(status=1) | CASES[case]
    real = case.pop("real", "")
    stand_ins = {"jansson", "cmocka", "mpi", "fuzzer", "gnuplot"} - {*real.split()}
    machine.case("doctor", f"compiler make {real}", " ".join(stand_ins), **case)


@pytest.mark.rest
def test_where_everything_is_here_doctor_and_setup_say_so(machine):
    said, _ = machine.run("dev/doctor.sh", 0, "ok *oneDNN *[0-9]", "ok *pytest *[0-9]", *map(works, BOTH),
                          f"^ *disk  *[0-9.]* GB free in {ROOT}$", "^ *processor .*, [0-9]* cores$", "^ *memory .* GB are free$")
    assert "MISSING" not in said
    machine.fake("apt-get", APT)
    machine.run("dev/setup.sh", 0, "^everything is here$", asks=[])


# ---- a bare system ----
@pytest.mark.parametrize("options, says", [
    ("buster", "SYSTEM must be bookworm or trixie, or one of them with /arm64, not 'buster'"),
    ("--root trixie", "no options, such as '--root'"),
    ("trixie make test", "COMMAND is one argument: quote it")])
def test_what_bare_does_not_understand_is_refused(options, says):
    run = command("sh dev/bare.sh", options)
    assert run.status == 2 and run.err.startswith("error: ") and run.err.count("\n") == 1 and says in run.err, run


def test_where_no_bare_system_can_be_made_the_command_runs_on_this_machine(machine):
    machine.user(1000, "ada")
    run = command("sh dev/bare.sh trixie", ["pwd; ls dev/bare.sh; exit 7"], env={"PATH": machine.path, "TMPDIR": machine.place})
    assert run.status == 7 and f"{machine.place}/bare." in run.out and "dev/bare.sh\n" in run.out, run
    assert "no bare trixie, because you are not root: the command runs on this machine, in a fresh clone" in run.err, run
    assert not [*machine.place.glob("bare.*")], "the clone is left behind"


# ---- make ----
def test_an_unknown_target_is_an_error_of_one_line():
    run = command("make tets")
    assert run.status == 2 and run.err.endswith("there is no target 'tets'; make help lists the targets.  Stop.\n"), run


@pytest.mark.parametrize("setting", ["ARCH=x86-64-v3", "USE_NCCL=0", "HOST_CXX=clang++", "DEBUG=1", "PRECISION=bf16"])
def test_the_tools_that_make_data_are_built_once_whatever_the_settings(setting):
    run = command("make -nB", setting, "build/tokenize", timeout=30)
    assert run.status == 0 and run.out.count(" -c dev/data/tokenize.c ") == 1, run


def test_a_lab_is_made_without_a_word_about_files_that_are_not_built_yet(tmp_path):
    run = command("make lab PROGRAM=ddp", [f"LAB={tmp_path}/lab"])
    assert run.status == 0 and run.err == "", run


def test_make_help_lists_the_commands_of_readme():
    said = command("make help").out
    assert_says(said, "^make demo  ", "^make test  ", "^DEVICE=cpu", "^V=1 ", "^WERROR=1 ", no=["^#"])
    assert all(len(line) <= 120 for line in said.splitlines())


# ---- a folder with a space ----
@pytest.mark.parametrize("ccache", [True, False], ids=["ccache", "no_ccache"])
def test_a_clone_in_a_folder_with_a_space_builds_programs_data_and_labs(tmp_path, ccache):
    place, log = tmp_path / "Sam's first course", tmp_path / "cached"
    for name in command("git ls-files").out.splitlines():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    executable(tmp_path / "bin/ccache", f'[ "$CCACHE_BASEDIR" = "$PWD" ] && echo "$@" >>{log} && exec "$@"')
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    def done(*arguments):
        run = command(*arguments, cwd=place, env=env, timeout=600)
        assert run.status == 0, run
        return run
    done("make DEVICE=cpu OPTIMISE=-O0 build/schedule_order build/train_gpt2_single data/train.bin", *["CACHE="] * (not ccache))
    assert log.exists() == ccache
    assert_says(done("build/train_gpt2_single --model d1 --channels 16 --heads 2 --batch-size 1 --steps 1 --val-data= "
                     "--sample-every 0").out, "^step 1/1 ")
    done("make lab PROGRAM=single")
    done("make DEVICE=cpu PRECISION=fp32 lab-program PROGRAM=single", *["CACHE="] * (not ccache))
    plan = done("make -n DEVICE=cpu build/plan").out
    line, = [x for x in plan.replace("\\\n", " ").splitlines() if x.startswith("printf") and "dev.plan" in x]
    script = done("sh -c", [line.replace(">build/plan", "")]).out
    assert f'PYTHONPATH="{place}:{place}/dev/tools"' in script and "python3 -m dev.plan" in script


def test_a_cluster_needs_a_folder_without_a_space(tmp_path):
    run = command("sh dev/cluster/cluster.sh up 2 1 unlimited", env={"CLUSTER": tmp_path / "the cluster"})
    assert run.status == 1 and f"cannot name a folder such as '{tmp_path}/the cluster': CLUSTER=" in run.err, run
