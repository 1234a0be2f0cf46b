"""A short run of each fuzz target, from the inputs that earlier runs kept; make fuzz runs them for longer."""
import os
import pytest
from suite import ROOT, succeeds


@pytest.mark.rest
@pytest.mark.parametrize("reader", ["tokens", "mask", "tokenizer", "safetensors"])
def test_a_reader_survives_hostile_input(reader):
    if not (ROOT / "build/test/fuzz").exists(): pytest.skip("clang with its fuzzer runtime is missing: sh dev/setup.sh")
    kept, seconds = ROOT / f"build/fuzz/corpus-{reader}", int(os.environ.get("FUZZ_SECONDS", "6"))
    kept.mkdir(parents=True, exist_ok=True)
    succeeds(f"build/test/fuzz -max_total_time={seconds} -max_len=65536 -timeout=10 -rss_limit_mb=2048 -detect_leaks=0",
             f"-close_fd_mask=3 -artifact_prefix=build/fuzz/crash-{reader}-", [kept], env={"FUZZ_TARGET": reader},
             timeout=seconds + 300)
