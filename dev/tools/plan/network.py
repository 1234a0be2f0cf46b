"""Seconds of messages, which take alpha + n/bandwidth (Hockney 1994).

A ring collective of N ranks has N-1 hops one after the other, and every rank sends (N-1)/N of the data; an all-reduce is a
reduce-scatter and an all-gather, so twice that (Thakur, Rabenseifner and Gropp 2005):
    seconds = k (N-1) alpha + k bytes (N-1)/N / busbw        k = 2 for an all-reduce, else 1
busbw is defined as in nccl-tests. With several nodes, nodes-1 of the hops are between nodes, and the data that crosses there is
limited by the network interfaces. Of a mesh, t neighbours share a replica of the model, and ranks that are t apart the same part: these
groups communicate at the same time, and share their nodes' interfaces. A tree moves the same data in (ranks of a node - 1) hops
inside and log2(nodes) between nodes; NCCL has a tree for all-reduce and, from 2.23 on with one rank per node, for the others. Hops are
counted as NCCL counts them when it chooses an algorithm (src/graph/tuning.cc).
"""
import math
from typing import NamedTuple
import nccl
from tool import ceil_div
from machines import ALL_GATHER, ALL_REDUCE, Gpu, Link, passes


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
    algorithm: str = "ring"  # ring or tree decides the number of hops; nccl: what NCCL takes on `gpu`
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
        n, node = N // t, self.per_node or N
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
        if nodes > 1: busbw = min(busbw, (1 if self.between.measured else self.nics) * self.between.busbw[collective] / g.sharing)
        hops = inside * self.inside.alpha[collective] + between * self.between.alpha[collective]
        return passes(collective) * (hops + nbytes * (g.N - 1) / g.N / (busbw * self.efficiency))

    def world_seconds(self, collective, nbytes, N): return self.seconds(collective, nbytes, self.world(N))

    def crosses(self, N, p):
        """True if some of p neighbours are in different nodes."""
        return p > 1 and 0 < self.per_node < N and self.per_node % p != 0

    def message(self, nbytes, crosses):
        """Seconds of a message between two ranks, of which each has an interface."""
        link = self.between if crosses else self.inside
        return link.alpha[ALL_GATHER] + nbytes / link.busbw[ALL_GATHER]
