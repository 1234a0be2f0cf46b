"""What tests of the planner's functions share: its modules, and plans of named models."""
import os
import sys
from suite import ROOT

sys.path[:0] = [str(ROOT / "dev/tools/plan"), str(ROOT / "dev/tools")]
os.environ.setdefault("PLAN_STAGES", str(ROOT / "build/predict"))

from machines import Network, link_of, open_link  # noqa: E402 (the path comes first)
from options import shape_named  # noqa: E402
from questions import Config, Plan  # noqa: E402


def plan_of(name, N, **changes):
    L, NH, C = shape_named(name)
    plan = Plan(Config(1024, 50257, 50304, L, NH, C), 4, 1024, N)
    shape = {key: changes.pop(key) for key in list(changes) if key in Config._fields}
    return plan._replace(config=plan.config._replace(**shape), **changes)


def piped(plan, p, schedule="1f1b", v=1, split="auto", **changes):
    return plan._replace(p=p, schedule=schedule, v=v, split=split, **changes)


def network_of(inside, between, per_node, **changes):
    return Network(open_link(inside), open_link(between), per_node, per_node)._replace(**changes)


def network_with(alpha, busbw):
    """Every reduce-scatter and all-gather takes alpha seconds and the bytes that it sends at busbw."""
    return Network(link_of(alpha, busbw), link_of(alpha, busbw), 0, 1)
