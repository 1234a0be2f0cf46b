"""Functions of llmc/'s headers that need no program around them, in build/host.so (test/unit/host.c): random numbers, rates, the
model's tensors, layouts of shards, the pieces of a model that ranks hold, set and save, files of tensors, checkpoints and logs.
What may die or crash does so in a child.

    python3 test/kernels/check_host.py build/host.so [CLAIM...]

pytest: test_layers.py."""
import collections, contextlib, ctypes, errno, itertools, json, math, mmap, os, re, resource, shutil, signal, sys, tempfile
from pathlib import Path
import numpy as np
sys.path.append(str(Path(__file__).resolve().parents[2])) # dev.lib
from layers import (
    STORED, GPT2Config, ParamRange, StepLog, claim, dies, every_precision, in_child, lives, main, numbers, numbers_of, on,
    to_bf16, to_stored, within)


# ---- random numbers, draws, rates, scales, a line through times ----
def filled(name, dtype, n, *arguments):
    """A new array of n, which is the first argument of a function that writes it."""
    out = np.empty(n, dtype)
    getattr(on.lib, name)(out.ctypes.data, *(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))
    return out


def near_mean(what, values, mean, variance):
    """Within five standard errors."""
    within(what, np.mean(values), mean, 5 * (variance / np.size(values))**0.5)


@claim
def philox_gives_the_known_answers():
    """Of philox4x32-10, as they come with Random123 (Salmon et al.)."""
    ones = 2**64 - 1
    for key, high, low, answer in (
            (0, 0, 0, (0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8)),
            (ones, ones, ones, (0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd)),
            (0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88, # digits of pi
             (0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1))):
        assert (filled("philox_words", "u4", 4, key, high, low) == answer).all()


@claim
def random_numbers_have_their_distribution_and_seeds_and_streams_nothing_in_common():
    n = 1000000
    u, x = filled("uniforms", "f4", n, 7, 3, n).astype("f8"), filled("normals", "f4", n, 7, 3, 0, n).astype("f8")
    assert (0 <= u).all() and (u < 1).all()
    near_mean("uniform numbers", u, 0.5, 1 / 12)
    chi_square = ((np.histogram(u, 64, (0, 1))[0] - n / 64)**2).sum() / (n / 64)
    within("how evenly they lie", chi_square, 63, 5 * 126**0.5)
    for power, mean, variance in (1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96): near_mean(f"x^{power}", x**power, mean, variance)
    near_mean("x and the next x", x[1:] * x[:-1], 0, 1)
    for seed, stream in (8, 3), (7, 4):
        near_mean("another seed or stream", x * filled("normals", "f4", n, seed, stream, 0, n), 0, 1)


@claim
def permute_is_a_permutation_of_any_size_without_favourite_places():
    for n in *range(1, 600), *range(600, 2001, 7), 1 << 16, (1 << 16) + 1, 300007:
        assert (np.sort(filled("places", "u8", n, n % 5, 0, n, n)) == np.arange(n)).all(), f"n = {n}"
    for n in 1 << 33, (1 << 40) + 1, 1 << 62, 2**64 - 1: assert (filled("places", "u8", 1000, 9, n - 1000, 1000, n) < n).all()
    for n in 2, 3, 4, 5, 6, 7, 8, 12, 17, 40: # over many seeds
        for element in range(n):
            counts = np.bincount(filled("places_of_seeds", "u8", 10000, element, 10000, n).astype("i8"), minlength=n)
            within(f"places of {element} of {n}", counts / 10000, np.full(n, 1 / n), 5 * (1 / n * (1 - 1 / n) / 10000)**0.5)


LOW, LOGITS, TIES = -np.inf, (np.log(2), -1, np.log(5), np.log(3), -np.inf, -7), (-5, 0, -5, 0, 0, -5)
EXTREMES = -3e38, 3e38, LOW, 2.9e38, -3e38, 0


@claim
def tokens_are_drawn_as_often_as_softmax_says_of_the_k_likeliest():
    def shares(logits, temperature, top_k, want, n=100000):
        """Up to one draw in n and the rounding of u; never where the probability is 0."""
        logits = np.array(logits, "f4")
        found = np.bincount(filled("draws", "i4", n, logits, len(logits), temperature, top_k, n), minlength=len(logits)) / n
        want = np.pad(want, (0, len(logits) - len(want)))
        within(f"{logits}, {temperature}, {top_k}", found, want, np.where(want > 0, 2 / n, 0))

    for temperature, top_k in itertools.product((0.5, 1, 2), (0, 5, 1000)):
        weights = np.exp(np.array([0, 1, -2, 0.5, 3]) / temperature)
        shares((0, 1, -2, 0.5, 3), temperature, top_k, weights / weights.sum())
    for case in ((LOGITS, 1, 1, (0, 0, 1)), (LOGITS, 1, 2, (0, 0, 5 / 8, 3 / 8)), (LOGITS, 1, 3, (0.2, 0, 0.5, 0.3)),
                 (TIES, 1, 2, (0, 0.5, 0, 0.5)), (TIES, 1, 3, (0, 1 / 3, 0, 1 / 3, 1 / 3)), # the first of those that are equal
                 (EXTREMES, 1, 0, (0, 1)), (EXTREMES, 1e-30, 0, (0, 1)), ((LOW, 0), 1, 0, (0, 1)), ((-2,), 1, 1, (1,)),
                 ((1000, LOW, 1000, 999, 0, 1000), 1e-3, 0, (1 / 3, 0, 1 / 3, 0, 0, 1 / 3)), # whose exponentials overflow
                 ((1, 2, LOW, 3, LOW, LOW), 1e9, 0, (1 / 3, 1 / 3, 0, 1 / 3)),
                 ((-3, 2, 7, 6.999, LOW), 0, 0, (0, 0, 1)), ((1, 1, 1), 0, 0, (1,))): # temperature 0 takes the first of the largest
        shares(*case)
    logits = (np.floor(200 * numbers(1000)) / 64).astype("f4") # with repetitions
    for k, x in enumerate(np.sort(logits)[::-1], 1): assert on.lib.kth_is(logits.ctypes.data, 1000, k, x), f"the {k}th largest"


COSINE, LINEAR, CONSTANT, WSD = range(4)


def rates(schedule, steps, warmup, final=0.1, n=None):
    n = n or steps + 3
    return filled("rates", "f8", n, schedule, steps, warmup, final, n)


@claim
def the_learning_rate_rises_to_its_peak_falls_in_its_schedules_way_and_ends_at_its_final_fraction():
    """Of a peak of 0.5."""
    for schedule in range(4): within("warm-up", rates(schedule, 100, 10)[:11], 0.5 * np.minimum(np.arange(1, 12) / 10, 1), 1e-12)
    t = np.arange(101) / 100 # of the steps from the peak to the end
    within("cosine", rates(COSINE, 111, 10)[10:111], 0.5 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * t))), 1e-12)
    within("linear", rates(LINEAR, 111, 10)[10:111], 0.5 * (1 - 0.9 * t), 1e-12)
    within("constant", rates(CONSTANT, 100, 10)[10:100], np.full(90, 0.5), 1e-12)
    fall = np.maximum(np.arange(10, 100) - 79, 0) / 20 # the last fifth
    within("warm-up, stable, decay", rates(WSD, 100, 10)[10:100], 0.5 * (1 - 0.9 * fall), 1e-12)
    for schedule, steps, final in itertools.product((COSINE, LINEAR, WSD), (7, 22, 67, 202, 607), (0.25, 0)):
        within("the last steps", rates(schedule, steps, 1, final, steps + 1001)[steps - 1:], np.full(1002, final / 2), 1e-12)
    for schedule, steps, warmup in itertools.product(range(4), range(13), range(15)): # any lengths are sensible
        found = rates(schedule, steps, warmup)
        assert ((0 < found) & (found <= 0.5)).all() and (np.diff(found[warmup:]) <= 0).all(), (schedule, steps, warmup)


@every_precision
def the_loss_scale_doubles_after_an_interval_of_good_steps_and_halves_at_an_overflow_in_fp16_alone():
    def scaled(finite, scale, interval):
        finite, bad = np.array(finite, "u1"), np.empty(len(finite), "i4")
        return filled("scales", "f8", len(finite), bad, finite, len(finite), scale, interval), bad

    scale, bad = scaled([1] * 8 + [0, 1, 1, 1, 0, 0, 1], 1024, 3)
    assert [*scale] == [1024, 1024, 2048, 2048, 2048, 4096, 4096, 4096, 2048, 2048, 2048, 4096, 2048, 1024, 1024]
    assert [*bad] == [0] * 8 + [1, 0, 0, 0, 1, 2, 0]
    scale, bad = scaled([0] * 50 + [1] * 1000, 65536, 1) # it stays a finite float of at least 1
    assert scale[49] == 1 and bad[49] == 50 and 1e9 < scale[-1] < np.finfo("f4").max
    scale, bad = scaled([i % 1000 != 0 for i in range(5000)] + [0], 1, 0)
    assert (scale == 1).all() and bad[-1] == 1, "without an interval the scale changes"
    assert [*filled("first_scale", "f8", 2)] == ([4096, 7] if on.precision == "fp16" else [1, 0])


@claim
def a_line_through_times_is_no_faster_than_what_was_measured():
    def line(bytes_, us):
        found, bytes_, seconds = np.zeros(2), np.array(bytes_, "f8"), 1e-6 * np.array(us)
        is_found = on.lib.fitted(*(a.ctypes.data for a in (found, bytes_, seconds)), len(us))
        return (*found, max(bytes_ / seconds)) if is_found else None

    sizes = 64 * 4.0**np.arange(9)
    within("alpha and beta", line(sizes, 5 + 2e-4 * sizes)[:2], (5e-6, 2e-10), (5e-8, 2e-12)) # the largest size has nearly beta
    # A pause of the scheduler at two sizes: each counts no more than a larger message.
    sizes, held_up, quiet = 65536 * 4.0**np.arange(5), (25000, 18, 12000, 140, 900), (18, 18, 140, 140, 900)
    assert line(sizes, held_up)[:2] == line(sizes, quiet)[:2]
    # Flat, then a steep rise that ends: the best line of any slope would have 4 times the largest bandwidth.
    alpha, beta, fastest = line(8 * 4.0**np.arange(9), (320, 330, 315, 340, 320, 325, 330, 345, 350))
    assert abs(1 / beta / fastest - 1) < 1e-9 and 2e-4 <= alpha <= 3.3e-4
    alpha, beta, fastest = line((100, 1000, 10000), (1, 20, 300)) # latency is not negative
    assert alpha == 0 and 1 / beta <= 1e8
    for bytes_, us in ((64,), (1,)), ((64, 64), (1, 2)), ((64, 128), (2, 1)): assert line(bytes_, us) is None


@contextlib.contextmanager
def small_folder():
    """In memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder: yield Path(folder)


def path_of(out): return str(out).encode()


# ---- sums over ranks ----
@claim
def rows_are_added_in_their_order_and_rounded_once_by_all_threads_also_in_the_place_of_any_of_them():
    """Of a thread's slice, and of more, of which other threads add a part: that changes no sum. Types: fp32, bf16, fp16, fp64."""
    def added(rows, out, n, type_):
        pointers = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        on.lib.add_rows(out.ctypes.data, pointers, len(rows), n, type_)
        return out.copy()

    had = len(os.listdir("/proc/self/task"))
    for n, count, type_ in itertools.product((1029, 51277), (1, 2, 3, 4), range(4)):
        values = [numbers(n) for _ in range(count)]
        rows = [x if type_ == 3 else in_precision(x.astype("f4"), type_) for x in values]
        exact = rows if type_ == 3 else [(x.astype("u4") << 16).view("f4") if type_ == 1 else x.astype("f4") for x in rows]
        total = exact[0]
        for x in exact[1:]: total = total + x
        want = to_bf16(total) if type_ == 1 else total.astype("f2") if type_ == 2 else total
        on.lib.set_threads(had + 2)
        for place in range(-1, count):
            same_order = [row.copy() for row in rows]
            got = added(same_order, np.empty_like(rows[0]) if place < 0 else same_order[place], n, type_)
            assert (got == want).all(), f"{count} rows of type {type_}, place {place}"
    began = len(os.listdir("/proc/self/task")) - had
    on.lib.set_threads(2)
    assert began > 0, "one thread adds all"


# ---- files of tensors: for every check of the reference implementation there is one that fails only that check ----
@contextlib.contextmanager
def tensor_file():
    with small_folder() as folder: yield folder / "file.safetensors"


def put(path, header, data=0, length=None):
    """Bytes, the text of a header or its object, and so many bytes of zeros; its length, unless it is to be another."""
    text = header if isinstance(header, bytes) else header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))


def opened(path, names=""):
    """How many tensors it has, and of those with these names the rank, the elements, the beginning and the end."""
    facts = np.empty((len(names.split()), 4), "i8")
    return on.lib.open_tensors(path_of(path), facts.ctypes.data, names.encode()), facts.tolist()


def tensor(dtype, shape, *place): return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


def without(name, **more): return {"a": {key: value for key, value in (tensor("F32", [1], 0, 4) | more).items() if key != name}}


@claim
def a_good_file_opens_also_with_tensors_that_have_no_elements():
    with tensor_file() as path:
        put(path, json.dumps({"__metadata__": {"format": "pt"}, "b": tensor("F32", (2, 1), 4, 12), "a": tensor("BF16", [2], 0, 4),
                              "none": tensor("F32", (0, 5), 12, 12), "scalar": tensor("F32", (), 12, 16)}) + "  ", 16)
        count, (b, none, scalar, c) = opened(path, "b none scalar c")
        assert (count, b[0], b[1], b[3]) == (4, 2, 2, path.stat().st_size - 4) and (none[1], scalar[1], c[0]) == (0, 1, -1)
        put(path, {})
        assert opened(path)[0] == 0


MOST, LARGE, NO_DTYPE, NO_SHAPE, NO_PLACE = 2**63 - 1, "'a' is larger than any memory", *(
    f"'a' has no {x}" for x in ("dtype", "shape", "data_offsets"))
ONE = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'


@claim
def everything_that_a_header_says_is_checked():
    with tensor_file() as path:
        for text in b"", b"1234567":
            path.write_bytes(text)
            dies(lambda: opened(path), str(path), "; find another", f"has {len(text)} bytes, too few")
        for length, says in ((100000001, "100000001 bytes where the format allows 100000000"),
                             (2**64 - 1, "18446744073709551615 bytes where the format allows"),
                             (2**64 - 7, "where the format allows"), # 8 + N would be 1
                             (100000000, "should have 100000000 bytes and the whole file has 10: truncated"), (3, "truncated"),
                             (0, "does not begin with '{'")):
            put(path, "{}", 0, length)
            dies(lambda: opened(path), str(path), "; find another", says)
        for data, header, says in (
                # UTF-8, JSON, an object
                (0, b'{"\xff":1}', "not valid JSON"), (0, b'{"\xc0\x80":1}', "not valid JSON"), # an overlong form
                (0, "[]", "does not begin with '{'"), (0, " {}", "does not begin with '{'"), (0, '{"a":', "not valid JSON"),
                (0, "{} x", "not valid JSON"), (0, b"{}\0", "not valid JSON"), (0, {"a": 1}, "'a' is not an object"),
                (0, {"__metadata__": []}, "'__metadata__' is not an object"),
                (0, {"__metadata__": {"k": 1}}, "metadata's 'k' is not a string"),
                # each member
                (4, without("dtype"), NO_DTYPE), (4, without("", dtype=4), NO_DTYPE), (4, without("shape"), NO_SHAPE),
                *((4, without("", dtype=name), f"unknown dtype '{name}'") for name in ("F31", "f32")),
                *((4, without("", shape=shape), NO_SHAPE) for shape in (1, [1.0], [-1, -1])),
                (4, without("", shape=[1] * 9), "'a' has no shape of at most 8"),
                (4, without("", shape=[MOST + 1]), "not valid JSON: too big integer"), (4, without("data_offsets"), NO_PLACE),
                *((4, without("", data_offsets=place), NO_PLACE) for place in ([0], [0, 4, 8], [0, 4.0], [-4, 0])),
                # names that occur twice, also as an escape
                (8, f'{{"a":{{{ONE}}},"a":{{{ONE}}}}}', "duplicate object key"),
                (8, f'{{"a":{{{ONE}}},"\\u0061":{{{ONE}}}}}', "duplicate object key"),
                (4, f'{{"a":{{"dtype":"F32",{ONE}}}}}', "duplicate object key"),
                # holes and overlaps
                (8, {"a": tensor("F32", [1], 4, 8)}, "'a' starts at byte 4 of the data where the one before ended at 0 (a hole)"),
                (12, {"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 8, 12)}, "where the one before ended at 4 (a hole)"),
                (8, {"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [1], 4, 8)}, "where the one before ended at 8 (an overlap)"),
                (4, {"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 0, 4)}, "(an overlap)"),
                (4, {"a": tensor("F32", [1], 0, 4), "b": tensor("F32", [1], 4, 0)}, "'b' ends at byte 0, before it starts at 4"),
                # a shape must fill its place, and tensors the file
                (4, {"a": tensor("F32", [2], 0, 4)}, "'a' takes 4 bytes where its shape and dtype need 8"),
                (4, {"a": tensor("F32", [0], 0, 4)}, "'a' takes 4 bytes where its shape and dtype need 0"),
                (4, {"a": tensor("F32", [2**32, 2**32], 0, 4)}, LARGE), # 0 if it wraps
                (0, {"a": tensor("F64", [2**62], 0, 0)}, LARGE), (8, {"a": tensor("U8", [MOST], 0, MOST)}, LARGE),
                (1, {"a": tensor("F4", [3], 0, 1)}, "'a' takes 1 bytes"), # a byte and a half
                (7, {"a": tensor("F32", [2], 0, 8)}, "'a' ends at byte 8 of the data, of which there are 7: truncated"),
                (9, {"a": tensor("F32", [2], 0, 8)}, "its tensors have 8 bytes and the file 9 after the header"),
                (1, {}, "its tensors have 0 bytes and the file 1 after the header")):
            put(path, header, data)
            dies(lambda: opened(path), str(path), "; find another", says)


def in_precision(values, dtype): # of numbers that need no rounding
    return (values, (values.view("u4") >> 16).astype("u2"), values.astype("f2"))[dtype]


@claim
def what_is_written_in_pieces_comes_back_in_other_pieces_and_types():
    rows, cols = 301, 173 # more than a piece of the reader's
    n = rows * cols
    values = (np.arange(n) * 7 % 255 - 127).astype("f4") / 8
    with tensor_file() as path:
        assert on.lib.create_tensors(path_of(path), rows, cols) == 0
        for t, name in enumerate((b"fp32", b"bf16", b"fp16")):
            cuts = [0, *sorted(on.rng.integers(0, n, 5).tolist()), n]
            for number, (begin, end) in enumerate(zip(cuts, cuts[1:])):
                source = 0 if number % 3 == 0 else t
                piece = in_precision(values[begin:end].copy(), source)
                on.lib.write_tensor(path_of(path), name, begin, end - begin, piece.ctypes.data, source)
        for t, name in enumerate((b"fp32", b"bf16", b"fp16")):
            assert opened(path, name.decode())[1][0][2] % 2 == 0 and opened(path, "fp32")[1][0][2] % 8 == 0
            for dtype, cuts in itertools.product(range(3), ([0, n], [0, 1, 40000, n])): # from bf16 to fp16 through fp32
                for begin, end in zip(cuts, cuts[1:]):
                    got = np.empty(end - begin, ("f4", "u2", "f2")[dtype])
                    on.lib.read_tensor(got.ctypes.data, path_of(path), name, begin, end - begin, dtype, 0)
                    assert (got == in_precision(values[begin:end].copy(), dtype)).all(), f"{name} in DType {dtype}"
        assert on.lib.create_tensors(path_of(path), rows, cols) == errno.EEXIST # nothing is written over
        assert opened(path)[0] == 3


@claim
def what_cannot_be_read_is_refused_when_it_is_read():
    with tensor_file() as path:
        put(path, {"a": tensor("F32", [2], 0, 8), "mask": tensor("BOOL", [2, 4], 8, 16)}, 16)
        assert opened(path)[0] == 2 # a mask may be there
        out = np.empty(8, "f4")
        for name, begin, n, lost, *says in ((b"mask", 0, 8, 0, "'mask' is stored as BOOL", "find another"),
                                            (b"a", 2, 1, 0, "'a' has 2 elements; 1 from 2 were asked for"),
                                            (b"a", 0, 2, 10, "'a' cannot be read: the file shrank", "find another")):
            dies(lambda: on.lib.read_tensor(out.ctypes.data, path_of(path), name, begin, n, 0, lost), str(path), *says)


@claim
def tensors_beyond_4_gib_are_found():
    """In a sparse file of 6 GiB, whose offsets do not fit in 32 bits."""
    n = 3 << 30
    with tempfile.TemporaryDirectory() as folder:
        put(path := Path(folder) / "large", {"a": tensor("BF16", [3, 1 << 30], 0, 2 * n)})
        try: os.truncate(path, path.stat().st_size + 2 * n)
        except OSError: return # this file system has no large sparse files
        values, got = np.array([1, 2, 3], "f4"), np.empty(3, "f4")
        on.lib.write_tensor(path_of(path), b"a", n - 3, 3, values.ctypes.data, 0)
        for begin, want in (n - 3, values), ((n - 3) % (1 << 31), 0 * values):
            on.lib.read_tensor(got.ctypes.data, path_of(path), b"a", begin, 3, 0, 0)
            assert (got == want).all()


# ---- the model's tensors ----
# Name, rows and columns in multiples of C (or T and Vp rows), mean and deviation of its initial weights (-1: into the residual
# stream), and how ranks of tensor parallelism cut it. A block is two units; checkpoints and initial weights number its elements as
# they are listed in NUMBERED. These names and sizes are written out here, because this order must never change.
ROOT = [("ln_f.weight", 1, 0, 1, 0, "none"), ("ln_f.bias", 1, 0, 0, 0, "none"), ("wpe", "T", 1, 0, 1, "none"),
        ("wte", "Vp", 1, 0, 1, "outputs")]
ATTENTION = [("ln_1.weight", 1, 0, 1, 0, "none"), ("ln_1.bias", 1, 0, 0, 0, "none"), ("qkv.bias", 3, 0, 0, 0, "heads"),
             ("proj.bias", 1, 0, 0, 0, "none"), ("qkv.weight", 3, 1, 0, 1, "heads"), ("proj.weight", 1, 1, 0, -1, "inputs")]
MLP = [("ln_2.weight", 1, 0, 1, 0, "none"), ("ln_2.bias", 1, 0, 0, 0, "none"), ("fc.bias", 4, 0, 0, 0, "outputs"),
       ("fcproj.bias", 1, 0, 0, 0, "none"), ("fc.weight", 4, 1, 0, 1, "outputs"), ("fcproj.weight", 1, 4, 0, -1, "inputs")]
NUMBERED = [name for name, *_ in ATTENTION[:4] + MLP[:4] + ATTENTION[4:] + MLP[4:]] # vectors first
Tensor = collections.namedtuple("Tensor", "name offset number rows cols mean std cut")


def size(t): return t.rows * max(t.cols, 1)


def tensors(c, u):
    """Of unit u; number: the first element's in the block or the root."""
    def shape(rows, cols): return {"T": c.max_T, "Vp": c.Vp}.get(rows) or rows * c.C, cols * c.C

    names, prefix, found, offset = (ROOT, "", [], 0) if u == 0 else ((ATTENTION, MLP)[(u - 1) % 2], f"h.{(u - 1) // 2}.", [], 0)
    counts = {name: math.prod(max(n, 1) for n in shape(rows, cols)) for name, rows, cols, *_ in ROOT + ATTENTION + MLP}
    for name, rows, cols, mean, std, cut in names:
        number = sum(counts[other] for other in NUMBERED[:NUMBERED.index(name)]) if u else offset
        std = np.float32({0: 0, 1: 0.02, -1: 0.02 / (2 * c.L)**0.5}[std])
        found.append(Tensor(prefix + name, offset, number, *shape(rows, cols), mean, std, cut))
        offset += counts[name]
    return found


def units(c): return range(1 + 2 * c.L)
def elements(c, u): return sum(map(size, tensors(c, u)))
def undecayed(c, u): return sum(size(t) for t in tensors(c, u) if not t.cols)


def named(name):
    c = GPT2Config(64)
    assert on.lib.named_model(name.encode(), ctypes.byref(c)), name
    c.max_T, c.V, c.Vp = c.max_T or 64, 50257, 50304
    return c


@claim
def the_named_models_have_their_published_sizes():
    for name, n in ("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200):
        c = named(name)
        assert on.lib.parameters_of(c) == n == sum(elements(c, u) for u in units(c)) - 47 * c.C
    c = named("d12")
    assert (c.L, c.NH, c.C) == (12, 12, 768)
    for name in b"d0", b"d257", b"d", b"d4x", b"gpt3", b"": assert not on.lib.named_model(name, ctypes.byref(c)), name


def in_part(t, part, parts):
    """The elements of a tensor that a part has, in order."""
    each = np.arange(size(t)).reshape(t.rows, -1)
    if t.cut == "outputs": each = np.split(each, parts)[part]
    if t.cut == "heads": each = np.concatenate([np.split(section, parts)[part] for section in np.split(each, 3)])
    if t.cut == "inputs": each = np.split(each, parts, axis=1)[part]
    return each.reshape(-1)


SHAPES = [GPT2Config(*shape) for shape in ( # max_T, V, Vp, L, NH, C
    (8, 50, 128, 3, 2, 16), (7, 100, 128, 2, 1, 6), (3, 129, 256, 5, 1, 13),
    (1, 1, 128, 1, 1, 1),     # a block of 25 elements: most ranks have none of it
    (1, 1, 128, 7, 1, 1),     # two such blocks still end within the shards of the first ranks
    (32, 384, 384, 2, 4, 32), (16, 300, 384, 3, 12, 48), (2, 3, 128, 256, 1, 2))]


@claim
def tensors_lie_in_their_units_and_are_numbered_in_their_blocks_also_in_parts():
    for c, parts in itertools.product(SHAPES, (1, 2, 3, 4)):
        if parts > 1 and (c.NH % parts or c.Vp % parts): continue
        for u in units(c) if c.L < 10 else (0, 1, 2, 511, 512):
            n, vectors = 0, 0
            for i, t in enumerate(tensors(c, u)):
                got, runs = on.lib.tensor_of(c, u, i), on.lib.runs_of(c, u, i, parts - 1, parts)
                assert (got.name.decode(), got.offset, got.block_offset, got.rows, got.cols) == t[:5], f"{t}: {got.name}"
                assert got.stored_rows == (c.V if t.name == "wte" else t.rows) and (got.mean, got.std) == (t.mean, t.std)
                own = t.offset + in_part(t, parts - 1, parts)
                by_runs = runs.begin + runs.stride * np.arange(runs.count)[:, None] + np.arange(runs.n)
                assert (by_runs.reshape(-1) == own).all(), f"{t.name} in {parts} parts"
                n, vectors = n + len(own), vectors + len(own) * (t.cols == 0)
            p = on.lib.range_of(c, u, parts - 1, parts)
            assert (p.unit, p.part, p.parts, p.begin, p.n, p.no_decay) == (u, parts - 1, parts, 0, n, vectors)


def initial(c, seed, u):
    """Every element depends on its number alone; the padding of the vocabulary is 0."""
    found = []
    for t in tensors(c, u):
        weights = np.full(size(t), t.mean, "f4")
        if t.std: weights = t.std * filled("normals", "f4", size(t), seed, (u + 1) // 2, t.number, size(t))
        if t.name == "wte": weights[c.V * c.C:] = 0
        found.append(weights)
    return np.concatenate(found)


@claim
def initial_weights_follow_their_numbers_and_have_gpt2s_distribution():
    for c, u in [(c, u) for c in SHAPES[:7] for u in units(c)]:
        n, want = elements(c, u), initial(c, 1337, u)
        got = filled("initial_weights", "f4", n, c, 1337, u, 0, n)
        assert (got == want).all(), f"unit {u}"
        assert (filled("initial_weights", "f4", n - n // 2, c, 1337, u, n // 2, n) == want[n // 2:]).all(), f"half of unit {u}"
    c = named("d4")
    for u in 0, 3, 4:
        weights = filled("initial_weights", "f4", elements(c, u), c, 1337, u, 0, elements(c, u)).astype("f8")
        for t in tensors(c, u):
            values = weights[t.offset:t.offset + size(t)][:c.V * c.C]
            within(t.name, (values.mean(), values.std()), (t.mean, t.std), (3e-4, 0.01 * t.std + 1e-9))


# ---- pieces of a model ----
MODEL, MASTER, M, V, MOMENTUM = range(5) # CheckpointPart
STATE = {"m": M, "v": V, "momentum": MOMENTUM}
FILL = 0x5a                    # bytes around arrays, and in those that nothing has written
Cut = collections.namedtuple("Cut", "parts shares pieces seed has on_host muon", defaults=(1, 1, 1, 0, "params master", False, False))
WHOLE, EVEN = Cut(), None # as a seed: equal shares, and the padding in the last one


def values_of(c):
    """(parts of a checkpoint) of each unit, (elements): random numbers that 16 bits cannot hold, except in the padding of wte.
    MODEL: the masters, rounded to floatX."""
    def random(u):
        x = numbers(elements(c, u)).astype("f4")
        if u == 0: x[len(x) - (c.Vp - c.V) * c.C:] = 0
        return x
    found = [[None] * 5 for _ in units(c)]
    for u in units(c):
        for part in MASTER, *STATE.values(): found[u][part] = random(u)
        found[u][MODEL] = numbers_of(to_stored(found[u][MASTER])).astype("f4")
    return found


class Held:
    """An array of a piece in memory of its own, with guards."""

    def __init__(self, n, dtype):
        self.whole = np.full(n * dtype.itemsize + 128, FILL, "u1")
        self.array, self.pointer = self.whole[64:len(self.whole) - 64].view(dtype), self.whole.ctypes.data + 64

    def assert_guards(self): assert (np.delete(self.whole, slice(64, len(self.whole) - 64)) == FILL).all(), "written beside a piece"


class Ranks:
    """One for each share of each part of the model. A unit's part is cut at random places into shares of so many pieces, some of
    them empty; the share of a rank is `pieces` of each. With Muon, a piece is cut once more where a block's matrices begin."""

    def __init__(self, c, cut):
        self.c, self.ranges, self.places, self.held, self.counts = c, [], [], [], []
        self.size = cut.parts * cut.shares
        for part, share in itertools.product(range(cut.parts), range(cut.shares)):
            for u in units(c):
                own = np.concatenate([t.offset + in_part(t, part, cut.parts) for t in tensors(c, u)])
                bounds = [0, *self.ends(u, cut, len(own)), len(own)][share * cut.pieces:(share + 1) * cut.pieces + 1]
                vectors = sum(in_part(t, part, cut.parts).size for t in tensors(c, u) if t.cols == 0)
                matrices = vectors if cut.muon and u > 0 else len(own) + 1
                if bounds[0] < matrices < bounds[-1]: bounds = sorted([*bounds, matrices])
                for begin, end in zip(bounds, bounds[1:]): self.add(u, part, cut, begin, own[begin:end], begin >= matrices)
            self.counts.append(len(self.ranges) - sum(self.counts))

    def ends(self, u, cut, n):
        count, stored = cut.shares * cut.pieces, n - (u == 0) * (self.c.Vp - self.c.V) * self.c.C
        if cut.seed is EVEN: return [stored * k // count for k in range(1, count)]
        ends = np.sort(np.random.default_rng([cut.seed, u]).integers(0, n + 1, count - 1)).tolist()
        if count > 2 and cut.seed % 3 == 0: ends[0] = 0  # the first piece is empty
        if count > 2 and cut.seed % 3 == 1: ends[-1] = n # the last one is
        return ends

    def add(self, u, part, cut, begin, places, has_momentum):
        held = {name: Held(len(places), STORED[on.precision] if name == "params" else np.dtype("f4"))
                for name in [*cut.has.split(), *["master"] * (on.is_16 and "master" not in cut.has),
                             *(["momentum"] if has_momentum else ["m", "v"])]}
        self.held.append(held)
        self.places.append(places)
        self.ranges.append(ParamRange(unit=u, part=part, parts=cut.parts, begin=begin, n=len(places), on_host=cut.on_host,
                                      **{name: h.pointer for name, h in held.items()}))

    def fill(self, values):
        for p, places, held in zip(self.ranges, self.places, self.held):
            for name, h in held.items():
                of = values[p.unit][STATE.get(name, MASTER)][places]
                h.array[:] = to_stored(of) if name == "params" else of

    def check(self, values, weights=MASTER, moments=True):
        """They hold these values, to the bit: as masters those of `weights`, and moments, or nothing in their place."""
        for p, places, held in zip(self.ranges, self.places, self.held):
            for name, h in held.items():
                h.assert_guards()
                of = values[p.unit]
                if name in STATE and not moments: assert (h.whole == FILL).all(), f"{name} of unit {p.unit} was written"
                else:
                    want = of[(STATE | {"params": MODEL}).get(name, weights)][places]
                    want = to_stored(want) if name == "params" else want
                    assert (h.array == want).all(), f"{name} of unit {p.unit}, part {p.part} of {p.parts}, from {p.begin} on"

    def arrays(self): return (ParamRange * len(self.ranges))(*self.ranges), (ctypes.c_int * self.size)(*self.counts), self.size

    def save(self, folder, sharded=False, step=7, keep=0):
        on.lib.save_pieces(str(folder).encode(), *self.arrays(), self.c, sharded, step, keep)


def saved(c, cut, values, folder, sharded=False):
    """The files of a checkpoint that ranks with this cut save, which changes nothing of theirs."""
    ranks = Ranks(c, cut)
    ranks.fill(values)
    shutil.rmtree(folder, ignore_errors=True)
    ranks.save(folder, sharded)
    ranks.check(values)
    return {path.name: path.read_bytes() for path in (folder / "step_00000007").iterdir()}


def check_load(c, cut, values, folder, resumes):
    ranks = Ranks(c, cut)
    count = on.lib.load_pieces(str(folder / "step_00000007").encode(), *ranks.arrays(), resumes)
    assert count == on.lib.parameters_of(c), "not all elements count in the checksum"
    ranks.check(values, MASTER if resumes else MODEL, resumes)


def check_cut(c, first, values, whole, cut, other, folder):
    """Ranks with this cut begin with the initial weights, and save the files of one that has it all, or their own; others load
    both."""
    ranks = Ranks(c, cut)
    on.lib.set_weights((ParamRange * len(ranks.ranges))(*ranks.ranges), len(ranks.ranges), c, 5)
    ranks.check(first, MASTER, False)
    assert saved(c, cut, values, folder) == whole, f"other files by {cut}"
    for sharded in False, True:
        if sharded: saved(c, cut, values, folder, True)
        for by, resumes in (cut, True), (other, True), (other, False): check_load(c, by, values, folder, resumes)


@every_precision
def initial_weights_and_a_checkpoints_bytes_are_the_same_from_any_ranks_and_it_loads_into_any_others():
    """With AdamW and with Muon."""
    has = "params", "master", "params master"
    random = [(Cut(1, 1 + k % 4, 1 + k % 5, k, has[k % 3], k % 2 == 0), Cut(1, 1 + k % 5, 1, 3, on_host=True)) for k in range(10)]
    parts = [(Cut(4 if k % 2 else 2, 1 + k // 2, 1 + k % 4, k, has[k % 3], k == 2),
              WHOLE if k < 2 else Cut(2 if k % 2 else 4, 1 + k // 2, 2, 1)) for k in range(6)]
    for c, cuts in ((GPT2Config(8, 50, 128, 2, 4, 16), random + parts), # of 4 parts of wte all, some or none of the rows are stored
                    (GPT2Config(3, 129, 256, 3, 1, 13), random),
                    (GPT2Config(4, 33000, 33024, 1, 4, 64), # half of wte is still more than is staged
                     [(Cut(on_host=True), WHOLE), (Cut(2, has="master"), WHOLE)])):
        values, begun = values_of(c), [[initial(c, 5, u)] * 4 for u in units(c)]
        for of_unit in begun: of_unit[MODEL] = numbers_of(to_stored(of_unit[MASTER])).astype("f4")
        with tempfile.TemporaryDirectory() as folder:
            for muon in False, True:
                whole = saved(c, WHOLE._replace(muon=muon), values, Path(folder) / "whole")
                for pair in cuts:
                    cut, other = (by._replace(muon=muon) for by in pair)
                    check_cut(c, begun, values, whole, cut, other, Path(folder) / "cut")


@claim
def pieces_that_are_not_the_model_are_no_checkpoint():
    """One is missing, or there twice."""
    c = GPT2Config(8, 50, 128, 2, 4, 16)
    on.lib.set_threads(1) # a child would wait for threads that it does not have
    with tempfile.TemporaryDirectory() as folder:
        for change in (lambda ranges: ranges[:-1]), (lambda ranges: ranges + ranges[-1:]):
            ranks = Ranks(c, WHOLE)
            ranks.fill(values_of(c))
            ranks.ranges = change(ranks.ranges)
            ranks.counts = [len(ranks.ranges)]
            dies(lambda: ranks.save(folder), "the ranks' shares do not add up to the model") # noqa: B023
            assert [*Path(folder).iterdir()] == []
    on.lib.set_threads(2)


# ---- checkpoints ----
TINY = GPT2Config(4, 10, 128, 2, 2, 4)
NEWER, OLDER = "step_00000002", "step_00000001"


def save_here(out, step=2, shards=0, keep=0, muon=False):
    """By so many writers that each have files of their own; 0: in whole files."""
    ranks = Ranks(TINY, Cut(1, shards or 1, seed=EVEN, muon=muon))
    ranks.fill(values_of(TINY))
    ranks.save(out, shards > 0, step, keep)


def save(*arguments, **settings): lives(lambda: save_here(*arguments, **settings))


def entries(out): return sorted(path.name for path in out.iterdir())
def load(path): on.lib.read_checkpoint(path_of(path))
def newest(out): return Path((on.lib.newest_checkpoint(path_of(out)) or b"none").decode()).name


@contextlib.contextmanager
def checkpoints(*steps):
    """A folder with checkpoints of these steps. Children have one thread, because they would wait for others that they have not."""
    on.lib.set_threads(1)
    with small_folder() as folder:
        (out := folder / "out").mkdir()
        for step in steps: save(out, step)
        yield out
    on.lib.set_threads(2)


def check_steps(out, *names):
    """These are all there is, and the last one is the newest, which loads."""
    assert entries(out) == [*names] and newest(out) == names[-1], f"{entries(out)}, newest {newest(out)}"
    lives(lambda: load(out / names[-1]))


def check_damage(path, damages, *phrases):
    """Each of (bytes of a file in the place of its own, or None, and what is said) is noticed. Afterwards the file is whole."""
    good = path.read_bytes()
    for bad, *more in damages:
        path.unlink()
        if bad is not None: path.write_bytes(bad)
        dies(lambda: load(path.parent), *phrases, *more)
        path.write_bytes(good)
    load(path.parent)


def edited(path, old, new):
    """A file's text with the first `old` replaced; tensors have that of their header, and its length."""
    data, begin = path.read_bytes(), 8 if "-of-" in path.name else 0
    end = begin + int.from_bytes(data[:8], "little") if begin else len(data)
    assert old.encode() in data[begin:end], f"{old} is not in {path.name}"
    text = data[begin:end].replace(old.encode(), new.encode(), 1)
    return (len(text).to_bytes(8, "little") if begin else b"") + text + data[end:]


@claim
def a_full_checkpoints_tensors_are_in_the_order_of_their_numbers():
    """Other programs may rely on these files, so it must never change."""
    names = [name for name, *_ in ROOT] + [f"h.{l}.{name}" for l in range(2) for name in NUMBERED]
    matrices = [x for x in names if x.startswith("h.") and x.endswith(".weight") and ".ln_" not in x]
    with checkpoints() as out:
        save(out)
        save(out, 3, muon=True)
        with_m, ends = [x for x in names if x not in matrices], []
        for step, file, tensors_of in ((2, "model", {"": names}), (2, "optimizer", {"m.": names, "v.": names}),
                                       (3, "optimizer", {"m.": with_m, "v.": with_m, "momentum.": matrices})):
            data = (out / f"step_{step:08}/{file}.safetensors").read_bytes()
            header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
            assert header.pop("__metadata__") == {"format": "shard.c", "layout": "out_in"}
            places = sorted(x["data_offsets"] for x in header.values())
            assert [header[part + name]["data_offsets"] for part, of_part in tensors_of.items() for name in of_part] == places
            assert [begin for begin, _ in places] == [0, *(end for _, end in places[:-1])] and len(places) == len(header)
            assert header.get("m.wte", {"shape": [10, 4]})["shape"] == [10, 4] # without the padding
            ends.append(places[-1][1])
            assert len(data) == 8 + int.from_bytes(data[:8], "little") + ends[-1]
        assert ends[1] - ends[2] == 4 * 2 * 12 * TINY.C**2, "Muon saves other than 4 bytes of each element of a block's matrices"


@every_precision
def the_state_of_a_run_is_stored():
    with checkpoints(2, 3) as out:
        save(out, 4, muon=True)
        state = {step: json.loads((out / f"step_{step:08}/state.json").read_text()) for step in (2, 3, 4)}
        assert state[4]["optimizer"] == "Muon" and {*state[4]["checksums"]} == {*state[3]["checksums"], "momentum"}
        sums = state[2].pop("checksums")
        assert {*sums} == {"model", "m", "v", *["master"] * on.is_16} and len(state[2].pop("checksum_of_this")) == 16
        assert state[2] == {
            "format": "shard.c checkpoint", "version": 1, "dtype": on.precision, "has_optimizer": True, "step": 2, "tokens": 192,
            "model": {"layers": 2, "heads": 2, "channels": 4, "vocab_size": 10, "max_seq_len": 4}, "adamw_t": 1, "good_steps": 1,
            "data": {"seed": 1337, "seq_len": 3, "epoch": 3, "position": 17, "checksum": "000000000000fedc"},
            "loss_scale": 65536.5, "options": {"lr": 0.1}}
        assert "checksum" not in state[3]["data"]


@claim
def weights_at_a_path_of_their_own_remove_no_steps_and_resume_no_run():
    with checkpoints(3) as out:
        n = sum(elements(TINY, u) for u in units(TINY))
        values = on.rng.integers(0, 255, n).astype("f4") / 64 # which every precision holds
        for dtype in range(3):
            on.lib.save_weights(path_of(out / f"imported{dtype}") + b"/", TINY, dtype, values.ctypes.data)
            dies(lambda: load(out / f"imported{dtype}"), "imported", "holds weights only", "--init-from")
            got, padding = filled("read_weights", "f4", n, path_of(out / f"imported{dtype}")), elements(TINY, 0) - np.arange(1, 473)
            assert (np.delete(got, padding) == np.delete(values, padding)).all() and (got[padding] == 0).all()
        assert entries(out) == ["imported0", "imported1", "imported2", "step_00000003"]


@claim
def a_run_resumes_from_a_state_of_its_own_optimizer_alone_and_the_others_weights_are_still_of_use():
    with checkpoints() as out:
        for muon, names in (False, ("AdamW", "Muon")), (True, ("Muon", "AdamW")):
            save(out, 2, muon=muon)
            lives(lambda: on.lib.resume_with(path_of(out / NEWER), muon)) # noqa: B023
            dies(lambda: on.lib.resume_with(path_of(out / NEWER), not muon), # noqa: B023
                 f"--resume: {out / NEWER} has the state of {names[0]}, and this program trains with {names[1]}; --init-from loads"
                 " the weights alone")
            filled("read_weights", "f4", sum(elements(TINY, u) for u in units(TINY)), path_of(out / NEWER))
            part = M if muon else MOMENTUM # of a matrix
            dies(lambda: on.lib.read_part(path_of(out / NEWER), part, 1, 24, 25), f'has no "{"m" if muon else "momentum"}" to read') # noqa: B023


@claim
def only_the_newest_stay_and_folders_that_are_not_ours():
    with checkpoints() as out:
        assert newest(out) == "none"
        for step in 2, 7, 12: save(out, step, keep=2)
        assert entries(out) == ["step_00000007", "step_00000012"] and newest(out) == "step_00000012"
        save(out, 3, keep=2) # never the one just written, though others are newer
        save(out, 100000000) # 0 keeps all, and eight digits are no limit
        assert entries(out) == ["step_00000003", "step_00000007", "step_00000012", "step_100000000"]
        assert newest(out) == "step_100000000"
    others = ".tmp_mine", "metrics.jsonl", "step_000000001", "step_00000001x", "step_0000000a", "step_1", "xstep_00000001"
    with checkpoints() as out:
        for name in others: (out / name).mkdir()
        for step in 2, 3: save(out, step, keep=1)
        assert entries(out) == sorted([*others, "step_00000003"]) and newest(out) == "step_00000003"


@claim
def any_flipped_bit_is_noticed_also_of_a_shard():
    """All of a header's length, then here and there; of the values, whose checksum is over all shards, the last byte."""
    files = ["state.json", "model.safetensors", "optimizer.safetensors"]
    shards = ["state.json", "model.safetensors.index.json", "optimizer.safetensors.index.json", "model-00001-of-00003.safetensors",
              "optimizer-00003-of-00003.safetensors"]
    for names, shards, muon in (files, 0, False), (shards, 3, False), (files, 0, True), (shards, 3, True):
        with checkpoints() as out:
            save(out, 1)
            save(out, 2, shards, muon=muon)
            for name in names:
                data, flips = (out / NEWER / name).read_bytes(), []
                for place in [*range(8), *on.rng.integers(8, len(data), 40 if shards else 60)]:
                    flips.append([data[:place] + bytes([data[place] ^ 1 << on.rng.integers(8)]) + data[place + 1:]])
                check_damage(out / NEWER / name, flips, NEWER)
                if name.endswith(".json"): continue
                last = data[:-1] + bytes([data[-1] ^ 1])
                check_damage(out / NEWER / name, [(last, "do not match their checksum: the file is damaged")], name[:5], OLDER)


@claim
def a_missing_truncated_or_additional_file_is_named():
    with checkpoints() as out:
        save(out, 1)
        save(out, 2, 3)
        for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "optimizer-00002-of-00003.safetensors",
                     "model.safetensors.index.json", "optimizer.safetensors.index.json"):
            cut = (out / NEWER / name).read_bytes()[:-3], "is not valid JSON" if "json" in name else "truncated"
            gone = None, "cannot be opened: No such file"
            check_damage(out / NEWER / name, [cut, gone], f"{NEWER}/{name}", "fall back to", OLDER)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        save(out, 3, 40) # some of which are empty, and more than may be open
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 17, limits[1]))
        load(out / "step_00000003")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, IN_FIRST = "model.safetensors.index.json", f"it is in {FIRST}"
NO_PIECES = ("wtf[0:8]", "wt[0:8]", "wte[0:8", "wte[0:8] ", "wte[+0:8]", "wte[00:8]", "wte[8:0]", "wte[-8:0]",
             "wte[32:18446744073709551616]", "wte[", "wte", "m.wte[0:8]")


@claim
def every_piece_of_a_shard_and_its_index_are_checked():
    with checkpoints() as out:
        save(out, 2, 2)
        for file, old, new, *says in ( # file, old text, new text, phrases of the error
                (FIRST, '"wte[0:8]"', '"wte[1:9]"', "model-*-of-00002.safetensors", "element 0 of tensor 'wte' is missing"),
                (SECOND, '"wte[8:40]"', '"wte[7:39]"', "model-*-of-00002.safetensors", "element 7 of tensor 'wte' is there twice"),
                (SECOND, '"h.1.fc.weight[50:64]"', '"h.0.fc.weight[49:63]"', "49 of tensor 'h.0.fc.weight' is there twice"),
                (FIRST, '"h.0.ln_1.bias[0:4]"', '"h.0.fc.bias[0:4]"', "element 0 of tensor 'h.0.ln_1.bias' is missing"),
                (SECOND, "wte[8:40]", "wte[9:41]", SECOND, "'wte[9:41]' is not in state.json's model, nor a piece of a tensor"),
                (FIRST, '"wte[0:8]"', '"wte[0:9]"', FIRST, "'wte[0:9]' does not have the shape (9, 0)"),
                (FIRST, '"shape":[8]', '"shape":[8,1]', FIRST, "'wte[0:8]' does not have the shape (8, 0)"),
                (FIRST, '"shape":[8]', '"shape":[9]', FIRST, "'wte[0:8]' takes 32 bytes where its shape and dtype need 36"),
                (FIRST, '"F32"', '"I32"', FIRST, "is stored as I32 where state.json says F32"),
                (FIRST, '"ln_f.bias[0:4]"', '"ln_f.weight[0:4]"', FIRST, "duplicate object key"),
                (FIRST, '"shard.c"', '"pt"', FIRST, '"format": "pt" where a checkpoint has "shard.c"'),
                (FIRST, '"out_in"', '"in_out"', FIRST, '"layout": "in_out" where a checkpoint has "out_in"'),
                ("optimizer-00002-of-00002.safetensors", "m.wte[8:40]", "v.wte[7:39]", "optimizer-*-of-00002",
                 "8 of tensor 'm.wte' is missing"),
                *((FIRST, "wte[0:8]", name, FIRST, f"'{name}' is not in") for name in NO_PIECES),
                (INDEX, FIRST, SECOND, f"' is in {SECOND}; {IN_FIRST}"), (INDEX, FIRST, "../x", f"' is in ../x; {IN_FIRST}"),
                (INDEX, f'"wte[0:8]": "{FIRST}"', '"wte[0:8]": 1', f"says that 'wte[0:8]' is in no file; {IN_FIRST}"),
                (INDEX, '"wte[0:8]"', '"wte[0:7]"', f"says that 'wte[0:8]' is in no file; {IN_FIRST}"),
                (INDEX, '"wte[0:8]"', f'"wte[40:40]": "{FIRST}", "wte[0:8]"', "or lists more than they hold"),
                (INDEX, '"total_size": 2208', '"total_size": 2209', "has a total_size that is not the files'"),
                (INDEX, '"weight_map"', '"weight_map": {}, "weight_map"', "is not valid JSON: duplicate object key"),
                (INDEX, '"weight_map"', '"map"', "is in no file"), (INDEX, "{", "[", "is not valid JSON")):
            remedy = "" if file == INDEX else "copy it again from where it came (there is no older checkpoint beside it)"
            check_damage(out / NEWER / file, [(edited(out / NEWER / file, old, new), *says)], NEWER, remedy)
        text = (out / NEWER / INDEX).read_bytes()
        cuts = [(text[:n], f"{INDEX}: line ", "is not valid JSON") for n in range(0, len(text), len(text) // 7)]
        check_damage(out / NEWER / INDEX, cuts, NEWER)


@claim
def with_muon_each_tensor_has_either_a_momentum_or_m_and_v():
    with checkpoints() as out:
        save(out, 2, 2, muon=True)
        first, second = (f"optimizer-{k:05}-of-00002.safetensors" for k in (1, 2))
        for file, old, new, *says in (
                (second, '"momentum.h.1.fc.weight[50:64]"', '"m.h.1.fc.weight[50:64]"', second,
                 "'m.h.1.fc.weight[50:64]' is not in state.json's model"),
                (first, '"m.h.0.ln_1.bias[0:4]"', '"momentum.h.0.ln_1.bias[0:4]"', "'momentum.h.0.ln_1.bias[0:4]' is not in"),
                (first, '"m.wte[0:8]"', '"momentum.wte[0:8]"', "'momentum.wte[0:8]' is not in state.json's model"),
                (second, '"momentum.h.1.fc.weight[50:64]"', '"momentum.h.0.fc.weight[49:63]"',
                 "49 of tensor 'momentum.h.0.fc.weight' is there twice"),
                (first, '"momentum.h.0.qkv.weight[0:20]"', '"momentum.h.0.qkv.weight[1:21]"',
                 "element 0 of tensor 'momentum.h.0.qkv.weight' is missing")):
            check_damage(out / NEWER / file, [(edited(out / NEWER / file, old, new), *says)], NEWER)
        path = out / NEWER / "state.json"
        for old, new, says in (
                ('"Muon"', '"AdamW"', '"optimizer" must be Muon, or missing if it is AdamW, not AdamW'),
                ('"Muon"', "true", '"optimizer" must be Muon, or missing if it is AdamW, not another type'),
                ('"optimizer"', '"optimiser"', "does not match its own checksum"),
                ('"momentum": "', '"momentum": "0', 'no "momentum" of 16 hexadecimal digits')):
            check_damage(path, [(edited(path, old, new), says)], "state.json")


@claim
def every_field_of_the_state_is_checked():
    with checkpoints() as out:
        save(out)
        path = out / NEWER / "state.json"
        for old, new, says in (
                ('"format"', '"kind"', "is not the state of a shard.c checkpoint"),
                ('"version": 1', '"version": 2', "has version 2 where this program knows version 1; use the program that wrote it"),
                ('"version"', '"revision"', 'no whole number "version"'), ('"model"', '"none"', 'no whole number "layers"'),
                ('"layers": 2', '"layers": 0', '"layers" must be between 1 and 256, not 0'),
                ('"layers": 2', '"layers": 4294967298', '"layers" must be between 1 and 256, not 4294967298'),
                ('"heads": 2', '"heads": 3', "4 channels do not divide over 3 heads"),
                ('"channels": 4', '"channels": 65537', '"channels" must be between'),
                ('"vocab_size": 10', '"vocab_size": -1', '"vocab_size" must be between'),
                ('"max_seq_len": 4', '"max_seq_len": 1.5', 'no whole number "max_seq_len"'),
                ('"fp32"', '"fp8"', "must be fp32, bf16 or fp16, not fp8"),
                ('"fp32"', "1", "must be fp32, bf16 or fp16, not missing"),
                ("true", "1", '"has_optimizer" must be true or false'), ('"step": 2', '"step": -1', '"step" must be between'),
                ('"seed": 1337', '"seed": -1', '"seed" must be between'),
                ('"seq_len": 3', '"seq_len": 5', '"seq_len" must be between 1 and 4, not 5'),
                ('"epoch": 3', '"epoch": -1', '"epoch" must be between'),
                ('"position": 17', '"position": "3"', 'no whole number "position"'),
                ("000000000000fedc", "fedc", 'no "checksum" of 16 hexadecimal digits'),
                ('"adamw_t": 1', '"adamw_t": 3', '"adamw_t" must be between 0 and 2, not 3'),
                ('"good_steps": 1', '"good_steps": 3', '"good_steps" must be between 0 and 2, not 3'),
                ("65536.5", "0", '"loss_scale" must be a number above 0'),
                ('"loss_scale"', '"scale"', '"loss_scale" must be a number above 0'),
                ('"options"', '"options": 1, "others"', 'no object "options"'),
                ("{", '{"shards": 0,', '"shards" must be between 1 and 65536, not 0'),
                ("{", '{"shards": true,', 'no whole number "shards"'), ("{", '{"shards": 3,', "does not match its own checksum"),
                ('"m": "', '"m": "0', 'no "m" of 16 hexadecimal digits'),
                ('"checksum_of_this"', '"checksum"', 'no "checksum_of_this" of 16 hexadecimal digits'),
                ('"position": 17', '"position": 18', "does not match its own checksum: it was damaged or edited")):
            check_damage(path, [(edited(path, old, new), says)], "state.json")


@claim
def what_is_written_must_be_the_whole():
    """It is checked what one writer writes or leaves out, of two if each writes half."""
    half, whole = [32, 44, 78, 44, 78], [elements(TINY, u) for u in units(TINY)]
    for shard, shards, begins, ends, part, of, *says in (
            (0, 0, True, whole, MASTER, (0, 0, 1), 'a checkpoint in fp32 with optimizer state has no part "master"'),
            (0, 0, True, whole, MOMENTUM, (1, 24, 25), 'a checkpoint in fp32 with optimizer state has no part "momentum"'),
            (0, 2, True, half, M, (2, 60, 79), f"{NEWER}: element 50 of tensor 'm.h.0.fc.weight' is in none of the ranges that"),
            (1, 2, False, half, M, (2, 79, 80), f".tmp_{NEWER}/{SECOND}: cannot be written: No such file",
             "make it a folder that every rank sees or choose another --out"),
            (0, 2, True, whole, M, (0, 0, 0), f"{SECOND}: cannot be opened", "--out must be a folder that every rank sees"),
            (0, 1, True, [*whole[:-1], 155], M, (0, 0, 0), "model-*-of-00001",
             "element 63 of tensor 'h.1.fcproj.weight' is missing"),
            (2, 2, False, half, M, (2, 79, 80), "shard 2 of 2: a checkpoint has 1 to 65536 shards, counted from 0")):
        with checkpoints() as out:
            ranges = (ctypes.c_size_t * 5)(*ends)
            dies(lambda: on.lib.write_wrongly(path_of(out), TINY, shard, shards, begins, ranges, part, *of), *says)
            assert entries(out) == []


@claim
def other_things_are_called_by_their_name():
    def tensor(name):
        header = {"__metadata__": {"format": "pt"}, name: {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]}}
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(160)

    with checkpoints() as out:
        save(out)
        dies(lambda: load(out), "is a folder of checkpoints", NEWER)
        dies(lambda: load(out / OLDER), "there is no such checkpoint")
        (out / "config.json").write_text("{}")
        dies(lambda: load(out), "this is a Hugging Face layout, use build/hf_import")
        check_damage(out / NEWER / "model.safetensors", [
            (tensor("transformer.wte.weight"), "this is a Hugging Face layout"), # under our state
            (tensor("wte"), '"format": "pt" where a checkpoint has "shard.c"')], "model.safetensors")


# ---- full disks, links, errors of the file system, crashes ----
def until_saved(out, shards, limits):
    """What a save says that may use more and more of something, while it fails: the last good checkpoint stays."""
    for limit in limits:
        status, said = in_child(lambda: (limit(), save_here(out, 2, shards, keep=1)))
        if status == 0: break
        assert status == 1 and entries(out) == [OLDER]
        yield said
    check_steps(out, NEWER)


@claim
def a_save_that_has_no_room_leaves_the_last_good_checkpoint_and_names_each_file_in_turn():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN) # it would kill the process; a full disk only gives an error
    full = "cannot be written: File too large; free 1 MB or choose another --out; the last good checkpoint is "
    for shards, files in (0, ("model.s", "optimizer.s")), (7, ("model-0000", "optimizer-0000", "safetensors.index.json")):
        with checkpoints(1) as out:
            limits = (lambda n=n: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)) for n in range(500, 50000, 250))
            said = [*until_saved(out, shards, limits)]
            assert all(full in x and OLDER in x.split(full)[1] for x in said)
            for file in files: assert any(file in x for x in said), f"{file} always fitted"


@claim
def a_save_that_may_open_no_more_files_says_how_to_allow_more():
    with checkpoints(1) as out:
        limits = (lambda n=n: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)) for n in range(4, 50))
        said = [*until_saved(out, 0, limits)]
        assert all("too many open files in this process" in x and "make it writable" not in x for x in said)
        assert any(OLDER in x for x in said)


def link_older(out, name):
    """Moves step 1 out of the way, as to another disk, and puts a link to it at this name. Returns what is to stay whole."""
    archive = out.parent / "archive/old"
    archive.parent.mkdir()
    (out / OLDER).rename(archive)
    (out / name).symlink_to(archive)
    return archive


@claim
def a_link_in_the_place_of_a_checkpoint_is_unlinked_and_never_followed():
    for name, shards in itertools.product((OLDER, f".tmp_{OLDER}", ".tmp_step_00000003", f".replaced_{OLDER}"), (0, 2)):
        with checkpoints(1) as out:
            archive = link_older(out, name)
            for step in 2, 3: save(out, step, shards, keep=2)
            check_steps(out, NEWER, "step_00000003")
            lives(lambda: load(archive))
    for dangles in False, True: # one that has the name of a new checkpoint steps aside
        with checkpoints(1) as out:
            archive = link_older(out, NEWER)
            if dangles: archive.parent.rename(out.parent / "unmounted")
            save(out, keep=1)
            if dangles: (out.parent / "unmounted").rename(archive.parent)
            check_steps(out, NEWER)
            lives(lambda: load(archive))


@claim
def a_file_system_that_syncs_no_folders_has_checkpoints():
    with checkpoints() as out:
        for step, reason in enumerate((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS), 1):
            lives(lambda: (on.lib.refuse(reason, 0, 9), save_here(out, step, keep=1)))
        check_steps(out, "step_00000003")


@claim
def a_complete_checkpoint_that_cannot_have_its_name_stays_and_the_error_says_where():
    hidden = f".tmp_{NEWER}"
    no_name = "cannot be given its name: ", "it is complete in ", hidden

    def refused(reason, syncs, renames, *says):
        dies(lambda: (on.lib.refuse(reason, syncs, renames), save_here(out, keep=1)), NEWER, *says)

    with checkpoints(1) as out:
        for reason, syncs, renames, why in (errno.EIO, 0, 9, "Input/output error"), (errno.EPERM, 9, 0, "Operation not permitted"):
            refused(reason, syncs, renames, *no_name, why)
            assert entries(out) == [hidden, OLDER]
        lives(lambda: load(out / hidden))
        save(out, 3) # by another run, which has continued from step 1
        check_steps(out, OLDER, "step_00000003")
    with checkpoints(1) as out:
        refused(errno.EIO, 1, 9, "it is complete, but its name may not survive a power cut: Input/output error")
        check_steps(out, OLDER, NEWER)
        refused(errno.EIO, 9, 0, *no_name) # the old one stays
        assert entries(out) == [hidden, OLDER, NEWER]
        lives(lambda: load(out / hidden))
        save(out, 3, keep=1) # without a warning that step 2 could not be removed
        check_steps(out, "step_00000003")


@claim
def a_crash_before_any_system_call_loses_nothing():
    """No step that was reported safe is lost, and every folder with a checkpoint's name is complete."""
    for shards, least_calls in (0, 70), (2, 110):
        safe = mmap.mmap(-1, 1) # the last step reported safe, also by a child

        def save_twice(call):
            on.lib.crash_at(call)
            for _ in range(2):
                save_here(out, 2, shards, keep=1)
                safe[0] = 2

        for call in itertools.count(1):
            with checkpoints(1) as out:
                safe[0] = 1
                status, said = in_child(lambda: save_twice(call))
                assert (status, said) in ((0, ""), (-signal.SIGKILL, "")), said
                assert int(newest(out)[-1]) in (safe[0], safe[0] + 1)
                for path in {out / newest(out), *out.glob("step_*")}: lives(lambda: load(path))
                for step in 2, 3: save(out, step, shards, keep=1) # the same step again, and the next
                assert entries(out) == ["step_00000003"] # they have cleaned up
            if status == 0: break
        assert call > least_calls


# ---- the log of a run, and its metrics.jsonl ----
def step_log(step, **more):
    usual = dict(loss=4 + 1 / step, grad_norm=0.1, param_norm=45.678, lr=1e-3, loss_scale=1, tokens=2048 * step,
                 tokens_per_s=12345.6, step_ms=165.9, mem_bytes=100000000, mem_peak_bytes=123456789)
    return StepLog(step=step, **usual | more)


def logged(out, resumed_step, work):
    """What a run prints that begins there, from a checkpoint of this step or anew."""
    def run():
        on.lib.log_open(path_of(out), resumed_step, 4)
        work()
        on.lib.log_close()
    status, said = in_child(run, 1)
    assert status == 0, said
    return said


def log_steps(out, first, last):
    return logged(out, first - 1, lambda: [on.lib.log_step(step_log(step)) for step in range(first, last + 1)])


def metrics(out):
    text = (out / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def check_steps_logged(out, first, last):
    """The run's record, and then these steps; numbers come back to the bit."""
    record, *steps = metrics(out)
    assert "run" in record and [(x["step"], x["loss"]) for x in steps] == [(n, 4 + 1 / n) for n in range(first, last + 1)]


@claim
def a_log_has_its_runs_options_and_every_field_of_a_step():
    with small_folder() as out:
        log_steps(out / "deep/down", 1, 10)
        check_steps_logged(out / "deep/down", 1, 10)
        run, *_, third = metrics(out / "deep/down")[:4]
        assert third == {"step": 3, "loss": 4 + 1 / 3, "grad_norm": 0.1, "param_norm": 45.678, "lr": 1e-3, "loss_scale": 1.0,
                         "tokens_per_s": 12345.6, "step_ms": 165.9, "tokens": 2048 * 3, "mem_bytes": 100000000,
                         "mem_peak_bytes": 123456789, "comm_bytes": 0, "comm_exposed_ms": 0.0, "skipped": False}
        assert isinstance(third["comm_exposed_ms"], float)
        assert (run["run"]["program"], run["run"]["world_size"]) == ("train_gpt2_test", 4)
        given = run["run"]["options"]
        logged(out, 0, lambda: os._exit(on.lib.log_open(path_of(out), 0, 4) != len(given)))
        assert {name: given[name] for name in ("steps", "lr-schedule", "resume", "prompt")} == {
            "steps": 300, "lr-schedule": "cosine", "resume": False, "prompt": "caf?"}
        assert [type(given[name]) for name in ("lr", "seq-len", "data")] == [float, int, str]


@claim
def norms_have_32_bits():
    tiny, norm = 2.0**-31, on.lib.norm_logged
    for x, want in (0, 0), (-2.5, 2.5), (1 + tiny, 1 + tiny), (1 + tiny / 4, 1), (1 + tiny * 3 / 4, 1 + tiny), (np.inf, np.inf):
        assert norm(x) == want, x
    assert np.isnan(norm(-np.nan)) and not np.signbit(norm(-np.nan))
    for x in 1e-6 * 1.7**np.arange(43): assert abs(norm(x) - x) < 1e-6


@claim
def nan_and_infinity_are_null():
    def odd():
        on.lib.log_step(step_log(1, loss=np.nan, grad_norm=np.inf, skipped=True, lr=0.1 + 0.2))
        for losses in (2.25, 0.75), (-np.inf, np.nan): on.lib.log_eval(1, *losses)
    with small_folder() as out:
        logged(out, 0, odd)
        _, step, *evaluations = metrics(out)
        assert [step[name] for name in ("loss", "grad_norm", "lr", "skipped")] == [None, None, 0.1 + 0.2, True]
        assert evaluations == [{"step": 1, "val_loss": 2.25, "val_loss_per_byte": 0.75},
                               {"step": 1, "val_loss": None, "val_loss_per_byte": None}]


@claim
def a_resumed_run_has_each_step_once_and_what_is_not_a_whole_line_is_cut_off():
    for torn, step in itertools.product(("", "{", '{"step":11,"lo', '{"step":11}', '{"step":10}'), (6, 10)):
        with small_folder() as out:
            for _ in range(2): log_steps(out, 1, 10) # replaces an older run's
            check_steps_logged(out, 1, 10)
            with open(out / "metrics.jsonl", "a") as f: f.write(torn)
            log_steps(out, step + 1, 12)
            check_steps_logged(out, 1, 12)
            for gone in True, False: # there is no file, or its first line itself is torn
                (out / "metrics.jsonl").unlink() if gone else os.truncate(out / "metrics.jsonl", 5)
                log_steps(out, 7, 12)
                check_steps_logged(out, 7, 12)


@claim
def whole_lines_stay_whatever_they_are_and_the_log_says_how_many_are_cut():
    for odd in "\n", " \n\n", "null\n", "[1]\n", '{"note":1}\n', '{"step":3,"step":4}\n', '{"step":1,"lo\n':
        with small_folder() as out:
            log_steps(out, 1, 10)
            path = out / "metrics.jsonl"
            before, fourth, rest = re.fullmatch('(.*)({"step":4,.*)({"step":9,.*)', path.read_text(), re.S).groups()
            stays = before + odd + fourth + odd
            path.write_text(stays + rest + odd + '{"st')
            said = log_steps(out, 9, 9)
            assert path.read_text().startswith(stays + '{"step":9,') and path.read_text()[len(stays):].count("\n") == 1
            lines = 5 if odd == " \n\n" else 4
            assert said.startswith(f"metrics    {lines} lines cut from the end of {path}, the last one torn: "
                                   "steps after 8 are repeated\n")


@claim
def a_full_disk_is_an_error_of_the_log():
    with small_folder() as out:
        dies(lambda: (on.lib.log_open(path_of(out), 0, 4), on.lib.log_to(b"/dev/full"), on.lib.log_step(step_log(1))),
             "metrics.jsonl", "No space left", "--resume")


@claim
def lines_for_people_say_what_matters_and_log_every_leaves_out_some_that_metrics_have():
    def line(step, loss, more=""):
        return (f"step {step:3}/300 | loss {loss:.4f} | grad norm 0.1000 | param norm 45.68 | lr 1.00e-03 | mem 123 MB | "
                f"12346 tok/s{more}\n")

    def work():
        for step in [*range(12, 30), 300]:
            if step == 300: on.lib.log_ranks(4)
            on.lib.log_step(step_log(step, skipped=step == 17, loss_scale=32768 if step == 17 else 1, comm_exposed_ms=1.25))
        for losses in (2.34567, 2.34567), (4.5, 1.87654), (4.5, np.nan): on.lib.log_eval(50, *losses)

    with small_folder() as out:
        assert logged(out, 11, work) == ( # the first of this run is shown
            line(12, 4.0833) + line(17, 4.0588, " | loss scale 32768 | skipped: gradients not finite") + line(20, 4.05)
            + line(300, 4.0033, " | comm exposed 1.2 ms") + "step  50/300 | val loss 2.3457\n"
            "step  50/300 | val loss 4.5000 per token, 1.8765 per byte\n"
            "step  50/300 | val loss 4.5000\n") # the tokenizer does not know all tokens
        assert len(metrics(out)) == 1 + 18 + 1 + 3


@claim
def a_terminal_gets_one_line_that_is_rewritten():
    def work():
        for step in 148, 149, 150: # 149 comes too soon after 148
            on.lib.log_on_terminal(step == 149)
            on.lib.log_step(step_log(step))
        on.lib.log_say(b"sample\n")

    said, erase = logged("", 0, work), "\x1b[K"
    lines = [rf"step {step}/300 \[{bar:.<20}\] loss {loss} \| 12346 tok/s \| 4h..m left{re.escape(erase)}\r"
             for step, bar, loss in ((148, "#" * 9, 4.0068), (150, "#" * 10, 4.0067))]
    assert re.fullmatch("".join(lines) + re.escape(erase) + "sample\n", said), repr(said)


# ---- layouts of fully sharded parameters ----
WRAPS = [("halves", 1), *((n, n) for n in (0, 1, 2, 3, 4, 5, 7, 256))] # --wrap-blocks, also of more blocks than a model has


def check_layout(c, wrap, S, alignment, kind=0, limit=2, pieces=True):
    halves, blocks = wrap[0] == "halves", wrap[1]
    of_units = np.array([(elements(c, u), undecayed(c, u), len(tensors(c, u))) for u in (0, 1, 2)])
    sizes, vectors, counts = (np.concatenate([column[:1], np.tile(column[1:], c.L)]) for column in of_units.T)
    groups = np.zeros((len(sizes), 6), "u8")
    groups = groups[:on.lib.layout_make(groups.ctypes.data, c, blocks, halves, kind, limit, S, alignment)].astype("i8")
    first = [0, *range(1, len(sizes), 1 if halves else 2 * blocks)] if halves or blocks else [0]
    assert groups[:, 0].tolist() == first, f"groups begin at {groups[:, 0]}"
    assert (groups[:, 1] == np.diff([*first, len(sizes)])).all()
    for column, of_unit in (2, sizes), (3, counts): assert (groups[:, column] == np.add.reduceat(of_unit, first)).all()
    # Shards are as small as alignment allows, and lie next to each other.
    shard = -(-(-(-groups[:, 2] // S)) // alignment) * alignment
    assert (groups[:, 4] == shard).all() and (groups[:, 5] == np.cumsum(shard) - shard).all()
    assert on.lib.own_elements() == shard.sum()
    assert (shard[3:] <= shard[1:-2]).all(), "a bucket has no room for one of those that take it in turn"
    place = np.zeros((len(sizes), 3), "u8")
    on.lib.layout_units(place.ctypes.data)
    group = np.repeat(np.arange(len(first)), groups[:, 1])
    offset = np.cumsum(sizes) - sizes
    offset -= offset[first][group]
    assert (place == np.stack([offset, sizes, group], 1)).all()
    # Gather buffers: as large as the largest group that takes them, and bounded where groups are freed.
    frees, others = kind != 1, len(first) - 1
    assert on.lib.gather_buffers() == (min(limit, others) if frees else others) + 1
    for r in range(on.lib.gather_buffers()):
        assert on.lib.gather_buffer(r) == (shard[1:].max() if frees and r else shard[r]), f"gather buffer {r}"
    if pieces: check_pieces(S, sizes, vectors, offset, group, shard, groups[:, 5])


def check_pieces(S, sizes, vectors, offset, group, shard, shard_offset):
    """The pieces of all ranks are every unit once; gathered, each comes to its place."""
    end = np.zeros(len(sizes), "i8") # of the pieces of earlier ranks
    for rank in range(S):
        piece = np.zeros((len(sizes), 4), "u8")
        on.lib.layout_pieces(piece.ctypes.data, rank)
        begin, n, no_decay, at = piece.astype("i8").T
        has = n > 0
        assert (begin == end)[has].all(), "a hole between the pieces of two ranks, or an overlap"
        assert (np.minimum(no_decay, n) == np.clip(vectors - begin, 0, n))[has].all()
        assert (offset + begin == rank * shard[group] + at - shard_offset[group])[has].all()
        assert ((shard_offset[group] <= at) & (at + n <= (shard_offset + shard)[group]))[has].all()
        assert (at[has][1:] >= (at + n)[has][:-1]).all(), "pieces overlap in sharded memory"
        end += n
    assert (end == sizes).all()


@claim
def a_layout_has_every_unit_in_one_group_and_every_element_with_one_rank():
    """For every way to wrap, any number of shards, and shapes that do not divide evenly; ZeRO++'s shards are in blocks of 256."""
    for c, wrap, S, alignment in itertools.product(SHAPES, WRAPS, range(1, 9), (16, 256)): check_layout(c, wrap, S, alignment)
    for wrap, S in itertools.product([("halves", 1), *((n, n) for n in range(51))], 2**np.arange(11)):
        check_layout(named("gpt2-xl"), wrap, int(S), 16, pieces=False)
    for kind, limit in itertools.product(range(3), range(1, 8)): check_layout(SHAPES[2], (2, 2), 2, 16, kind, limit)


if __name__ == "__main__": main(sys.argv[1:])
