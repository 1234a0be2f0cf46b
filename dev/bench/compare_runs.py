#!/usr/bin/env python3
"""Compares two runs: their metrics step by step, or their weights element by element. Needs nothing but Python.

    compare_runs.py metrics A.jsonl B.jsonl --bits                    the same numbers, to the bit
    compare_runs.py metrics A.jsonl B.jsonl --rtol 1e-5 --atol 1e-6   |a - b| <= atol + rtol |a|: A is the reference
    compare_runs.py metrics A.jsonl B.jsonl --rtol 0.01 --only loss   one field
    compare_runs.py weights A.safetensors B.safetensors --rtol 1e-5

Prints the worst deviation as a share of what is allowed; the status is 0 if all agree, else 1."""
import argparse, array, json, math, sys

FIELDS = ("loss", "grad_norm", "param_norm", "lr", "loss_scale", "tokens", "counted", "val_loss", "compression_error",
          "compression_norm_ratio", "compression_cosine")


def metrics(path):
    with open(path) as file: lines = [x for x in map(json.loads, filter(str.strip, file)) if "step" in x]
    return {(x["step"], field): x[field] for x in lines for field in FIELDS if field in x
            and not (field == "loss" and x.get("counted") == 0)}


def weights(path):
    with open(path, "rb") as file: data = file.read()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, t in json.loads(data[8:begin]).items():
        if name == "__metadata__": continue
        part = data[begin + t["data_offsets"][0]:begin + t["data_offsets"][1]]
        if t["dtype"] == "BF16": part = b"".join(b"\0\0" + part[i:i + 2] for i in range(0, len(part), 2))
        numbers = memoryview(part).cast("e").tolist() if t["dtype"] == "F16" else array.array("f", part)
        found |= {(name, i): x for i, x in enumerate(numbers)}
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("metrics", "weights"))
    parser.add_argument("files", nargs=2)
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--rtol", type=float, default=0)
    parser.add_argument("--atol", type=float, default=0)
    parser.add_argument("--only", choices=FIELDS)
    options = parser.parse_args()
    a, b = map({"metrics": metrics, "weights": weights}[options.what], options.files)
    same_steps = {key[0] for key in a} == {key[0] for key in b} # before one field is chosen: where nothing counted there is no loss
    if options.only: a = {key: x for key, x in a.items() if key[1] == options.only}
    if not a or not a.keys() <= b.keys() or not same_steps:
        print(f"{' and '.join(options.files)} have other steps, fields or tensors")
        return 1

    def share(x, y):
        if x is y is None and options.bits or options.bits and x == y: return 0
        if options.bits or not all(isinstance(z, (int, float)) and math.isfinite(z) for z in (x, y)): return math.inf
        allowed = options.atol + options.rtol * abs(x)
        return 0 if x == y else abs(x - y) / allowed if allowed else math.inf

    shares = {key: share(a[key], b[key]) for key in a}
    worst, outside = max(shares, key=shares.get), sum(x > 1 for x in shares.values())
    print(f"{len(a)} numbers compared, {outside} of them outside; the worst is {worst}: {a[worst]} and {b[worst]}, "
          f"{shares[worst]:.3g} of what is allowed")
    return outside > 0


if __name__ == "__main__": sys.exit(main())
