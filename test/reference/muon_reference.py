#!/usr/bin/env python3
"""Makes test/reference/muon/: the training run of make_reference.py with torch.optim.Muon for the matrices of the blocks.

    python3 test/reference/muon_reference.py     # seconds; tokens.bin is the one that make_reference.py wrote

q, k and v are three matrices, and the learning rate is AdamW's times 0.2 sqrt(max(rows, cols)). torch.optim.Muon rounds every
matrix to bf16 before it orthogonalises it, whatever the precision of the weights. So the same lines run here without that. """
import os

import torch

from make_reference import (HERE, RUN, batch_of, finish_step, initial_model, our_tensors, read_tokens, sequence_order,
                            write_metrics, write_safetensors)

FOLDER = os.path.join(HERE, "muon")


def orthogonalised(grad, ns_coefficients, ns_steps, eps):
    """torch.optim._muon._zeropower_via_newtonschulz without its cast to bf16."""
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


class MuonAndAdamW:
    """The matrices of the blocks are views of the model's parameters, because qkv has three."""

    def __init__(self, model):
        r, blocks = RUN, {name: p for name, p in model.named_parameters() if name.startswith("h.") and p.dim() == 2}
        self.views = []  # (parameter, its part, the part as a parameter of Muon's)
        for name, p in blocks.items():
            for part in range(3 if "qkv" in name else 1):
                rows = slice(part * RUN["channels"], (part + 1) * RUN["channels"]) if "qkv" in name else slice(None)
                self.views.append((p, rows, torch.nn.Parameter(p.detach()[rows])))
        self.muon = torch.optim.Muon([view for *_, view in self.views], lr=0.0, weight_decay=r["weight_decay"], momentum=0.95,
                                     nesterov=True, adjust_lr_fn="match_rms_adamw")
        others = [p for name, p in model.named_parameters() if name not in blocks]
        groups = [{"params": [p for p in others if p.dim() == dim], "weight_decay": decay}
                  for dim, decay in ((2, r["weight_decay"]), (1, 0.0))]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=r["betas"], eps=r["eps"])
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self):
        for p, rows, view in self.views:
            view.grad = p.grad[rows]
        self.muon.step()
        self.adamw.step()


def train(model, tokens, order):
    optimizer = MuonAndAdamW(model)
    for step, sequences in enumerate(order):
        model.zero_grad()
        loss = model(*batch_of(tokens, sequences))
        loss.backward()
        yield finish_step(model, optimizer, step, loss)


def main():
    torch.optim._muon._zeropower_via_newtonschulz = orthogonalised
    tokens = read_tokens(os.path.join(HERE, "tokens.bin"))
    os.makedirs(FOLDER, exist_ok=True)
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        model = initial_model(dtype)
        run = {"program": f"PyTorch {torch.__version__}", "precision": name, **RUN}
        write_metrics(os.path.join(FOLDER, f"pytorch_{name}.jsonl"), run, train(model, tokens, sequence_order(len(tokens))))
    write_safetensors(os.path.join(FOLDER, "pytorch_fp64.safetensors"), our_tensors(model))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main()
