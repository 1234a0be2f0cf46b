"""Presets of GPUs, of the nodes in which they are sold, and of links; and this machine, as dev/bench/here.py has measured it.

FLOP/s    are dense, of the matrix units in 16 bits, and of the vector units in fp32. Data sheets print twice the former for
          H100 and later "with sparsity".
Memory    is what the vendor's tool reports of the whole device (nvidia-smi, rocm-smi), which is neither 80e9 nor 80 GiB; a
          process gets some hundred MB less, because the driver and its own context take their part.
Links     are bandwidths of one direction, as the data sheets print both: NVLink 3 has 12 links, 4 and 5 have 18; an MI300X
          has 7 of 64 GB/s. Interfaces are those of the vendors' 8-GPU machines: DGX A100 (200 Gb/s), DGX H100, H200 and
          B200 (400 Gb/s). A consumer's GPU has PCIe, and what it has beyond that depends on who built the machine; 100 Gb/s
          for all is a guess.
Nodes     NVIDIA's user guides of the DGX machines (ConnectX-6 with 200 Gb/s per GPU in the A100's, ConnectX-7 with 400 in
          later ones; interfaces for storage are not counted). AWS's page of P4 and P5 instances: 400 and 3200 Gb/s over EFA; the
          32 interfaces of a p5 are taken as 8 of 400 Gb/s. Google's page of GPU networks: 4 interfaces of 200 Gb/s for the GPUs
          of an a3-high, 8 in an a3-mega. The workstation is a guess: four consumer GPUs over PCIe 4.0, one interface of 10 Gb/s.
Sources   NVIDIA's data sheets of A100 (1758950-r4), H100, H200, Blackwell (3384703) and the Ada GPU architecture white
          paper; AMD's of the Instinct MI300X. Peaks agree with torchtitan/tools/utils.py (b5bcd76), which names the same
          sheets; it rounds the MI300X's.
"""
import os
from typing import NamedTuple
from tool import read_json, require, unique_keys

AMPERE, HOPPER, BLACKWELL = 1, 2, 3 # generations of NVIDIA's GPUs, 0: Volta
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
    per_node: int
    nics: int
    watts: float             # of the whole device, at most
    generation: int
    nccl_inside: float       # GB/s of `inside` as NCCL counts it; 0: collectives are not NCCL's
    nvlink: bool
    nvswitch: bool
    amd: bool                # the node's processors
    hop: float = 5e-6        # seconds of a hop where collectives are not NCCL's


GPUS = {gpu.name: gpu for gpu in (
    Gpu("a100-40", "A100 SXM, 40 GB", 312e12, 19.5e12, 40960 * MIB, 1555e9, 300e9, 25e9, 8, 8, 400,
        AMPERE, 12 * 20.0, True, True, True),
    Gpu("a100-80", "A100 SXM, 80 GB", 312e12, 19.5e12, 81920 * MIB, 2039e9, 300e9, 25e9, 8, 8, 400,
        AMPERE, 12 * 20.0, True, True, True),
    Gpu("h100", "H100 SXM, 80 GB", 989e12, 67e12, 81559 * MIB, 3350e9, 450e9, 50e9, 8, 8, 700,
        HOPPER, 18 * 20.6, True, True, False),
    Gpu("h200", "H200 SXM, 141 GB", 989e12, 67e12, 143771 * MIB, 4800e9, 450e9, 50e9, 8, 8, 700,
        HOPPER, 18 * 20.6, True, True, False),
    Gpu("b200", "B200 SXM, 180 GB", 2250e12, 80e12, 183359 * MIB, 8000e9, 900e9, 50e9, 8, 8, 1000,
        BLACKWELL, 18 * 40.1, True, True, False),
    Gpu("rtx4090", "GeForce RTX 4090, 24 GB", 165.2e12, 82.6e12, 24564 * MIB, 1008e9, 31.5e9, 12.5e9, 8, 1, 450,
        AMPERE, 24, False, False, True),
    Gpu("mi300x", "Instinct MI300X, 192 GB", 1307.4e12, 163.4e12, 206141652992, 5300e9, 448e9, 50e9, 8, 8, 750,
        HOPPER, 0, False, False, True))}
GPU_NAMES = "|".join([*GPUS, "cpu-here"])

NODES = { # GPU, its ranks in a node, interfaces, bytes/s of one
    "dgx-a100-40": ("a100-40", 8, 8, 25e9), "dgx-a100": ("a100-80", 8, 8, 25e9), "dgx-h100": ("h100", 8, 8, 50e9),
    "dgx-h200": ("h200", 8, 8, 50e9), "dgx-b200": ("b200", 8, 8, 50e9), "aws-p4d": ("a100-40", 8, 4, 12.5e9),
    "aws-p4de": ("a100-80", 8, 4, 12.5e9), "aws-p5": ("h100", 8, 8, 50e9), "gcp-a3-high": ("h100", 8, 4, 25e9),
    "gcp-a3-mega": ("h100", 8, 8, 25e9), "workstation": ("rtx4090", 4, 1, 1.25e9)}
NODE_NAMES = ", ".join(NODES)


def node_gpu(name):
    gpu, per_node, nics, nic = NODES[name]
    return GPUS[gpu]._replace(per_node=per_node, nics=nics, nic=nic)


# ---- links ----
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
COLLECTIVES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)


def passes(collective): return 2 if collective == ALL_REDUCE else 1


class Link(NamedTuple):
    alpha: dict              # of each collective, seconds per hop
    busbw: dict              # bytes per second that a rank sends
    measured: bool = False   # between nodes: with all of a node's interfaces, as nccl-tests define it


# Nominal values: bandwidths per direction are the vendors', and collectives reach less; alphas are what NCCL assumes for a hop of
# its ring with large messages (hwLat in src/graph/tuning.cc of 2.18 and later).
LINKS = {
    "nvlink": ("NVLink 4, 450 GB/s per direction", 3.4e-6, 450e9),         # half of the H100's 900 GB/s both ways
    "nvlink3": ("NVLink 3, 300 GB/s per direction", 3.4e-6, 300e9),        # of the A100's 600
    "nvlink2": ("NVLink 2, 150 GB/s per direction", 3.4e-6, 150e9),        # of the V100's 300
    "pcie": ("PCIe 4.0 x16, 31.5 GB/s per direction", 5.7e-6, 31.5e9),     # 16 lanes x 16 GT/s x 128/130 / 8
    "infiniband": ("NDR InfiniBand, 50 GB/s per interface", 14e-6, 50e9),  # 400 Gb/s
    "hdr": ("HDR InfiniBand, 25 GB/s per interface", 14e-6, 25e9)}         # 200 Gb/s


def link_of(alpha, busbw):
    """The same for all collectives."""
    return Link(dict.fromkeys(COLLECTIVES, alpha), dict.fromkeys(COLLECTIVES, busbw))


def open_link(name): return link_of(*LINKS[name][1:]) if name in LINKS else read_link(name)
def link_description(name): return LINKS[name][0] if name in LINKS else name
def is_number(x): return isinstance(x, (int, float)) and not isinstance(x, bool)
def dict_of(x): return x if isinstance(x, dict) else {}


def read_link(path):
    """What dev/comm measured on ranks of one machine. Its alpha is for a whole call, ours for a hop."""
    remedy = f"--link and --inter-link want {', '.join(LINKS)} or a file that comm_bench --json wrote"
    root = dict_of(read_json(path, remedy, object_pairs_hook=unique_keys))
    ranks, collectives = root.get("ranks"), dict_of(root.get("collectives"))
    require(is_number(ranks) and 2 <= ranks <= 1e6, f'{path}: "ranks" must be a number from 2 on; {remedy}')
    alphas, busbws = {}, {}
    for name in COLLECTIVES:
        alpha, busbw = (dict_of(collectives.get(name)).get(key) for key in ("alpha", "busbw"))
        require(is_number(alpha) and is_number(busbw),
                f'{path}: has no numbers "alpha" and "busbw" of "{name}" under "collectives"; {remedy}')
        require(alpha >= 0 and busbw > 0, f'{path}: has "alpha" below 0 or "busbw" not above 0 for "{name}"; {remedy}')
        alphas[name] = alpha / passes(name) / (ranks - 1)
        busbws[name] = float(busbw)
    return Link(alphas, busbws, True)


# ---- this machine: --gpu cpu-here ----
def this_machine(path):
    """As the file says, if there is one: peak, bandwidth and link. Without it only the memory is known. Besides a link, which
    --link reads as well, it has two numbers of each rank, measured while as many ranks compute as will train."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    here = GPUS["a100-40"]._replace(name="cpu-here", what="equal share of this machine", memory=memory, peak16=0, peak32=0, bandwidth=0,
                                    inside=0, nic=0, nccl_inside=0, watts=0, per_node=0, nics=0)
    if not os.access(path, os.R_OK): return here
    remedy = "--here wants the file that dev/bench/here.py wrote"
    root, link = read_json(path, remedy), read_link(path)

    def number(key):
        """gflops: of large fp32 products; copy: GB/s of memory, read and written."""
        x = root.get(key)
        require(is_number(x) and x > 0, f'{path}: has no number "{key}" above 0; renew it with dev/bench/here.py; {remedy}')
        return 1e9 * x
    return here._replace(peak32=number("gflops"), bandwidth=number("copy"), inside=link.busbw[ALL_GATHER], nic=link.busbw[ALL_GATHER],
                         hop=link.alpha[ALL_GATHER])


def share_machine(here, ranks):
    """The same as the device of one of so many ranks, which share its memory."""
    return here._replace(memory=here.memory / ranks, per_node=ranks, nics=1)
