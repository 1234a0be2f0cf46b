"""GPT-2 trained by PyTorch on a GPU: what dev/bench/bench_gpu.py compares with.

    python pytorch_cuda.py eager|compile fp32|autocast|bf16 MODEL B T [cuda|cpu]

The step of pytorch_gpt2.py in this folder, with what makes PyTorch fast on a GPU: fused attention, fused AdamW, torch.compile of
the model. autocast keeps fp32 parameters, gradients and moments and computes in bf16. bf16 has all of them in bf16 and no fp32
master copy, so it moves fewer bytes than our programs do, and trains worse. fp32 means fp32: no TF32. Runs until it is stopped
and prints a line "step ..." each step, with the most memory that tensors have taken. cpu is for trying the script itself.
"""
import itertools
import sys

import torch
from torch import nn

from pytorch_gpt2 import GPT2, V


def main(mode, precision, name, B, T, device):
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device(device):
        model = GPT2(name)
    if precision == "bf16":
        model = model.bfloat16()
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    forward = torch.compile(model) if mode == "compile" else model
    for step in itertools.count(1):
        tokens = torch.randint(V, (B, T + 1)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gb = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0
        print(f"step {step} | loss {loss.item():.4f} | grad norm {norm.item():.4f} | mem {gb:.3f} GB", flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (6, 7) or sys.argv[1] not in ("eager", "compile") or sys.argv[2] not in ("fp32", "autocast", "bf16"):
        sys.exit("usage: pytorch_cuda.py eager|compile fp32|autocast|bf16 MODEL B T [cuda|cpu]")
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] if len(sys.argv) == 7 else "cuda")
