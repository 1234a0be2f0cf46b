#!/bin/bash
# --recompute block keeps less, runs parts of the forward pass twice, and gives the same bits.
. test/lib.sh

peak_bytes() { "$COMPARE" show "$1/metrics.jsonl" mem_peak_bytes | awk 'END { print $2 }'; }
less_memory() { echo "$(peak_bytes "$1") < $(peak_bytes "$2") bytes?"; [ "$(peak_bytes "$1")" -lt "$(peak_bytes "$2")" ]; }

for precision in fp32 bf16 fp16; do
    kept=$work/$precision-none recomputed=$work/$precision-block
    check "$precision: a run that keeps activations" tiny $precision --layers 3 --out "$kept"
    check "$precision: a run that recomputes them" tiny $precision --layers 3 --recompute block --out "$recomputed"
    check "  has the same metrics, weights and optimizer state to the bit" same_run "$kept" "$recomputed"
    check "  and needs less memory" less_memory "$recomputed" "$kept"
done
done_testing
