"""Shell tests that are not pytest's yet: each file's checks of a tier are one test here."""
import pytest
from suite import ROOT, command

FILES = {path.stem: path for path in sorted((ROOT / "test").glob("*/*.t"))}
ONLY_REST = {"cublaslt_descriptors", "cpu_variants", "variants", "roofline"} & FILES.keys()
WITH_REST = [name for name, path in FILES.items() if name in ONLY_REST or "for_tier rest" in path.read_text()]


def assert_passes(name, tier):
    run = command("bash", FILES[name], env={"TIER": tier}, timeout=1200)
    assert run.status == 0 and "not ok" not in run.out and "1.." in run.out, run


@pytest.mark.parametrize("name", sorted(FILES.keys() - ONLY_REST))
def test_quick_checks_pass(name): assert_passes(name, "quick")


@pytest.mark.rest
@pytest.mark.parametrize("name", WITH_REST)
def test_rest_checks_pass(name): assert_passes(name, "" if name in ONLY_REST else "rest")
