"""Pipelines, as build/schedule_order has them from llmc/parallel: which blocks are in which part of the model (split.h), what each rank
does in which order (pipeline.h), and when, if every rank does its actions in order and each as early as its input is there.

A step has m micro-batches; a rank has v parts of the model, part number c of rank r being number c*p + r of all. An action is one
micro-batch in one part: F forward, I the gradient of the input, W the gradients of the weights, B both.
"""
import functools, os
import schedule_play
from questions import FOLDER
from schedule_play import Pipeline, ask_player

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
PLAYER = os.path.join(FOLDER, "..")


@functools.lru_cache(None)
def split(text, p, v, L, Vp, C):
    """"blocks" of each part of the model, and "efficiency": without a bubble, the share of the time in which ranks compute."""
    return ask_player(PLAYER, split=text, p=p, v=v, L=L, Vp=Vp, C=C)


def plan_split(plan, text=None):
    l, c = plan.pipe, plan.config
    return split(text or l.split, l.p, l.v, c.L, c.Vp, c.C)


def split_of(plan): return plan_split(plan)["blocks"]
def blocks_of(plan, rank): return sum(split_of(plan)[rank::plan.pipe.p])


def pipeline_of(plan): return Pipeline(plan.pipe.schedule, plan.pipe.p, plan.accumulation, plan.pipe.v)


@functools.lru_cache(16)
def play(l, times, message):
    """The step of "ranks", with their actions in "boxes": [kind, micro-batch, part, begin, end]. "bubble": by formula, if it were
    balanced. times: (F, I, W) of each part of the model; message: seconds between two ranks."""
    mean = [sum(part[k] / l.p for part in times) for k in range(3)]
    return schedule_play.play(PLAYER, l, mean, times, message=message)


def slots(plan, rank):
    """The most (micro-batch, part) whose activations are alive at a time."""
    l = pipeline_of(plan)
    return play(l, ((0, 0, 0),) * (l.p * l.v), 0)["ranks"][rank]["slots"]
