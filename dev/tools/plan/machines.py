"""Presets of GPUs, of the nodes in which they are sold, and of links; this machine or the cluster on it, as dev/bench/here.py has
measured it; and the seconds of messages and collectives over links.

FLOP/s    are dense, of the matrix units in 16 bits, and of the vector units in fp32.
Memory    is what the vendor's tool reports of the whole device (nvidia-smi, rocm-smi). A process gets some hundred MB less.
Links     are bandwidths of one direction: NVLink 3 has 12 links, 4 and 5 have 18; an MI300X has 7 of 64 GB/s. Interfaces are those
          of the vendors' 8-GPU machines. 100 Gb/s for all of a machine with PCIe is a guess.
Nodes     NVIDIA's user guides of the DGX machines (without interfaces for storage). AWS's page of P4 and P5 instances; the 32
          interfaces of a p5 are taken as 8 of 400 Gb/s. Google's page of GPU networks. The workstation is a guess.
Sources   NVIDIA's data sheets of A10, A100 (1758950-r4), H100, H200, Blackwell (3384703) and the Ada GPU architecture white paper;
          AMD's of the Instinct MI300X. Peaks agree with torchtitan/tools/utils.py (b5bcd76).
Seconds   are those of a ring (doc/plan.md), or of a tree, whose hops are counted as in NCCL (src/graph/tuning.cc). busbw is defined
          as in nccl-tests.
"""
import math, os
from typing import NamedTuple
import nccl
from nccl import AMPERE, BLACKWELL, HOPPER
from tool import ceil_div, read_json, require, unique_keys

MIB = 1048576


class Gpu(NamedTuple):
    name: str
    what: str
    peak16: float            # FLOP/s
    peak32: float
    memory: float            # bytes
    bandwidth: float         # bytes/s of the device's memory
    inside: float            # bytes/s that a GPU sends to others of its node
    nic: float               # bytes/s of an interface
    nics: int                # of a node
    watts: float             # of the whole device, at most
    generation: int
    nccl_inside: float       # GB/s of `inside` as NCCL counts it; 0: collectives are not NCCL's
    nvlink: bool             # with a switch; else PCIe
    amd: bool                # the node's processors
    per_node: int = 8
    hop: float = 5e-6        # seconds of a hop where collectives are not NCCL's
    mfu: float = 1           # measured: the share of its peak that a step reaches; bytes/s of its update
    update: float = 0


GPUS = {row[0]: Gpu(*row) for row in (
    ("a100-40", "A100 SXM, 40 GB", 312e12, 19.5e12, 40960 * MIB, 1555e9, 300e9, 25e9, 8, 400, AMPERE, 12 * 20.0, True, True),
    ("a100-80", "A100 SXM, 80 GB", 312e12, 19.5e12, 81920 * MIB, 2039e9, 300e9, 25e9, 8, 400, AMPERE, 12 * 20.0, True, True),
    ("h100", "H100 SXM, 80 GB", 989e12, 67e12, 81559 * MIB, 3350e9, 450e9, 50e9, 8, 700, HOPPER, 18 * 20.6, True, False),
    ("h200", "H200 SXM, 141 GB", 989e12, 67e12, 143771 * MIB, 4800e9, 450e9, 50e9, 8, 700, HOPPER, 18 * 20.6, True, False),
    ("b200", "B200 SXM, 180 GB", 2250e12, 80e12, 183359 * MIB, 8e12, 900e9, 50e9, 8, 1000, BLACKWELL, 18 * 40.1, True, False),
    ("a10", "A10, 24 GB", 125e12, 31.2e12, 23028 * MIB, 600e9, 31.5e9, 12.5e9, 1, 150, AMPERE, 24, False, True),
    ("rtx4090", "GeForce RTX 4090, 24 GB", 165.2e12, 82.6e12, 24564 * MIB, 1008e9, 31.5e9, 12.5e9, 1, 450, AMPERE, 24, False, True),
    ("mi300x", "Instinct MI300X, 192 GB", 1307.4e12, 163.4e12, 206141652992, 5300e9, 448e9, 50e9, 8, 750, HOPPER, 0, False, True))}
GPU_NAMES = "|".join(GPUS)

NODES = { # GPU, its ranks in a node, interfaces, bytes/s of one
    "dgx-a100-40": ("a100-40", 8, 8, 25e9), "dgx-a100": ("a100-80", 8, 8, 25e9), "dgx-h100": ("h100", 8, 8, 50e9),
    "dgx-h200": ("h200", 8, 8, 50e9), "dgx-b200": ("b200", 8, 8, 50e9), "aws-p4d": ("a100-40", 8, 4, 12.5e9),
    "aws-p4de": ("a100-80", 8, 4, 12.5e9), "aws-p5": ("h100", 8, 8, 50e9), "gcp-a3-high": ("h100", 8, 4, 25e9),
    "gcp-a3-mega": ("h100", 8, 8, 25e9), "workstation": ("rtx4090", 4, 1, 1.25e9)}
NODE_NAMES = ", ".join(NODES)


# ---- links ----
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather"


def passes(collective): return 2 if collective == ALL_REDUCE else 1


class Link(NamedTuple):
    alpha: dict              # of each collective, seconds per hop
    busbw: dict              # bytes per second that a rank sends
    measured: bool = False   # between nodes: with all of a node's interfaces, as nccl-tests define it


# Bandwidths are the vendors', and collectives reach less; alphas are what NCCL assumes for a hop of its ring with large messages
# (hwLat in src/graph/tuning.cc of 2.18 and later).
LINKS = {
    "nvlink": ("NVLink 4, 450 GB/s per direction", 3.4e-6, 450e9),         # half of the H100's 900 GB/s both ways
    "nvlink3": ("NVLink 3, 300 GB/s per direction", 3.4e-6, 300e9),        # of the A100's 600
    "nvlink2": ("NVLink 2, 150 GB/s per direction", 3.4e-6, 150e9),        # of the V100's 300
    "pcie": ("PCIe 4.0 x16, 31.5 GB/s per direction", 5.7e-6, 31.5e9),     # 16 lanes x 16 GT/s x 128/130 / 8
    "infiniband": ("NDR InfiniBand, 50 GB/s per interface", 14e-6, 50e9),  # 400 Gb/s
    "hdr": ("HDR InfiniBand, 25 GB/s per interface", 14e-6, 25e9)}         # 200 Gb/s


# The same for all collectives.
def link_of(alpha, busbw): return Link(dict.fromkeys(COLLECTIVES, alpha), dict.fromkeys(COLLECTIVES, busbw))
def open_link(name, inside=False): return link_of(*LINKS[name][1:]) if name in LINKS else read_link(name, inside)


def number_in(root, path, remedy, low, *keys):
    """Of a file of JSON, at least `low`."""
    x = root
    for key in keys: x = x.get(key) if isinstance(x, dict) else None
    require(isinstance(x, (int, float)) and not isinstance(x, bool) and x >= low,
            f'{path}: has no number "{".".join(keys)}" from {low:g} on; {remedy}')
    return x


def crossing(g, N):
    """How many times a rank's part all g ranks of a node together send to the other nodes, if each sends to each of N ranks; in a
    ring once."""
    return g * (N - g) / (N - 1)


def read_link(path, inside=False):
    """What dev/comm measured on ranks of one machine; or on those of a cluster, and if it has several of them inside a node. Its alpha
    is for a whole call, ours for a hop."""
    remedy = f"--link and --inter-link want {', '.join(LINKS)} or a file that comm_bench --json wrote"
    root = read_json(path, remedy, object_pairs_hook=unique_keys)
    if inside and isinstance(root, dict): root = root.get("inside", root)
    ranks = number_in(root, path, remedy, 2, "ranks")
    g = number_in(root, path, remedy, 1, "ranks_per_node") if "ranks_per_node" in root else 0
    require(g == 0 or (ranks > g and ranks % g == 0), f"{path}: {ranks} ranks are no nodes of {g}; {remedy}")
    hops = (ranks // g if g else ranks) - 1
    alpha, busbw = ({name: number_in(root, path, remedy, low, "collectives", name, key) for name in COLLECTIVES}
                    for key, low in (("alpha", 0), ("busbw", 1)))
    if g: busbw = {name: x * (1 if name == ALL_REDUCE else crossing(g, ranks)) for name, x in busbw.items()} # of a node's interface
    return Link({name: x / passes(name) / hops for name, x in alpha.items()}, {name: float(x) for name, x in busbw.items()}, True)


# ---- this machine: --here ----
MEASURED = "build/here.json", "build/here_cluster.json" # of the machine, of the cluster on it


def this_machine(path):
    """As the file says, if there is one: peak, bandwidth and links. Without it only the memory is known. Besides links, which
    --link reads as well, it has numbers of each rank, measured while as many ranks compute as will train."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = Gpu("cpu-here", "equal share of this machine", 0, 0, memory, 0, 0, 0, 0, 0, AMPERE, 0, True, True, per_node=0)
    if not os.access(path, os.R_OK): return here
    remedy = "--measured wants the file that dev/bench/here.py wrote"
    root, inside, between = read_json(path, remedy), read_link(path, True), read_link(path)
    # GFLOP/s of large fp32 products; GB/s of memory, read and written; what a step of train_gpt2_single reaches of both
    flops, copied, mfu, update = (scale * number_in(root, path, f"renew it with dev/bench/here.py; {remedy}", 1e-3, key)
                                  for key, scale in (("gflops", 1e9), ("copy", 1e9), ("mfu", 1), ("update", 1e9)))
    return here._replace(peak32=flops, bandwidth=copied, inside=inside.busbw[ALL_GATHER], nic=between.busbw[ALL_GATHER],
                         hop=between.alpha[ALL_GATHER], mfu=mfu, update=update, per_node=root.get("ranks_per_node", 0), nics=1)


# ---- seconds ----
class Group(NamedTuple):
    """N ranks, of which at most per_node are in a node, whose interfaces `sharing` such groups use at the same time."""
    N: int
    per_node: int
    sharing: int = 1


class Network(NamedTuple):
    inside: Link             # inside a node; between nodes
    between: Link
    per_node: int = 0        # ranks of a node; 0: all ranks are in one node
    nics: int = 0            # network interfaces of a node
    algorithm: str = "ring"  # ring or tree decides the number of hops, direct what crosses; nccl: what NCCL takes on `gpu`
    gpu: Gpu = None
    efficiency: float = 1    # share of the links' bandwidth that collectives reach
    sm_share: float = 0      # share of a device's processors that communication takes beside compute

    def world(self, N): return Group(N, self.per_node if 0 < self.per_node < N else N)

    def neighbours(self, N, t):
        """t neighbours. If t does not divide a node's ranks, some of the groups are in two nodes, and the others wait for them."""
        g = self.world(t)
        return g._replace(per_node=t - 1) if t < self.per_node < N and self.per_node % t != 0 else g

    def apart(self, N, t):
        """N/t ranks, each t ranks after the one before."""
        return self.strided(N, N // t, t)

    def strided(self, N, n, t):
        """n of N ranks, each t ranks after the one before."""
        node = self.per_node or N
        return Group(n, min(max(node // t, 1), n), min(t, node))

    def seconds(self, collective, nbytes, g):
        """Of a collective of a group; nbytes: of its largest buffer."""
        if g.N == 1: return 0
        if self.algorithm == "nccl":
            group = nccl.gpu_group(self.gpu._replace(nics=max(self.nics, 1)), g.N, g.per_node, g.sharing)
            return nccl.choose(group, collective == ALL_REDUCE, nbytes / self.efficiency).seconds
        nodes = ceil_div(g.N, g.per_node)
        between, inside = nodes - 1, g.N - nodes
        if self.algorithm == "tree": between, inside = math.ceil(math.log2(nodes)), g.per_node - 1
        busbw = self.inside.busbw[collective] if g.per_node > 1 else math.inf
        if nodes > 1:
            direct = self.algorithm == "direct" and collective != ALL_REDUCE
            crosses = g.sharing * (crossing(g.per_node, g.N) if direct else 1)
            busbw = min(busbw, (1 if self.between.measured else self.nics) * self.between.busbw[collective] / crosses)
        hops = inside * self.inside.alpha[collective] + between * self.between.alpha[collective]
        return passes(collective) * (hops + nbytes * (g.N - 1) / g.N / (busbw * self.efficiency))

    def world_seconds(self, collective, nbytes, N): return self.seconds(collective, nbytes, self.world(N))
