"""GPT-2 trained by PyTorch: what `make bench` and experiments/bench_gpu.py compare with.

    python pytorch_gpt2.py eager|compile fp32|autocast|bf16 L NH C B T cuda|cpu

The same step as train_gpt2_single's: forward, backward, clipping by the global norm, AdamW with decay on 2-D tensors only, on
random tokens from random weights, with what is fastest in PyTorch: fused attention, fused AdamW, on a GPU torch.compile of
the model. autocast keeps fp32 parameters, gradients and moments and computes in bf16. bf16 has all of them in bf16 and no
fp32 master copy, so it moves fewer bytes than our programs do, and trains worse. fp32 means fp32: no TF32. Runs until it is
stopped and prints a line "step ..." each step, on a GPU with the most memory that tensors have taken.
"""
import itertools
import sys

import torch
from torch import nn
from torch.nn import functional as F

V, PADDED_V, MAX_T = 50257, 50304, 1024


class Block(nn.Module):
    def __init__(self, NH, C):
        super().__init__()
        self.NH = NH
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, C // self.NH).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, L, NH, C):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(PADDED_V, C), nn.Embedding(MAX_T, C)
        self.blocks = nn.ModuleList(Block(NH, C) for _ in range(L))
        self.ln_f = nn.LayerNorm(C)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if name.endswith("proj.weight") else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, PADDED_V), targets.reshape(-1))


def main(mode, precision, L, NH, C, B, T, device):
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device(device):
        model = GPT2(L, NH, C)
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
    if len(sys.argv) != 9 or sys.argv[1] not in ("eager", "compile") or sys.argv[2] not in ("fp32", "autocast", "bf16"):
        sys.exit("usage: pytorch_gpt2.py eager|compile fp32|autocast|bf16 L NH C B T cuda|cpu")
    main(*sys.argv[1:3], *map(int, sys.argv[3:8]), sys.argv[8])
