"""Layers as a shared library, build/layers.so of test/unit/layers.cu, called from Python: arrays in the device's memory, calls,
comparisons.

    x, y, out = normal(n), normal(n), unset(n)      floatX, rounded from float64
    call("add_in_place", x, y, n)                   by the prototype in layers_api.h; what is not const there is an output
    near("the sum", x, x.d + y.d, roundings=1)      within the rounding of stored values and so many fp32 roundings of the largest

A call is made twice from the same beginning, and must leave the same bits. What it may only read stays as it was. Around every
array lie guards, which are NaN for whoever reads them and must stay; a library with an address sanitizer has none, and arrays end
where their memory does."""
import ctypes, linecache, os, re, sys
from pathlib import Path
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SET, ADD = 0, 1 # GradMode
KERNELS, PRODUCTS, ATTENTION, COMPRESSION, EXPERTS = range(5)
AUTO, CUDNN, OWN = range(3)
F32 = 2.0**-24 # half a unit in the last place, relative
STORED = {"fp32": np.dtype("f4"), "bf16": np.dtype("u2"), "fp16": np.dtype("f2")}


class LayerShapes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "B T C NH Vp parts context chunk".split()]


class TokenRange(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("first", "count")]


class GPT2Config(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "max_T V Vp L NH C".split()]


class TensorInfo(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 32),
                *((name, ctypes.c_size_t) for name in "offset block_offset rows cols stored_rows".split()),
                ("mean", ctypes.c_float), ("std", ctypes.c_float), ("cut", ctypes.c_int)]


class TensorRuns(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "begin n count stride".split()]


class ParamRange(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int) for name in "unit part parts".split()),
                *((name, ctypes.c_size_t) for name in "begin n no_decay".split()),
                ("on_host", ctypes.c_bool), ("is_replicated", ctypes.c_bool),
                *((name, ctypes.c_void_p) for name in "params grads master m v momentum".split())]


class StepLog(ctypes.Structure):
    _fields_ = [("step", ctypes.c_longlong),
                *((name, ctypes.c_double) for name in "loss grad_norm param_norm lr loss_scale".split()),
                ("tokens", ctypes.c_longlong), *((name, ctypes.c_double) for name in "tokens_per_s flops step_ms".split()),
                *((name, ctypes.c_size_t) for name in "mem_bytes mem_peak_bytes comm_bytes".split()),
                ("comm_exposed_ms", ctypes.c_double), ("skipped", ctypes.c_bool), ("masked", ctypes.c_bool),
                ("counted", ctypes.c_longlong)]


class AdamW(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in "lr beta1 beta2 eps weight_decay".split()] + [("t", ctypes.c_int)]


class Muon(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in "lr beta weight_decay".split()]


BY_VALUE = {"size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool, "void": None,
            "uint64_t": ctypes.c_uint64, "long": ctypes.c_long, "json_int_t": ctypes.c_longlong, "unsigned": ctypes.c_uint,
            **{kind.__name__: kind for kind in (
                LayerShapes, TokenRange, AdamW, Muon, GPT2Config, TensorInfo, TensorRuns, ParamRange, StepLog)}}


def type_of(text):
    if "*" in text: return ctypes.c_char_p if text.split()[:2] == ["const", "char*"] else ctypes.c_void_p
    return BY_VALUE.get(text.split()[0], ctypes.c_int) # or an enum


def prototypes():
    """{function: (type of the result, [(type, whether it points to what is written)])} of the contract, layers.cu and host.c."""
    found = {}
    contracts = [ROOT / "llmc/device" / name for name in ("layers_api.h", "muon_api.h", "compress_api.h", "experts_api.h", "device_api.h")]
    for path in *contracts, ROOT / "test/unit/layers.cu", ROOT / "test/unit/host.c":
        text = re.sub(r"//.*", "", path.read_text())
        for result, name, inside in re.findall(r"^([A-Za-z][\w ]*?[ *]+)(\w+)\(([^()]*)\)\s*[;{]", text, re.M):
            parameters = [p.strip() for p in inside.split(",")] if inside.strip() not in ("", "void") else []
            found[name] = type_of(result), [(type_of(p), "*" in p and not p.startswith("const")) for p in parameters]
    return found


class Settings:
    """Of this process: the library and what it is built for."""
    quick = False          # leave out cases that show nothing new about races, because race detection is slow
    guard = 64             # bytes
    unaligned = None       # the array of this number begins one element later
    arrays = []            # those since begin()
    record = None          # a list of what calls have left, if a claim wants one
    rng = np.random.default_rng(0)


on = Settings


def open_library(path, sanitized):
    on.lib, on.prototypes, on.guard = ctypes.CDLL(str(Path(path).resolve())), prototypes(), 0 if sanitized else 64
    for name, (result, parameters) in on.prototypes.items():
        if hasattr(on.lib, name):
            function = getattr(on.lib, name)
            function.restype, function.argtypes = result, [kind for kind, _ in parameters]
    on.lib.device_init(0, 1)
    on.precision = ("fp32", "bf16", "fp16")[on.lib.elements_are()]
    on.eps = {"fp32": F32, "bf16": 2.0**-8, "fp16": 2.0**-11}[on.precision]
    on.element_bytes = STORED[on.precision].itemsize
    on.is_16, on.is_cpu = on.precision != "fp32", not hasattr(on.lib, "products_go")
    on.is_emulated = not on.is_cpu and bool(on.lib.emulated())
    on.dtype = ("fp32", "bf16", "fp16").index(on.precision) # DType


# ---- numbers as they are stored ----
def to_bf16(x):
    bits = np.asarray(x, "f4").view("u4")
    rounded = (bits + np.uint32(0x7fff) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where((bits & np.uint32(0x7fffffff)) > 0x7f800000, bits >> np.uint32(16) | np.uint32(0x40), rounded).astype("u2")


def from_bf16(bits): return (np.asarray(bits).astype("u4") << 16).view("f4")


def to_stored(x):
    """Rounded to floatX, as it is stored."""
    if on.precision == "bf16": return to_bf16(x)
    with np.errstate(over="ignore"): return np.asarray(x, "f4").astype(STORED[on.precision])


def from_stored(bits): return from_bf16(bits) if on.precision == "bf16" else np.asarray(bits).astype("f4")
def numbers_of(bits): return from_stored(bits).astype("f8")
def rounded(x): return numbers_of(to_stored(x))


# ---- arrays ----
class Array:
    """What the device's memory held at first is start (as stored) and d (float64); what it holds now is bits() and get()."""

    def __init__(self, start, is_x, offset=0):
        self.is_x, self.base = is_x, None
        self.start = np.array(start, order="C")
        offset += on.unaligned == len(on.arrays)
        on.arrays.append(self)
        # packed rows begin at multiples of 4
        self.front = on.guard + offset * max(self.start.itemsize, 4 if self.start.dtype == "u1" else 0)
        self.bytes = self.front + self.start.nbytes + on.guard
        self.base = on.lib.array_alloc(self.bytes)
        self.pointer = self.base + self.front
        self.again()

    n = property(lambda self: self.start.size)
    d = property(lambda self: self.decoded(self.start))

    def decoded(self, bits): return (from_stored(bits) if self.is_x else bits).astype("f8")

    def again(self):
        whole = np.full(self.bytes, 0xff, "u1")
        whole[self.front:self.front + self.start.nbytes] = self.start.reshape(-1).view("u1")
        on.lib.array_copy(self.base, whole.ctypes.data, self.bytes)

    def bits(self):
        whole = np.empty(self.bytes, "u1")
        on.lib.array_copy(whole.ctypes.data, self.base, self.bytes)
        end = self.front + self.start.nbytes
        guards = whole[:self.front].tobytes() + whole[end:].tobytes()
        assert guards == b"\xff" * len(guards), "a call wrote before or behind an array"
        return whole[self.front:end].view(self.start.dtype).reshape(self.start.shape)

    def get(self): return self.decoded(self.bits())

    def keep(self):
        """What it holds now is what the next call finds. Returns itself."""
        self.start = self.bits().copy()
        return self

    def free(self): on.lib.array_free(self.base)


def x(values, offset=0): return Array(to_stored(values), True, offset)
def f(values, offset=0): return Array(np.asarray(values, "f4"), False, offset)
def ns(values, offset=0): return (f if on.precision == "fp16" else x)(values, offset) # floatNS
def integers(values): return Array(np.asarray(values, "i4"), False)
def doubles(*values): return Array(np.asarray(values, "f8"), False)
def packed(bits): return Array(np.ascontiguousarray(bits), False) # bytes, or 16 or 32 bits each
def unset_bytes(n): return Array(np.full(n, 0xa5, "u1"), False)
def unset(*shape): return x(np.full(shape, np.nan))
def unset_f(*shape): return f(np.full(shape, np.nan))
def unset_ns(n, offset=0): return ns(np.full(n, np.nan), offset)
def numbers(*shape, mean=0, std=1): return mean + std * on.rng.standard_normal(shape)
def normal(*shape, mean=0, std=1, offset=0): return x(numbers(*shape, mean=mean, std=std), offset)
def normal_f(*shape, mean=0, std=1, offset=0): return f(numbers(*shape, mean=mean, std=std), offset)
def gradient_before(mode, *shape): return unset(*shape) if mode == SET else normal(*shape)
def after(mode, before, gradient): return gradient + (before.d if mode == ADD else 0)


def begin(B=1, T=1, C=1, NH=1, Vp=1, what=KERNELS, context=1, chunk=0, attention=AUTO, deterministic=False):
    """Frees all arrays and prepares the layers for these shapes."""
    while on.arrays: on.arrays.pop().free()
    if hasattr(on.lib, "begin"): on.lib.begin(LayerShapes(B, T, C, NH, Vp, 1, context, chunk), attention, deterministic, what)


# ---- calls ----
def run(what, calls, *outputs):
    """Makes calls twice from the same beginning; the outputs have the same bits."""
    for a in outputs: a.again()
    calls()
    first = [a.bits() for a in outputs]
    if on.record is not None: on.record += [(what, bits) for bits in first]
    if on.quick: return
    for a in outputs: a.again()
    calls()
    for a, bits in zip(outputs, first): same(f"{what}, again", a, bits)


def raw(name, *arguments):
    """Calls a function once with what arrays hold now."""
    return getattr(on.lib, name)(*(a.pointer if isinstance(a, Array) else a for a in arguments))


def call(name, *arguments):
    parameters = on.prototypes[name][1]
    assert len(arguments) == len(parameters), f"{name} has {len(parameters)} parameters"
    outputs = [a for a, (_, written) in zip(arguments, parameters) if written and isinstance(a, Array)]
    inputs = [(a, a.bits()) for a in arguments if isinstance(a, Array) and a not in outputs]
    run(name, lambda: raw(name, *arguments), *outputs)
    for a in outputs: a.bits() # and the guards
    for number, (a, before) in enumerate(inputs): same(f"input {number} of {name}, which it may only read", a, before)


# ---- comparisons ----
def as_bits(a): return np.ascontiguousarray(a.bits() if isinstance(a, Array) else a)


def same(what, got, want):
    """To the bit."""
    __tracebackhide__ = True
    got, want = as_bits(got).reshape(-1), as_bits(want).reshape(-1)
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.size == want.size, f"{what}: {got.size} elements, not {want.size}"
    if got.tobytes() == want.tobytes(): return
    off = np.flatnonzero((got.view("u1") != want.view("u1")).reshape(got.size, got.itemsize).any(1))
    raise AssertionError(f"{what}: element {off[0]} of {got.size} is {got[off[0]]}, not {want[off[0]]}; {off.size} differ")


def within(what, got, want, tolerance):
    got, want = np.asarray(got, "f8").reshape(-1), np.asarray(want, "f8").reshape(-1)
    assert got.size == want.size, f"{what}: {got.size} elements, not {want.size}"
    tolerance = np.broadcast_to(np.asarray(tolerance, "f8").reshape(-1), got.shape)
    off = np.flatnonzero(~(np.abs(got - want) <= tolerance))
    if off.size == 0: return
    first = f"element {off[0]} of {got.size} is {got[off[0]]:.9g}, not {want[off[0]]:.9g} within {tolerance[off[0]]:.3g}"
    raise AssertionError(f"{what}: {first}; {off.size} are off")


def largest(want): return np.abs(want).max(initial=0)


def near(what, got, want, roundings=0, more=0, relative=None):
    """Within the rounding of stored values, fp32 roundings of the largest result, and `more`, of each element."""
    want = np.asarray(want, "f8")
    if relative is None: relative = 1.01 * on.eps if got.is_x else 0
    smallest = 2.0**-25 if got.is_x and on.precision == "fp16" else 0 # fp16 below 2^-14 has steps of 2^-24
    within(what, got.get(), want, (relative * np.abs(want) + roundings * F32 * largest(want) + more + smallest))


# ---- claims ----
claims = {}


def claim(function):
    claims[function.__name__] = function
    return function


def of(device):
    """A claim about the layers of the CPU (cpu) or of a GPU (cuda); others pass without."""
    def wanted(function):
        claims[function.__name__] = function
        function.device = device
        return function
    return wanted


def every_precision(function):
    """A claim about the host that is made in 16 bits as well."""
    function.in_16_bits = True
    return claim(function)


def in_child(call, said_to=2):
    """(the status, less the signal that killed it; what it said to stderr, or to stdout)"""
    at, child_writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(child_writes, said_to)
        call()
        ctypes.CDLL(None).fflush(None)
        os._exit(0)
    os.close(child_writes)
    with open(at, newline="") as pipe: said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def lives(call):
    """In a child process, without a word."""
    assert in_child(call) == (0, ""), in_child(call)


def dies(call, *phrases):
    """In a child process, with one line of error that has all phrases."""
    status, said = in_child(call)
    good = status == 1 and said.startswith("error: ") and said.count("\n") == 1
    assert good and all(x in said for x in phrases), f"{status}: {said}"


def rows(table, few=None):
    """The rows of a table, or if only a few are wanted the first ones."""
    return table[:few] if on.quick and few is not None else table


def main(arguments):
    """LIBRARY [sanitized] [quick] [CLAIM...]: results as TAP."""
    options = [a for a in arguments[1:] if a in ("sanitized", "quick")]
    open_library(arguments[0], "sanitized" in options)
    on.quick = "quick" in options
    failed = 0
    for number, name in enumerate([a for a in arguments[1:] if a not in options] or [*claims], 1):
        error = check_claim(name)
        failed += error != ""
        print(f"{error}{'not ' * (error != '')}ok {number} - {name}", flush=True)
    begin()
    sys.exit(failed > 0)


def check_claim(name):
    """Returns what is wrong, as a comment of TAP, or "". A claim about the other device passes."""
    if getattr(claims[name], "device", "") not in ("", "cpu" if on.is_cpu else "cuda"): return ""
    on.rng, on.unaligned, on.record = np.random.default_rng(sum(name.encode())), None, None
    try:
        begin()
        claims[name]()
    except Exception as e:
        trace = e.__traceback__ # to the claim's line, or that of what it calls, but not into Given's comparisons
        while trace.tb_next and "/check_" in trace.tb_next.tb_frame.f_code.co_filename and (
                "self" not in trace.tb_next.tb_frame.f_locals): trace = trace.tb_next
        what = str(e) or linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
        return f"# line {trace.tb_lineno}: {what if isinstance(e, AssertionError) else repr(e)}\n"
    return ""
