"""GPT-2 124M trained by PyTorch on a GPU: what dev/gpu_check.sh compares with.

    python pytorch_cuda.py eager|compile fp32|autocast|bf16 B T [STEPS]

The step of pytorch_gpt2.py beside this, with what makes PyTorch fast on a GPU: fused attention, fused AdamW, torch.compile of
the model. autocast keeps fp32 parameters and computes in bf16; bf16 has parameters, gradients and moments in bf16 and no fp32
master copy, so it moves fewer bytes than any of ours. fp32 means fp32: no TF32. Prints the median tokens a second, and the
most memory that was in use.
"""
import statistics
import sys
import time

import torch
from torch import nn

from pytorch_gpt2 import GPT2, V


def main(mode, precision, B, T, steps):
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = GPT2().cuda()
    if precision == "bf16":
        model = model.bfloat16()
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    forward = torch.compile(model) if mode == "compile" else model
    seconds = []
    for _ in range(steps):
        tokens = torch.randint(V, (B, T + 1)).cuda()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[len(seconds) // 2:])
    print(f"tokens_per_s {B * T / step:.0f} step_ms {1e3 * step:.2f} gb {torch.cuda.max_memory_allocated() / 1e9:.2f}")


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6) or sys.argv[1] not in ("eager", "compile") or sys.argv[2] not in ("fp32", "autocast", "bf16"):
        sys.exit("usage: pytorch_cuda.py eager|compile fp32|autocast|bf16 B T [STEPS]")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) == 6 else 20)
