"""Every layer and every kernel that compresses gradients against its definition in float64, for any device and precision:

    python3 test/kernels/check_layers.py build/layers.so [quick] [CLAIM...]

A gradient is defined by its formula, and one claim compares these formulas with finite differences of the forward definitions. In
16 bits inputs are rounded first, so that bounds only need to cover the layer's own rounding. PyTorch made the inputs and results in
test/reference/layers.safetensors. Where the contract promises the same bits on every device, results must equal the definition to
the bit; the same holds for conversions to and from 16 bits (llmc/base/precision.h). pytest: test_layers.py."""
import ctypes, itertools, os, sys
from pathlib import Path
import numpy as np
sys.path.append(str(Path(__file__).resolve().parents[2])) # dev.lib
from check_experts import check_router, check_router_backward, check_rows, check_sort, random_choice
from layers import (
    ADD, ATTENTION, AUTO, COMPRESSION, CUDNN, F32, KERNELS, OWN, PRODUCTS, SET, AdamW, Array, LayerShapes, Muon, TokenRange, after,
    begin, call, claim, doubles, f, from_bf16, gradient_before, integers, largest, main, near, normal, normal_f, ns, numbers,
    numbers_of, of, on, packed, raw, rounded, rows, run, same, to_bf16, to_stored, unset, unset_bytes, unset_f, unset_ns, within, x)

MODES = SET, ADD


def sum_error(terms):
    """The error of a sum, in roundings of the largest result: it grows like a random walk."""
    return min(4 + terms, 8 + 2 * terms**0.5)


def summed(terms):
    """The sum along the first axis, added in order in fp32."""
    return np.add.accumulate(terms.astype("f4"))[-1]


# ---- inputs: random, or PyTorch's ----
class Given:
    """A layer's case in PyTorch's file: its inputs by name, and the results to compare with. Without a case inputs are random."""

    def __init__(self, case=None):
        if case:
            from dev.lib import REFERENCE, ROOT, tensors
            stored = tensors(ROOT / REFERENCE / "layers.safetensors")
            self.tensors = {name[len(case) + 1:]: values for name, values in stored.items() if name.startswith(case + ".")}
        self.case, self.used = case, set()

    def theirs(self, name):
        self.used.add(name)
        return self.tensors[name]

    def __call__(self, name, *shape, mean=0, std=1):
        if not self.case: return normal(*shape, mean=mean, std=std)
        array = x(self.theirs(name).reshape(shape))
        assert (array.d == self.theirs(name).reshape(shape)).all(), f"{name} is not exact in {on.precision}"
        return array

    def before(self, mode, name, *shape):
        """The gradient that is there before: PyTorch's, or zeros if the file has none."""
        if not self.case: return gradient_before(mode, *shape)
        return self(name, *shape) if name else x(np.zeros(shape))

    def near(self, name, array, want, *bounds, **more):
        near(name, array, want, *bounds, **more)
        self.also(name, array, 16 * F32 if not array.is_x else self.share())

    def share(self): return 2 * on.eps if on.is_16 else 16 * F32

    def also(self, name, array, share=None):
        """Compares with PyTorch's result, within a share of the largest element."""
        if not self.case: return
        theirs = self.theirs(name)
        within(f"PyTorch's {name} of {self.case}", array.get(), theirs, (share or self.share()) * largest(theirs))

    def end(self):
        left = set(self.tensors) - self.used
        assert not left, f"{left} of {self.case} are not compared"


def given(case, check, *arguments, **settings):
    g = Given(case)
    check(*arguments, g=g, **settings)
    g.end()


# ---- bf16 and fp16 ----
FP32, BF16, FP16 = range(3) # DType
PATTERNS = np.arange(65536).astype("u2")
VALUES = {BF16: from_bf16(PATTERNS), FP16: PATTERNS.view("f2").astype("f4")} # bf16 is the upper half of a float, fp16 NumPy's
FORMATS = {BF16: (7, -126, (2 - 2.0**-7) * 2.0**127), FP16: (10, -14, 65504.0)} # fraction bits, lowest normal exponent, largest


def converted(array, to, source=FP32, piece=None):
    """The library's conversion of an array, all at once or in pieces."""
    out, step = np.empty(len(array), "u2" if to else "f4"), piece or len(array)
    for i in range(0, len(array), step):
        part = array[i:i + step]
        on.lib.convert_numbers(out[i:].ctypes.data, to, part.ctypes.data, source, len(part))
    return out


@np.errstate(all="ignore")
def rounded_by_definition(array, dtype):
    """Rounds to the nearest number of the format, and ties to even, in float64 without loss."""
    fraction, lowest, largest = FORMATS[dtype]
    array = array.astype("f8")
    shift = fraction - np.maximum(np.frexp(array)[1] - 1, lowest)
    nearest = np.ldexp(np.rint(np.ldexp(array, shift)), -shift)
    return np.where(np.abs(nearest) > largest, np.copysign(np.inf, array), nearest)


def same_numbers(what, got, want):
    """Zeros have their sign, and NaN is NaN."""
    wrong = np.flatnonzero(~((got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)))
    assert len(wrong) == 0, f"{what}: number {wrong[0]} is {got[wrong[0]]!r}, not {want[wrong[0]]!r}"


@of("cpu")
def every_pattern_of_16_bits_is_its_number_and_comes_back():
    for (dtype, want), piece in itertools.product(VALUES.items(), (None, 7)): # by vector instructions and all threads; one by one
        got = converted(PATTERNS, FP32, dtype, piece)
        same_numbers(f"DType {dtype}", got, want)
        back, is_nan = converted(got, dtype, piece=piece), np.isnan(want)
        assert (back == PATTERNS)[~is_nan].all() and (back >> 15 == PATTERNS >> 15).all() and np.isnan(want[back[is_nan]]).all()


@of("cpu")
def floats_round_to_the_nearest_even_number_of_16_bits_and_nan_stays_nan():
    """First the middle between each number and the next, where the rounding changes direction, and the floats just below and above
    it. Then floats of random bits, which include all exponents, subnormals, Inf and NaN, and some within fp16's range."""
    any_bits = on.rng.integers(0, 1 << 32, 500000, "u4")
    any_bits[:5] = 0x7f800001, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffffffff
    for dtype, values in VALUES.items():
        low = values[:0x7fff][np.isfinite(values[:0x7fff])].astype("f8")
        middle = (low + np.append(np.diff(low), low[-1] - low[-2]) / 2).astype("f4")
        near_middle = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
        in_range = np.ldexp(any_bits.astype("f4"), on.rng.integers(-59, -39, len(any_bits)).astype("i4"))
        for array in near_middle, -near_middle, any_bits.view("f4"), in_range:
            for piece in None, 7 if len(array) < 500000 else None:
                got = converted(converted(array, dtype, piece=piece), FP32, dtype)
                same_numbers(f"DType {dtype}", got, rounded_by_definition(array, dtype))


@of("cpu")
def arrays_convert_between_all_pairs_of_types_by_all_threads():
    """One slice, and several slices, which several threads convert."""
    def threads(): return len(os.listdir("/proc/self/task"))
    for source, to, n in itertools.product(range(3), range(3), (1003, 5 * 8192 + 77)):
        stored = converted(numbers(n).astype("f4"), source)
        before = converted(stored, FP32, source)
        want = rounded_by_definition(before, to) if to else before
        same_numbers(f"DType {source} to {to}", converted(converted(stored, to, source), FP32, to), want)
    had = threads()
    on.lib.set_threads(had + 2)
    converted(stored, BF16, source)
    began = threads() - had
    on.lib.set_threads(2)
    assert began > 0, "one thread converts all"


@of("cpu")
@np.errstate(all="ignore")
def numbers_that_are_too_large_are_those_that_become_infinite():
    edges = np.array([65504, 65520, FORMATS[BF16][2], (2 - 2.0**-8) * 2.0**127, np.finfo("f4").max, np.inf, np.nan, 1], "f4")
    near_edges = np.concatenate([edges, np.nextafter(edges, -edges), np.nextafter(edges, np.float32(np.inf))])
    for array in near_edges, -near_edges:
        for dtype in range(3):
            too_large = np.flatnonzero(np.isinf(converted(converted(array, dtype), FP32, dtype)) & ~np.isinf(array))
            first = ctypes.c_size_t()
            assert on.lib.too_large(array.ctypes.data, len(array), dtype, ctypes.byref(first)) == len(too_large)
            assert bool(len(too_large)) == (dtype != FP32) and (dtype == FP32 or first.value == too_large[0])


# ---- embeddings ----
def tokens_at_edges(n, V, Vp, parts):
    """Random tokens. They begin with the first and the last token of every part, where these exist."""
    tokens, width = on.rng.integers(0, V, n), Vp // parts
    edges = [part * width + end for part in range(parts) for end in (0, width - 1)][:n]
    for i, edge in enumerate(edges):
        if edge < V: tokens[i] = edge
    return tokens


def check_encoder(B, T, C, V, Vp, parts, g=Given()):
    """The whole follows its definition, and the parts add up to the same bits."""
    begin(B, T, C, 1, Vp)
    tokens = integers(g.theirs("tokens").reshape(B, T) if g.case else tokens_at_edges(B * T, V, Vp, parts).reshape(B, T))
    wte, wpe, dout = g("wte", Vp, C), g("wpe", T, C), g("dout", B, T, C)
    out, of_part, total = unset(B, T, C), unset(B, T, C), x(np.zeros((B, T, C)))
    at = tokens.start
    call("encoder_forward", out, tokens, wte, wpe, B, T, C)
    g.near("out", out, wte.d[at] + wpe.d)
    dwte = np.zeros((Vp, C))
    np.add.at(dwte, at.reshape(-1), dout.d.reshape(-1, C))
    for mode in MODES:
        into, pos = g.before(ADD, "dwte_before", Vp, C), g.before(mode, "", T, C)
        call("encoder_backward", into, pos, dout, tokens, B, T, C, mode)
        g.near("dwte", into, into.d + dwte, B * T)
        g.near("dwpe", pos, after(mode, pos, dout.d.sum(0)), B)
        before = pos.d.astype("f4") if mode == ADD else np.float32(0)
        same("dwpe summed in the order of sequences", pos, to_stored(before + summed(dout.d)))
        for part in range(parts):
            first, count = part * Vp // parts, Vp // parts
            these, own = TokenRange(first, count), slice(first, first + count)
            if mode == SET:
                call("encoder_part_forward", of_part, tokens, x(wte.d[own]), wpe if part == parts // 2 else None, these, B, T, C)
                raw("add_in_place", total, of_part, out.n)
            share, pos_share, alone = x(into.d[own]), x(pos.d), x(into.d[own])
            call("encoder_part_backward", share, pos_share, dout, tokens, these, B, T, C, mode)
            same("a part of dwte", share, into.bits()[own])
            same("dwpe beside a part", pos_share, pos)
            call("encoder_part_backward", alone, None, dout, tokens, these, B, T, C, mode)
            same("a part of dwte without dwpe", alone, share)
    same("the sum of encoder_part_forward", total, out)


@claim
def encoder_adds_token_and_position_and_sums_their_gradients_also_in_parts():
    for shape in rows([ # B, T, C, V, Vp, parts
            (1, 1, 1, 1, 1, 1), (2, 9, 7, 11, 12, 1), (2, 9, 16, 11, 12, 2),
            (2, 9, 7, 5, 12, 4),        # the last two parts have nothing but padding
            (2, 150, 8, 2500, 2502, 2), # more tokens than threads in the prefix sum, more positions than a block takes
            (3, 40, 304, 5, 6, 3),      # more channels than are summed at a time, tokens that occur often
            (1, 3, 2056, 4, 4, 1),      # rows longer than a block
            (2, 9, 7, 10, 12, 3),       # the last part has a token of padding
            (2, 9, 7, 11, 12, 2), (1, 1, 1, 1, 2, 2)], 7):
        check_encoder(*shape)


# ---- layernorm ----
def layernorm(a, w, b):
    mean = a.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(((a - mean)**2).mean(1, keepdims=True) + 1e-5)
    return (a - mean) * rstd * w + b, mean[:, 0], rstd[:, 0]


def layernorm_gradients(a, w, dout):
    """Of the input, w and b."""
    _, mean, rstd = layernorm(a, w, 0)
    normal, d = (a - mean[:, None]) * rstd[:, None], dout * w
    dinp = rstd[:, None] * (d - d.mean(1, keepdims=True) - normal * (d * normal).mean(1, keepdims=True))
    return dinp, (dout * normal).sum(0), dout.sum(0)


def check_layernorm(N, C, mean_of_x=0, g=Given()):
    begin(1, N, C)
    slack = 16 + 8 * abs(mean_of_x) # the subtraction of the mean magnifies roundings
    of_rows = slack + min(N, 2 * N**0.5)
    x1, x2, w, b = g("inp1", N, C, mean=mean_of_x), g("inp2", N, C), g("w", C, mean=1, std=0.5), g("b", C, std=0.5)
    res, out, mean, rstd, dout = unset(N, C), unset(N, C), unset_f(N), unset_f(N), g("dout", N, C)
    call("residual_layernorm_forward", res, out, mean, rstd, x1, x2, w, b, N, C)
    g.near("res", res, x1.d + x2.d)
    want, want_mean, want_rstd = layernorm(res.get(), w.d, b.d)
    g.near("out", out, want, slack)
    near("mean", mean, want_mean, max(16, C**0.5)) # a debug build adds one after the other
    near("rstd", rstd, want_rstd, max(16, C**0.5))
    for name, array in ("mean", mean), ("rstd", rstd): g.also(name, array) # PyTorch's sum is not rounded
    again = unset(N, C)
    call("residual_layernorm_forward", res.keep(), again, mean, rstd, res, None, w, b, N, C)
    if on.unaligned is None: same("layernorm recomputed from the stored sum", again, out) # else it is read in other pieces
    dinp, dw, db = layernorm_gradients(res.get(), w.d, dout.d)
    for mode in MODES:
        into, into_w, into_b = g.before(ADD, "dres", N, C), g.before(mode, "", C), g.before(mode, "", C)
        call("layernorm_backward", into, into_w, into_b, dout, res, w, mean, rstd, N, C, mode)
        g.near("dinp", into, into.d + dinp, slack)
        g.near("dw", into_w, after(mode, into_w, dw), of_rows)
        g.near("db", into_b, after(mode, into_b, db), of_rows)


@claim
def layernorm_adds_the_residual_and_normalises():
    for shape in rows([(5, 19), (1, 8),
                       (3, 1),      # a row of one channel normalises to 0
                       (40, 64), (9, 776),
                       (3, 64, 100), # far from 0, where E[x^2] - E[x]^2 would cancel
                       (1030, 257), # a GPU's backward takes a row in a block at a time, three times
                       (4101, 8),   # and here several, twice
                       (515, 1031), # rows that are too long for a block to keep
                       (40, 33)], 7):
        check_layernorm(*shape)


@of("cuda")
def layernorm_of_rows_around_its_limits():
    """Of forward's shared memory, for eight rows and for one, and of what backward's threads keep."""
    eight, one, two = (on.lib.limits_of_layernorm(which) for which in range(3))
    vector, thread_each = 8 if on.is_16 else 4, 1024
    for C in two, thread_each:
        for more in 0, 1, vector: check_layernorm(3, C + more, 1)
    for C in rows([eight, eight + vector, 1024 * vector, 1024 * vector + vector, one], 0): check_layernorm(9, C, 1)


# ---- linear layers ----
GELU = (2 / np.pi)**0.5, 0.044715


def gelu(a): return 0.5 * a * (1 + np.tanh(GELU[0] * (a + GELU[1] * a**3)))


def gelu_derivative(a):
    t = np.tanh(GELU[0] * (a + GELU[1] * a**3))
    return 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * GELU[0] * (1 + 3 * GELU[1] * a * a)


def in_every_way(calls, compare, *outputs):
    """On a GPU with each algorithm that cuBLASLt offers: even ways use its epilogues, odd ways use kernels instead."""
    if on.is_cpu:
        run("a product", calls, *outputs)
        compare(0)
        return
    for a in outputs: a.again()
    calls() # makes the plans
    assert not on.is_emulated or on.lib.plans(REFUSED) == 0, "the emulator's cuBLASLt refuses an epilogue"
    way = 0
    while way < on.lib.products_go(way) and not (on.quick and way == 2):
        run("a product", calls, *outputs)
        compare(way)
        way += 1


def product(name, *arguments, compare):
    outputs = [a for a, (_, written) in zip(arguments, on.prototypes[name][1]) if written and isinstance(a, Array)]
    in_every_way(lambda: raw(name, *arguments), compare, *outputs)


def between():
    """In roundings: a GPU rounds a product to floatX before another kernel reads it, by at most half a unit of the largest
    result."""
    return 1.01 * on.eps / F32 if on.is_16 and not on.is_cpu else 0


largest_gelu = [0, 0] # its error by epilogues, and by kernels


def near_gelu(act, pre, roundings, way):
    """cuBLASLt applies GELU to the sum before rounding it, up to half a unit away from pre."""
    a, want = pre.get(), gelu(pre.get())
    largest_gelu[way % 2] = max(largest_gelu[way % 2], np.abs(act.get() - want).max())
    if on.is_cpu: return near("gelu", act, want, 4)
    half = 1.01 * on.eps * np.abs(a) + roundings * F32
    spread = np.maximum(np.abs(gelu(a + half) - want), np.abs(gelu(a - half) - want))
    near("gelu", act, want, more=spread + 8 * F32)


def check_linear(N, C, OC, g=Given()):
    begin(1, N, max(C, (OC + 3) // 4), 1, 1, PRODUCTS)
    inp, w, bias, dout = g("inp", N, C), g("w", OC, C), g("b", OC), g("dout", N, OC)
    before_gelu, out, pre, dinp, wide = g("pre", N, C), unset(N, OC), unset(N, OC), unset(N, C), unset_f(OC, C)
    want, error = inp.d @ w.d.T, sum_error(C)
    product("matmul_forward", out, inp, w, None, N, C, OC, compare=lambda way: g.near("out_no_bias", out, want, error))
    product("matmul_forward", out, inp, w, bias, N, C, OC, compare=lambda way: g.near("out", out, want + bias.d, error + between()))

    def compare_gelu(way):
        g.near("out", pre, want + bias.d, error + between())
        near_gelu(out, pre, error * 4 * C**0.5, way)
        g.also("out_gelu", out)
    product("matmul_gelu_forward", out, pre, inp, w, bias, N, C, OC, compare=compare_gelu)

    want, error = dout.d @ w.d, sum_error(OC)
    product("matmul_backward_input", dinp, dout, w, N, C, OC, compare=lambda way: g.near("dinp", dinp, want, error))
    # in 16 bits the product may be rounded before gelu' multiplies it
    product("matmul_gelu_backward_input", dinp, dout, w, before_gelu, N, C, OC, compare=lambda way: g.near(
        "dpre", dinp, want * gelu_derivative(before_gelu.d), 12 + 2 * error + between(),
        relative=(2.1 if on.is_16 else 1.01) * on.eps))

    want, want_bias, error = dout.d.T @ inp.d, dout.d.sum(0), sum_error(N)
    for mode in MODES:
        dw, db = g.before(mode, "", OC, C), g.before(mode, "", OC)
        alone, chunk, wide = x(dw.d), x(dw.d), f(dw.d)

        def compare(way):
            g.near("dw", dw, after(mode, dw, want), error)
            # what an epilogue adds was rounded before
            g.near("db", db, after(mode, db, want_bias), error + between() * (mode == ADD))
        product("matmul_backward_weight", dw, db, dout, inp, N, C, OC, mode, compare=compare)
        product("matmul_backward_weight", alone, None, dout, inp, N, C, OC, mode,
                compare=lambda way: near("dw without a bias", alone, after(mode, alone, want), error))
        product("matmul_backward_weight_fp32", wide, dout, inp, N, C, OC, mode,
                compare=lambda way: near("sums of dw in fp32", wide, after(mode, wide, want), error))
        call("matmul_backward_weight_chunk", chunk, dout, inp, 0, N, N, C, OC, mode) # the only one
        if not on.is_cpu: continue
        same("dw without a bias", alone, dw)
        same("dw of a single chunk", chunk, dw)
        if not on.is_16: same("dw in fp32", wide, dw)


@claim
def linear_layers_are_a_product_plus_bias_their_derivatives_and_gelu():
    """On a GPU in every way."""
    for_all = [(1, 1, 1), (1, 16, 32), (5, 7, 3), (33, 17, 65), (2, 8, 8), (64, 32, 96), (96, 48, 64), (40, 24, 130)] # N, C, OC
    for_the_cpu = [
        (5, 7, 9), (1, 33, 65), (67, 1, 3), (130, 70, 257), (256, 96, 384),
        (3, 1100, 5), (257, 1030, 70), # more columns than a tile
        (2, 3, 2100), (7, 40, 2100),   # more rows of w than a tile
        (1100, 33, 65),                # sums over more rows than a tile
        (300, 64, 500),                # tiles in several parts
        (40, 512, 896)]                # rows of w that share sets of the cache, in several panels
    for shape in for_all + for_the_cpu * on.is_cpu: check_linear(*shape)
    if not on.is_cpu:
        by_library, by_us = largest_gelu
        print(f"# largest error of GELU in {on.precision}: {by_library:.2g} by cuBLASLt, {by_us:.2g} by our kernel", flush=True)


@claim
def chunks_of_a_weight_gradient_are_rounded_once():
    """The second half nearly cancels the first half, so the sum is small, but the partial sums that are rounded are large."""
    at_once, N, C, OC = 64, 8 * 64 - 8, 16, 40 # the last chunk has fewer rows
    on.lib.logits_at_a_time(at_once * OC)
    begin(1, N, C, 1, OC, PRODUCTS)
    half, noise, inputs = numbers(N // 2, OC), 0.01 * numbers(N // 2, OC), numbers(N // 2, C)
    dout, inp = x(np.concatenate([half, noise - rounded(half)])), x(np.concatenate([inputs, inputs]))
    for mode in MODES:
        dw, each = gradient_before(mode, OC, C), gradient_before(mode, OC, C)
        each.start = dw.start.copy()
        begins = range(0, N, at_once)
        chunks = [(row, min(at_once, N - row), x(dout.d[row:row + at_once]), x(inp.d[row:row + at_once])) for row in begins]
        chunks = [(0, 0, unset(0, OC), unset(0, C)), *chunks, (N, 0, unset(0, OC), unset(0, C))] # two have no rows
        want = after(mode, dw, dout.d.T @ inp.d)
        bound = 1.01 * on.eps * np.abs(want) + 64 * 64 * F32 # of sums as large as 64

        def by_chunks():
            for row, n, d, a in chunks: raw("matmul_backward_weight_chunk", dw, d, a, row, n, N, C, OC, mode)

        def rounded_each_time():
            for row, n, d, a in chunks: raw("matmul_backward_weight", each, None, d, a, n, C, OC, ADD if row else mode)
        in_every_way(by_chunks, lambda way: within("a gradient in chunks", dw.get(), want, bound), dw)
        run("rounded with each chunk", rounded_each_time, each)
        if on.is_16: assert (np.abs(each.get() - want) > bound).mean() > 0.5, "rounding with each chunk shows nowhere"
        elif on.is_cpu: same("chunks in fp32", dw, each)
    on.lib.logits_at_a_time(1 << 24)


@claim
def a_gradients_definition_is_the_derivative_of_what_it_belongs_to():
    """Along a random direction, by finite differences of fourth order."""
    def derivative(function, at, direction, h=1e-3):
        values = [function(at + k * h * direction) for k in (-2, -1, 1, 2)]
        return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)

    def check(what, function, at, gradient):
        direction = numbers(*at.shape)
        want = derivative(function, at, direction)
        assert abs((gradient * direction).sum() - want) <= 1e-8 * (1 + abs(want)), what

    a, w, b, d = numbers(5, 19), numbers(19), numbers(19), numbers(5, 19)
    dinp, dw, db = layernorm_gradients(a, w, d)
    check("layernorm's input", lambda y: (layernorm(y, w, b)[0] * d).sum(), a, dinp)
    check("layernorm's w", lambda y: (layernorm(a, y, b)[0] * d).sum(), w, dw)
    check("layernorm's b", lambda y: (layernorm(a, w, y)[0] * d).sum(), b, db)
    check("GELU", lambda y: (gelu(y) * d).sum(), a, gelu_derivative(a) * d)
    for B, T, NH, HS in (2, 5, 2, 3), (1, 13, 3, 5):
        qkv, dout = numbers(B, T, 3 * NH * HS), numbers(B, T, NH * HS)
        out, _ = attention(qkv, NH)
        check("attention", lambda y: (attention(y, NH)[0] * dout).sum(), qkv, attention_gradient(qkv, dout, out, NH)[0])
    logits, targets = numbers(4, 11), np.array([3, 0, -1, 10])
    losses, dlogits = cross_entropy(logits, targets)
    check("cross-entropy", lambda y: cross_entropy(y, targets)[0].sum(), logits, dlogits)


# ---- bias and GELU around a product ----
@of("cuda")
def bias_and_gelu_follow_a_product_and_their_gradients_precede_one():
    for shape in (1, 1), (5, 33), (3, 64), (2, 264): check_bias_gelu(*shape)
    for shape in rows([(1, 1), (7, 9),
                       (130, 264),       # more columns than a block
                       (8321, 8)], 3):   # more rows than the smallest chunks hold
        check_bias_backward(*shape)


def check_bias_gelu(N, C):
    begin(1, N, C)
    out, bias, act, dinp = normal(N, C, std=3), normal(C), unset(N, C), normal(N, C)
    call("bias_gelu_alone", act, out, bias, N, C)
    near("the product plus bias", out, out.d + bias.d)
    near("its GELU", act, gelu(out.get()), 8)
    call("bias_gelu_alone", None, out, bias, N, C)
    near("the product plus bias, without GELU", out, out.d + bias.d)
    call("gelu_backward_alone", dinp, out.keep(), N, C)
    near("GELU's gradient", dinp, dinp.d * gelu_derivative(out.d), 8)


def check_bias_backward(N, OC):
    begin(1, N, (OC + 3) // 4)
    dout = normal(N, OC)
    for mode in MODES:
        dbias = gradient_before(mode, OC)
        call("bias_backward_alone", dbias, dout, N, OC, mode)
        near("a bias's gradient", dbias, after(mode, dbias, dout.d.sum(0)), sum_error(N))


# ---- attention ----
def heads(a, NH):
    """(B,T,C) as (B,NH,T,HS)."""
    B, T, C = a.shape
    return a.reshape(B, T, NH, C // NH).transpose(0, 2, 1, 3)


def together(a):
    B, NH, T, HS = a.shape
    return a.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def probabilities(qkv, NH):
    """q, k, v, P, and log(sum(exp)) of each row of scores."""
    q, k, v = (heads(a, NH) for a in np.split(qkv, 3, axis=2))
    T, HS = q.shape[2:]
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / HS**0.5, -np.inf)
    most = scores.max(3, keepdims=True)
    sums = np.exp(scores - most).sum(3, keepdims=True)
    return q, k, v, np.exp(scores - most) / sums, (np.log(sums) + most)[..., 0]


def attention(qkv, NH):
    """out (B,T,C) and stats (B,NH,T)"""
    *_, v, p, stats = probabilities(qkv, NH)
    return together(p @ v), stats


def attention_gradient(qkv, dout, out, NH):
    """dqkv; and by how much out and dqkv may change if P and dS are rounded to floatX before they are multiplied."""
    q, k, v, p, _ = probabilities(qkv, NH)
    d, scale = heads(dout, NH), q.shape[3]**-0.5
    ds = p * (d @ v.swapaxes(2, 3) - (d * heads(out, NH)).sum(3, keepdims=True))
    dqkv = np.concatenate([together(a) for a in (ds @ k * scale, ds.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ d)], axis=2)
    eps = getattr(on, "eps", F32)
    off = lambda a: eps * np.abs(a) + (2.0**-25 if eps == 2.0**-11 else 0) * np.tri(a.shape[2]) # noqa: E731
    dqkv_off = [off(ds) @ np.abs(k) * scale, off(ds).swapaxes(2, 3) @ np.abs(q) * scale, off(p).swapaxes(2, 3) @ np.abs(d)]
    return dqkv, together(off(p) @ np.abs(v)), np.concatenate([together(a) for a in dqkv_off], axis=2)


def attention_slack(T, HS, std):
    """In roundings, of out and of stats. An error in a score is one in the argument of exp; in 16 bits a GPU's exp is its
    approximate instruction."""
    slack, larger = 8 + HS**0.5 + T**0.5, max(1, std)**2
    if on.is_cpu: return min(min(slack, 16) * larger, 4096), 16
    slack *= larger * (4 if on.is_16 else 1)
    return slack, slack


def check_attention(B, T, NH, HS, std=1, g=Given(), what=KERNELS, **settings):
    """With these settings of the library, or with the previous ones if what is None."""
    C = NH * HS
    if what is not None: begin(B, T, C, NH, 1, what, **settings)
    slack, of_stats = attention_slack(T, HS, std)
    qkv, out, dout, dqkv = g("qkv", B, T, 3 * C, std=std), unset(B, T, C), g("dout", B, T, C), unset(B, T, 3 * C)
    stats = unset_f(B, NH, T)
    want, want_stats = attention(qkv.d, NH)
    rounds = not on.is_cpu and (what != KERNELS or on.lib.on_tensor_cores(HS)) and on.is_16 # P and dS, before they are multiplied
    call("attention_forward", out, stats, qkv, B, T, C, NH)
    _, out_off, _ = attention_gradient(qkv.d, dout.d, want, NH)
    g.near("out", out, want, slack, more=out_off if rounds else 0)
    g.near("stats", stats, want_stats, of_stats)
    want_dqkv, _, dqkv_off = attention_gradient(qkv.d, dout.d, out.get(), NH)
    backward = lambda: raw("attention_backward", dqkv, dout, qkv, out, stats, B, T, C, NH) # noqa: E731
    if settings.get("deterministic", True): run("attention_backward", backward, dqkv)
    else:
        dqkv.again()
        backward()
    g.near("dqkv", dqkv, want_dqkv, 4 * slack, more=dqkv_off if rounds else 0)
    if T > 150 and B == 1 and what == KERNELS: # what a token computes does not depend on those after it
        first = unset(1, 100, C)
        call("attention_forward", first, unset_f(NH, 100), x(qkv.d[:, :100]), 1, 100, C, NH)
        near("attention of the first 100 tokens", first, want[:, :100], slack, more=out_off[:, :100] if rounds else 0)


@claim
def attention_of_every_head_size():
    """A GPU's kernels are compiled for three ranges of head sizes, and each with and without vectors. (The next claim has those
    with.)"""
    for size in rows([3, 33, 77, 1, 8, 16, 31, 32, 63, 64, 65, 80, 127, 128], 3): check_attention(1, 35, 2, size)


@claim
def attention_over_lengths_around_a_tile():
    for shape in rows([ # B, T, NH, HS
            (1, 1, 1, 1), # one token sees only itself
            (2, 1, 3, 16), (2, 64, 1, 16), (1, 65, 2, 56), (1, 130, 1, 24), (2, 66, 3, 8), (1, 97, 1, 128),
            (2, 13, 3, 5), # odd everywhere
            (2, 5, 2, 3), (1, 66, 2, 2), (1, 201, 2, 33, 2)], 7): # several blocks
        check_attention(*shape)


@claim
def attention_of_64_channels_over_lengths_around_a_tile():
    """On tensor cores blocks have 64 rows in warps of 16; tiles have 64 or 32 rows, and two tiles are in shared memory."""
    for B, T, NH in rows([(1, 130, 1), (1, 1, 1), (2, 17, 2), (1, 32, 1), (1, 200, 1)], 1): check_attention(B, T, NH, 64)


@claim
def attention_survives_scores_that_exp_alone_would_overflow():
    check_attention(1, 70, 1, 16, 8)
    check_attention(1, 3, 2, 2, 30)
    for size in rows([64], 0): check_attention(1, 70, 1, size, 8)


def check_parts(B, n, chunks, NH, HS, std=1, common=0):
    """Each chunk of n tokens attends to itself and all before it, in several orders. What is merged and added is fp32 in every
    precision. common: a number that is added to all scores against keys of even chunks, and taken from those against odd ones."""
    T, C = chunks * n, NH * HS
    begin(B, T, C, NH, 1, context=chunks, chunk=n)
    values = numbers(B, T, 3, NH, HS, std=std)
    if common:
        values[:, :, 0, :, 0] = (common * HS**0.5)**0.5
        values[:, :, 1, :, 0] = values[:, :, 0, :, 0] * np.where(np.arange(T) // n % 2, -1, 1)[None, :, None]
    qkv, dout = rounded(values.reshape(B, T, 3 * C)), rounded(numbers(B, T, C))
    want, want_stats = attention(qkv, NH)
    slack, of_stats = attention_slack(T, HS, std)
    slack += 4 * common
    _, out_off, _ = attention_gradient(qkv, dout, want, NH)
    rounds = not on.is_cpu and on.lib.on_tensor_cores(HS)
    own = [slice(c * n, (c + 1) * n) for c in range(chunks)]
    alone = qkv.copy()
    alone[:, :, C:] = np.nan # k and v, which are not read from the queries' array
    q, kv, d = ([x(a[:, s]) for s in own] for a in (alone, qkv[:, :, C:], dout))
    outs, stats = [unset_f(B, n, C) for _ in own], [unset_f(B, NH, n) for _ in own]
    orders = [lambda i: range(i + 1), lambda i: range(i, -1, -1), lambda i: [(part + 1) % (i + 1) for part in range(i + 1)]]
    for order in rows(orders, 1):
        for i, s in enumerate(own):
            def forward():
                for number, k in enumerate(order(i)):
                    raw("attention_part_forward", outs[i], stats[i], q[i], kv[k], k == i, number > 0, B, n, C, NH)
            run("attention_part_forward", forward, outs[i], stats[i])
            near("a part's out", outs[i], want[:, s], slack, more=out_off[:, s] if rounds else 0)
            near("a part's stats", stats[i], want_stats[:, :, s], of_stats)
    stored = [x(a.get()) for a in outs] # as backward reads it
    want_d, _, off = attention_gradient(qkv, dout, np.concatenate([a.d for a in stored], axis=1), NH)
    off = off if rounds else 0 * off
    dq, dkv = [normal_f(B, n, C) for _ in own], [normal_f(B, n, 2 * C) for _ in own]

    def backward():
        for i in range(chunks):
            for k in range(i + 1):
                raw("attention_part_backward", dq[i], dkv[k], d[i], q[i], kv[k], stored[i], stats[i], k == i, B, n, C, NH)
    run("attention_part_backward", backward, *dq, *dkv)
    for i, s in enumerate(own):
        near("a part's dq", dq[i], dq[i].d + want_d[:, s, :C], 4 * slack, more=off[:, s, :C])
        near("a part's dkv", dkv[i], dkv[i].d + want_d[:, s, C:], 4 * slack, more=off[:, s, C:])
    if chunks > 1 or rounds: return
    whole, whole_stats = unset(B, T, C), unset_f(B, NH, T)
    call("attention_forward", whole, whole_stats, x(qkv), B, T, C, NH)
    if on.is_cpu:
        same("the only part's out, rounded", to_stored(outs[0].get()), whole)
        same("the only part's stats", stats[0], whole_stats)


@claim
def attention_in_parts_is_that_of_the_whole_sequence_in_any_order_of_its_chunks():
    for shape in rows([ # B, n, chunks, NH, HS
            (1, 37, 2, 2, 16), (2, 67, 2, 1, 64), (1, 1, 2, 2, 64), (2, 1, 2, 1, 16), (2, 17, 2, 2, 64), (1, 64, 2, 1, 64),
            (1, 65, 2, 2, 32), (2, 33, 2, 1, 80), (1, 35, 2, 1, 128), (1, 3, 2, 1, 77), (2, 7, 1, 3, 5), (2, 5, 2, 2, 3),
            (1, 1, 4, 2, 2), (2, 7, 3, 3, 5), (1, 4, 4, 1, 8), (1, 65, 2, 1, 1)], 2):
        check_parts(*shape)


@claim
def attention_in_parts_survives_scores_that_exp_alone_would_overflow():
    for size in 16, 64: check_parts(1, 35, 2, 1, size, 8)
    for chunks in 2, 3, 4: check_parts(1, 3, chunks, 2, 4, common=200)


# ---- classifier ----
def cross_entropy(logits, targets):
    """Losses, and dlogits of their sum: 0 for a row without a target (-1)."""
    masked, N = targets < 0, len(targets)
    most = logits.max(1, keepdims=True)
    p = np.exp(logits - most)
    sums = p.sum(1, keepdims=True)
    losses = (np.log(sums) + most)[:, 0] - logits[range(N), targets]
    dlogits = p / sums
    dlogits[range(N), targets] -= 1
    return np.where(masked, 0, losses), np.where(masked[:, None], 0, dlogits)


def classify(logits, targets, dloss, N, V, Vp, parts, checked=True):
    """(losses, losses beside gradients, dlogits) of stored logits (N,Vp), in so many parts; 0: by the one that has all of them."""
    losses, again, chosen = unset_f(N), unset_f(N), integers(targets)
    if parts == 0:
        whole = packed(logits)
        call("classifier_forward", losses, whole, chosen, N, V, Vp)
        call("classifier_forward_backward", again, whole, chosen, dloss, N, V, Vp)
        return losses, again, whole.bits()
    width = Vp // parts
    ranges = [TokenRange(part * width, width) for part in range(parts)]
    logits_of = [packed(logits[:, r.first:r.first + width]) for r in ranges]
    stats = [unset_f(N, 3) for _ in ranges]
    for r, own, s in zip(ranges, logits_of, stats):
        call("classifier_part_stats", s, own, chosen, r, N, V)
        if checked: check_stats(s.get(), numbers_of(own.start)[:, :max(0, V - r.first)], targets, r)
    gathered = f(np.stack([s.get() for s in stats]))
    call("classifier_part_forward", losses, gathered, chosen, parts, N)
    for r, own in zip(ranges, logits_of):
        call("classifier_part_forward_backward", again, own, gathered, chosen, dloss, r, parts, N, V)
        same("losses beside gradients", again, losses)
    return losses, again, np.concatenate([own.bits() for own in logits_of], axis=1)


def check_stats(stats, logits, targets, these):
    """The largest logit and the target's are copies; the sum has its own roundings."""
    for i, target in enumerate(targets):
        if target < 0: continue
        row, place = logits[i], target - these.first
        most = row.max(initial=-float(np.finfo("f4").max))
        assert stats[i, 0] == np.float32(most), f"the largest logit of row {i} is {stats[i, 0]}, not {most}"
        want, most_off = np.exp(row - most).sum(), 32 + len(row)**0.5 if on.is_cpu else 64
        assert abs(stats[i, 1] - want) <= min(4 + len(row),
                                              most_off) * F32 * want, f"the sum of row {i} is {stats[i, 1]}, not {want}"
        assert stats[i, 2] == (row[place] if 0 <= place < len(row) else 0), f"the target's logit of row {i} is {stats[i, 2]}"


def check_classifier(N, V, Vp, parts, apart=0, dloss=0.125, g=Given()):
    """apart: how much larger the logits of each part are than those before. Padding, and rows without a target, are not numbers."""
    begin(1, N, 1, 1, Vp)
    if g.case: dloss = float(g.theirs("dloss")[0])
    targets = g.theirs("targets").astype("i4") if g.case else tokens_at_edges(N, V, Vp, parts)
    if not g.case and N > 2: targets[1], targets[-1] = -1, V - 1
    values = g("logits", N, V, std=3).d + apart * (np.arange(V) // (Vp // parts))
    padded = np.full((N, Vp), np.nan)
    padded[:, :V] = np.where(targets[:, None] < 0, np.inf, values)
    padded[:, V::2] = np.inf
    logits, values = to_stored(padded), rounded(values)
    want, gradient = cross_entropy(values, targets)
    whole, bound = classify(logits, targets, dloss, N, V, Vp, 0), max(8, V**0.5 / 3)
    for losses, again, dlogits in (classify(logits, targets, dloss, N, V, Vp, parts), whole):
        g.near("losses", losses, want, bound)
        near("losses beside gradients", again, want, bound)
        got = packed(dlogits[:, :V])
        got.is_x = True
        g.near("dlogits", got, dloss * gradient, bound)
        rest = numbers_of(dlogits)
        assert (rest[:, V:] == 0).all() and (rest[targets < 0] == 0).all(), "gradients of padding or of masked rows"
        if parts > 1 or on.unaligned is not None: continue # the whole may be read in other pieces than its part
        same("one part's losses and the whole's", again, whole[1])
        same("one part's dlogits and the whole's", dlogits, whole[2])
    if on.is_cpu:
        same("losses without gradients", whole[0], whole[1])
        return
    alone, loss, chosen = packed(logits), unset_f(N), integers(targets) # which may be read in other pieces than the whole
    call("classifier_forward_backward", loss, alone, chosen, dloss, N, V, Vp)
    fits = alone.bits()
    on.lib.shared_memory_is(0)
    call("classifier_forward_backward", loss, alone, chosen, dloss, N, V, Vp)
    same("dlogits of a row that does not fit in shared memory", alone, fits)


@claim
def classifier_is_cross_entropy_over_the_vocabulary_without_its_padding_also_in_parts():
    for shape in rows([ # N, V, Vp, parts, apart
            (1, 1, 1, 1), (1, 1, 128, 1), # V = 1: the loss is 0
            (5, 50, 64, 1), (4, 129, 130, 1), (3, 130, 130, 1), (3, 5, 128, 1),
            (5, 9001, 9088, 1),     # more than one pass of a GPU's block
            (5, 50, 64, 2, 100),    # exponentials that would overflow with the other part's maximum
            *((9, 11, 12, parts) for parts in (1, 2, 3, 4)),
            # of 3: a part of one token; of 4: of padding
            *((9, 257, 384, parts, apart) for parts in (1, 2, 3, 4) for apart in (0, -40, 40)),
            (4, 5, 28, 4),          # parts of 7: not whole pieces
            (3, 5, 16, 4), (1, 1, 4, 4), (1, 1, 8, 8), (2, 4, 8, 8),
            (300, 6, 8, 2)], 20):   # more rows than a block takes
        check_classifier(*shape)


@of("cuda")
def classifier_at_the_limits_of_shared_memory():
    """A row around a limit: what every kernel may have, what this GPU gives a block, and what is left of either beside the kernel's
    static memory. From small to large, because what a kernel was once allowed it keeps."""
    of_warps, most = 32 * 4, on.lib.shared_memory_most()
    for limit, allowed in ((48 << 10, most), (most, most), (48 << 10, 48 << 10)):
        for size in (limit - of_warps, limit)[:1 if allowed < most else 2]:
            for more in -16, 0, 2 * on.element_bytes, 16: # 2 elements: a row that is not whole vectors
                Vp = (size + more) // on.element_bytes
                begin(1, 1, 1, 1, Vp)
                on.lib.shared_memory_is(allowed)
                logits, loss = normal(1, Vp, std=3), unset_f(1)
                want, gradient = cross_entropy(logits.d[:, :Vp - 3], np.array([Vp - 4]))
                call("classifier_forward_backward", loss, logits, integers([Vp - 4]), 0.125, 1, Vp - 3, Vp)
                near("the loss", loss, want, 32)
                near("dlogits", logits, np.pad(0.125 * gradient, ((0, 0), (0, 3))), 32)


@claim
def classifier_and_its_parts_leave_out_masked_rows():
    """Rows of masked tokens may hold anything, even what has no finite softmax: their losses and gradients are 0, and those of the
    other rows have the bits of a batch without a mask."""
    N, V, Vp = 7, 50, 64
    for parts, counts in itertools.product((0, 1, 2, 4), (0, 1, 3)): # every counts-th row counts, with 0 none
        begin(1, N, 1, 1, Vp)
        masked = np.array([counts == 0 or row % counts != 0 for row in range(N)])
        values, targets = numbers(N, Vp, std=3), on.rng.integers(0, V, N)
        garbage = np.where(masked[:, None], np.where(np.arange(Vp) % 3, np.nan, np.inf), values)
        want = classify(to_stored(values), targets, 0.125, N, V, Vp, parts)
        got = classify(to_stored(garbage), np.where(masked, -1, targets), 0.125, N, V, Vp, parts, checked=False)
        for what, a, b in zip(("losses", "losses beside gradients", "dlogits"), got, want):
            a, b = (y.bits() if isinstance(y, Array) else y for y in (a, b))
            b = np.where(masked.reshape(N, *[1] * (b.ndim - 1)), b.dtype.type(0), b)
            same(f"{what} beside masked rows", a, b)


@claim
def classifier_hides_no_inf_or_nan_and_neither_does_a_part_from_the_other():
    def outcome(values, target, V, Vp, parts):
        begin(1, 1, 1, 1, Vp)
        losses, again, dlogits = classify(to_stored(values[None]), np.array([target]), 1, 1, V, Vp, parts, checked=False)
        return np.concatenate([losses.get(), again.get()]), numbers_of(dlogits)[0]

    # of 16 tokens, 13 of which are in the vocabulary
    for parts, bad, at in itertools.product((0, 1, 2), (np.nan, np.inf), range(0, 13, 4)):
        values = numbers(16)
        values[at] = bad
        losses, dlogits = outcome(values, 3, 13, 16, parts)
        assert np.isnan(losses).all() and np.isnan(dlogits[:13]).all(), f"{parts} parts hide {bad}"
    for parts in 0, 1, 2: # probabilities of 0, and of two parts a whole one
        values = numbers(16)
        values[8:13] = -np.inf
        losses, dlogits = outcome(values, 3, 13, 16, parts)
        assert np.isfinite(losses).all() and np.isfinite(dlogits[:8]).all(), f"{parts} parts with logits of -inf"
        assert (dlogits[8:] == 0).all(), f"{parts} parts with logits of -inf"
    # where a row is whole, all that one thread of a GPU reads
    for parts, bad in itertools.product((0, 1, 2), (np.nan, np.inf, -np.inf)):
        values = numbers(128)
        values[:64 if parts == 2 else 8] = bad
        losses, dlogits = outcome(values, 67, 100, 128, parts)
        is_right = np.isfinite if bad == -np.inf else np.isnan
        assert is_right(losses).all() and is_right(dlogits[67]), f"{bad} of {parts} parts"


# ---- no rows ----
def left_by_no_rows(name, *arguments, mode):
    """Parameter gradients become 0, or are as they were."""
    call(name, *arguments, mode)
    for a, (_, written) in zip(arguments, on.prototypes[name][1]):
        if written and a: same(f"{name} without rows", a, np.zeros_like(a.start) if mode == SET else a.start)


@claim
def no_rows_write_no_rows_and_give_no_gradients():
    C, OC, V, T = 16, 24, 30, 3
    these = TokenRange(16, 16) # the second half of the vocabulary
    for deterministic in False, True:
        begin(1, 8, OC, 1, 32, PRODUCTS, deterministic=deterministic)
        none, wide, numbers_of_none, tokens = unset(0, C), unset(0, OC), unset_f(0), integers([])
        w, bias, ln, wte, wpe = normal(OC, C), normal(OC), normal(C), normal(32, C), normal(T, C)
        call("matmul_forward", wide, none, w, bias, 0, C, OC)
        call("matmul_forward", wide, none, w, None, 0, C, OC)
        call("matmul_gelu_forward", wide, unset(0, OC), none, w, bias, 0, C, OC)
        call("matmul_backward_input", none, wide, w, 0, C, OC)
        call("matmul_gelu_backward_input", none, wide, w, unset(0, C), 0, C, OC)
        call("residual_layernorm_forward", none, unset(0, C), numbers_of_none, unset_f(0), unset(0, C), unset(0, C), ln, ln, 0, C)
        call("classifier_forward", numbers_of_none, unset(0, 32), tokens, 0, V, 32)
        call("classifier_forward_backward", numbers_of_none, unset(0, 32), tokens, 1, 0, V, 32)
        call("classifier_part_stats", numbers_of_none, unset(0, 16), tokens, these, 0, V)
        call("classifier_part_forward", numbers_of_none, unset_f(0), tokens, 2, 0)
        call("classifier_part_forward_backward", numbers_of_none, unset(0, 16), unset_f(0), tokens, 1, these, 2, 0, V)
        for mode in MODES:
            dw, db, dpe, exact = (gradient_before(mode, *shape) for shape in ((OC, C), (OC,), (T, C), (OC, C)))
            ln_dw, ln_db = gradient_before(mode, C), gradient_before(mode, C)
            exact = f(exact.d)
            left_by_no_rows("matmul_backward_weight", dw, db, wide, none, 0, C, OC, mode=mode)
            left_by_no_rows("matmul_backward_weight", dw, None, wide, none, 0, C, OC, mode=mode)
            left_by_no_rows("matmul_backward_weight_fp32", exact, wide, none, 0, C, OC, mode=mode)
            left_by_no_rows("matmul_backward_weight_chunk", dw, wide, none, 0, 0, 0, C, OC, mode=mode)
            left_by_no_rows("layernorm_backward", none, ln_dw, ln_db, unset(0, C), unset(0, C), ln, numbers_of_none, unset_f(0), 0,
                            C, mode=mode)
            for B, positions in (0, dpe), (2, unset(0, C)): # no sequences; sequences of no tokens
                length = T if B == 0 else 0
                call("encoder_forward", none, tokens, wte, wpe, B, length, C)
                call("encoder_part_forward", none, tokens, wte, wpe, these, B, length, C)
                for name, *part in ("encoder_backward",), ("encoder_part_backward", these):
                    dwte = normal(32, C)
                    call(name, dwte, positions, none, tokens, *part, B, length, C, mode)
                    same("dwte, to which no rows are added", dwte, dwte.start)
                    same("dwpe without rows", positions, np.zeros_like(positions.start) if mode == SET else positions.start)


@claim
def sums_over_no_rows_that_were_sent_are_0():
    n = 300
    begin_compression()
    blocks, signs, elements, nothing = unset(n), unset(n), unset_f(n), unset_bytes(0)
    call("dequantise_sum", blocks, on.dtype, nothing, 0, n, 8)
    call("unpack_signs_sum", signs, nothing, 0, n)
    call("sparse_sum_fp32", elements, nothing, 0, n, 5)
    for out in blocks, signs, elements: assert (out.get() == 0).all()


# ---- numbers about a step ----
def squares_in_order(a):
    """The sum of squares in the order that host_adamw.h promises, up to 16 M elements."""
    total = 0.0
    for begins in range(0, len(a), 16384):
        chunk = a[begins:begins + 16384].astype("f8")
        lanes = np.add.accumulate(np.pad(chunk, (0, -len(chunk) % 16)).reshape(-1, 16)**2)[-1]
        while len(lanes) > 1: lanes = lanes[:len(lanes) // 2] + lanes[len(lanes) // 2:]
        total += lanes[0]
    return total


@claim
def sums_depend_on_the_number_of_elements_alone_and_add_to_what_is_there():
    for n in rows([0, 1, 7, 17, 1000, 10003, 16384, 16399, 100003, 150001], 6):
        begin()
        values = numbers(n, mean=0.5)
        for name, make, exact in ("add_sum", f, lambda a: a.d.sum()), ("add_sum_squares", x, lambda a: (a.d**2).sum()), (
                "add_sum_squares_fp32", f, lambda a: (a.d**2).sum()):
            a, total, moved, other = make(values), doubles(3), make(values, 1), doubles(3)
            call(name, total, a, n)
            call(name, other, moved, n)
            within(f"{name} of {n} numbers", total.get(), 3 + exact(a), 1e-14 * n + 1e-13 * abs(3 + exact(a)))
            same(f"{name} of numbers that are not aligned", other, total)
            if name == "add_sum": continue
            in_order = squares_in_order(a.d)
            if on.is_cpu: assert total.get()[0] == 3 + in_order, f"{name} of {n} numbers has another order"
            host = a.start.copy()
            got = on.lib.host_squares(host.ctypes.data, on.dtype if make is x else 0, n)
            assert got == in_order, f"{name} of {n} numbers on the host is {got!r}, not {in_order!r}"
        if n == 0: continue
        values[n // 2] = np.inf
        total = doubles(3)
        call("add_sum_squares", total, x(values), n)
        assert np.isinf(total.get()[0])


@claim
def adding_and_narrowing_round_once_wherever_arrays_begin():
    for n, place in itertools.product((0, 1, 7, 8, 1000, 4099) + (40003,) * on.is_cpu, range(4)):
        begin()
        a, b = normal(n, offset=place % 2), normal(n, std=0.1, offset=place // 2)
        wide, added = normal_f(n, offset=place % 2), normal_f(n, std=0.1, offset=place // 2)
        narrowed, back = unset(n), unset_f(n)
        call("add_in_place", a, b, n)
        same("a sum", a, to_stored((a.d.astype("f4") + b.d.astype("f4"))))
        call("add_in_place_fp32", wide, added, n)
        same("a sum in fp32", wide, wide.start + added.start)
        call("from_fp32", narrowed, added, n)
        same("rounded to floatX", narrowed, to_stored(added.start))
        call("to_fp32", back, narrowed, n)
        same("widened", back, rounded(added.start).astype("f4"))


STEP_STATS = np.dtype([(name, "f8") for name in ("loss", "stopping", "saving", "grad_square", "param_square", "grad_norm")] +
                      [(name, "f4") for name in ("grad_scale", "padding")])


@claim
def clipping_scales_down_to_the_norm_and_skips_what_is_not_finite():
    squares = 25, 2, 0.25, 0, 1e6, 1e-12, 25.0 * 1024**2, np.inf, np.nan
    for square, max_norm, loss_scale in itertools.product(squares, (0, 1), (1, 1024)):
        stats = Array(np.array([(1, 0, 2, square, 3, -1, -1, 0)], STEP_STATS), False)
        call("clip_gradients", stats, max_norm, loss_scale)
        got, norm = stats.bits()[0], np.sqrt(square) / loss_scale # a double, not rounded to fp32
        scale = np.float32(min(1, max_norm / (norm + 1e-6) if max_norm else 1) / loss_scale) if np.isfinite(norm) else 0
        assert np.array_equal(got["grad_norm"], norm, equal_nan=True), f"{square}, {max_norm}, {loss_scale}: {got}"
        assert got["grad_scale"] == scale, f"{square}, {max_norm}, {loss_scale}: {got}"
        assert tuple(got)[:3] == (1, 0, 2) and got["param_square"] == 3


# ---- AdamW ----
EXAMPLE = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, t=1)


class Optimizer:
    """Parameters under way: master weights that are not numbers of floatX, moments that are not 0. Weights of fp32 are their own
    master. With the same seed it is the same. Arrays of the device begin so many elements after an aligned address, master weights
    and moments more."""

    def __init__(self, n, offset=0, of_master=0, of_moments=0):
        r = np.random.default_rng(5)
        params, self.n = rounded(0.02 * r.standard_normal(n)), n
        self.grads = x(0.01 * r.standard_normal(n), offset)
        self.m = f(1e-3 * r.standard_normal(n), offset + of_moments)
        self.v = f(1e-5 * r.random(n), offset + of_moments)
        self.params = x(params, offset + (0 if on.is_16 else of_master))
        self.master = f(params * (1 + 1e-3 * r.standard_normal(n)), offset + of_master) if on.is_16 else None

    weights = property(lambda self: self.master or self.params)
    arrays = property(lambda self: [self.params, *[self.master] * on.is_16, self.m, self.v])

    def update(self, scale, no_decay, square=None, first=0, end=None, t=1):
        end = self.n if end is None else end
        at = lambda a: a and a.pointer + first * a.start.itemsize # noqa: E731
        arrays = [at(a) for a in (self.params, self.master, self.m, self.v, self.grads)]
        raw("adamw_update", AdamW(**EXAMPLE | {"t": t}), *arrays, f([scale]), end - first, max(no_decay - first, 0), square)


def same_optimizer(what, a, b):
    for one, other in zip(a.arrays, b.arrays): same(what, one, other)


def adamw_in_fp32(settings, params, m, v, grads, scale, no_decay):
    """Each operation rounded to fp32, as the CPU's layers and every host do it. Returns params, m, v."""
    a, r = settings, np.float32
    grads, decay = grads * r(scale), np.where(np.arange(len(params)) < no_decay, r(1), r(1 - a["lr"] * a["weight_decay"]))
    m = m + r(1 - a["beta1"]) * (grads - m)
    v = v * r(a["beta2"]) + r(1 - a["beta2"]) * grads * grads
    denominator = np.sqrt(v) / r(np.sqrt(1 - a["beta2"]**a["t"])) + r(a["eps"])
    return params * decay - r(a["lr"] / (1 - a["beta1"]**a["t"])) * m / denominator, m, v


def check_adamw(n, steps, settings, no_decay, max_norm, loss_scale, g=Given()):
    """Steps whose learning rate rises to the setting's and whose gradients are clipped. They arrive multiplied by the loss scale,
    which must not change the norm and the update. PyTorch's file has its settings rounded to fp32."""
    begin(Vp=128)
    start, all_grads = g("start", n, std=0.02), g("grads", steps, n, std=0.1)
    master = f(start.d) if on.is_16 else None
    m, v, p = f(np.zeros(n)), f(np.zeros(n)), start.d.copy()
    want_m, want_v, norms, path, want_norms, want_path = np.zeros(n), np.zeros(n), [], [], [], []
    if g.case:
        ours = [no_decay, max_norm, *(settings[k] for k in ("beta1", "beta2", "eps", "weight_decay"))]
        assert (np.float32(ours) == g.theirs("settings")).all()
    for step in range(steps):
        a = settings | {"lr": settings["lr"] * (step + 1) / steps, "t": step + 1}
        assert not g.case or np.float32(a["lr"]) == g.theirs("lrs")[step]
        grads, stats = x(loss_scale * all_grads.d[step]), Array(np.zeros(1, STEP_STATS), False)
        raw("add_sum_squares", stats.pointer + STEP_STATS.fields["grad_square"][1], grads, n)
        raw("clip_gradients", stats, max_norm, loss_scale)
        scale = stats.pointer + STEP_STATS.fields["grad_scale"][1]
        raw("adamw_update", AdamW(**a), start, master, m, v, grads, scale, n, no_decay, None)
        clipped = all_grads.d[step] * loss_scale * float(stats.bits()["grad_scale"][0])
        p[no_decay:] *= 1 - a["lr"] * a["weight_decay"]
        want_m = a["beta1"] * want_m + (1 - a["beta1"]) * clipped
        want_v = a["beta2"] * want_v + (1 - a["beta2"]) * clipped**2
        p -= a["lr"] * (want_m / (1 - a["beta1"]**a["t"])) / (np.sqrt(want_v / (1 - a["beta2"]**a["t"])) + a["eps"])
        norms.append(stats.bits()["grad_norm"][0])
        path.append((master or start).get())
        want_norms.append(np.sqrt((all_grads.d[step]**2).sum()))
        want_path.append(p.copy())
    g.near("norms", f(norms), want_norms, 2)
    for name, got, want in ("params", f(path), want_path), ("m", m, want_m), ("v", v, want_v): g.near(name, got, want, 8)
    if on.is_16: same("params beside their master", start, to_stored(master.get()))


@claim
def adamw_follows_its_definition():
    for n, no_decay in (1003, 301), (1, 0), (7, 2), (8, 8), (4099, 1366):
        check_adamw(n, 5, EXAMPLE, no_decay, 1, 1)
    # in fp32 0.99999988, and 1 - beta a fifth more
    check_adamw(1003, 5, EXAMPLE | {"beta1": 0.9999999, "beta2": 0.9999999}, 301, 1, 1)


@claim
def adamw_of_a_range_equals_adamw_of_its_pieces_to_the_bit():
    n, cuts = (20011, (1, 3, 17, 8191, 8193, 20010)) if on.is_cpu else (2051, (1, 3, 17, 1024, 2050))
    for no_decay in 0, 1001, n:
        begin()
        whole = Optimizer(n)
        whole.update(1, no_decay)
        for cut in cuts:
            pieces = Optimizer(n)
            pieces.update(1, no_decay, end=cut)
            pieces.update(1, no_decay, first=cut)
            same_optimizer("AdamW in two pieces", pieces, whole)
        elsewhere = Optimizer(n, 1)
        elsewhere.update(1, no_decay)
        same_optimizer("AdamW of arrays that are not aligned", elsewhere, whole)


@claim
def every_form_of_adamw_gives_the_same_master_weights_to_the_bit():
    """Three updates, the second of which is skipped: in floatX; fp32 with widened gradients, as a sharded program has them; of
    weights that nobody needs in floatX; and on the host, which does on every device what the CPU's layers do. Alignment must not
    change the result."""
    for n in rows([1, 8, 4099, 0, 8191, 8193, 16390], 3): # the host takes slices of 8192
        # a unit's may go on after this piece
        for no_decay in sorted({0, n // 3, 8191, 8197, n + 1}): check_forms_of_adamw(n, no_decay)


def check_forms_of_adamw(n, no_decay):
    begin()
    o = Optimizer(n)
    exact = [o.weights.d.astype("f4"), o.m.start, o.v.start]
    places = [(0, 0)] if on.is_cpu else [(0, 0), (1, 0), (0, 1), (1, 1)]
    others = [(form, Optimizer(n, 0, *place)) for form in ("fp32", "without params") for place in places]
    on_host = [(kind, *(y.copy() for y in exact), Optimizer(n).params.start.copy()) for kind in (0, on.dtype)]
    grads = f(o.grads.d)
    for t in 1, 2, 3:
        scale = 0 if t == 2 else 0.7
        settings = EXAMPLE | {"t": t}
        by_value, given_scale = AdamW(**settings), f([scale])
        o.update(scale, no_decay, t=t)
        if scale: exact = [*adamw_in_fp32(settings, *exact, o.grads.d.astype("f4"), scale, no_decay)]
        for form, other in others:
            if form == "fp32": raw("adamw_update_fp32", by_value, other.weights, other.m, other.v, grads, given_scale, n, no_decay)
            else: raw("adamw_update", by_value, None, other.weights, other.m, other.v, other.grads, given_scale, n, no_decay, None)
        for kind, weights, m, v, params in on_host:
            host_grads = o.grads.start if kind else o.grads.d.astype("f4")
            on.lib.host_adamw(by_value, params.ctypes.data if on.is_16 else None, weights.ctypes.data, m.ctypes.data, v.ctypes.data,
                              host_grads.ctypes.data, kind, scale, n, no_decay, None)
    for form, other in others:
        if on.is_16: same(f"params beside their master, AdamW {form}", other.params, other.params.start)
        for a, b in zip((other.weights, other.m, other.v), (o.weights, o.m, o.v)): same(f"AdamW {form}", a, b)
    for kind, weights, m, v, params in on_host:
        for got, want in zip((weights, m, v), exact): same(f"AdamW on the host, gradients of type {kind}", got, want.astype("f4"))
        if on.is_16: same("params on the host", params, to_stored(weights))
    for got, want in zip((o.weights, o.m, o.v), exact):
        if on.is_cpu: same("AdamW in fp32 operations", got, want.astype("f4"))
        else: within("AdamW", got.get(), want, 4 * F32 * largest(want))


@claim
def adamw_changes_nothing_when_the_step_is_skipped():
    o, before = Optimizer(100), Optimizer(100)
    o.grads.start[7] = to_stored(np.nan)
    o.grads.again()
    o.update(0, 10)
    same_optimizer("a step that is skipped", o, before)
    if on.is_16: raw("adamw_update", AdamW(**EXAMPLE), None, o.master, o.m, o.v, o.grads, f([0]), 100, 10, None)
    same_optimizer("a step without params that is skipped", o, before)


@claim
def adamw_adds_the_squares_of_the_params():
    """Also after a skipped step. The bits of the sum do not depend on where arrays begin, and summing does not change the
    update."""
    for n, scale in itertools.product(rows([0, 1, 7, 1024, 4099, 8193, 16390, 3 * 16384, 150001], 5), (0.5, 0)):
        begin()
        square, other = doubles(3), doubles(3)
        o, moved, plain = Optimizer(n), Optimizer(n, 1), Optimizer(n)
        o.update(scale, n // 3, square)
        moved.update(scale, n // 3, other)
        plain.update(scale, n // 3)
        same_optimizer("AdamW that sums squares", o, plain)
        within(f"the squares of {n} params", square.get(), 3 + (o.params.get()**2).sum(), 1e-13 * (3 + (o.params.get()**2).sum()))
        same("squares of params that are not aligned", other, square)
        if on.is_cpu: assert square.get()[0] == 3 + squares_in_order(o.params.get()), "the order is not that of add_sum_squares"


# ---- Muon ----
def orthogonalised(a):
    """By singular values, each of which goes through the polynomial five times."""
    U, S, V = np.linalg.svd(a, full_matrices=False)
    s = S / np.linalg.norm(S)
    for _ in range(5): s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return U * s @ V


def newton_schulz(values, offset=0, of_work=0):
    """The array that holds the result. Arrays begin so many elements after an aligned address."""
    rows, cols = np.shape(values)
    begin(1, max(rows, cols), min(rows, cols), 1, 1, PRODUCTS)
    a = ns(values, offset)
    call("newton_schulz", a, unset_ns(on.lib.work_of_newton_schulz(rows, cols), of_work), rows, cols)
    return a


def check_newton_schulz(values):
    """In fp32 a change of a coefficient by 1 % would move the result by 4 to 8 %, another number of iterations by 36 %. bf16 rounds
    more where there are fewer rows to average over."""
    a = newton_schulz(values)
    want, bound = orthogonalised(a.d), 1e-5 if not on.precision == "bf16" else 0.05 if min(a.start.shape) >= 64 else 0.1
    error = np.linalg.norm(a.get() - want) / np.linalg.norm(want)
    assert error <= bound, f"{a.start.shape}, norm {np.linalg.norm(a.d):.3g}: off by {error:.3g}"
    return a


@claim
def newton_schulz_moves_singular_values_by_its_polynomial():
    for shape in rows([(64, 64), (1, 64), (64, 1), (3, 128), (96, 96), (256, 64), (64, 256), (50, 33), (1, 1)], 4):
        check_newton_schulz(numbers(*shape))
    # rows and columns of different scale
    check_newton_schulz(numbers(64, 64) * np.exp(numbers(64, 1)) * np.exp(numbers(64) / 2))


@claim
def newton_schulz_does_not_depend_on_the_scale():
    values = rounded(numbers(64, 80))
    bits = newton_schulz(values).bits()
    for power in 20, 0, -20, -40, -60: same(f"times 2^{power}", newton_schulz(np.ldexp(values, power)), bits)
    for factor in 1e-6, 1e-12, 1e-30: check_newton_schulz(factor * values)
    if on.precision != "bf16": check_newton_schulz(np.ldexp(values[:, :64], -140)) # the reciprocal of the norm is beyond fp32


@claim
def newton_schulz_of_zeros_of_low_rank_and_of_what_is_not_finite():
    for shape in (64, 64), (3, 16), (16, 3): assert (newton_schulz(np.zeros(shape)).get() == 0).all(), "zeros do not stay zeros"
    if on.precision != "bf16": # which would round to another rank
        values = np.linalg.svd(newton_schulz(numbers(64, 3) @ numbers(3, 64)).get())[1]
        assert (0.67 < values[:3]).all() and (values[:3] < 1.15).all() and values[3] < 1e-3, values[:4]
    for value, shape in itertools.product((np.nan, np.inf, -np.inf), ((64, 64), (3, 16), (16, 3))):
        values = numbers(*shape)
        values[1, 2] = value
        assert np.isnan(newton_schulz(values).get()).all(), f"{value} is hidden"


@claim
def newton_schulz_has_the_same_bits_wherever_arrays_begin():
    for shape in (64, 80), (33, 17):
        values = numbers(*shape)
        bits = newton_schulz(values).bits()
        for place in itertools.product((0, 1, 3), (0, 1, 4)): same(f"{shape}, from {place}", newton_schulz(values, *place), bits)


@claim
def newton_schulz_multiplies_as_often_as_its_formula_says():
    """Always with the smaller side inside."""
    for shape in (64, 64), (16, 64), (64, 16), (1, 64), (64, 1), (12, 48), (48, 12):
        m, n = sorted(shape)
        begin(1, n, m, 1, 1, PRODUCTS)
        before = on.lib.flops_so_far()
        raw("newton_schulz", ns(numbers(*shape)), unset_ns(on.lib.work_of_newton_schulz(*shape)), *shape)
        done, formula = on.lib.flops_so_far() - before, on.lib.flops_of_newton_schulz(*shape)
        assert done == formula == 5 * (4 * m * m * n + 2 * m**3), f"{shape}: {done:.0f} FLOPs, the formula has {formula:.0f}"


@of("cuda")
def plans_of_newton_schulz_are_never_timed_or_beside_a_sum_and_nobody_elses():
    """Ranks that try algorithms may choose different ones. Nor does another place have other plans."""
    N = 32
    begin(1, N, N, 1, 1, PRODUCTS)
    on.lib.products_are_tried(True)
    on.lib.layers_overlap_sum(True)
    out, work = unset(N, N), on.lib.work_of_newton_schulz(N, N)
    for offset in 0, 1: raw("newton_schulz", ns(numbers(N, N), offset), unset_ns(work, offset), N, N)
    own, timed, fewer = plans(IN_USE), plans(TIMED), plans(FOR_FEWER_PROCESSORS)
    on.lib.layers_overlap_sum(False)
    raw("matmul_forward", out, normal(N, N), normal(N, N), None, N, N, N)
    on.lib.products_are_tried(False)
    # A and A^2 have one, the product with X another
    assert (own, timed, fewer) == (2, 0, 0), f"{own} plans, {timed} timed, {fewer} for fewer multiprocessors"
    assert plans(TIMED) == 1 and plans(IN_USE) == 3, "a layer of the same shape shares a plan with newton_schulz"


def check_momentum(n):
    """Three steps, the second of which is skipped because of its gradients."""
    begin()
    beta, m = float(np.float32(0.95)), normal_f(n, std=0.1)
    for scale in 0.5, 0, 2:
        values, u = numbers(n, std=0.1), unset_ns(n)
        if scale == 0: values[n // 2:n // 2 + 1] = np.nan
        grads, start, before = x(values), m.start, m.d
        call("muon_momentum", u, m, grads, f([scale]), 0.95, n)
        if scale == 0:
            same("momentum after a skipped step", m, start)
            assert (u.get() == 0).all(), "a skipped step has an update"
            continue
        g = scale * grads.d
        want = beta * before + (1 - beta) * g
        near("momentum", m, want, 3)
        near("the update", u, beta * want + (1 - beta) * g, 4)
        m.keep()


@claim
def muons_momentum_is_nesterovs():
    for n in rows([1003, 1, 7, 8, 4099, 0], 3): check_momentum(n)


MUON, MUON_SCALE = dict(lr=2e-2, beta=0.95, weight_decay=0.1), 3.2


def update_by_muon(o, update, scale=1, square=None, first=0, end=None, params=True):
    """Of an Optimizer. Without params, weights are given as the master alone."""
    end = o.n if end is None else end
    at = lambda a: a and a.pointer + first * a.start.itemsize # noqa: E731
    weights = (o.params, o.master) if params else (None, o.weights)
    raw("muon_update", Muon(**MUON), MUON_SCALE, *map(at, (*weights, update)), f([scale]), end - first, square)


def check_muon_update(n):
    begin()
    u = ns(0.1 * numbers(n))
    o, alone = Optimizer(n), Optimizer(n)
    update_by_muon(o, u)
    w, decay, step = o.weights.d, MUON["lr"] * MUON["weight_decay"], MUON["lr"] * float(np.float32(MUON_SCALE))
    near("weights", o.weights, w - decay * w - step * u.d, 3)
    r = np.float32
    in_fp32 = o.weights.start * r(1 - decay) - r(step) * u.d.astype("f4") if not on.is_16 else (
        o.master.start * r(1 - decay) - r(step) * u.d.astype("f4"))
    if on.is_cpu: same("the update in fp32 operations", o.weights, in_fp32)
    if on.is_16: same("params beside their master", o.params, to_stored(o.master.get()))
    update_by_muon(alone, u, params=False)
    same("weights that are given as the master alone", alone.weights, o.weights)
    if on.is_16: same("params that were not given", alone.params, alone.params.start)
    return o, u


@claim
def muons_update_decays_weights_and_subtracts_the_scaled_update():
    """A range has the bits of its pieces, wherever arrays begin."""
    for n in rows([1003, 1, 7, 8, 4099, 0], 3): check_muon_update(n)
    n = 2051
    o, u = check_muon_update(n)
    for cut in 1, 3, 17, 1024, n - 1:
        pieces = Optimizer(n)
        update_by_muon(pieces, u, end=cut)
        update_by_muon(pieces, u, first=cut)
        same_optimizer("Muon in two pieces", pieces, o)
    for place in itertools.product((0, 1), repeat=3):
        elsewhere = Optimizer(n, *place[:2])
        update_by_muon(elsewhere, ns(u.d, place[2]))
        same_optimizer("Muon of arrays that are not aligned", elsewhere, o)


@claim
def muons_update_changes_nothing_when_the_step_is_skipped_and_adds_the_squares_of_the_params():
    """After a skipped step, too."""
    for n, scale in itertools.product(rows([0, 1, 7, 1024, 4099, 16390, 150001], 5), (1, 0)):
        begin()
        values, squares = 0.1 * numbers(n), (doubles(3), doubles(3))
        if scale == 0: values[n // 2:n // 2 + 1] = np.nan
        places, plain = (Optimizer(n), Optimizer(n, 1)), Optimizer(n)
        for o, square in zip(places, squares): update_by_muon(o, ns(values), scale, square)
        update_by_muon(plain, ns(values), scale)
        for o in places: same_optimizer("Muon that sums squares", o, plain)
        if scale == 0: same_optimizer("a step that is skipped", plain, Optimizer(n))
        params = plain.params.get()
        within(f"the squares of {n} params", squares[0].get(), 3 + (params**2).sum(), 1e-13 * (3 + (params**2).sum()))
        same("squares of params that are not aligned", squares[1], squares[0])
        if on.is_cpu: assert squares[0].get()[0] == 3 + squares_in_order(params), "the order is not that of add_sum_squares"


# ---- elementwise functions of the CPU ----
def each(name, a):
    a, y = f(a), unset_f(len(a))
    call(name, y, a, y.n)
    return y.bits()


@of("cpu")
def exp_and_gelu_are_accurate_over_the_whole_float_range():
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 88.72283, 88.7229, -103.9])
    a = np.concatenate([np.arange(0, 2**32, 9973, dtype="u8").astype("u4").view("f4"), special])
    with np.errstate(over="ignore", invalid="ignore"):
        got, want = each("exp_each", a), np.exp(a.astype("f8"))
        as_float = want.astype("f4")
        unit = np.spacing(np.maximum(np.abs(np.nextafter(as_float, np.float32(0))), np.finfo("f4").smallest_normal)).astype("f8")
        right = (got == as_float) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= 1.5 * unit)
        right |= np.isinf(got) & (want >= 2.0**128 * (1 - 2.0**-24))
    assert right.all(), f"exp({a[~right][0]!r}) is {got[~right][0]!r}"
    a = a[np.abs(a) < 1e18] # beyond, x^2 overflows, as it does in PyTorch
    d = a.astype("f8")
    # in the far left tail the definition's 1 + tanh cancels, so errors count against the size of x itself
    within("gelu", each("gelu_each", a), gelu(d), 4 * F32 * np.abs(gelu(d)) + 1e-7 * np.minimum(1, np.abs(d)) + 1e-44)
    within("gelu's derivative", each("gelu_derivative_each", a), gelu_derivative(d), 4 * F32 * np.abs(gelu_derivative(d)) + 4e-7)
    assert (each("exp_each", [0, -np.inf, 89])[:3] == [1, 0, np.inf]).all()
    y = each("gelu_each", [0, np.inf, np.nan])
    assert y[0] == 0 and np.isinf(y[1]) and np.isnan(y[2]) and np.isnan(each("gelu_derivative_each", [np.nan])[0])


@of("cpu")
def an_element_does_not_depend_on_its_place_in_the_array():
    a = numbers(100, std=3)
    for name in "exp_each", "gelu_each", "gelu_derivative_each":
        whole = each(name, a)
        for first in range(100): same(name, each(name, a[first:]), whole[first:])


# ---- the CPU's threads ----
@of("cpu")
def results_are_the_same_for_any_number_of_threads():
    """Matrix products are oneDNN's, which promises equal bits only for an equal number of threads. A bias's gradient is not one."""
    def results(threads):
        on.lib.set_threads(threads)
        on.rng, on.record = np.random.default_rng(1), []
        for parts in 1, 2:
            check_encoder(3, 70, 48, 50, 64, parts)
            check_classifier(210, 50, 64, parts)
        check_layernorm(210, 48)
        check_attention(3, 70, 4, 12)
        check_parts(3, 70, 2, 4, 12)
        for bits in 4, 8: check_blocks(120000, bits)
        check_signs(120000)
        check_top_k(numbers(120000), 120000 // 7)
        check_low_rank(400, 300, 5)
        call("orthonormalise", normal_f(400, 5), 400, 5)
        call("add_comparison", doubles(1, 2, 3), normal(120000), normal_f(120000), 120000)
        call("add_sum_squares", doubles(0), normal(100003), 100003)
        check_router(210, 48, 8, 2)
        check_router_backward(210, 300, 8, 2)
        check_sort(random_choice(210, 8, 2), 8, 40)
        check_rows(210, 48, 8, 3, 70)
        found, on.record = on.record, None
        o = Optimizer(20011)
        o.update(1, 100)
        updated = [a.bits() for a in o.arrays]
        u, m, square = unset_ns(20011), o.m, doubles(0)
        raw("muon_momentum", u, m, o.grads, f([0.7]), 0.95, 20011)
        update_by_muon(o, u, 1, square)
        updated += [a.bits() for a in (*o.arrays, u, square)]
        begin(1, 210, 192, 1, 1, PRODUCTS)
        dbias = normal(192)
        call("matmul_backward_weight", normal(192, 48), dbias, normal(210, 192), normal(210, 48), 210, 48, 192, ADD)
        found += [("AdamW or Muon", bits) for bits in updated] + [("a bias's gradient", dbias.bits())]
        check_linear(210, 48, 192) # whose products have the same bits from run to run
        return found

    one = results(1)
    assert len(one) > 100
    for threads in 2, 3:
        for (what, a), (_, b) in zip(results(threads), one, strict=True): same(f"{what}, with {threads} threads", a, b)
    on.lib.set_threads(2)


@claim
def rows_are_copied_and_what_is_between_them_stays():
    for count in range(6):
        source, to = packed(np.arange(40, dtype="u1")), packed(np.arange(100, 140, dtype="u1"))
        want = to.start.copy()
        for i in range(count): want[1 + 5 * i:4 + 5 * i] = source.start[2 + 7 * i:5 + 7 * i]
        raw("device_copy_rows", to.pointer + 1, 5, source.pointer + 2, 7, 3, count)
        same("rows", to, want)


# ---- compressed gradients: the error, bf16 ----
LENGTHS = [1, 33, 257, 3000, 2, 31, 255, 256, 1000]


def varied(n):
    """Some elements are 0, large, tiny, or equal in magnitude; both signs occur."""
    a, size = numbers(n), np.array([1, 1e-3, 0, 1, 1])[np.arange(n) // 256 % 5]
    return size * np.where(np.arange(n) % 7 == 3, np.round(a), a)


def begin_compression(): begin(what=COMPRESSION)


@claim
def numbers_are_rounded_to_bf16_and_the_rest_is_kept():
    for n in 1, 1000:
        begin_compression()
        g, error, total, kept = normal(n, std=1e-3), normal_f(n, std=1e-4), unset_f(n), unset_f(n)
        out, back = packed(np.full(n, 0xa5a5, "u2")), unset(n)
        want = g.d.astype("f4") + error.start
        call("add_error", total, g, error, n)
        same("gradients and error", total, want)
        call("scale_in_place_fp32", total.keep(), 0.3, n)
        same("a scaled error", total, want * np.float32(0.3))
        call("add_error", total, g, None, n)
        same("gradients without an error", total, g.d.astype("f4"))
        call("round_bf16", out, kept, g, error, n)
        same("what is sent", out, to_bf16(want))
        same("what is kept", kept, want - from_bf16(to_bf16(want)))
        call("widen_bf16", back, out.keep(), n)
        same("what arrives", back, to_stored(from_bf16(to_bf16(want))))
        call("round_bf16", out, error, g, error, n) # in place
        same("what is kept in place", error, kept)
        call("round_bf16", out, None, g, None, n)
        same("without an error", out, to_bf16(g.d))


# ---- blocks ----
def blocks_of(a, bits):
    """The packed bytes of numbers, and what is sent."""
    limit, n = (127, 7)[bits == 4], len(a)
    padded = np.pad(np.asarray(a, "f4"), (0, -n % 256)).reshape(-1, 256)
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.abs(padded).max(1)
        scale = np.where(np.isfinite(most), most / np.float32(limit), np.nan).astype("f4")
        q = np.where(scale[:, None] > 0, np.clip(np.rint(padded / scale[:, None]), -limit, limit), 0).astype("i4")
    numbers = q.astype("i1").view("u1") if bits == 8 else (q[:, 1::2] * 16 | q[:, ::2] & 15).astype("u1")
    sent = scale[:, None] * q.astype("f4")
    return np.concatenate([scale[:, None].view("u1"), numbers], axis=1).reshape(-1), sent.reshape(-1)[:n]


def check_blocks(n, bits):
    begin_compression()
    g, error, kept, rows_of = normal(n, std=0.5), f(varied(n)), unset_f(n), [x(numbers(n)) for _ in range(2)]
    total = g.d.astype("f4") + error.start
    bytes_sent, sent = blocks_of(total, bits)
    one, alone = unset_bytes(len(bytes_sent)), unset_bytes(len(bytes_sent))
    call("quantise", one, kept, g, on.dtype, error, n, bits)
    same("blocks", one, bytes_sent)
    same("what blocks leave", kept, total - sent)
    # half a scale, and the rounding of a quotient of at most 127
    half = 0.50001 * np.repeat(bytes_sent.reshape(-1, 4 + 32 * bits)[:, :4].copy().view("f4"), 256)[:n]
    within("what is sent", sent, total, half)
    wide, in_place = f(total), f(error.start)
    call("quantise", alone, wide, wide, 0, None, n, bits)
    same("blocks of fp32, in place", alone, bytes_sent)
    same("what they leave", wide, kept)
    call("quantise", alone, None, f(g.d), 0, error, n, bits)
    same("blocks of fp32 with an error", alone, bytes_sent)
    call("quantise", alone, in_place, g, on.dtype, in_place, n, bits)
    same("what is kept in the error's place", in_place, kept)
    call("quantise", alone, None, g, on.dtype, None, n, bits)
    same("blocks without an error", alone, blocks_of(g.d, bits)[0])
    every = [(bytes_sent, sent), *(blocks_of(r.d, bits) for r in rows_of)]
    three, out, back = packed(np.concatenate([b for b, _ in every])), unset(n), unset_f(n)
    total = np.float32(0) + every[0][1] + every[1][1] + every[2][1]
    call("dequantise_sum", back, 0, three, 3, n, bits)
    same("the sum of three rows", back, total)
    call("dequantise_sum", out, on.dtype, three, 3, n, bits)
    same("the sum of three rows in floatX", out, to_stored(total))
    call("dequantise_sum", back, 0, three, 1, n, bits)
    same("one row", back, np.float32(0) + sent)
    if n <= 256: return
    rest = unset_f(n - 256) # cut between blocks
    raw("dequantise_sum", rest, 0, one.pointer + 4 + 32 * bits, 1, n - 256, bits)
    same("a row without its first block", rest, (np.float32(0) + sent)[256:])


@claim
def a_block_comes_back_within_half_a_scale_and_rows_of_blocks_are_summed_in_their_order():
    for bits, n in itertools.product((8, 4), rows(LENGTHS + [40001] * on.is_cpu, 4)): check_blocks(n, bits)
    for bits, on.unaligned in itertools.product((8, 4), rows([*range(0, 12)], 0)): check_blocks(600, bits) # one at an odd address


@claim
def blocks_of_zeros_of_tiny_numbers_and_of_none():
    a = np.zeros(1024, "f4")
    a[256:512] = np.arange(256) * np.float32(2.0**-149) # a scale this small has no digits
    a[600], a[800] = np.inf, np.copysign(np.float32(np.nan), -1)
    for bits in 4, 8:
        begin_compression()
        source, kept, back, one = f(a), unset_f(1024), unset_f(1024), unset_bytes(len(blocks_of(a, bits)[0]))
        call("quantise", one, kept, source, 0, None, 1024, bits)
        call("dequantise_sum", back, 0, one.keep(), 1, 1024, bits)
        got, left = back.bits(), kept.bits()
        assert (got[:256] == 0).all() and (left[:256] == 0).all() and (got[256:512] + left[256:512] == a[256:512]).all()
        within("a tiny number", got[256:512], a[256:512], 2.0**-149 * (2 if bits == 8 else 37))
        assert np.isnan(got[512:]).all(), "a block with a number that is not finite"
        same("blocks of finite numbers", one.bits()[:2 * (4 + 32 * bits)], blocks_of(a[:512], bits)[0])


# ---- signs ----
def check_signs(n):
    begin_compression()
    size = -(-(4 + -(-n // 32) * 4) // 16) * 16
    used = 4 + -(-n // 32) * 4 # behind it is padding, which nobody writes
    all_rows, out, three, words = [], unset(n), unset(n), []
    for row in range(3):
        values = varied(n) if row == 0 else numbers(n, std=2)
        values[n // 2] = 0
        a, kept, one = f(values), unset_f(n), unset_bytes(size)
        call("pack_signs", one, kept, a, n)
        scale, mean = one.bits()[:4].view("f4")[0], np.abs(a.d).mean()
        within("the scale", scale, mean, 1e-7 * mean)
        bits = np.packbits(np.pad(a.start < 0, (0, -n % 32)), bitorder="little")
        same("signs", one.bits()[4:used], bits)
        assert (one.bits()[used:] == 0xa5).all(), "padding was written"
        each = np.where(a.start < 0, -scale, scale).astype("f4")
        same("what signs leave", kept, a.start - each)
        call("pack_signs", one, None, a, n)
        same("signs without an error", one.bits()[4:used], bits)
        call("pack_signs", one, a, a, n) # in place
        same("what signs leave in place", a, kept)
        all_rows.append(each)
        words.append(one.bits())
    call("unpack_signs_sum", out, packed(words[0]), 1, n)
    same("one row of signs", out, to_stored(np.float32(0) + all_rows[0]))
    call("unpack_signs_sum", three, packed(np.concatenate(words)), 3, n)
    same("three rows of signs", three, to_stored(np.float32(0) + all_rows[0] + all_rows[1] + all_rows[2]))


@claim
def signs_take_a_bit_each_and_have_one_scale():
    for n in rows(LENGTHS + [40001] * on.is_cpu, 4): check_signs(n)
    one, out = unset_bytes(16), unset(3)
    call("pack_signs", one, None, f([1, np.nan, -1]), 3)
    call("unpack_signs_sum", out, one.keep(), 1, 3)
    assert np.isnan(out.get()).all()


# ---- the k largest ----
def top_k_of(a, k):
    """The packed bytes, and what is kept. The bits of |x| are in its order, and those of NaN are above."""
    chosen = np.sort(np.argsort(-(a.view("u4") & 0x7fffffff).astype("i8"), kind="stable")[:k])
    kept = a.copy()
    kept[chosen] = 0
    return np.concatenate([chosen.astype("u4").view("u1"), a[chosen].view("u1")]), kept


def check_top_k(values, k):
    a, kept = f(values), unset_f(len(values))
    want, left = top_k_of(a.start, k)
    size = -(-len(want) // 16) * 16
    one = unset_bytes(size)
    want = np.concatenate([want, np.full(size - len(want), 0xa5, "u1")])
    call("pack_top_k", one, kept, a, a.n, k)
    same(f"the {k} largest of {a.n}", one, want)
    same("what they leave", kept, left)
    call("pack_top_k", one, a, a, a.n, k) # in place
    same("the largest, in place", one, want)
    same("what they leave in place", a, left)
    call("pack_top_k", one, None, a, a.n, k)


@claim
def the_k_largest_are_found_and_equal_ones_by_their_index():
    for n in rows(LENGTHS + [40001] * on.is_cpu, 3):
        begin_compression()
        for k in sorted({1, -(-n // 10), -(-n // 2), n}):
            # many ties, of either sign
            for values in rows([varied(n), np.round(2 * numbers(n)), np.zeros(n)], 1): check_top_k(values, k)
    begin_compression()
    # that differ only in the lowest digit
    close = (1 + np.floor(20 * on.rng.random(5000)) * 2.0**-23) * np.where(np.arange(5000) % 2, -1, 1)
    close[4000:4002] = -np.nan, np.inf # the NaN is above it
    for k in rows([1300, 1, 2, 4999], 1): check_top_k(close, k)
    edge = np.float32([1, np.nextafter(np.float32(1), 2), -np.nextafter(np.float32(1), 2), 0.5, -1, np.nextafter(np.float32(1), 0)])
    for k in range(1, 7): check_top_k(edge, k)
    for n, k in rows([(140000, 15000)], 0): check_top_k(varied(n), k) # a GPU's blocks take several tiles


@claim
def rows_of_elements_are_summed_in_their_order():
    begin_compression()
    n, k = 5000, 701 # 8 bytes behind each row
    each = [top_k_of(numbers(n).astype("f4"), k)[0] for _ in range(3)]
    want, total = np.zeros(n, "f4"), unset_f(n)
    for one in each: want[one[:4 * k].view("u4")] += one[4 * k:].view("f4")
    padded = [np.concatenate([one, np.full(-len(one) % 16, 0xa5, "u1")]) for one in each]
    call("sparse_sum_fp32", total, packed(np.concatenate(padded)), 3, n, k)
    same("a sum of sparse rows", total, want)


# ---- matrices of low rank ----
def check_low_rank(n, k, r):
    begin_compression()
    m, p, q = normal_f(n, k), normal_f(n, r), normal_f(k, r)
    mq, mtp, kept, out = unset_f(n, r), unset_f(k, r), unset_f(n, k), unset(n, k)
    call("skinny_product", mq, m, q, n, k, r)
    near("m q", mq, m.d @ q.d, 4 + k**0.5 / 4)
    call("skinny_product_transposed", mtp, m, p, n, k, r)
    near("m^T p", mtp, m.d.T @ p.d, 4 + n**0.5 / 4)
    call("low_rank_apply", out, kept, m, p, q, 0.25, n, k, r)
    near("p q^T", out, p.d @ q.d.T, 4 + r**0.5 / 4)
    left = m.start - np.float32(0.25) * out.get().astype("f4")
    same("what low_rank_apply keeps", kept, left)
    call("low_rank_apply", out, None, m, p, q, 1, n, k, r)
    call("low_rank_apply", out, m, m, p, q, 0.25, n, k, r)
    same("in place", m, left)


@claim
def skinny_products():
    for shape in rows([(1, 1, 1), (5, 7, 2),
                       (130, 33, 4), # three chunks of rows, the last shorter
                       (19, 300, 5), # two blocks of columns
                       (100, 17, 9), (19, 300, 19), (40, 600, 40)], 4):
        check_low_rank(*shape)
    for n, k, r in rows([(140, 1200, 600)], 0): # it would take three chunks of rows, and a GPU's workspace has room for two
        begin_compression()
        m, p, q = normal_f(n, k), normal_f(n, r), unset_f(k, r)
        call("skinny_product_transposed", q, m, p, n, k, r)
        near("m^T p", q, m.d.T @ p.d, 4 + n**0.5 / 4)


def orthonormal(p):
    """Gram-Schmidt from the first column on, made twice; a column that depends on those before it becomes one of the identity's."""
    p, n = p.copy(), len(p)

    def rest(j):
        for i in [*range(j)] * 2: p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
        return np.linalg.norm(p[:, j])
    for j in range(p.shape[1]):
        before, length = np.linalg.norm(p[:, j]), rest(j)
        for t in range(n):
            if length > (1e-6 * before if t == 0 else 0.5 / n**0.5): break
            p[:, j] = np.arange(n) == (j + t) % n
            length, before = rest(j), 0 if t == 0 else before
        p[:, j] /= length
    return p


def check_orthonormal(values, roundings=64):
    begin_compression()
    p = f(values)
    call("orthonormalise", p, *values.shape)
    got = p.get()
    within("products of columns", got.T @ got, np.eye(values.shape[1]), 1e-6)
    near("orthonormal columns", p, orthonormal(p.d), roundings)


@claim
def columns_become_orthonormal_and_those_that_depend_on_others_are_replaced():
    for n, r in rows([(1, 1), (7, 3), (64, 4), (200, 4), (30, 9), # three of a GPU's tiles of columns
                      (12, 12), (1000, 16), (1500, 3)], 5): # several chunks of rows
        check_orthonormal(numbers(n, r, std=10))
    check_orthonormal(np.zeros((50, 4))) # the identity's columns
    check_orthonormal(np.array([[0, 0], [2, 2.]])) # the column of the identity whose turn it is may be there already
    dependent = numbers(40, 3)
    dependent[:, 1] = 4 * dependent[:, 0]
    check_orthonormal(dependent)
    dependent = numbers(50, 4)
    dependent[:, 1], dependent[:, 3] = 3 * dependent[:, 0], 0
    check_orthonormal(dependent)
    check_orthonormal(1 + 1e-4 * numbers(60, 3), 2e4) # nearly dependent: rounding once would leave an angle
    bad = numbers(50, 4)
    bad[1, 1] = np.nan
    p = f(bad)
    call("orthonormalise", p, 50, 4)
    assert np.isnan(p.get()[0, 1])


@claim
def comparison_adds_squares_and_products():
    for n in rows(LENGTHS + [0, 5000, 40001], 10):
        begin_compression()
        a, b, sums = normal(n), normal_f(n), doubles(1, 2, 3)
        call("add_comparison", sums, a, b, n)
        want = np.array([1 + (a.d**2).sum(), 2 + (b.d**2).sum(), 3 + (a.d * b.d).sum()])
        within("x^2, y^2, x y", sums.get(), want, 1e-12 * np.array([want[0], want[1], want[0] + want[1]]))


# ---- PyTorch ----
TORCH = {"encoder.odd": (check_encoder, 3, 7, 13, 11, 11, 1),
         "layernorm.odd": (check_layernorm, 6, 33), "layernorm.even": (check_layernorm, 5, 96),
         "matmul.odd": (check_linear, 7, 33, 19), "matmul.even": (check_linear, 40, 16, 48),
         "attention.short": (check_attention, 3, 7, 4, 5), "attention.long": (check_attention, 1, 131, 2, 4),
         "attention.wide": (check_attention, 2, 9, 1, 64), "attention.one": (check_attention, 2, 1, 3, 2),
         "classifier.bytes": (check_classifier, 9, 257, 384, 1), "classifier.tiny": (check_classifier, 4, 3, 128, 1)}


@of("cpu")
def layers_agree_with_pytorch():
    for case, (check, *arguments) in TORCH.items(): given(case, check, *arguments)
    theirs = EXAMPLE | {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.3}
    for loss_scale in 1, 8: given("adamw.clipped", check_adamw, 301, 7, theirs, 100, 1, loss_scale)


# ---- where arrays begin ----
@claim
def arrays_that_are_not_aligned_are_read_element_by_element():
    """One array after the other is not aligned to 16 bytes, and no kernel may read 16 bytes at once from it."""
    checks = [(check_encoder, 1, 3, 16, 3, 4, 2), (check_layernorm, 2, 16), (check_classifier, 3, 27, 32, 2),
              (check_attention, 1, 3, 1, 16), (check_attention, 1, 3, 1, 64), (check_parts, 1, 3, 2, 1, 16),
              (check_parts, 1, 3, 2, 1, 64), (check_linear, 8, 16, 24), (check_momentum, 16),
              (check_router, 5, 16, 4, 2), (check_router_backward, 5, 16, 4, 2), (check_rows, 5, 16, 4, 2, 2)]
    if not on.is_cpu: checks += [(check_bias_gelu, 2, 16), (check_bias_backward, 2, 16)]
    for check, *arguments in rows(checks, 0):
        for on.unaligned in itertools.count():
            check(*arguments)
            if on.unaligned >= len(on.arrays): break


# ---- which product and which attention a GPU chooses ----
IN_USE, TIMED, OF_BIASES, FOR_FEWER_PROCESSORS, REFUSED, WITH_A_FAILED_CANDIDATE, FEWEST_CANDIDATES, MOST_CANDIDATES = range(8)


def plans(which): return on.lib.plans(which)


def check_layer(C, OC, N=16):
    """Of 16 rows, forward and backward, with gradients that are added or set."""
    inp, w, bias, dout = normal(N, C), normal(OC, C), normal(OC), normal(N, OC)
    for mode in ADD, SET, ADD:
        out, dinp, dw, dbias = unset(N, OC), unset(N, C), gradient_before(mode, OC, C), gradient_before(mode, OC)
        call("matmul_forward", out, inp, w, bias, N, C, OC)
        near("out", out, inp.d @ w.d.T + bias.d, sum_error(C) + between())
        call("matmul_backward_input", dinp, dout, w, N, C, OC)
        near("dinp", dinp, dout.d @ w.d, sum_error(OC) + between())
        call("matmul_backward_weight", dw, dbias, dout, inp, N, C, OC, mode)
        near("dw", dw, after(mode, dw, dout.d.T @ inp.d), sum_error(N))
        near("dbias", dbias, after(mode, dbias, dout.d.sum(0)), sum_error(N) + between())


def prepare(deterministic=False, parts=1):
    """A model of 32 channels, a micro-batch of 16 rows, a vocabulary of which the classifier takes all rows at once."""
    begin(1, 16, 128, 1, 1, PRODUCTS, deterministic=deterministic)
    clean = on.lib.prepare_products(LayerShapes(2, 8, 32, 2, 64, parts, 1, 0))
    assert clean, "what was set while products are tried is left behind"


@of("cuda")
def only_what_is_overwritten_is_timed():
    for tries, timed in (True, 5), (False, 0): # dinp, and the other two with and without their epilogues
        begin(1, 16, 32, 1, 1, PRODUCTS)
        on.lib.products_are_tried(tries)
        check_layer(24, 32)
        on.lib.products_are_tried(False)
        assert plans(TIMED) == timed, f"{plans(TIMED)} plans were timed, not {timed}"


@of("cuda")
def every_product_of_a_step_is_tried_before_it():
    """A layer has five (forward, dinp, dw; two of them also without epilogue), fcproj a sixth, the classifier three."""
    prepare()
    tried = 24
    assert plans(TIMED) == plans(IN_USE) == tried, f"{plans(IN_USE)} plans were made, and {plans(TIMED)} timed"
    check_layer(32, 96)
    check_layer(32, 32)
    assert plans(IN_USE) == tried, f"training makes {plans(IN_USE) - tried} plans that were not tried"
    check_layer(32, 64) # no layer of a model
    assert plans(IN_USE) > tried and plans(TIMED) == tried, "another shape was timed"


@of("cuda")
def partial_products_are_tried_too():
    """One of two ranks that share the model: its partial products, with and without the bias that one rank adds."""
    N, C, Vp = 16, 32, 64
    prepare(parts=2)
    assert plans(TIMED) == 29, f"{plans(TIMED)} plans were timed"
    wide, w, bias, out = normal(N, 2 * C), normal(Vp, C), normal(C), unset(N, C)
    # proj, fcproj
    for inputs, b in itertools.product((C // 2, 2 * C), (bias, None)): raw("matmul_forward", out, wide, w, b, N, inputs, C)
    for outputs in 3 * C // 2, 2 * C, Vp: raw("matmul_backward_input", out, wide, w, N, C, outputs) # qkv, fc, the classifier
    on.lib.layers_overlap_sum(True)
    for outputs in 3 * C // 2, 2 * C: raw("matmul_backward_weight", w, None, wide, out, N, C, outputs, ADD)
    for inputs in C // 2, 2 * C: raw("matmul_backward_weight", w, None, out, wide, N, inputs, C, ADD)
    on.lib.layers_overlap_sum(False)
    assert plans(IN_USE) == 29, f"training makes {plans(IN_USE) - 29} plans that were not tried"


@of("cuda")
def products_beside_a_sum_are_for_the_multiprocessors_that_it_leaves():
    """By other plans, with the same numbers."""
    prepare()
    on.lib.layers_overlap_sum(True)
    assert on.lib.processors_for_products(False) == max(on.lib.processors_for_products(True) - on.lib.processors_of_a_sum(), 1)
    check_layer(40, 24)
    beside = plans(FOR_FEWER_PROCESSORS)
    on.lib.layers_overlap_sum(False)
    check_layer(40, 24)
    assert 0 < beside == plans(FOR_FEWER_PROCESSORS), f"{beside} plans beside a sum, {plans(FOR_FEWER_PROCESSORS)} after it"
    prepare(deterministic=True)
    on.lib.layers_overlap_sum(True)
    assert on.lib.processors_for_products(False) == 0, "a deterministic run has other plans beside a sum"
    on.lib.layers_overlap_sum(False)


@of("cuda")
def deterministic_runs_time_nothing_and_leave_biases_to_our_kernel():
    for deterministic, timed, of_biases in (True, 0, 0), (False, 24, 4):
        prepare(deterministic)
        check_layer(32, 96)
        assert not deterministic or plans(TIMED) == 0, f"{plans(TIMED)} plans were timed in a deterministic run"
        assert plans(OF_BIASES) == of_biases, f"{plans(OF_BIASES)} plans for bias gradients, not {of_biases}"


@of("cuda")
def candidates_that_fail_are_skipped():
    """The emulator's algorithm 2 comes first. It fails when it is run, and leaves an error of the runtime behind; or its result
    says not to use it."""
    if not on.is_emulated: return
    setenv, unsetenv = ctypes.CDLL(None).setenv, ctypes.CDLL(None).unsetenv
    for setting, candidates in (b"CUDA_EMULATOR_CUBLASLT_FAILS", 3), (b"CUDA_EMULATOR_CUBLASLT_INVALID", 2):
        setenv(setting, b"4", 1)
        try:
            prepare()
            fewest, most = plans(FEWEST_CANDIDATES), plans(MOST_CANDIDATES)
            assert fewest == most == candidates, f"{fewest} to {most} candidates"
            assert candidates < 3 or plans(WITH_A_FAILED_CANDIDATE) == 0, "a candidate was chosen that fails"
            check_layer(32, 96)
        finally: unsetenv(setting)


@of("cuda")
def each_call_has_its_own_bias_and_gelu_input():
    """Layers of one shape share a plan."""
    N, C, OC = 8, 16, 24
    begin(1, N, OC, 1, 1, PRODUCTS)
    inp, w = normal(N, C), normal(OC, C)
    for _ in range(2):
        bias, pre, act, dout, dw, dbias = normal(OC, std=3), unset(N, OC), unset(N, OC), normal(N, OC), unset(OC, C), unset(OC)
        call("matmul_gelu_forward", act, pre, inp, w, bias, N, C, OC)
        near("what goes into gelu", pre, inp.d @ w.d.T + bias.d, sum_error(C) + between())
        call("matmul_backward_weight", dw, dbias, dout, inp, N, C, OC, SET)
        near("dw", dw, dout.d.T @ inp.d, sum_error(N))
        near("dbias", dbias, dout.d.sum(0), sum_error(N))


@of("cuda")
def plans_of_training_outlive_those_of_sampling():
    N, C = 2 * on.lib.plans_at_most(), 8
    begin(1, N, C, 1, 1, PRODUCTS)
    inp, w, out = normal(N, C), normal(C, C), unset(N, C)
    for length in range(N, 0, -1):
        on.lib.products_are_tried(length == N)
        raw("matmul_forward", out, inp, w, None, length, C, C)
    near("products of many lengths", out, inp.d @ w.d.T, sum_error(C))
    assert plans(TIMED) == 1, f"{plans(TIMED)} plans are timed, not 1"


@of("cuda")
def who_computes_our_own_attention():
    """The kernels' results differ in the last bits, which shows which one computed: heads of 64 channels in 16 bits use tensor
    cores, but not if their arrays do not begin at a multiple of 16 bytes."""
    for HS, offset, tensor_cores in (48, 0, False), (64, 1, False), (64, 0, on.is_16):
        B, T, NH = 1, 40, 2
        C = NH * HS
        begin(B, T, C, NH, 1, ATTENTION, attention=OWN, deterministic=True)
        qkv, dout = normal(B, T, 3 * C, offset=offset), normal(B, T, C)
        results = []
        for by in range(2):
            out, stats, dqkv = unset(B, T, C), unset_f(B, NH, T), unset(B, T, 3 * C)
            if by == 0:
                raw("attention_by", tensor_cores, out, stats, qkv, None, None, B, T, C, NH)
                raw("attention_by", tensor_cores, dqkv, stats, qkv, dout, out, B, T, C, NH)
            else:
                raw("attention_forward", out, stats, qkv, B, T, C, NH)
                raw("attention_backward", dqkv, dout, qkv, out, stats, B, T, C, NH)
            results.append((out, dqkv))
        for a, b in zip(*results): same(f"heads of {HS} channels, {offset} elements after an aligned address", a, b)


def cudnn(B, T, NH, HS, deterministic=False, attention=CUDNN):
    begin(B, T, NH * HS, NH, 1, ATTENTION, attention=attention, deterministic=deterministic)


def again_by_cudnn(B, T, NH, HS, deterministic=True):
    # the graph's exp may be off by 8 roundings
    check_attention(B, T, NH, HS, 2**0.5, what=None, deterministic=deterministic)


@of("cuda")
def cudnn_follows_the_definition_over_shapes():
    if on.lib.cudnn_lacks(): return
    more = [(1, 33, 1, 128), (3, 17, 2, 8), (1, 130, 2, 80)] + [(2, 1024, 12, 64), (1, 2047, 2, 128)] * (not on.is_emulated)
    for shape in rows([(2, 64, 3, 64), (2, 65, 2, 32), *more], 2):
        for deterministic in False, True:
            cudnn(*shape, deterministic)
            assert on.lib.attention_is().startswith(b"cuDNN "), f"{on.lib.attention_is()} computes attention"
            again_by_cudnn(*shape, deterministic)


@of("cuda")
def cudnn_leaves_other_shapes_and_unaligned_arrays_to_our_own_kernels():
    if on.lib.cudnn_lacks(): return
    cudnn(1, 8, 2, 12, attention=AUTO)
    again_by_cudnn(1, 8, 2, 12)
    cudnn(2, 40, 2, 16, True)
    again_by_cudnn(1, 40, 2, 16)
    again_by_cudnn(2, 7, 2, 16)
    for on.unaligned in range(7):
        cudnn(1, 9, 2, 16, True)
        again_by_cudnn(1, 9, 2, 16)


@of("cuda")
def cudnn_sets_its_sums_to_zero_itself():
    """Without --deterministic cuDNN adds to sums, which it must set to 0 itself: begin() fills them with NaN, and a second backward
    finds what the first has left."""
    if on.lib.cudnn_lacks(): return
    for T in 32, 65, 128:
        cudnn(1, T, 2, 16)
        for _ in range(2):
            before = on.lib.memsets_so_far()
            again_by_cudnn(1, T, 2, 16, False)
            assert on.lib.memsets_so_far() == before, "a step needs a memset"


def choose(choice, HS, T):
    """Prints which attention computes T tokens and heads of HS channels, or the library dies."""
    cudnn(1, T, 2, HS, attention=("auto", "cudnn", "own").index(choice))
    print(on.lib.attention_is().decode())


if __name__ == "__main__":
    if "choose" in sys.argv:
        from layers import open_library
        open_library(sys.argv[1], False)
        choose(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else: main(sys.argv[1:])
