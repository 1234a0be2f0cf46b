#!/usr/bin/env python3
"""repeat.py OUT [AFTER [LENGTH [DOCUMENTS [SEED]]]] - makes a token file that a model can predict only if it sees far back, and its
mask.

In a document of LENGTH tokens (2048) each token is that AFTER tokens before it (1024). The first AFTER tokens are new in each
document: 8 keys in a random order, each followed by its value in this document, one of 8; that 32 times; then silence, token 0. In
the loss count the values of each key's first place in a copy. A model that sees the pairs before it finds a value by its key; one
that sees AFTER - 512 tokens or fewer must guess, with a loss of ln 8 = 2.08. A key and its value are one token, so that one block
can learn this.
--tokenizer= --vocab-size 73 reads the tokens: silence, the keys, and each key with each value. The files are those of
llmc/data/tokens.h and mask.h; with a LENGTH of --seq-len a document is a sequence."""
import random, sys
from array import array
from pathlib import Path

KEYS, VALUES, TIMES = 8, 8, 32
PAIRS = 2*KEYS * TIMES # tokens of a document's pairs


def document(after, length):
    value = [1 + KEYS + VALUES * key + random.randrange(VALUES) for key in range(KEYS)]
    keys = [key for _ in range(TIMES) for key in random.sample(range(KEYS), KEYS)]
    new = [token for key in keys for token in (1 + key, value[key])] + [0] * (after - PAIRS)
    return (new * (length // after + 1))[:length]


def checksum(values):
    """That of llmc/base/checksum.h."""
    total, ones = 0, 2**64 - 1
    for place, value in enumerate(values, 1):
        x = place * 0x9E3779B97F4A7C15 & ones ^ value
        for _ in range(2): x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & ones
        total += x ^ x >> 32
    return total & ones


def main(out, *numbers):
    after, length, n, seed = map(int, (*numbers, *("1024", "2048", "1024", "1")[len(numbers):]))
    if not PAIRS <= after < length: sys.exit(f"error: AFTER must be from {PAIRS} on and less than LENGTH, {length}; it is {after}")
    random.seed(seed)
    tokens = array("H", (token for _ in range(n) for token in document(after, length)))
    counts = [int(t >= after and t % after < 2*KEYS and t % after % 2 == 1) for t in range(length)]
    bits = int("".join(map(str, reversed(counts * n))), 2).to_bytes((len(tokens) + 7) // 8, "little") # the first bit is the lowest
    sample = [token for i in range(64) for token in tokens[(len(tokens) - 64) * i // 63:][:64]]
    Path(out).write_bytes(array("i", [20240520, 1, len(tokens)] + [0] * 253).tobytes() + tokens.tobytes())
    header = array("Q", [int.from_bytes(b"tokmask1", "little"), len(tokens), n * sum(counts), checksum(bits), checksum(sample), 0,
                         0, 0])
    Path(out).with_suffix(".mask").write_bytes(header.tobytes() + bits)
    print(f"{out}: {n} documents of {length} tokens, of which {sum(counts)} count")


if __name__ == "__main__": main(*sys.argv[1:]) if 2 <= len(sys.argv) <= 6 else sys.exit(__doc__)
