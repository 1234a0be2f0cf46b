"""Tiers, C tests as items of pytest, and the folder that a session's runs share."""
import hashlib, os, re, shutil, subprocess, tempfile, time
import pytest
import suite

# Each test of test/unit/*.c runs in a plain build, those of these programs also in the others. CI runs all of them with sanitizers,
# and some that have threads with ThreadSanitizer.
IN_16_BITS = ("test_layer_contracts", "test_compress_rounds")
WITH_TSAN = ("test_dataloader", "test_control")


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("quick", "rest", "all"), default="",
                     help="quick: what make test runs (default); rest: what make test-all adds; all (default with --device "
                          "emulated or cuda)")
    parser.addoption("--device", choices=("cpu", "emulated", "cuda"), default="",
                     help="cpu: no programs of GPUs; emulated: these alone; cuda: these alone, on this machine's GPUs")
    parser.addoption("--minutes", type=float, default=0,
                     help="after so many, tests that have not begun are skipped: a GPU is often lent")
    parser.addoption("--part", action="store_true",
                     help="of the rest only what the commit's files choose: a tenth of long tables, a fifth of all else")


def pytest_configure(config):
    config.shard_begin = time.monotonic()
    if not hasattr(config, "workerinput"):
        os.environ["SHARD_TEST_SESSION"] = config.shard_session = tempfile.mkdtemp(prefix="shard_test_")
        os.chmod(config.shard_session, 0o711) # see suite.environment
    if config.getoption("--device") == "cuda": suite.DEVICE = "cuda"
    os.chdir(suite.ROOT)


def pytest_unconfigure(config):
    if hasattr(config, "shard_session"):
        shutil.rmtree(config.shard_session, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole modules go to one worker, because their tests share runs; but each mistake has a copy of the sources for itself, each
    build of the layers runs its claims in a process of its own, and on a GPU every run has a worker."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if "test_a_layer_follows_its_definition" in nodeid: return nodeid.rpartition("-")[0]
            return nodeid if suite.DEVICE == "cuda" or "test_a_mistake_fails" in nodeid else super()._split_scope(nodeid)
    return ByModule(config, log)


def pytest_make_parametrize_id(val):
    """Options and other text are in a test's name by their words."""
    if isinstance(val, str): return re.sub(r"[^\w.+-]+", "_", val.replace("--", "")).strip("_")[:60] or "plain"


def pytest_collection_modifyitems(config, items):
    device, chosen, left = config.getoption("--device"), [], []
    tier = config.getoption("--tier") or ("all" if device in ("emulated", "cuda") else "quick")
    of_commit = config.getoption("part") and subprocess.run(["git", "rev-parse", "HEAD^{tree}"], capture_output=True,
                                                            text=True).stdout
    for item in items:
        is_rest = bool(item.get_closest_marker("rest") or item.get_closest_marker("sampled"))
        wanted = tier == "all" or is_rest == (tier == "rest")
        if device: wanted &= bool(item.get_closest_marker("gpu")) == (device != "cpu")
        if device == "cuda": wanted &= not item.get_closest_marker("timed") or "timed" in config.option.markexpr # it runs alone
        sampled = item.get_closest_marker("sampled")
        if wanted and of_commit and is_rest: # one by one, or together those whose mark says the same: sampled("variants of {name}")
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            group = sampled.args[0].format(**parameters) if sampled and sampled.args else item.nodeid
            wanted = hashlib.sha256((of_commit + group).encode()).digest()[0] % (10 if sampled else 5) == 0
        (chosen if wanted else left).append(item)
    # The long modules come first.
    chosen.sort(key=lambda item: -getattr(getattr(item, "module", None), "LONG", 0))
    items[:] = chosen
    config.hook.pytest_deselected(items=left)


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - item.config.shard_begin > 60 * minutes: pytest.skip(f"{minutes:g} minutes are over")


# ---- C tests ----
def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".c" and file_path.name.startswith("test_"):
        return CFile.from_parent(parent, path=file_path)


class CFile(pytest.File):
    """A program of test/unit: each TEST(claim) in each build."""

    def collect(self):
        program = self.path.stem
        builds = {"": {}, "debug": {"debug": True}}
        if program in IN_16_BITS:
            builds |= {p + d: {"precision": p, "debug": bool(d)} for p in ("bf16", "fp16") for d in ("", "-debug")}
        if program in WITH_TSAN:
            builds["tsan"] = {"tsan": True}
        claims = re.findall(r"^TEST\((\w+)\)", self.path.read_text(), re.M)
        for build, settings in builds.items():
            for claim in claims:
                item = CTest.from_parent(self, name=f"{claim}[{build}]" if build else claim, program=program, claim=claim,
                                         **settings)
                if "debug" in build or build in ("tsan", "fp16"): item.add_marker(pytest.mark.rest)
                yield item


class CTest(pytest.Item):
    def __init__(self, *, program, claim, precision="fp32", debug=False, tsan=False, **rest):
        super().__init__(**rest)
        self.program, self.claim, self.precision, self.debug, self.tsan = program, claim, precision, debug, tsan

    def runtest(self):
        if self.tsan and suite.sanitizers(): pytest.skip(f"sanitizers cannot run here: {suite.sanitizers()}")
        path = f"build/tsan/test/{self.program}" if self.tsan else suite.program(f"test/{self.program}", self.precision,
                                                                                 debug=self.debug)
        env = {"ASAN_OPTIONS": "detect_leaks=1"} if self.debug else {}
        # ThreadSanitizer does not see how OpenMP's own threads wait for one another. Before a process ends it waits for races with
        # threads that still run: longer than a heartbeat, less than the default second.
        if self.tsan: env |= {"TSAN_OPTIONS": "atexit_sleep_ms=300", "OMP_NUM_THREADS": 1}
        run = suite.command([path, self.claim], env=env)
        if run.status != 0: pytest.fail(str(run), pytrace=False)

    def reportinfo(self):
        return self.path, 0, f"{self.program}: {self.name}"
