#!/usr/bin/env python3
"""Makes all the numbers under test/reference/ that our programs are compared with, by PyTorch.

    python3 test/reference/make_reference.py            # writes the files beside this script

README.md beside it says which versions made the stored ones, and what each file contains. Nothing here calls our code:
things that both sides must agree on and that are not PyTorch's (file formats, the order of the data, the learning-rate
schedule) are written a second time, from the description in llmc/.
"""
import json
import math
import os
import struct

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))


# ---------------------------------------------------------------------------- file formats

def write_safetensors(path, tensors, metadata=None):
    """tensors: name -> array, stored as fp32 in the given order."""
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    arrays = {name: np.ascontiguousarray(np.asarray(a), dtype="<f4") for name, a in tensors.items()}
    for name, a in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [offset, offset + a.nbytes]}
        offset += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values()))


def read_safetensors(path):
    """Reads what write_safetensors wrote: name -> array."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[slice(*t["data_offsets"])], dtype="<f4").reshape(t["shape"]) for name, t in header.items()}


def write_tokens(path, tokens):
    """llm.c's format: 256 int32 (magic, version, number of tokens, zeros), then uint16 tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def read_tokens(path):
    return np.fromfile(path, dtype="<u2", offset=1024).astype(np.int64)


def write_metrics(path, run, steps):
    """metrics.jsonl as our programs write it."""
    with open(path, "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in [{"run": run}, *steps])


def checksum(words, place=0):
    """llmc/base/checksum.h: the sum over words of a hash of (bits, place); that of the first is `place`."""
    words = np.asarray(words).astype(np.uint64)
    with np.errstate(over="ignore"):
        x = (np.arange(place + 1, place + len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ words
        for _ in range(2):
            x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        return f"{int((x ^ (x >> np.uint64(32))).sum(dtype=np.uint64)):016x}"


def write_checkpoint(folder, tensors, model, seq_len):
    """A checkpoint of fp32 weights alone, as llmc/save/checkpoint.h reads it; tensors in the order of llmc/model/gpt2.h."""
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "model.safetensors"), tensors, {"format": "shard.c", "layout": "out_in"})
    bits = np.concatenate([np.ascontiguousarray(a, dtype="<f4").view("<u4").ravel() for a in tensors.values()])
    state = {"format": "shard.c checkpoint", "version": 1, "model": model, "dtype": "fp32", "has_optimizer": False, "step": 0,
             "data": {"seed": 0, "seq_len": seq_len, "epoch": 0, "position": 0}, "adamw_t": 0, "loss_scale": 1.0, "good_steps": 0,
             "options": {}, "checksums": {"model": checksum(bits)}}
    text = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    state["checksum_of_this"] = checksum(np.frombuffer(text, dtype=np.uint8))
    with open(os.path.join(folder, "state.json"), "w") as f:
        json.dump(state, f, indent=2)


# ---------------------------------------------------------------------------- the layers of llmc/device/layers.h
# Inputs are multiples of 1/64 below 2 in magnitude: fp32, bf16 and fp16 all hold them exactly, so one set of numbers
# serves the three builds. PyTorch computes in double; the results are stored in fp32.

def coarse(generator, *shape, scale=0.5):
    x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return ((x * 64).round() / 64).clamp(-127 / 64, 127 / 64)


def gradients(output, d_output, inputs):
    return torch.autograd.grad(output, inputs, d_output)


def layernorm_case(g, N, C):
    inp1, inp2, w, b = coarse(g, N, C), coarse(g, N, C), 1 + coarse(g, C, scale=0.2), coarse(g, C)
    dout, dres = coarse(g, N, C), coarse(g, N, C)  # dres: what reaches the residual stream past the layer
    res = (inp1 + inp2).requires_grad_()
    w.requires_grad_(), b.requires_grad_()
    out = F.layer_norm(res, (C,), w, b, eps=1e-5)
    dinp, dw, db = gradients(out, dout, (res, w, b))
    mean = res.mean(1)
    rstd = 1 / torch.sqrt(res.var(1, unbiased=False) + 1e-5)
    return dict(inp1=inp1, inp2=inp2, w=w, b=b, dout=dout, dres=dres, res=res, out=out, mean=mean, rstd=rstd,
                dinp=dres + dinp, dw=dw, db=db)


def matmul_case(g, N, C, OC):
    inp, w, b, dout, pre = coarse(g, N, C), coarse(g, OC, C), coarse(g, OC), coarse(g, N, OC), coarse(g, N, C, scale=1)
    for t in (inp, w, b, pre):
        t.requires_grad_()
    out = F.linear(inp, w, b)
    dinp, dw, db = gradients(out, dout, (inp, w, b))
    out_gelu = F.gelu(out, approximate="tanh")
    dpre, = gradients(F.linear(F.gelu(pre, approximate="tanh"), w), dout, (pre,))
    return dict(inp=inp, w=w, b=b, dout=dout, pre=pre, out=out, out_no_bias=F.linear(inp, w), out_gelu=out_gelu,
                dinp=dinp, dw=dw, db=db, dpre=dpre)


def attention_case(g, B, T, C, NH):
    qkv, dout = coarse(g, B, T, 3 * C, scale=0.7), coarse(g, B, T, C)
    qkv.requires_grad_()
    q, k, v = (x.view(B, T, NH, C // NH).transpose(1, 2) for x in qkv.split(C, dim=2))
    scores = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(~torch.ones(T, T).tril().bool(), -math.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
    dqkv, = gradients(out, dout, (qkv,))
    return dict(qkv=qkv, dout=dout, out=out, stats=scores.logsumexp(-1), dqkv=dqkv)


def classifier_case(g, N, V, dloss):
    logits = coarse(g, N, V, scale=1).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=g)
    targets[0], targets[1], targets[-1] = V - 1, 0, -1  # -1: a row without a target
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)
    dlogits, = gradients(losses, torch.full((N,), dloss, dtype=torch.float64), (logits,))
    return dict(logits=logits, targets=targets, dloss=torch.tensor([dloss]), losses=losses, dlogits=dlogits)


def encoder_case(g, B, T, C, V):
    tokens = torch.randint(0, V, (B, T), generator=g)
    tokens[0, 0], tokens[-1, -1], tokens[0, 1:4] = 0, V - 1, 5  # both ends, and one token several times
    wte, wpe, dout, dwte_before = coarse(g, V, C), coarse(g, T, C), coarse(g, B, T, C), coarse(g, V, C)
    wte.requires_grad_(), wpe.requires_grad_()
    out = F.embedding(tokens, wte) + wpe
    dwte, dwpe = gradients(out, dout, (wte, wpe))
    return dict(tokens=tokens, wte=wte, wpe=wpe, dout=dout, dwte_before=dwte_before, out=out, dwte=dwte_before + dwte, dwpe=dwpe)


def adamw_case(g, n, no_decay, steps, max_norm):
    """Clipped AdamW steps over n parameters, the first no_decay of them without weight decay."""
    start = coarse(g, n)
    grads = torch.stack([coarse(g, n, scale=0.02 * 4 ** (i % 3)) for i in range(steps)])
    lrs = [1e-2 * (i + 1) / steps for i in range(steps)]
    kept, decayed = (start[s].clone().requires_grad_() for s in (slice(no_decay), slice(no_decay, n)))
    optimizer = torch.optim.AdamW([{"params": [kept], "weight_decay": 0.0}, {"params": [decayed], "weight_decay": 0.3}],
                                  lr=0.0, betas=(0.9, 0.95), eps=1e-5)
    norms, params = [], []
    for grad, lr in zip(grads, lrs):
        kept.grad, decayed.grad = grad[:no_decay].clone(), grad[no_decay:].clone()
        norms.append(nn.utils.clip_grad_norm_([kept, decayed], max_norm))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        params.append(torch.cat([kept, decayed]).detach().clone())
    state = [optimizer.state[p] for p in (kept, decayed)]
    return dict(start=start, grads=grads, lrs=torch.tensor(lrs), norms=torch.stack(norms), params=torch.stack(params),
                m=torch.cat([s["exp_avg"] for s in state]), v=torch.cat([s["exp_avg_sq"] for s in state]),
                settings=torch.tensor([no_decay, max_norm, 0.9, 0.95, 1e-5, 0.3]))


def make_layers():
    g = torch.Generator().manual_seed(1)
    cases = {
        "layernorm.odd": layernorm_case(g, 6, 33),
        "layernorm.even": layernorm_case(g, 5, 96),
        "matmul.odd": matmul_case(g, 7, 33, 19),
        "matmul.even": matmul_case(g, 40, 16, 48),
        "attention.short": attention_case(g, 3, 7, 20, 4),  # heads of 5 channels
        "attention.long": attention_case(g, 1, 131, 8, 2),  # longer than any tile of keys
        "attention.wide": attention_case(g, 2, 9, 64, 1),   # GPT-2's 64 channels a head
        "attention.one": attention_case(g, 2, 1, 6, 3),     # a single token attends to itself
        "classifier.bytes": classifier_case(g, 9, 257, 1 / 8),
        "classifier.tiny": classifier_case(g, 4, 3, 2.0),
        "encoder.odd": encoder_case(g, 3, 7, 13, 11),
        "adamw.clipped": adamw_case(g, 301, 100, 7, 1.0),
    }
    tensors = {f"{case}.{name}": t.detach().numpy() for case, named in cases.items() for name, t in named.items()}
    write_safetensors(os.path.join(HERE, "layers.safetensors"), tensors)


# ---------------------------------------------------------------------------- the order of the data (llmc/base/rng.h)

def philox(key, high, low):
    """First 32 bits of Philox4x32-10."""
    x = [low & 0xffffffff, low >> 32, high & 0xffffffff, high >> 32]
    k0, k1 = key & 0xffffffff, key >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ k0, p1 & 0xffffffff, (p0 >> 32) ^ x[3] ^ k1, p0 & 0xffffffff]
        k0, k1 = (k0 + 0x9E3779B9) & 0xffffffff, (k1 + 0xBB67AE85) & 0xffffffff
    return x[0]


def random_permute(seed, stream, i, n):
    """Where i goes in a permutation of [0,n): a Feistel network of eight rounds, repeated until the result is in [0,n)."""
    if n < 2:
        return 0
    half = 1
    while 1 << (2 * half) < n:
        half += 1
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for r in range(8):
            left, right = right, left ^ (philox(seed, stream, r << 32 | right) & mask)
        i = left << half | right
        if i < n:
            return i


# ---------------------------------------------------------------------------- a training run: llmc/model/gpt2.h in plain PyTorch
# test/runs/test_single.py has the command that repeats it with our program.

RUN = dict(layers=2, heads=4, channels=32, vocab=257, seq_len=32, batch=16, steps=20, lr=3e-3, warmup=5, final_lr_fraction=0.1,
           weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5, grad_clip=1.3, seed=42)


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C, eps=1e-5), nn.LayerNorm(C, eps=1e-5)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.NH = NH

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, C // self.NH).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Its parameters have the names that our checkpoints use, except the ".weight" of the two embeddings."""

    def __init__(self, L, NH, C, V, T):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.ln_f = nn.LayerNorm(C, eps=1e-5)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe.weight[:inputs.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_model():
    r = RUN
    return GPT2(r["layers"], r["heads"], r["channels"], r["vocab"], r["seq_len"])


def initial_model(dtype):
    """The same weights for every dtype: drawn in fp32. Wider than GPT-2's 0.02, so that attention is far from uniform
    and every gradient matters; no bias is 0 and no layernorm weight is 1, so that each takes part from the first step."""
    model = new_model()
    g = torch.Generator().manual_seed(RUN["seed"])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("ln_" in name and name.endswith("weight")), 0.1, generator=g)
    return model.to(dtype)


def our_tensors(model):
    """The parameters under our names, in the order of llmc/model/gpt2.h: a unit's 1-D tensors come before its 2-D ones."""
    named = {name: p.detach().float().numpy() for name, p in model.named_parameters()}
    tensors = {"ln_f.weight": named["ln_f.weight"], "ln_f.bias": named["ln_f.bias"], "wpe": named["wpe.weight"],
               "wte": named["wte.weight"]}
    for block in range(RUN["layers"]):
        for name in ("ln_1.weight", "ln_1.bias", "qkv.bias", "proj.bias", "ln_2.weight", "ln_2.bias", "fc.bias", "fcproj.bias",
                     "qkv.weight", "proj.weight", "fc.weight", "fcproj.weight"):
            tensors[f"h.{block}.{name}"] = named[f"h.{block}.{name}"]
    assert len(tensors) == len(named)
    return tensors


def load_our_tensors(model, tensors):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(tensors[{"wte.weight": "wte", "wpe.weight": "wpe"}.get(name, name)]))


def make_text():
    """Text from which a model can learn: sentences from a small vocabulary, as UTF-8 bytes."""
    g = torch.Generator().manual_seed(RUN["seed"] + 1)
    words = "a fine day the small cat dog ran sat to on under tree house over and then again slowly café naïve".split()
    text = ""
    while len(text) < 6600:
        length = int(torch.randint(3, 9, (), generator=g))
        text += " ".join(words[int(torch.randint(len(words), (), generator=g))] for _ in range(length)).capitalize() + ".\n"
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


def learning_rate(step):
    """Linear warm-up, then half a cosine that reaches its minimum at the last step (llmc/model/schedule.h)."""
    r = RUN
    if step < r["warmup"]:
        return r["lr"] * (step + 1) / r["warmup"]
    progress = (step - r["warmup"]) / max(1, r["steps"] - 1 - r["warmup"])
    low = r["lr"] * r["final_lr_fraction"]
    return low + (r["lr"] - low) * 0.5 * (1 + math.cos(math.pi * progress))


def sequence_order(num_tokens, batch=RUN["batch"]):
    """The sequence at each place of the run: (steps, batch). Each epoch has its own permutation; sequences at its end
    that do not fill a batch are left out (llmc/data/dataloader.h)."""
    r = RUN
    sequences = (num_tokens - 1) // r["seq_len"]
    batches = sequences // batch
    stream_data = 1 << 32
    order = [[random_permute(r["seed"], stream_data + step // batches, step % batches * batch + b, sequences)
              for b in range(batch)] for step in range(r["steps"])]
    return np.array(order)


def batch_of(tokens, sequences):
    T = RUN["seq_len"]
    rows = np.stack([tokens[s * T:s * T + T + 1] for s in sequences])
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def global_norm(tensors):
    """In double whatever the tensors are: fp32's last digit of a norm above 16 is 1.9e-6."""
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


def make_optimizer(model):
    r = RUN
    decayed = [p for p in model.parameters() if p.dim() > 1]
    kept = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": r["weight_decay"]}, {"params": kept, "weight_decay": 0.0}],
                             lr=0.0, betas=r["betas"], eps=r["eps"])


def finish_step(model, optimizer, step, loss, scaler=torch.amp.GradScaler("cpu", enabled=False)):
    """Everything after the backward pass. Returns the step's line of metrics, as our metrics.jsonl has it."""
    scaler.unscale_(optimizer)
    grad_norm = global_norm(p.grad for p in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), RUN["grad_clip"])
    lr = learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    scaled = {"loss_scale": scale, "skipped": int(scaler.get_scale() < scale)} if scaler.is_enabled() else {}
    return dict(step=step + 1, loss=float(loss.detach()), grad_norm=grad_norm, param_norm=global_norm(model.parameters()),
                lr=lr) | scaled


def train(model, tokens, order):
    """The usual training loop. Yields a line of metrics per step."""
    optimizer = make_optimizer(model)
    for step, sequences in enumerate(order):
        optimizer.zero_grad()
        loss = model(*batch_of(tokens, sequences))
        loss.backward()
        yield finish_step(model, optimizer, step, loss)


def make_run():
    tokens = make_text()
    order = sequence_order(len(tokens))
    write_tokens(os.path.join(HERE, "tokens.bin"), tokens)
    shape = {"layers": RUN["layers"], "heads": RUN["heads"], "channels": RUN["channels"], "vocab_size": RUN["vocab"],
             "max_seq_len": RUN["seq_len"]}
    write_checkpoint(os.path.join(HERE, "initial"), our_tensors(initial_model(torch.float32)), shape, RUN["seq_len"])
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        model = initial_model(dtype)
        run = {"program": f"PyTorch {torch.__version__}", "precision": name, **RUN}
        write_metrics(os.path.join(HERE, f"pytorch_{name}.jsonl"), run, train(model, tokens, order))
        write_safetensors(os.path.join(HERE, f"pytorch_{name}.safetensors"), our_tensors(model))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make_layers()
    make_run()
