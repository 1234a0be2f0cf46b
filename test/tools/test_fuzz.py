"""A short run of each fuzz target; make fuzz runs them for longer."""
import os
import pytest
from suite import ROOT, succeeds


@pytest.mark.rest
@pytest.mark.parametrize("reader", ["tokens", "mask", "tokenizer", "safetensors"])
def test_a_reader_survives_hostile_input(reader):
    if not (ROOT / f"build/fuzz/{reader}").exists(): pytest.skip("clang with its fuzzer runtime is missing: sh dev/setup.sh")
    succeeds("sh test/unit/fuzz.sh", os.environ.get("FUZZ_SECONDS", "6"), reader, timeout=600)
