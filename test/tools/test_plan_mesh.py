"""build/plan's model of any mesh: tables of models, rates and published rows, each checked against another figure of the same
source or against a count; steps that can be counted by hand; properties; how near it comes to what others have published; and the
search."""
import itertools, statistics
import pytest
from planned import mesh_of
from dev.plan.machines import ALL_GATHER, ALL_REDUCE, GPUS, LINKS, MIB, NODES, Group, link_of, network_of_gpu
from dev.plan.mesh import ALL, HALF, INPUTS, SELECTED
from dev.plan.search import PARTS, machinery, search
from dev.plan.shapes import SHAPES
from dev.plan.validate import COUNTED, DEEPSPEED_2021, LLMC, PROGRAMS, TIMES, offs, predict, read_published, state_bytes, summary

near = lambda x: pytest.approx(x, rel=1e-9, abs=1e-15)
ROWS = read_published()


# ---- shapes and rates ----
@pytest.mark.parametrize("name, parameters, times, multiple", [
    # two embeddings of 128256 x 4096, 32 blocks of 2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336 + 2 x 4096, a norm of 4096; the
    # widths of torchtitan's rule: 8/3 C, times 1.3 or 1.2, in multiples of 1024 or 4096
    ("llama2-7b", 6738415616, 1, 256), # 32000 tokens, a head of keys and values for each of queries
    ("llama3-8b", 8030261248, 1.3, 1024), ("llama3-70b", 70553706496, 1.3, 4096), ("llama3-405b", 405853388800, 1.2, 4096)])
def test_llamas_parameters_can_be_counted(name, parameters, times, multiple):
    s = SHAPES[name]
    assert s.parameters() == parameters and s.F == -(-int(times * int(8.0 * s.C / 3)) // multiple) * multiple


@pytest.mark.parametrize("s", SHAPES.values(), ids=SHAPES)
def test_every_shape_divides_and_has_its_parameters_and_the_flops_of_equation_3(s):
    assert s.C % s.NH == 0 and s.NH % s.NKV == 0 and (s.llama or s.F == 4 * s.C)
    if s.llama: return
    size = s.name.removeprefix("gpt3-") # table 2.1 of the GPT-3 paper, whose figures are rounded to the model's name
    if size != s.name: assert s.parameters() == pytest.approx(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], rel=0.02)
    F = 96 * s.L * s.C * s.C * (1 + 2048 / (6 * s.C) + s.V / (16 * s.L * s.C)) # per token
    assert s.flops_recomputed(2048, False) == near(F)
    assert s.flops(2048, False) - s.flops(2048, True) == near(6 * s.L * s.C * 2048) # the masked half
    assert s.parameters() == s.elements() - (s.Vp - s.V) * s.C # two counts
    # flops_per_token, like llm.c's, counts 6 for every parameter: also for vectors and positions
    assert s.flops(2048, True) == near(s.flops_per_token(2048) - 6 * (s.L * s.block_vectors() + (s.T + 2) * s.C))


def test_activations_of_a_block():
    gpt, llama = SHAPES["gpt2"], SHAPES["llama3-8b"]
    assert gpt.block_activations(1, False) == 16 * 768 and gpt.block_activations(4, True) == 16 / 4 * 768
    assert gpt.block_activations(4, False) == (4 + 12 / 4) * 768 # as train_gpt2_tp, doc/formulas.md
    # 2 norms in and out, q and the output of attention, k and v of 1024, and 3 of 14336
    assert llama.block_activations(1, False) == 6 * 4096 + 2 * 1024 + 3 * 14336


def test_presets_of_gpus():
    for gb, g in zip((40, 80, 80, 141, 180, 24, 24, 192), GPUS.values(), strict=True): # by the data sheets
        # a data sheet's GB is 1e9 or 2^30 bytes, and some are kept back for error correction
        inside, between = LINKS[g.link].busbw, LINKS[g.nic].busbw
        assert 0.99 * gb * 1e9 < g.memory <= gb * 1073741824 and g.peak16 > g.peak32
        assert g.bandwidth > inside[ALL_GATHER] > between[ALL_GATHER]
    assert GPUS["h100"].memory == 81559 * MIB
    assert all(gpu in GPUS and nics <= per_node and nic in LINKS for gpu, per_node, nics, nic in NODES.values())


def test_links_reach_most_of_the_wire():
    """By the data sheets, in one direction. A sum is faster only where the switch adds up, which sends each byte once instead of
    twice."""
    wires = {"nvlink5": 900, "nvlink": 450, "nvlink3": 300, "nvlink2": 150, "xgmi": 448, "pcie": 31.5, "infiniband": 50, "hdr": 25,
             "100gbit": 12.5, "10gbit": 1.25}
    for (name, link), wire in zip(LINKS.items(), map(wires.get, LINKS), strict=True):
        gathers, sums = 1e-9 * link.busbw[ALL_GATHER], 1e-9 * link.busbw[ALL_REDUCE]
        assert 0.74 * wire < gathers < 0.97 * wire and (sums < 2 * wire if name in ("nvlink5", "nvlink") else sums == gathers)


# ---- by hand ----
def test_a_step_of_one_gpu():
    p = mesh_of("gpt2", "h100", 1, 1, 1, 0, 8, 4) # two micro-batches of 4096 tokens
    C, tokens, peak, memory = 768, 4096, 989e12 * 0.62, 3350e9 * 0.9
    # forward: 24 C^2 FLOPs and the unmasked half of attention's; 24 C numbers of 2 bytes, read or written
    block = (24 * C * C + 2 * C * 1024) * tokens / peak + 2 * 24 * C * tokens / memory
    head = 2 * C * 50257 * tokens / peak + 2 * 2 * 50257 * tokens / memory
    t = p.step()
    assert t.compute == near(2 * (12 * 3 * block + 3 * head)) and t.update == near(28 * 124439808.0 / memory)
    assert (t.tensor, t.bubble, t.messages, t.data) == (0, 0, 0, 0) and t.tokens_per_s == near(8 * 1024 / t.seconds)
    again = block - 8 * C * C * tokens / peak # another forward pass, without the MLP's last product; others' programs do all of it
    assert p.but(kept=INPUTS).step().compute == near(2 * (12 * (3 * block + again) + 3 * head))
    assert p.but(kept=INPUTS, program=LLMC).step().compute == near(2 * (12 * 4 * block + 3 * head))


@pytest.mark.parametrize("zero, each", [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_bytes_of_states(zero, each):
    p = mesh_of("gpt2", "h100", 8, 1, 1, zero, 8, 1)
    b, wide = p.bytes(), p.but(program=p.program._replace(gradient_bytes=4)).bytes() # shards of ZeRO-3 are fp32 in any case
    assert wide.gradients == near((1 if zero == 3 else 2) * b.gradients)
    assert b.parameters + b.gradients + b.optimizer == near(each * 124439808) and (b.gathered > 0) == (zero == 3)
    assert b.activations == near(1024 * (12 * 2 * 16 * 768.0 + 2 * 50257.0)) # and the logits
    p = mesh_of("gpt2", "h100", 1, 4, 1, 0, 1, 1)
    assert p.bytes().activations - p.but(rows=True).bytes().activations == near(1024 * 12 * 2 * 3 * 768.0) # C of 4 C are left


def test_a_pipeline():
    p = mesh_of("gpt2", "h100", 1, 1, 2, 0, 8, 1, program=LLMC) # equal stages
    forward, backward, _, head = p.block_compute()
    stage, t, chunked = 6 * (forward + backward) + 3 * head, p.step(), p.but(v=2) # the last
    assert 2 * t.compute == near(p.but(p=1).step().compute)
    assert t.compute + t.bubble == near((8 + 1) * stage) # 8 micro-batches, and one bubble
    assert t.messages == near(2 * 9 * (2 * 1024 * 768 / 370e9 + 10e-6))
    assert t.compute + chunked.step().bubble == near(8.5 * stage)
    # it keeps two micro-batches of six blocks, and with two chunks a half more of the difference
    assert p.bytes().activations == near(2 * 6 * 1024 * 2 * 16 * 768.0)
    assert chunked.bytes().activations == near(2.5 * 6 * 1024 * 2 * 16 * 768.0)
    # our programs' stages are balanced: 12 blocks and a head of 5.46 blocks are cut into 9 and 3
    ours, block = mesh_of("gpt2", "h100", 1, 1, 2, 0, 8, 1).step(), forward + backward
    slowest = max(9 * block, 3 * block + 3 * head)
    assert ours.compute + ours.bubble == near(8 * slowest + (12 * block + 3 * head - slowest))


def test_what_zero_sends(monkeypatch):
    """Two nodes of one GPU, whose hops take no time: ZeRO-1 reduces and gathers once a step, ZeRO-2 reduces in each of 4
    micro-batches."""
    monkeypatch.setitem(LINKS, "slow", link_of(0, 1e6)) # nothing hides what takes so long
    network_of_gpu.cache_clear()
    p = mesh_of("gpt2", "mi300x", 2, 1, 1, 1, 8, 1, chip=GPUS["mi300x"]._replace(per_node=1, nics=1, nic="slow"))
    half, (forward, backward, _, _) = 2 * p.shape.parameters() / 2 / 1e6, p.block_compute() # of all parameters, seconds
    data = lambda zero: p.but(zero=zero).step().data
    assert data(1) == near(half - 12 * backward + half - 12 * forward)
    assert data(2) == near(3 * (half - 12 * backward - 12 * forward) + half - 12 * backward + half - 12 * forward)
    assert data(0) == near(2 * half - 12 * backward)


def test_meshes_share_interfaces():
    w, p = network_of_gpu(GPUS["h100"]), mesh_of("gpt3-175b", "h100", 1, 16, 1, 0, 8, 1)
    assert w.apart(128, 1, 4) == Group(4, 4, 1) and w.apart(128, 16) == Group(8, 1, 8) and w.apart(128, 4, 4) == Group(4, 2, 4)
    assert p.collective(16, 1, False, 1e8) > p.collective(8, 1, False, 1e8)
    q = mesh_of("gpt3-175b", "rtx4090", 8, 1, 1, 0, 8, 1)
    assert q.rate(1, 16) == 12e9 and q.rate(8, 2) == 12e9 / 8 # 8 ranks, 1 interface


@pytest.mark.parametrize("T, ring, waits", [(2048, True, True), (262144, True, False), (262144, False, True)])
def test_ranks_that_share_sequences(T, ring, waits):
    p = mesh_of("llama3-8b", "h100", 2, 2, 1, 1, 8, 1, c=4, T=T)
    p, alone = p.but(program=p.program._replace(ring=ring)), p.but(c=1, d=8)
    # K and V of 1024 channels, of which a rank has half
    nbytes, hop = 2 * T / 4 * 2 * 1024 / 2, 2 * T / 4 * 2 * 1024 / 2 / 370e9 + 10e-6
    part = 2 * 4096 * T * T / 4 / 2 / (989e12 * 0.62) / 4
    exposed = 3 * 3 * max(0, hop - part) if ring else 3 * p.collective(4, 2, False, 4 * nbytes)
    assert p.N == alone.N == 16 and p.context_waits() == near(exposed) and (exposed > 0) == waits
    assert p.but(kept=INPUTS).context_waits() == near(4 / 3 * exposed)
    # states are sharded alike
    assert p.bytes()[:3] == near(alone.bytes()[:3]) and p.bytes().activations == near(alone.bytes().activations / 4)
    assert p.step().compute == near(alone.step().compute) # four times the micro-batches of a quarter
    assert p.error() is None and p.but(T=T + 2).error() == "sequences do not divide"
    assert p.but(t=8, d=1).rate(8, 4) == 47e9 and p.rate(2, 4) == 370e9 # of a node's 8 interfaces


@pytest.mark.parametrize("shape, d, t, p, zero, v, batch, error", [
    # 8 of keys and values
    ("gpt2", 1, 8, 1, 0, 1, 8, "heads do not divide"), ("llama3-8b", 1, 16, 1, 0, 1, 16, "heads do not divide"),
    ("gpt2", 3, 1, 1, 0, 1, 8, "the batch does not divide"), ("gpt2", 1, 1, 13, 0, 1, 8, "there are fewer blocks than stages"),
    ("gpt2", 1, 1, 3, 0, 2, 8, "micro-batches do not divide over stages"), ("gpt2", 2, 2, 2, 1, 1, 8, None)])
def test_what_cannot_be(shape, d, t, p, zero, v, batch, error):
    assert mesh_of(shape, "h100", d, t, p, zero, batch, 1, v=v).error() == error


@pytest.mark.parametrize("gpu, zero", itertools.product(GPUS, range(4)))
def test_what_holds_for_every_mesh(gpu, zero):
    for shape, t in itertools.product(SHAPES, (1, 2, 4, 8)):
        p = mesh_of(shape, gpu, 16, t, 1 if zero > 1 else 4, zero, 512, 1)
        if p.error(): continue
        s, b, inputs, before = p.step(), p.bytes(), p.but(kept=INPUTS), p.but(zero=max(zero - 1, 0)).bytes()
        assert sum(getattr(s, part) for part in PARTS) == near(s.seconds) and min(getattr(s, part) for part in PARTS) >= 0
        assert 0 < s.mfu < p.chip.products == (0.75 if gpu in ("a100-40", "a100-80", "a10", "rtx4090") else 0.62)
        # recomputation computes more and keeps less; a higher stage keeps less of the states
        assert inputs.step().compute > s.compute and inputs.step().seconds > 0.9999 * s.seconds
        assert inputs.bytes().activations < b.activations and (zero == 0 or sum(b[:3]) < sum(before[:3]))


# ---- what others have published ----
def published(source, model, kind, gpus=8):
    return next(r for r in ROWS if (r.source, r.model, r.kind, r.gpus) == (source, model, kind, gpus))


def test_published_rows_are_possible():
    assert len(ROWS) == 221
    for r in ROWS:
        assert (r.value > 0 or r.kind == "fits") and (r.gpu in GPUS or r.gpu in ("v100-32", "h100-96")) and r.bits in (8, 16)
        assert r.kept in ("", ALL, SELECTED, HALF, INPUTS) and 0 <= r.zero <= 3
        if r.source.startswith("ZeRO"): continue
        s = SHAPES[r.model]
        assert s.NH % r.tp == 0 and r.batch % (r.micro * r.dp) == 0, r
        # 126 blocks on 8 ranks do not divide: embedding and head count as one block each
        assert (s.L + (2 if s.L == 126 else 0)) % (r.pp * r.chunks) == 0, r


@pytest.mark.parametrize("model, gpus", [("22b", 8), ("175b", 64), ("530b", 280), ("1t", 512), ("530b", 2240)])
def test_korthikantis_utilizations_agree_with_seconds(model, gpus):
    mfu = published("Megatron 2022, table 5", f"megatron-{model}", "mfu", gpus)
    t, after, s = ROWS[ROWS.index(mfu) - 1], ROWS[ROWS.index(mfu) + 1], SHAPES[mfu.model] # rows cut, attention recomputed
    assert (t.kind, t.gpus, t.kept) == ("seconds", gpus, "selected")
    assert 100 * t.batch * t.T / (t.value * gpus * 312e12) * s.flops(t.T, False) == pytest.approx(mfu.value, rel=0.006)
    # section 6.3, "approximately"
    if after.kind == "hfu": assert after.value / mfu.value == pytest.approx(1 + t.T / (6 * s.C), rel=0.01)


def test_other_figures_agree_with_one_another():
    def llmc(kind): return published("llm.c", "gpt2-xl", kind).value
    s = SHAPES["gpt2-xl"]
    assert 1024 * 1024 / (llmc("tokens") * 8) == pytest.approx(llmc("seconds"), rel=1e-4)
    mfu = 100 * s.flops_per_token(1024) * 1048576 / (llmc("seconds") * 8 * 989e12) # llm.c's own count
    assert mfu == pytest.approx(llmc("mfu"), rel=0.002)
    # its log: 2 bytes a parameter, and of three kinds of 4 bytes an eighth; it pads the vocabulary
    elements = s.parameters() + (50304 - 50257) * 1600
    assert llmc("weights_mib") == llmc("gradients_mib") == 2 * elements // MIB
    assert llmc("optimizer_mib") == 3 * (elements // 2 // MIB)
    first = ROWS.index(published("torchtitan", "llama3-8b", "tokens")) # torchtitan: "33% to 39% MFU" of its first two rows
    percent = 100 * SHAPES["llama3-8b"].flops(8192, False) / 989e12
    assert [ROWS[first + k].value * percent for k in (0, 2)] == pytest.approx([33.5, 39], rel=0.03)


@pytest.mark.parametrize("source, times, sharded, n, most", [ # sharded: ZeRO-3's
    ("ZeRO, table 1", False, False, 54, 0.025), ("ZeRO, table 2", False, False, 20, 0.025), ("llm.c", False, False, 4, 0.012),
    ("torchtitan", False, False, 4, 0.14), ("Megatron 2021, table 1", False, False, 10, 0.03),
    ("Megatron 2021, table 1", True, False, 10, 0.13), ("Megatron 2021, table 2", True, False, 6, 0.11),
    ("Megatron 2022, table 4", True, False, 10, 0.05), ("Megatron 2022, table 5", True, False, 14, 0.12),
    ("llm.c", True, False, 6, 0.06), ("FSDP", True, True, 3, 0.22), ("torchtitan", True, True, 4, 0.25),
    ("NeMo", True, False, 15, 0.07),
    ("Llama 3", True, False, 6, 0.11), ("torchtitan, tp 8", True, True, 4, 0.38), ("Megatron 2021, table 2", True, True, 6, 0.28)])
def test_published_bytes_and_times(source, times, sharded, n, most):
    rows = [r for r in ROWS if r.source == source and (r.kind in TIMES) == times and (times and r.zero == 3) == sharded]
    found = offs([(r, predict(r, 2e9)) for r in rows], {r.kind for r in rows})
    assert len(found) == n and max(found) <= most


def test_medians_of_published_rows_and_largest_models_that_ran():
    assert all(r.value <= 32 * r.tp / state_bytes(r) for r in ROWS if r.kind == "largest_ran_b")
    found = summary([(r, predict(r, 2e9)) for r in ROWS])
    assert found["bytes"] < 0.05 and found["times"] < 0.10


def test_rows_that_set_no_constant_are_as_near_as_the_page_says():
    """doc/reference/plan_validation.md: 17 times set constants; of the other 58, half are within 6.7 %, and 48 within 15 %; of
    the 39 of these that depend on no assumption of ours and no table that we had seen, half are within 7.8 %, and 29 within 15 %."""
    timed = [r for r in ROWS if r.kind in COUNTED["times"] and predict(r, 2e9) == predict(r, 2e9)] # the others are NaN
    first = [next(r for r in timed if r.source == source) for source in ("torchtitan", "NeMo")]
    others = [r for r in timed if r not in first and r.source not in ("llm.c", "Megatron 2022, table 4")]
    blind = [r for r in others if r.source not in ("Llama 3", "Megatron 2021, table 1") and r.note != "mesh assumed"]
    assert len(timed) == 75
    for rows, count, near, median in (others, 58, 48, "6.7"), (blind, 39, 29, "7.8"):
        found = offs([(r, predict(r, 2e9)) for r in rows], TIMES)
        assert (len(found), sum(x <= 0.15 for x in found), f"{100 * statistics.median(found):.1f}") == (count, near, median)


def test_torchtitans_traffic_fits_the_gain_of_its_compiler_and_not_its_speed(monkeypatch):
    """doc/reference/plan_validation.md: errors of 20 and 18 %, and compiling gains 16 %, 14 % in our prediction; with a factor of
    5.0 there would be no error, but a gain of 37 %."""
    rows = [r for r in ROWS if r.source == "torchtitan" and r.kind == "tokens"][:2]
    assert [r.note for r in rows] == ["", "compiled"]
    def rounded(*ratios): return [round(100 * (x - 1)) for x in ratios]
    def errors_and_gain():
        eager, compiled = (predict(r, 2e9) for r in rows)
        return rounded(eager / rows[0].value, compiled / rows[1].value, compiled / eager)
    assert errors_and_gain() == [20, 18, 14] and rounded(rows[1].value / rows[0].value) == [16]
    monkeypatch.setitem(PROGRAMS, "torchtitan", PROGRAMS["torchtitan"]._replace(passes=5.0))
    assert errors_and_gain() == [0, 18, 37]


def test_gathers_that_are_slower_than_links():
    """DeepSpeed's of 2021: 5.1e9 parameters in 16 bits in 410 ms on 8 ranks, whatever the links have; and nothing hides them."""
    p = mesh_of("gpt3-13b", "a100-80", 8, 1, 1, 3, 8, 1)
    slow, s, once = p.but(program=DEEPSPEED_2021), p.shape, 2 / 10.2e9 * 0.410 # of a parameter
    assert p.data_collective(False, 10.2e9) < 0.1
    assert (slow.data_collective(False, 10.2e9), slow.data_collective(True, 10.2e9)) == near((0.410, 0.820))
    # twice gathered, once reduced; the root gathered once
    assert slow.step().data == near(once * (3 * s.parameters() - s.root_parameters()))


# ---- search ----
@pytest.mark.parametrize("shape, gpu, ranks, batch, T, found", [
    ("gpt2", "h100", 8, 512, 1024, lambda p: p.d == 8 and p.zero <= 1 and p.kept == ALL), # it fits on one: data parallelism
    ("gpt2-xl", "rtx4090", 8, 64, 1024, lambda p: p.d < 8 or p.zero > 0), # it does not
    ("gpt3-175b", "h100", 512, 1536, 2048, lambda p: 1 < p.t <= 8 and p.p > 1), # in a node, and between nodes
    ("llama3-8b", "h200", 64, 512, 8192, lambda p: p.d == 64), ("llama3-405b", "b200", 1024, 2048, 8192, lambda p: p.t <= 8),
    ("gpt3-13b", "mi300x", 16, 256, 2048, lambda p: p.t == 1)])
def test_results_are_in_order(shape, gpu, ranks, batch, T, found):
    results = search(SHAPES[shape], GPUS[gpu], ranks, batch, T, 2e9)[0]
    assert found(results[0].plan)
    fits = [r for r in results if r.error is None]
    assert fits == results[:len(fits)] != []
    for i, r in enumerate(results):
        assert r.plan.N == ranks and (r.error is None) == (r.time is not None) # nothing is timed that does not fit
        assert i >= len(fits) or r.total <= r.plan.chip.memory
    assert [r.total for r in results[len(fits):]] == sorted(r.total for r in results[len(fits):]) # what nearly fits is first
    for a, b in zip(fits, fits[1:]): # the faster first, or of those that take as long the one with less machinery
        assert b.time.seconds > 0.995 * a.time.seconds
        assert b.time.seconds >= a.time.seconds or machinery(b.plan) >= machinery(a.plan)
    assert {(r.plan.d, r.plan.t, r.plan.p) for r in results} >= {(ranks, 1, 1), (ranks // 2, 2, 1), (ranks // 2, 1, 2)}
