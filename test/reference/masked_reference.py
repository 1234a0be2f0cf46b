#!/usr/bin/env python3
"""Makes test/reference/masked/: the training run of make_reference.py with a mask, by PyTorch.

    python3 test/reference/masked_reference.py     # seconds; initial/ and tokens.bin are those that make_reference.py wrote

Tokens that do not count have the target ignore_index, and the loss is the mean over those that do. The mask is very unequal: of
half of the sequences no token counts, of a quarter the last two, of a quarter all, so ranks have anything from none to most of
a step's tokens. In one step none counts at all: there PyTorch's mean is NaN, and the sum, which is 0, is divided by 1.

evaluation.jsonl has the loss of the initial weights on all sequences. mean_of_means.jsonl has a mistake: each of 4 ranks takes the
mean over its own tokens, and the gradients are averaged. """
import os
import struct

import numpy as np
import torch
import torch.nn.functional as F

from make_reference import (HERE, RUN, batch_of, checksum, finish_step, initial_model, make_optimizer, our_tensors, read_tokens,
                            sequence_order, write_metrics, write_safetensors)

IGNORED = -1
EMPTY_STEP = 7
MISTAKEN_RANKS = 4
FOLDER = os.path.join(HERE, "masked")


def make_mask(num_tokens, order):
    """A bool per token. Those of the empty step's sequences do not count."""
    T = RUN["seq_len"]
    mask = np.zeros(num_tokens, dtype=bool)
    kinds = np.random.default_rng(RUN["seed"]).integers(0, 4, (num_tokens - 1) // T)
    for sequence, kind in enumerate(kinds):
        first = sequence * T + 1  # its targets are the tokens after its inputs
        if sequence not in order[EMPTY_STEP]:
            mask[first + (T - 2 if kind == 2 else 0):first + T] = kind >= 2
    return mask


def write_mask(path, mask, tokens):
    """llmc/data/mask.h, from its description."""
    bits = np.packbits(mask, bitorder="little")
    sum_of_spans, n = 0, min(64, len(tokens))
    for span in range(64):
        first = (len(tokens) - n) * span // 63
        sum_of_spans += int(checksum(tokens[first:first + n], 64 * span), 16)
    with open(path, "wb") as f:
        f.write(b"tokmask1" + struct.pack("<QQQQ", len(mask), int(mask.sum()), int(checksum(bits), 16), sum_of_spans % 2**64)
                + bytes(24) + bits.tobytes())


def masked_batch(tokens, mask, sequences):
    inputs, targets = batch_of(tokens, sequences)
    _, counts = batch_of(mask, sequences)
    return inputs, torch.where(counts, targets, IGNORED)


def logits_of(model, inputs):
    x = model.wte(inputs) + model.wpe.weight[:inputs.shape[1]]
    for block in model.h:
        x = block(x)
    return (model.ln_f(x) @ model.wte.weight.T).flatten(0, 1)


def mean_loss(model, inputs, targets):
    targets = targets.flatten()
    logits = logits_of(model, inputs)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / max(1, int((targets != IGNORED).sum()))
    mean = F.cross_entropy(logits, targets, ignore_index=IGNORED)
    assert torch.allclose(loss, mean, rtol=1e-6) or (loss == 0 and mean.isnan())
    return loss


def run(dtype, tokens, mask, order, ranks):
    """ranks > 1: each takes the mean over its own tokens, and the mean of these means is differentiated."""
    model = initial_model(dtype)
    optimizer, lines = make_optimizer(model), []
    for step, sequences in enumerate(order):
        optimizer.zero_grad()
        whole = masked_batch(tokens, mask, sequences)
        loss = mean_loss(model, *whole)
        for part in np.split(sequences, ranks):
            (mean_loss(model, *masked_batch(tokens, mask, part)) / ranks).backward()
        line = finish_step(model, optimizer, step, loss)
        line["counted"] = int((whole[1] != IGNORED).sum())
        if line["counted"] == 0:
            line["loss"] = None
        lines.append(line)
    return lines, model


def main():
    tokens = read_tokens(os.path.join(HERE, "tokens.bin"))
    order = sequence_order(len(tokens))
    mask = make_mask(len(tokens), order)
    os.makedirs(FOLDER, exist_ok=True)
    write_mask(os.path.join(FOLDER, "tokens.mask"), mask, tokens)
    for name, dtype, ranks in (("pytorch_fp32", torch.float32, 1), ("pytorch_fp64", torch.float64, 1),
                               ("mean_of_means", torch.float64, MISTAKEN_RANKS)):
        lines, model = run(dtype, tokens, mask, order, ranks)
        settings = {"program": f"PyTorch {torch.__version__}", "precision": str(dtype)[6:], "ranks": ranks, **RUN}
        write_metrics(os.path.join(FOLDER, name + ".jsonl"), settings, lines)
        if name == "pytorch_fp64":
            write_safetensors(os.path.join(FOLDER, name + ".safetensors"), our_tensors(model))
    model, sequences = initial_model(torch.float64), np.arange((len(tokens) - 1) // RUN["seq_len"])
    loss = float(mean_loss(model, *masked_batch(tokens, mask, sequences)).detach())
    write_metrics(os.path.join(FOLDER, "evaluation.jsonl"), {"program": f"PyTorch {torch.__version__}"},
                  [{"step": 0, "val_loss": loss}])
    of_ranks = [[int(masked_batch(tokens, mask, part)[1].ne(IGNORED).sum()) for part in np.split(s, MISTAKEN_RANKS)] for s in order]
    print("tokens that count, by step and rank of 4:", of_ranks)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main()
