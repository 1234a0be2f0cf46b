"""Every layer of llmc/device/ and every kernel that compresses gradients or moves tokens to experts follows its definition in
float64, which is in check_layers.py or check_experts.py: on the CPU in three precisions, with sanitizers, and without AVX-512,
where matrix products take other ways; on emulated GPUs in bf16 every case, the quick ones with the address sanitizer, with the race
detector, and in other precisions, which differ in conversions and elements per load; or on a GPU. So do functions of the host,
which are check_host.py's, also with sanitizers. A build's claims run in one process, because a mistake that a sanitizer finds ends
it."""
import re, sys
import check_host, check_layers
import pytest
from gpus import IS_REAL, WITHOUT_ASLR, capability, layers, missing
from suite import command, once, program, sanitizers

LONG = 4
claims = sys.modules["layers"].claims
HALF = "fp16" if IS_REAL and capability() < 8 else "bf16"
QUICK = ["cpu-fp32", "cpu-bf16"]
REST = ["cpu-fp16", "avx2-fp32", "debug-fp32", "debug-bf16", "debug-fp16"]
ON_GPUS = list(dict.fromkeys(f"plain-{x}" for x in (HALF, "fp32", "fp16"))) if IS_REAL else [
    "plain-bf16", "asan-bf16", "tsan-bf16", "plain-fp32", "plain-fp16", "asan-fp32"]
IN_EVERY_PRECISION = "linear|product|attention|cudnn" # what says most in the first minutes on a GPU, where libraries compute


def row(build, claim):
    marks = [pytest.mark.rest] if build not in QUICK else []
    if build in ON_GPUS: marks += [pytest.mark.gpu, missing("cublasLt", "cudnn")]
    if build in ON_GPUS[3:]: marks.append(pytest.mark.sampled(build)) # a build with all its claims, or none of them
    is_smoke = build.endswith(HALF) or re.search(IN_EVERY_PRECISION, claim)
    if build in ON_GPUS and "plain" in build and is_smoke: marks.append(pytest.mark.smoke)
    return pytest.param(build, claim, marks=marks, id=f"{build}-{claim}")


def is_of_host(claim): return claims[claim].__module__ == "check_host"


def is_made(build, claim):
    check = claims[claim]
    if is_of_host(claim): return build in ("cpu-fp32", "debug-fp32") or hasattr(check, "in_16_bits") and build in QUICK + REST
    device = "cuda" if build in ON_GPUS else "cpu"
    return getattr(check, "device", device) == device and not ("fp32" in build and "cudnn" in claim)


ROWS = [row(build, claim) for build in QUICK + REST + ON_GPUS for claim in claims if is_made(build, claim)]


def output(build, chosen):
    """What the claims of a build say, all of which are of layers or of the host. A few of an emulated GPU that are chosen by -k
    have every case."""
    kind, precision = build.split("-")
    script, library = (check_host, "host.so") if all(map(is_of_host, chosen)) else (check_layers, "layers.so")
    if kind == "debug" and sanitizers(): pytest.skip(f"sanitizers cannot run here: {sanitizers()}")
    some = len(chosen) < sum(row.values[0] == build for row in ROWS) - 2
    on_gpu, all_cases = build in ON_GPUS, build not in ON_GPUS or IS_REAL or build == ON_GPUS[0] or some and kind != "tsan"
    path = layers(kind, precision) if on_gpu else program(library, precision, debug=kind == "debug")
    sanitizer = {"debug": "asan", "asan": "asan", "tsan": "tsan"}.get(kind)
    env = {"OPENBLAS_NUM_THREADS": 1} | ({"OMP_NUM_THREADS": 1} if on_gpu else {})
    if kind == "avx2": env["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    if sanitizer: # it must be there before Python, and then does not see the emulator's own settings
        env |= {"LD_PRELOAD": command(f"cc -print-file-name=lib{sanitizer}.so").out.strip(), "TSAN_OPTIONS": "halt_on_error=1"}

    def run(place):
        options = ["sanitized"] * bool(sanitizer) + ["quick"] * (not all_cases) + sorted(chosen, key=[*claims].index)
        start = WITHOUT_ASLR if on_gpu and not IS_REAL else []
        done = command(start, [sys.executable, script.__file__, path], options, env=env, timeout=900)
        (place / "said").write_text(done.said)
    return (once(f"layers {path} {kind} {sorted(chosen)}", run) / "said").read_text()


@pytest.mark.parametrize("build, claim", ROWS)
def test_a_layer_follows_its_definition(build, claim, request):
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    said = output(build, {x["claim"] for x in chosen if x["build"] == build and is_of_host(x["claim"]) == is_of_host(claim)})
    if IS_REAL: print(*re.findall("^# largest .*", said, re.M), sep="\n") # pytest -rP shows it
    if re.search(rf"^ok \d+ - {claim}\b", said, re.M): return
    found = re.search(rf"^(?:# .*\n)*not ok \d+ - {claim}$", said, re.M)
    pytest.fail(found[0] if found else said[-3000:], pytrace=False)
