"""comm_bench, which is the test of what collectives give: on 1 to 8 ranks every number is right, in every type and way, in normal
and strict mode. Its table is right, wrong numbers are counted, and --json follows from the table. No time is judged."""
import contextlib, json, os, re, subprocess, sys
import numpy as np
import pytest
from suite import assert_refused, command, program, rest

LONG = 8

AWKWARD = "-b 3 -e 160000 -f 6.1 -n 2 -w 1"  # no number of ranks divides these sizes, and one is less than an element
SIZES = [3, 18, 109, 664, 4050, 24705, 150700]
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
PLACES = {"out": 5, "in": 9}  # columns of time, algbw, busbw and #wrong
# What is done, the places there are, whether counts are of each rank's part, and what bus bandwidth is of size / time on N ranks.
COLLECTIVES = {"all-reduce": ("sum", ["in"], 0, lambda n: 2 * (n - 1) / n), "broadcast": ("none", ["in"], 0, lambda n: 1),
               "all-to-all-v": ("none", ["out"], 1, lambda n: (n - 1) / (n + 1))} | {
    name: (redop, places, 1, lambda n: (n - 1) / n) for name, redop, places in
    [("reduce-scatter", "sum", ["out", "in"]), ("all-gather", "none", ["out", "in"]), ("all-to-all", "none", ["out"])]}


ALL_TYPES = "-d all --root -1 -b 3 -e 160000 -f 6.1 -n 1 -w 0"


def runs(piece):
    """All that results can depend on. Long operations are done in pieces of so many bytes, an all-to-all in halves of them."""
    near = f"-b {piece - 4} -e {piece + 4} --stepbytes 4 -n 1 -w 0"
    ways = "--allreduce ring", "--allreduce library", "--deterministic"
    return [f"--op all {ALL_TYPES}", f"--op all {near}",
            *(f"-o all-reduce {sizes} {way}" for way in ways for sizes in (ALL_TYPES, near)),
            f"--op all {ALL_TYPES} --offload", f"--op all {near} --offload", f"--op all {ALL_TYPES} --groups 2",
            f"--op all {AWKWARD} --emulate-link 100",
            *(f"-o {op} -b {piece // 2 - 16} -e {piece // 2 + 16} --stepbytes 16 -n 1 -w 0" for op in ("all-to-all",
                                                                                                      "all-to-all-v"))]


def bench(*options, ranks=1, debug=False, **settings):
    return command(program("comm_bench", debug=debug), "--comm-timeout 60", *options, ranks=ranks, **settings)


def tables(run):  # {collective: (rows of words, the text)}
    parts = re.split(r"^# (?=[a-z-]+, )", run.out, flags=re.M)[1:]
    return {text.split(",")[0]: ([line.split() for line in re.findall(r"^ .*", text, re.M)], text) for text in parts}


def assert_right(run, options):
    """No number is wrong, of as many collectives as the options mean."""
    found = tables(run)
    assert run.status == 0 and not re.search("runtime error:|ERROR: ", run.said), run
    assert len(found) == (2 if "--offload" in options else 1 if "--op all" not in options else 6), run
    for rows, text in found.values(): assert rows and "# Out of bounds values : 0 OK" in text, run


@pytest.mark.parametrize("strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize("ranks, debug", [(4, False), *(rest(n, False) for n in (1, 2, 3, 8)), rest(1, True), rest(3, True)])
def test_every_collective_gives_the_right_numbers_and_touches_nothing_else(ranks, debug, strict):
    for options in runs(1 << 14 if debug else 4 << 20):
        if ranks > 1 or "groups" not in options: assert_right(bench(options, ranks=ranks, debug=debug, strict=strict), options)


def assert_table_is_right(run, ranks, kind):
    """Sizes are whole elements per rank; times and bandwidths agree to the last digit printed; no number is wrong."""
    assert run.status == 0 and (f"# comm_bench on {ranks} ranks: " in run.out or ranks == 1), run
    assert [int(x) for x in re.findall(r"^#  Rank +(\d+)", run.out, re.M)] == list(range(ranks)), run
    assert list(tables(run)) == ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "all-to-all-v", "broadcast"], run
    for name, (rows, text) in tables(run).items():
        (redop, places, parts, factor), bandwidths = COLLECTIVES[name], []
        assert "# Out of bounds values : 0 OK" in text and len(rows) == len(SIZES), run
        for size, row in zip(SIZES, rows):
            count = size // BYTES[kind] // ranks ** parts
            assert row[:2] == [f"{count * ranks ** parts * BYTES[kind]}", f"{count}"], row
            assert row[2:5] == [kind, redop, "-1" if parts or redop == "sum" else "0"], row
            for place, at in PLACES.items():
                assert (row[at:at + 4] == ["N/A"] * 4) == (place not in places), row
                if place not in places: continue
                time, algbw, busbw = (float(x) for x in row[at:at + 3])
                assert time > 0 and row[at + 3] == "0" and abs(algbw - int(row[0]) / time / 1000) <= (0.006
                                                                                                      + 0.006 / time) * algbw, row
                assert abs(busbw - algbw * factor(ranks)) <= 0.011 * algbw, row
                assert all(len(x.split("e")[0].replace(".", "").lstrip("0")) >= 3 for x in row[at + 1:at + 3] if float(x)), row
                bandwidths.append(busbw)
        assert abs(float(re.search(r"^# Avg bus bandwidth *: *([\d.]+)", text,
                                   re.M)[1]) - np.mean(bandwidths)) <= 0.0011 + 0.006 * np.mean(bandwidths), text


@pytest.mark.parametrize("ranks, kind", [(3, "fp32"), *(rest(n, kind) for n, kind in enumerate(BYTES, 1))])
def test_the_columns_of_the_table_agree(ranks, kind):
    assert_table_is_right(bench("--op all", AWKWARD, "-d", kind, ranks=ranks), ranks, kind)


def test_it_says_that_others_used_the_cores():
    """Loops on all of them, while ranks measure."""
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count()):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        run = bench("-b 1M -e 1M -n 100", ranks=2)
    said, = re.findall(r"^Other programs used (\d+) % of the cores meanwhile: do not trust these times\.$", run.out, re.M)
    assert run.status == 0 and int(said) > 5


def test_sizes_may_be_k_and_m_and_without_checks_it_says_so():
    for options, sizes in ("-b 2K -e 1M -f 16", [2048, 32768, 524288]), ("--minbytes=1k -e 6k --stepbytes=2048",
                                                                         [1024, 3072, 5120]):
        (rows, _), = tables(bench(options, "-n 1 -w 0", ranks=None)).values()
        assert [int(row[0]) for row in rows] == sizes
    run = bench("-o broadcast -r 1 -b 64 -e 64 -c 0", ranks=2)
    assert [tables(run)["broadcast"][0][0][i] for i in (1, 4, 8, 12)] == ["16", "1", "N/A",
                                                                          "N/A"] and "values : not checked\n" in run.out


@pytest.mark.parametrize("options, out_of_place, in_place", [
    ("-o all-reduce", "N/A", "3"), ("-o all-reduce -d bf16 --allreduce ring", "N/A", "3"),
    ("-o reduce-scatter -d fp64", "2", "2"),  # the input, which is not as it was, counts as well
    ("-o all-gather -d fp16", "4", "3"), ("-o all-to-all -d bf16", "2", "N/A"),
    ("-o all-to-all-v -d fp16", "2", "N/A"),
    ("-o broadcast --root 1 -c 2", "N/A", "6"), ("-o broadcast --root 2", "N/A", "0")])
def test_a_wrong_input_is_counted_where_it_goes(options, out_of_place, in_place):
    run = bench("-b 60 -e 240 -f 2 -n 1 -w 0 --fault 1:2:bitflip", options, ranks=3)  # in the second of three lines
    (rows, _), = tables(run).values()
    clean = ["N/A" if x == "N/A" else "0" for x in (out_of_place, in_place)]
    assert [[row[8], row[12]] for row in rows] == [clean, [out_of_place, in_place], clean], run
    verdict = "OK" if in_place == "0" else "FAILED"
    assert run.status == (verdict == "FAILED") and re.search(rf"^# Out of bounds values : \d+ {verdict}$", run.out, re.M), run


def test_json_has_the_latency_and_bandwidth_that_fit_the_table_best(tmp_path):
    run = bench("--op all -b 64 -e 4M -f 4 -n 5 -w 2 --json", tmp_path / "links.json", ranks=3)
    links = json.loads((tmp_path / "links.json").read_text())
    assert links["ranks"] == 3 and links["backend"].startswith("MPI ") and links["collectives"].keys() == COLLECTIVES.keys()
    for name, (rows, text) in tables(run).items():
        place = COLLECTIVES[name][1][-1]
        size, time = np.array([[float(row[0]), 1e-6 * float(row[PLACES[place]])] for row in rows]).T
        time = np.minimum.accumulate(time[::-1])[::-1]  # a smaller size counts no more than a larger one
        alpha, beta, busbw = (links["collectives"][name][x] for x in ("alpha", "beta", "busbw"))
        assert len(rows) == 9 and alpha >= 0 and beta > 0 and abs(busbw * beta / COLLECTIVES[name][3](3) - 1) < 1e-4, text
        assert 1 / beta <= 1.01 * max(size / time), "a bandwidth that was not measured: " + text
        others = (alpha, beta), (alpha + max(0.03 * alpha, 1e-8), beta), (0.97 * alpha, beta), (alpha, 1.03 * beta), (alpha,
                                                                                                                      0.97 * beta)
        others = [(a, b) for a, b in others if 1 / b <= max(size / time) or b == beta]
        misses = [(((a + b * size) / time - 1) ** 2).sum() for a, b in others]
        assert misses[0] <= min(misses) + 1e-9, text
        said = [float(x) for x in re.search(rf"times {place}.* place: latency ([\d.]+) us, bus bandwidth ([\d.]+) GB",
                                            text).groups()]
        assert abs(said[0] - 1e6 * alpha) < 0.02 and abs(said[1] - 1e-9 * busbw) < 0.002, text


@pytest.mark.parametrize("options, ranks, pattern", [
    ("-b 1T", None, "--minbytes wants a size like 512, 64K, 8M or 1G, not '1T'"),
    ("--maxbytes 8MB", None, "--maxbytes wants .* not '8MB'"),
    ("--stepbytes=-1", None, "--stepbytes wants .* not '-1'"),
    ("-e 99999999999G", None, "must be between 1 and 1024G, not 99999999999G"),
    ("-b 64 -e 8", None, "--minbytes 64 is more than --maxbytes 8"), ("-i 8 -f 2", None, "leave one of them out"),
    ("-o sum", None, r"--op must be one of .* not 'sum'"), ("-d int8", None, "--datatype must be one of fp32.* not 'int8'"),
    ("-o reduce-scatter -d byte", None, "--op reduce-scatter: bytes are not added"),
    ("-o broadcast --offload", None, "parts cannot be in host memory"),
    ("--groups 3", 2, "--groups 3: there are only 2 ranks"),
    ("--groups 2 -r 1", 3, "--root 1: there is no such rank, the last one is 0"),
    ("-r 1", None, "--root 1: there is no such rank, the last one is 0"),
    ("-n 0", None, "--iters must be between 1 and 1000, not 0"),
    ("--json none.json", None, "a single rank has no link"),
    ("--json /nowhere/x.json", 2, "--json /nowhere/x.json: cannot be opened for"),
    ("-d all --json x", 2, "--json wants one --datatype"), ("-r -1 --json x", 2, "--json wants one --datatype and one --root"),
    ("-b 64 -e 64 -n 1 --json /dev/null", 2, "do not tell all-reduce's latency from its bandwidth: try a larger --maxbytes"),
    ("-b 8 -e 64 --comm-timeout 10 --fault 2:2:hang", 3, "rank 2 has not reached.*step 2")])
def test_a_mistake_or_a_rank_that_hangs_is_an_error_that_names_it(options, ranks, pattern):
    assert_refused(bench(options, ranks=ranks), pattern)
