"""All rates: of links, GPUs, the machines in which they are sold, and this machine or the cluster on it, as here.py has measured
it; and the seconds of collectives.

Links     busbw is what nccl-tests measure of large messages, of gathers and of all-reduces: a switch of NVLink 4 or 5 adds up,
          so that an all-reduce sends each byte once (NVLS). NVLink 4: NVIDIA/nccl-tests issues 212 and 290; NVLink 5: NVIDIA/nccl
          issue 1807; PCIe: five RTX 4090 that reach one another (tinygrad/open-gpu-kernel-modules issue 17); Infinity Fabric: 7
          links of 48 GB/s (AMD's blog on RCCL and xGMI); 400 Gb/s: nccl-tests issue 290; 200: issue 119. NVLink 2 and 3 are 6 and
          12 links of 20 GB/s, as NCCL takes them (src/graph/topo.h). The two slowest networks reach as much of their rate as
          those of 200 Gb/s. A hop's latency is that of NCCL's ring with messages of a block's size (LL128 in
          src/graph/tuning.cc).
FLOP/s    are dense, of the matrix units in 16 bits, and of the vector units in fp32. Peaks agree with
          torchtitan/tools/utils.py (b5bcd76).
Memory    is what the vendor's tool reports of the whole device (nvidia-smi, rocm-smi). A process gets some hundred MB less.
Nodes     NVIDIA's user guides of the DGX machines (without interfaces for storage). AWS's page of P4 and P5 instances; the 32
          interfaces of a p5 are taken as 8 of 400 Gb/s. Google's page of GPU networks. The workstation, and 100 Gb/s for all of
          a machine with PCIe, are guesses.
Sources   NVIDIA's data sheets of A10, A100 (1758950-r4), H100, H200, Blackwell (3384703) and the Ada GPU architecture white paper;
          AMD's of the Instinct MI300X.
"""
import math, os
from collections import namedtuple
from functools import cache
from tool import ceil_div, read_json, require, unique_keys

MIB = 1048576
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather"


# By collective: alpha, seconds of a hop; busbw, bytes per second that a rank sends. of_node: between nodes, all interfaces of a
# node together.
Link = namedtuple("Link", "what alpha busbw of_node", defaults=(False,))


def link_of(alpha, gathers, sums=0, what="this link"):
    return Link(what, dict.fromkeys(COLLECTIVES, alpha), dict.fromkeys(COLLECTIVES, gathers) | {ALL_REDUCE: sums or gathers})


LINKS = {name: link_of(*rates, what) for name, what, *rates in (
    ("nvlink5", "NVLink 5", 1.9e-6, 720e9, 830e9), ("nvlink", "NVLink 4", 1.9e-6, 370e9, 480e9),
    ("nvlink3", "NVLink 3", 1.9e-6, 240e9, 240e9), ("nvlink2", "NVLink 2", 1.9e-6, 120e9, 120e9),
    ("xgmi", "Infinity Fabric", 1.9e-6, 336e9, 336e9), ("pcie", "PCIe 4.0 x16", 2.5e-6, 24.7e9, 24.7e9),
    ("infiniband", "400 Gb/s each", 4e-6, 47e9, 47e9), ("hdr", "200 Gb/s each", 4e-6, 24e9, 24e9),
    ("100gbit", "100 Gb/s each", 4e-6, 12e9, 12e9), ("10gbit", "10 Gb/s each", 4e-6, 1.2e9, 1.2e9))}


class Gpu(namedtuple("Gpu", "name what peak16 peak32 products memory bandwidth watts link nic nics per_node mfu update",
                     defaults=(8, 1, 0))):
    """FLOP/s; products: the share of the peak that large products reach (mesh.py); bytes and bytes/s of memory; watts: the limit
    of the whole device; link, nic: inside a node and between nodes, in LINKS or a file; nics, per_node: interfaces and ranks of a
    node. Measured: mfu, and bytes/s of an update."""
    def peak(self, precision): return self.peak32 if precision == "fp32" else self.peak16


GPUS = {row[0]: Gpu(*row) for row in (
    ("a100-40", "A100 SXM, 40 GB", 312e12, 19.5e12, 0.75, 40960 * MIB, 1555e9, 400, "nvlink3", "hdr", 8),
    ("a100-80", "A100 SXM, 80 GB", 312e12, 19.5e12, 0.75, 81920 * MIB, 2039e9, 400, "nvlink3", "hdr", 8),
    ("h100", "H100 SXM, 80 GB", 989e12, 67e12, 0.62, 81559 * MIB, 3350e9, 700, "nvlink", "infiniband", 8),
    ("h200", "H200 SXM, 141 GB", 989e12, 67e12, 0.62, 143771 * MIB, 4800e9, 700, "nvlink", "infiniband", 8),
    ("b200", "B200 SXM, 180 GB", 2250e12, 80e12, 0.62, 183359 * MIB, 8e12, 1000, "nvlink5", "infiniband", 8),
    ("a10", "A10, 24 GB", 125e12, 31.2e12, 0.75, 23028 * MIB, 600e9, 150, "pcie", "100gbit", 1),
    ("rtx4090", "GeForce RTX 4090, 24 GB", 165.2e12, 82.6e12, 0.75, 24564 * MIB, 1008e9, 450, "pcie", "100gbit", 1),
    ("mi300x", "Instinct MI300X, 192 GB", 1307.4e12, 163.4e12, 0.62, 206141652992, 5300e9, 750, "xgmi", "infiniband", 8))}

NODES = { # GPU, ranks per node, number and kind of network interfaces
    "dgx-a100-40": ("a100-40", 8, 8, "hdr"), "dgx-a100": ("a100-80", 8, 8, "hdr"), "dgx-h100": ("h100", 8, 8, "infiniband"),
    "dgx-h200": ("h200", 8, 8, "infiniband"), "dgx-b200": ("b200", 8, 8, "infiniband"), "aws-p4d": ("a100-40", 8, 4, "100gbit"),
    "aws-p4de": ("a100-80", 8, 4, "100gbit"), "aws-p5": ("h100", 8, 8, "infiniband"), "gcp-a3-high": ("h100", 8, 4, "hdr"),
    "gcp-a3-mega": ("h100", 8, 8, "hdr"), "workstation": ("rtx4090", 4, 1, "10gbit")}


# ---- what was measured ----
MEASURED = "build/here.json", "build/here_cluster.json" # of the machine, of the cluster on it


def number_in(root, path, remedy, low, *keys):
    """Of a file of JSON, at least `low`."""
    x = root
    for key in keys: x = x.get(key) if isinstance(x, dict) else None
    require(isinstance(x, (int, float)) and not isinstance(x, bool) and x >= low,
            f'{path}: has no number "{".".join(keys)}" from {low:g} on; {remedy}')
    return x


# crossing: if each of N ranks sends its part to every other, a node's g ranks send other nodes so many times a ring's bytes. hops,
# from node to node: NCCL and MPI add up in trees when latency dominates, and gather in rings.
def passes(collective): return 2 if collective == ALL_REDUCE else 1
def crossing(g, N): return g * (N - g) / (N - 1)
def hops(collective, n): return math.ceil(math.log2(n)) if collective == ALL_REDUCE else n - 1


@cache
def open_link(name, inside=False):
    """One of LINKS, or a file of comm_bench about one machine or a cluster; that of a cluster with several ranks per node also
    has the links inside one. The file's alpha is that of a call, ours that of a hop."""
    if name in LINKS: return LINKS[name]
    remedy = f"--link and --inter-link want {', '.join(LINKS)} or a file that comm_bench --json wrote"
    root = read_json(name, remedy, object_pairs_hook=unique_keys)
    if inside and isinstance(root, dict): root = root.get("inside", root)
    def number(low, *keys): return number_in(root, name, remedy, low, *keys)
    ranks, g = number(2, "ranks"), number(1, "ranks_per_node") if "ranks_per_node" in root else 0
    require(g == 0 or (ranks > g and ranks % g == 0), f"{name}: {ranks} ranks are no nodes of {g}; {remedy}")
    alpha, busbw = {}, {}
    for what in COLLECTIVES:
        steps = hops(what, ranks // g) if g else ranks - 1
        alpha[what] = number(0, "collectives", what, "alpha") / passes(what) / steps
        busbw[what] = number(1, "collectives", what, "busbw") * (1.0 if g == 0 or what == ALL_REDUCE else crossing(g, ranks))
    return Link(name, alpha, busbw, True)


def this_machine(path):
    """The file also has rates of each rank while all compute: GFLOP/s of large fp32 products, GB/s of copies, and what a step of
    train_gpt2_single reaches of both."""
    remedy = "let python3 -m dev.plan.here (with --cluster for a cluster) measure this machine"
    root = read_json(path, remedy)
    flops, copied, mfu, update = (number_in(root, path, remedy, 1e-3, key) for key in ("gflops", "copy", "mfu", "update"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Gpu("cpu-here", "equal share of this machine", 0, 1e9 * flops, 1, memory, 1e9 * copied, 0, path, path, 1,
               root.get("ranks_per_node", 0), mfu, 1e9 * update)


# ---- seconds ----
# N ranks, at most per_node of them in a node; `sharing` groups use a node's interfaces at the same time.
Group = namedtuple("Group", "N per_node sharing", defaults=(1,))


class Network(namedtuple("Network", "inside between per_node nics direct sm_share", defaults=(0, 0, False, 0))):
    """Links inside a node and between nodes; ranks of a node (0: all) and its interfaces. direct: gathers send a message to each
    rank, as our programs over MPI do, instead of a ring; sm_share: the share of compute that communication takes."""
    def neighbours(self, N, t):
        """t neighbours. If t does not divide a node's ranks, some groups are in two nodes, and the others wait for them."""
        g = self.per_node
        return Group(t, t - 1 if t < g < N and g % t != 0 else g if 0 < g < t else t)

    def apart(self, N, t, n=0):
        """n of N ranks (0: N/t), t ranks apart."""
        node, n = self.per_node or N, n or N // t
        return Group(n, min(max(node // t, 1), n), min(t, node))

    def interfaces(self): return 1 if self.between.of_node else max(self.nics, 1)

    def seconds(self, collective, nbytes, g):
        """A collective of a group takes k (hops alpha + bytes (N-1)/N / busbw). nbytes: of its largest buffer."""
        if g.N == 1: return 0
        nodes, busbw = ceil_div(g.N, g.per_node), self.inside.busbw[collective] if g.per_node > 1 else math.inf
        if nodes > 1:
            crosses = g.sharing * (crossing(g.per_node, g.N) if self.direct and collective != ALL_REDUCE else 1)
            busbw = min(busbw, self.interfaces() * self.between.busbw[collective] / crosses)
        inside = g.per_node - 1 if collective == ALL_REDUCE else g.N - nodes
        latency = inside * self.inside.alpha[collective] + hops(collective, nodes) * self.between.alpha[collective]
        return passes(collective) * (latency + nbytes * (g.N - 1) / g.N / busbw)

    def world_seconds(self, collective, nbytes, N): return self.seconds(collective, nbytes, self.neighbours(N, N))


@cache
def network_of_gpu(gpu): return Network(open_link(gpu.link, True), open_link(gpu.nic), gpu.per_node, gpu.nics)
