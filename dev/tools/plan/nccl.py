"""The seconds that NCCL itself expects of a collective, from which it chooses an algorithm and a protocol.

Source    github.com/NVIDIA/nccl, 2.30.7 (commit 5067397): constants and formulas are of src/graph/tuning.cc, the bandwidth of a
          link is of src/graph/topo.h, and the speeds that a channel can have are of src/graph/search.cc.
Model     seconds = latency + bytes/bandwidth, for each algorithm and protocol; NCCL takes the least. A ring's latency grows
          with ranks, a tree's with log2(nodes), NVLS's (the switch adds up) with neither. The protocol LL sends 4 bytes of
          data with each 4 of a flag, LL128 120 of 128, Simple sends whole chunks and then tells.
Channels  NCCL searches rings and trees in the machine's topology. Here the search is what it finds in nodes whose GPUs are
          all equally near: the fastest channels of which the link has room for as many as give the greatest sum.
Not here  CollNet (SHARP), broadcast, user buffers, POWER's CPUs, nodes of unequal size, and RCCL, which has other constants.
"""
import math
from collections import namedtuple
from functools import cache
from typing import NamedTuple
from tool import ceil_div

AMPERE, HOPPER, BLACKWELL = 1, 2, 3 # generations of NVIDIA's GPUs, 0: Volta
TREE, RING, NVLS, NVLS_TREE, PAT = range(5)
LL, LL128, SIMPLE = range(3)
MOST_CHANNELS = 32 # of a ring, before any is doubled


class Group(NamedTuple):
    """Of its ranks, per_node are in each node. GB/s are 1e9 bytes per second, and of one direction."""
    gpu: tuple               # machines.Gpu
    nic: float               # GB/s of a network interface, as far as this group has it alone
    nics: float              # interfaces that the group has in a node
    ranks: int
    per_node: int

    nodes = property(lambda self: ceil_div(self.ranks, self.per_node))


Graph = namedtuple("Graph", "channels speed_inside speed") # channels that each move so many GB/s inside and between nodes


def gpu_group(gpu, ranks, per_node, sharing):
    """A group of ranks as NCCL sees it. sharing: groups that use a node's interfaces at the same time."""
    share = gpu.nics / sharing
    nic, nics = 1e-9 * gpu.nic * min(share, 1), float(max(1, min(math.floor(share), per_node)))
    return Group(gpu, nic, nics, ranks, per_node)


# The speeds that search.cc tries for a channel, fastest first: in one node, between nodes.
SPEEDS = ((40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3), (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, .24, .12))
SPEEDS_90 = ((60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3), (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, .24, .12))
SPEEDS_100 = ((90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
              (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, .24, .12))


def speeds_of(g): return {HOPPER: SPEEDS_90, BLACKWELL: SPEEDS_100}.get(g.gpu.generation, SPEEDS)[g.nodes > 1]


def room(g, speed, link):
    """How many channels of this speed have room: on a GPU's link, if others are in its node, on the interfaces, and in NCCL."""
    inside = math.floor(link / speed + 1e-9) if g.per_node > 1 else MOST_CHANNELS
    between = math.floor(g.nic / speed + 1e-9) * g.nics if g.nodes > 1 else MOST_CHANNELS
    return int(min(inside, between, MOST_CHANNELS))


@cache
def ring_graph(g):
    channels, speed = 0, 0
    for x in speeds_of(g):
        n = room(g, x, g.gpu.nccl_inside)
        if channels > 0 and x <= .49 * speed: break
        if n * x > channels * speed: channels, speed = n, x
    if channels == 0: # slower than all that NCCL tries
        least = min(g.gpu.nccl_inside if g.per_node > 1 else math.inf, g.nic * g.nics if g.nodes > 1 else math.inf)
        return Graph(1, least, least)
    # ncclTopoDupChannels: two half as fast, except where the GPU drives a few fast ones as well
    if speed < 25 or (g.gpu.generation >= HOPPER and speed < 50 and channels > 4): return Graph(channels, speed, speed)
    doubled = min(channels * 2, MOST_CHANNELS)
    speed /= ceil_div(doubled, channels)
    return Graph(doubled, speed, speed)


@cache
def tree_graph(g):
    """As many channels as the ring, the fastest of which there is room for so many: they need not come back to where they began.
    Inside a node they may be up to twice as fast, where the link has room."""
    ring, link = ring_graph(g), g.gpu.nccl_inside * g.per_node / (g.per_node - 1) if g.per_node > 1 else g.gpu.nccl_inside
    speed = inside = next((x for x in speeds_of(g) if room(g, x, link) >= ring.channels), ring.speed)
    for x in reversed(speeds_of(g) if g.per_node > 1 else ()):
        if x > inside and inside < 2 * speed and x * ring.channels <= link: inside = x
    return Graph(ring.channels, inside, speed)


@cache
def nvls_graph(g):
    """The switch's channels, at most one for each GPU of the node, each through an interface of its own. Each takes bandwidth of
    every GPU once, and of one GPU twice. Between nodes they may be up to twice as fast, where the interfaces are."""
    speeds, one = speeds_of(g), g.nodes == 1
    channels, inside, chosen = 0, 0, 0
    if not g.gpu.nvlink or g.gpu.generation < HOPPER or g.per_node < 2: return Graph(0, 0, 0)
    for i, x in enumerate(speeds):
        if channels >= g.per_node or (channels > 0 and x <= .49 * inside): break
        n = int(min(math.floor(g.gpu.nccl_inside / x + 1e-9) - 1, g.per_node))
        if not one: n = int(min(n, g.nics if x <= g.nic else 0))
        if n < (g.per_node if one else 1) or (n <= channels and n * x <= channels * inside): continue
        channels, inside, chosen = n, x, i
    speed = inside
    while channels > 0 and chosen > 0 and speed < 2 * inside and (one or speeds[chosen - 1] <= g.nic):
        chosen -= 1
        speed = speeds[chosen]
    return Graph(channels, inside, speed)


# ---- bandwidth in GB/s of the largest buffer; 0: what NCCL does not allow, without variables of the environment ----
# The most of a channel, by generation and in one node, two, more. LL's: of all channels; between nodes by the processor.
NVLS_MOST = ((26.5, 18.5, 10), (24, 23.6, 17.8), (0, 57.7, 45.5), (0, 96, 80))
LL_MOST = ((39, 39, 20.4), (87.7, 22.5, 19), (141, 45, 35), (282, 90, 70))
RING_LL128_MOST = (20, 20, 36.7, 40)
TREE_MOST = ((26.5, 18.5, 10), (24, 23.6, 17.8), (38.7, 41.4, 36), (70, 42.8, 24))
TREE_LL128_MOST = ((20, 20, 20), (20, 20, 20), (36.7, 36.7, 29), (55.6, 31.67, 20))


def nvls_busbw(g, algorithm, all_reduce):
    """GB/s that a rank sends with NVLS or a tree of such nodes."""
    graph, ppn = nvls_graph(g), g.ranks / g.nodes
    if graph.channels < 2: return 0
    inside = graph.speed_inside * (0, 0, .85, .74)[g.gpu.generation] * (graph.channels - 1) / graph.channels
    inside *= 2 if all_reduce else (ppn - 1) / ppn
    bw = min(inside, graph.speed * (2 if g.nodes <= 2 and algorithm == NVLS_TREE else 1))
    if algorithm == NVLS_TREE: bw = min(bw, NVLS_MOST[g.gpu.generation][min(g.nodes, 3) - 1])
    return graph.channels * bw


@cache
def bandwidth(g, algorithm, protocol, all_reduce):
    column, one_each = min(g.nodes, 3) - 1, g.per_node == 1 # of the tables; whether ranks are alone in their nodes
    ll_most = LL_MOST[g.gpu.generation if g.nodes == 1 else g.gpu.amd][column]
    steps = (2 if all_reduce else 1) * (g.ranks - 1)
    if protocol == LL128 and not (g.gpu.nvlink or one_each): return 0
    if algorithm == RING:
        graph = ring_graph(g)
        busbw = graph.channels * graph.speed
        if protocol == LL: busbw = min(ll_most, busbw * .5)
        if protocol == LL128: busbw = min(busbw * .92, graph.channels * RING_LL128_MOST[g.gpu.generation])
        return busbw * g.ranks / steps
    tree = tree_graph(g)
    busbw = tree.channels * (tree.speed_inside if g.nodes <= 2 else tree.speed)
    if algorithm == TREE:
        busbw = min(busbw * .92, tree.channels * TREE_MOST[g.gpu.generation][column])
        if protocol == LL: busbw = min(busbw / 3.8, ll_most)
        if protocol == LL128: busbw = min(busbw * (7.0 / 9 if g.nodes == 1 else 120.0 / 128),
                                          tree.channels * TREE_LL128_MOST[g.gpu.generation][column])
        if one_each: busbw *= .85 # a chain, not two trees that share the work
        return busbw * .5 if all_reduce else 0
    if protocol != SIMPLE: return 0
    if algorithm == PAT: return busbw * .75 if one_each and g.nodes > 1 and not all_reduce else 0
    if g.nodes > 1 and (algorithm == NVLS or not all_reduce) or g.nodes == 1 and algorithm == NVLS_TREE: return 0
    return nvls_busbw(g, algorithm, all_reduce) * (g.ranks / steps if all_reduce else 1)


# ---- latency, in microseconds: by algorithm and protocol ----
OVER_NVLINK = ((.6, 1.25, 4), (.6, 1.9, 3.4), (0, 0, 25), (0, 0, 25), (0, 0, 4))
OVER_PCI = ((1, 1.9, 4), (1, 2.5, 5.7), (0, 0, 0), (0, 0, 0), (0, 0, 4))
OVER_NET = ((5, 8.5, 14), (2.7, 4, 14), (0, 0, 18), (0, 0, 20.9), (0, 0, 14))
BASE = ((6.8, 14, 8.4), (6.6, 14, 8.4), (0, 0, 0), (0, 0, 0), (8, 8, 8))


@cache
def latency_of(g, algorithm, protocol, all_reduce):
    log, base = g.nodes.bit_length() - 1, BASE[algorithm][protocol]
    inside = (OVER_NVLINK if g.gpu.nvlink else OVER_PCI)[algorithm][protocol]
    # a rank that is alone in its node waits for all of a hop
    between = OVER_NET[TREE if g.per_node == 1 else algorithm][protocol]
    if algorithm == RING:
        overhead = 0 if g.nodes == 1 else (2 if g.gpu.amd else 1) * (3 if protocol == SIMPLE else 1) # of posting to the network
        return base + (2 if all_reduce else 1) * ((g.ranks - g.nodes) * max(inside, overhead) + (g.nodes - 1) * between)
    if algorithm == TREE: return base + 2 * ((g.ranks // g.nodes - 1) * inside + log * between)
    if algorithm == PAT: return base + log * (between / 3.5) + g.ranks * 2.8
    return inside + (2 * log * between if algorithm == NVLS_TREE else 0)


# ---- time ----
# Trees do not follow the model for medium sizes: NCCL's correction of their bandwidth, in tenths, from 64 bytes on by powers of 2.
CORRECTION = ((10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10),
              (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10, 10),
              (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9, 9))


def seconds_of(g, algorithm, protocol, all_reduce, nbytes):
    """Of one algorithm and protocol; nbytes: of the largest buffer. inf: not allowed."""
    bw, latency = bandwidth(g, algorithm, protocol, all_reduce), latency_of(g, algorithm, protocol, all_reduce)
    if bw <= 0: return math.inf
    if algorithm == TREE or (algorithm == NVLS_TREE and g.gpu.generation == BLACKWELL):
        log = -1 if nbytes < 64 else int(nbytes // 64).bit_length() - 1
        if 0 <= log < (23 if algorithm == TREE else 24): bw *= CORRECTION[protocol][log] / 10
    slow_ring = algorithm == RING and protocol == SIMPLE and all_reduce and g.nodes > 1
    if slow_ring and nbytes / (ring_graph(g).channels * g.ranks) >= 64: latency *= 1.9 if g.gpu.generation < AMPERE else 1.4
    return 1e-6 * latency + 1e-9 * nbytes / bw


Choice = namedtuple("Choice", "algorithm protocol seconds")


@cache
def choose(g, all_reduce, nbytes):
    """What NCCL chooses, and the seconds that it expects. nbytes: of the largest buffer."""
    if g.ranks == 1: return Choice(RING, SIMPLE, 0)
    choices = (Choice(a, p, seconds_of(g, a, p, all_reduce, nbytes)) for a in range(5) for p in range(3))
    return min(choices, key=lambda c: c.seconds)
