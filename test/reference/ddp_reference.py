#!/usr/bin/env python3
"""Makes test/reference/ddp/: the training run of make_reference.py by PyTorch's DistributedDataParallel.

    python3 test/reference/ddp_reference.py            # writes ddp/ beside this script, and checks what it writes
    python3 test/reference/ddp_reference.py NAME...    # only these of the runs under AMP

On 1, 2, 3 and 4 ranks (gloo, CPU, fp32), with one and with two micro-batches per rank and step. Each run starts from initial/
and tokens.bin, which make_reference.py wrote, and must agree with the single run in fp64 and with each other within the tests'
bound.

Two of them are repeated under AMP: autocast to bf16, with weights, gradients and AdamW's state in fp32. They are compared with
fp64, and so are runs with two mistakes, of which only the metrics are kept. The last run is in fp16 with a GradScaler, which
skips steps. memory.jsonl contains the bytes of each run. """
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from make_reference import (HERE, RUN, finish_step, initial_model, load_our_tensors, make_optimizer, new_model, our_tensors,
                            batch_of, read_safetensors, read_tokens, sequence_order, train, write_metrics, write_safetensors)

RTOL, ATOL = 1e-5, 1e-6  # the bound of test/runs/test_single.py
SCALING = {"init_scale": 2.0**20, "growth_interval": 4}  # too large at first, so the first steps are skipped, and later ones
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "": torch.float32}


@dataclass(frozen=True)
class Job:
    ranks: int
    accumulation: int  # micro-batches per rank and step
    amp: str = ""      # "bf16" or "fp16": what autocast computes in; fp16 with a GradScaler
    mistake: str = ""  # "summed": gradients are not divided by the ranks; "without_masters": weights are kept in bf16

    @property
    def batch(self):
        """Sequences a step over all ranks: the single run's 16, or 12 where 16 do not divide."""
        return RUN["batch"] if RUN["batch"] % (self.ranks * self.accumulation) == 0 else 12

    @property
    def name(self):
        return (f"ranks_{self.ranks}" + (f"_accumulate_{self.accumulation}" if self.accumulation > 1 else "")
                + {"": "", "bf16": "_amp", "fp16": "_amp_fp16"}[self.amp] + (f"_{self.mistake}" if self.mistake else ""))


AMP_JOBS = [Job(2, 1, amp="bf16"), Job(4, 2, amp="bf16"), Job(2, 1, amp="bf16", mistake="summed"),
            Job(2, 1, amp="bf16", mistake="without_masters"), Job(2, 1, amp="fp16")]
JOBS = [Job(ranks, accumulation) for ranks in (1, 2, 3, 4) for accumulation in (1, 2)]


# ---------------------------------------------------------------------------- what one rank does

def rows_of_rank(order, job, rank):
    """(steps, accumulation, B): micro-batch m on rank r has a step's rows (m*ranks + r)*B to (m*ranks + r + 1)*B - 1."""
    return order.reshape(len(order), job.accumulation, job.ranks, -1)[:, :, rank]


def round_weights(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())


def train_ddp(job, model, optimizer, tokens, rows):
    """rows (steps, accumulation, B) are this rank's sequences. Yields a line of metrics per step, the same on every rank."""
    ddp, scaler = DistributedDataParallel(model), torch.amp.GradScaler("cpu", enabled=job.amp == "fp16", **SCALING)
    if job.mistake == "without_masters":
        round_weights(model)
    for step in range(len(rows)):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for micro, sequences in enumerate(rows[step]):
            last = micro == len(rows[step]) - 1
            # DDP decides in the forward pass whether the backward pass will reduce, so no_sync encloses both
            with contextlib.nullcontext() if last else ddp.no_sync():
                with torch.autocast("cpu", dtype=DTYPES[job.amp], enabled=job.amp != ""):
                    part = ddp(*batch_of(tokens, sequences)) / len(rows[step])
                scaler.scale(part).backward()
            loss += part.detach()
        dist.all_reduce(loss)  # the loss was of this rank's tokens only; DDP has already averaged the gradients over ranks
        if job.mistake == "summed":
            for p in model.parameters():
                p.grad *= dist.get_world_size()
        yield finish_step(model, optimizer, step, loss / dist.get_world_size(), scaler)
        if job.mistake == "without_masters":
            round_weights(model)


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def memory_of(job, model, optimizer):
    """Exact bytes of tensors that outlive a step."""
    parameters = list(model.parameters())
    return {"run": job.name, "tensors": len(parameters), "parameters": bytes_of(parameters),
            "gradients": bytes_of(p.grad for p in parameters),
            "optimizer_state": bytes_of(t for s in optimizer.state.values() for t in s.values())}


def require_equal_on_all_ranks(model):
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(mine, first), f"rank {dist.get_rank()} ends with other weights than rank 0"


def run_rank(rank, job, folder):
    """Trains; rank 0 writes metrics.jsonl, weights.safetensors and memory.json into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=job.ranks)
    tokens = read_tokens(os.path.join(HERE, "tokens.bin"))
    order = sequence_order(len(tokens), job.batch)
    model = new_model()
    load_our_tensors(model, read_safetensors(os.path.join(HERE, "initial", "model.safetensors")))
    optimizer = make_optimizer(model)
    lines = list(train_ddp(job, model, optimizer, tokens, rows_of_rank(order, job, rank)))
    require_equal_on_all_ranks(model)
    memory = memory_of(job, model, optimizer)
    if rank == 0:
        with open(os.path.join(folder, "memory.json"), "w") as f:
            json.dump(memory, f)
        precision = f"{job.amp} by autocast, weights in " + ("bf16" if job.mistake == "without_masters"
                                                             else "fp32") if job.amp else "fp32"
        settings = {"program": f"PyTorch {torch.__version__} DistributedDataParallel, gloo", "precision": precision,
                    "ranks": job.ranks, "accumulation": job.accumulation, **RUN, "batch": job.batch}
        write_metrics(os.path.join(folder, "metrics.jsonl"), settings, lines)
        write_safetensors(os.path.join(folder, "weights.safetensors"), our_tensors(model))
    dist.barrier()
    os._exit(0)  # gloo's own shutdown aborts now and then in PyTorch 2.13, with all results written


# ---------------------------------------------------------------------------- all runs, and how much they differ

@dataclass
class Result:
    settings: dict
    steps: list     # a line of metrics each
    weights: dict   # name -> array
    memory: dict = None


def run_and_store(job):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (job, folder), job.ranks)
        with open(os.path.join(folder, "metrics.jsonl")) as f:
            first, *steps = map(json.loads, f)
        with open(os.path.join(folder, "memory.json")) as f:
            memory = json.load(f)
        result = Result(first["run"], steps, read_safetensors(os.path.join(folder, "weights.safetensors")), memory)
    write_metrics(os.path.join(HERE, "ddp", job.name + ".jsonl"), result.settings, result.steps)
    if not job.mistake:
        write_safetensors(os.path.join(HERE, "ddp", job.name + ".safetensors"), result.weights)
    return result


def single_in_fp64(batch):
    tokens = read_tokens(os.path.join(HERE, "tokens.bin"))
    model = initial_model(torch.float64)
    steps = list(train(model, tokens, sequence_order(len(tokens), batch)))
    return Result({}, steps, our_tensors(model))


def share_of_bound(reference, other):
    """The largest deviation of losses and norms, and of weights, as a share of what tests allow."""
    def share(a, b):
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        return float((np.abs(a - b) / (ATOL + RTOL * np.abs(a))).max())
    fields = ("loss", "grad_norm", "param_norm")
    metrics = share([[s[f] for f in fields] for s in reference.steps], [[s[f] for f in fields] for s in other.steps])
    return metrics, max(share(a, other.weights[name]) for name, a in reference.weights.items())


def differences(reference, other):
    """The largest relative difference of losses, gradient norms and parameter norms; then of weights as a share of how far
    they moved, as lengths of tensors: the worst tensor without and with qkv.bias (README.md: AdamW's eps)."""
    def metrics(field):
        return max(abs(a[field] - b[field]) / abs(a[field]) for a, b in zip(reference.steps, other.steps))
    initial = read_safetensors(os.path.join(HERE, "initial", "model.safetensors"))
    shares = {name: np.linalg.norm(a - other.weights[name]) / np.linalg.norm(a - initial[name])
              for name, a in reference.weights.items()}
    return [*map(metrics, ("loss", "grad_norm", "param_norm")),
            max(share for name, share in shares.items() if not name.endswith("qkv.bias")), max(shares.values())]


def run_under_amp(fp64, names=()):
    """Stores the runs under AMP, or those of these names, and prints how far they are from fp64, and mistaken ones from the right
    one."""
    results = {}
    print("\n| under AMP | compared with | loss | gradient norm | parameter norm | weights | with qkv.bias |")
    for job in [job for job in AMP_JOBS if not names or job.name in names]:
        results[job] = run_and_store(job)
        reference = results[Job(2, 1, amp="bf16")] if job.mistake else fp64
        row = [f"{x:.2g}" for x in differences(reference, results[job])]
        print(f"| {job.name} | {'ranks_2_amp' if job.mistake else 'fp64'} | " + " | ".join(row) + " |")
    return results


def main():
    torch.set_num_threads(1)
    if sys.argv[1:]: return run_under_amp(single_in_fp64(RUN["batch"]), sys.argv[1:])
    os.makedirs(os.path.join(HERE, "ddp"), exist_ok=True)
    fp64 = {batch: single_in_fp64(batch) for batch in {job.batch for job in JOBS}}
    results, shares = {}, []
    print("| ranks x micro-batches | sequences a step | losses and norms | final weights |")
    for job in JOBS:
        results[job] = run_and_store(job)
        row = share_of_bound(fp64[job.batch], results[job])
        shares.extend(row)
        print(f"| {job.ranks} x {job.accumulation} | {job.batch} | " + " | ".join(f"{100 * x:.1f} %" for x in row) + " |")
    pairs = [share_of_bound(a, b) for j, a in results.items() for k, b in results.items() if j.batch == k.batch]
    metrics, weights = (max(column) for column in zip(*pairs))
    print(f"any two with the same batch: {100 * metrics:.1f} % and {100 * weights:.1f} %")
    assert all(share <= 1 for share in [*shares, metrics, weights]), "there are numbers outside the bound"
    results.update(run_under_amp(fp64[RUN["batch"]]))
    with open(os.path.join(HERE, "ddp", "memory.jsonl"), "w") as f:
        f.writelines(json.dumps(result.memory) + "\n" for job, result in results.items() if not job.mistake)


if __name__ == "__main__":
    main()
