"""Mistakes made on purpose: each is made in a copy of the sources, and the tests that are meant for it must fail there.

test/exercises/list.toml has those of the chapters' exercises, test/mutations/list.toml small bugs in kernels, around them and in
compressed gradients; their heads say how to write one. `pytest test/test_mistakes.py --tier all -k forget-1-over-N -s` makes one,
and shows what failed. In the copy a program is built when a test asks for it, with little optimisation, because compiling takes
longer than running."""
import contextlib, fcntl, functools, re, shutil, sys, tomllib
import pytest
import suite

LONG = 3
LISTS = "test/exercises/list.toml", "test/mutations/list.toml"
PASSED, FAILED, SKIPPED, NOT_BUILT = 0, 1, 8, 9  # what pytest ends with in the copy, and what is made of that


class Mistake:
    """Of a list: name, file, what, tests (list of "MODULE:EXPRESSION", with a ! before those that must pass), survives (why, or
    ""), old and new (lines without the blanks around them)."""

    def __init__(self, name, what, diff, file, tests, survives=""):
        self.name, self.file, self.what, self.survives = name, file, " ".join(what.split()), " ".join(survives.split())
        self.tests = re.split("; *", " ".join(tests.split()))
        self.old, self.new = ([line[2:].strip() for line in diff.splitlines() if line[:2] in (sign, "  ")] for sign in ("- ", "+ "))
        assert self.old != self.new, f"{name} changes nothing"

    def make_in(self, folder):
        """Replaces the old lines, which follow one another in exactly one place of the file."""
        path = folder / self.file
        text, end = path.read_text(), r"(?: *// .*)?\n"  # a line may end with a comment,
        # and be wrapped where it has a blank
        old = (end + r"\s*").join(re.escape(line).replace(r"\ ", r"\s+") for line in self.old)
        places = list(re.finditer(rf"^([ \t]*){old}{end}", text, re.M))
        assert len(places) == 1, f"{self.name}: its old lines are in {len(places)} places of {self.file}, not in one"
        new = "".join(f"{places[0][1]}{line}\n" for line in self.new)
        path.write_text(text[:places[0].start()] + new + text[places[0].end():])


def mistakes_of(path):
    found = []
    for file, groups in tomllib.loads((suite.ROOT / path).read_text()).items():
        for group in groups:
            shared = {"file": file, "tests": group.pop("tests", "")}
            found += [Mistake(name, **shared | fields) for name, fields in group.items()]
    assert len({mistake.name for mistake in found}) == len(found), f"{path} has two mistakes of one name"
    return found


def copy_sources(folder):
    for name in "llmc", "dev", "test", "build/emulator":
        if (suite.ROOT / name).exists(): shutil.copytree(suite.ROOT / name, folder / name, symlinks=True)
    for path in *suite.ROOT.glob("train_gpt2_*.cu"), suite.ROOT / "Makefile", suite.ROOT / "pytest.ini": shutil.copy2(path, folder)
    for name in "nvidia", "data":  # the headers of CUDA's libraries and what programs read
        if (suite.ROOT / name).exists(): (folder / name).symlink_to(suite.ROOT / name)
    compiler = folder / "dev/emulator/compile.sh"  # a mistake may leave what is not used
    compiler.write_text(compiler.read_text().replace("-Werror", "-Wno-error").replace("-O2 unroll=8", "-O1 unroll="))


@contextlib.contextmanager
def sound():
    """A copy of the sources without a mistake, for one at a time."""
    place = suite.once("a copy for mistakes", copy_sources)
    with open(f"{place}.use", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def run_tests(folder, entry):
    """Runs the tests of an entry in a copy: PASSED, FAILED or SKIPPED, and what failed first. A deadlock is a failure, too."""
    module, _, which = entry.partition(":")
    files = [path for path in folder.glob(f"test/*/{module}*") if module in (path.name, path.stem) and path.suffix in (".py", ".c")]
    assert len(files) == 1, f"there is no module {module}, or more than one"
    run = suite.command(sys.executable, [folder / "test/test_mistakes.py"], files, "-x -q -p no:cacheprovider -p no:xdist",
                        ["-k", which],
                        f"--tier={'quick' if files[0].suffix == '.c' else 'all'}", cwd=folder, timeout=1200,
                        env={"PYTHONPATH": folder})
    assert run.status in (PASSED, FAILED) and re.search(r"\b\d+ (passed|failed|skipped|errors?)\b", run.out), run
    first = next(iter(re.findall(r"^(?:FAILED|ERROR) \S*?::(.*)", run.out, re.M)), "")
    return run.status if first or re.search(r"\b\d+ passed", run.out) else SKIPPED, first


def pass_without_a_mistake(entry):
    """Otherwise a failure would mean nothing. Once in a session for what stands before "and": a module, and for kernels its build.
    That each of its tests passes is shown where it belongs."""
    asked = entry.split(" and ")[0]
    def run(place):
        with sound() as folder: status, first = run_tests(folder, entry)
        assert status != FAILED, f"{entry} fails without a mistake: {first}"
        (place / "status").write_text(str(status))
    if int((suite.once(f"without a mistake: {asked}", run) / "status").read_text()) == SKIPPED:
        pytest.skip(f"nothing of {entry} can run here")


@pytest.mark.parametrize("path", [*LISTS, "test/labs_mistakes.toml"])
def test_every_mistake_can_be_made(path, tmp_path):
    for mistake in mistakes_of(path):
        copy = tmp_path / mistake.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(suite.ROOT / mistake.file, copy)
        mistake.make_in(tmp_path)


def chooses(expression, name):
    """What pytest's -k does with a test's name."""
    words = re.sub(r"[^\s()]+", lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0] in name), expression)
    return eval(words or "True")


@pytest.mark.rest
def test_every_entry_chooses_tests_that_exist():
    """Otherwise this is noticed only when its mistake is made. Claims of C programs are found where they run."""
    listed = suite.command(sys.executable, "-m pytest --collect-only -q --tier=all -p no:cacheprovider -p no:xdist",
                           suite.ROOT / "test").out
    names = re.findall(r"^test/\S*?(\w+)\.py(::.*)", listed, re.M)
    assert len(names) > 1000, listed[-1000:]
    entries = {entry.lstrip("!") for path in LISTS for mistake in mistakes_of(path) for entry in mistake.tests}
    empty = []
    for entry in entries:
        module, _, which = entry.partition(":")
        tests = [module + name for file, name in names if file == module.removesuffix(".py")]
        if tests and not any(chooses(which.lower(), name.lower()) for name in tests): empty.append(entry)
    assert empty == []


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", [mistake for path in LISTS for mistake in mistakes_of(path)], ids=lambda mistake: mistake.name)
def test_a_mistake_fails_the_tests_meant_for_it(mistake, tmp_path):
    for entry in mistake.tests: pass_without_a_mistake(entry.lstrip("!"))
    copy = tmp_path / "copy"
    with sound() as folder: shutil.copytree(folder, copy, symlinks=True)
    mistake.make_in(copy)
    print(f"\n{mistake.name}: {mistake.what}")
    as_expected = True
    for entry in mistake.tests:
        status, first = run_tests(copy, entry.lstrip("!"))
        expected = PASSED if entry[0] == "!" or mistake.survives else FAILED
        as_expected &= status == expected
        print(f"  {entry}: {'passes' if status == PASSED else 'fails: ' + first}{'' if status == expected else ' (NOT EXPECTED)'}")
    shutil.rmtree(copy)
    assert as_expected, f"{mistake.name} {'survives, says its list, and does not' if mistake.survives else 'is not noticed as it should be'}"


def main():
    """pytest in a copy, where a program is built when it is asked for, and what cannot be built is no failure of a test."""
    command, make = suite.command, suite.make

    def command_in_copy(*arguments, timeout=300, **settings):
        run = command(*arguments, timeout=150 if timeout == 300 else timeout, **settings)
        if run.status != 0 and re.match(r"make |.*\bcompile\.sh ", " ".join(run.command)):
            pytest.exit(f"it cannot be built: {run}", NOT_BUILT)
        return run

    def make_in_copy(*arguments, **settings):
        return make(["CFLAGS=-O1 -Wno-error"], *arguments, **settings)

    @functools.cache
    def program(name, precision="fp32", device="cpu", debug=False):
        variant = "-".join([*[device] * (device != "cpu"), *[precision] * (precision != "fp32"), *["debug"] * debug])
        return make_in_copy(f"DEVICE={device} PRECISION={precision} DEBUG={'1' * debug}",
                            f"build/{variant}{'/' * bool(variant)}{name}")

    suite.command, suite.make, suite.program = command_in_copy, make_in_copy, program
    return pytest.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
