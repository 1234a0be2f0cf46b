"""What tests of the planner's functions share: plans of named models, and networks."""
import os
from suite import ROOT

os.environ.setdefault("PLAN_PROGRAMS", str(ROOT / "build/predict"))

from dev.plan.machines import GPUS, Network, link_of, open_link  # noqa: E402 (the path comes first)
from dev.plan.mesh import MeshPlan  # noqa: E402
from dev.plan.plans import Plan  # noqa: E402
from dev.plan.shapes import SHAPES  # noqa: E402


def plan_of(name, N, max_T=1024, **changes):
    shape = {key: changes.pop(key) for key in list(changes) if key in ("L", "NH", "C", "V")}
    return Plan(**{"shape": SHAPES[name]._replace(T=max_T, **shape), "B": 4, "T": 1024, "N": N, "accumulation": 1, "t": 1, "p": 1,
                   "v": 1, "c": 1} | changes)


def mesh_of(shape, gpu, d, t, p, zero, batch, B, **changes):
    return MeshPlan(**{"shape": SHAPES[shape], "chip": GPUS[gpu], "d": d, "t": t, "p": p, "zero": zero, "batch": batch, "B": B,
                       "T": 1024} | changes)


def network_of(inside, between, per_node, **changes):
    return Network(open_link(inside), open_link(between), per_node, per_node)._replace(**changes)


def network_with(alpha, busbw):
    """Every reduce-scatter and all-gather takes alpha seconds and the bytes that it sends at busbw."""
    return Network(link_of(alpha, busbw), link_of(alpha, busbw), 0, 1)
