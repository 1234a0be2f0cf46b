"""What tests of the planner's functions share: its modules, and plans of named models."""
import os
from suite import ROOT

os.environ.setdefault("PLAN_PROGRAMS", str(ROOT / "build/predict"))

from machines import Network, link_of, open_link  # noqa: E402 (the path comes first)
from questions import Plan  # noqa: E402
from shapes import SHAPES  # noqa: E402


def plan_of(name, N, max_T=1024, **changes):
    shape = {key: changes.pop(key) for key in list(changes) if key in ("L", "NH", "C", "V")}
    return Plan(SHAPES[name]._replace(T=max_T, **shape), 4, 1024, N)._replace(**changes)


def piped(plan, p, schedule="1f1b", v=1, split="auto", **changes):
    return plan._replace(p=p, schedule=schedule, v=v, split=split, **changes)


def network_of(inside, between, per_node, **changes):
    return Network(open_link(inside), open_link(between), per_node, per_node)._replace(**changes)


def network_with(alpha, busbw):
    """Every reduce-scatter and all-gather takes alpha seconds and the bytes that it sends at busbw."""
    return Network(link_of(alpha, busbw), link_of(alpha, busbw), 0, 1)
