#!/bin/bash
# bf16 and fp16 train as PyTorch's fp64 does, within their precision, in half the memory for parameters and gradients.
. test/lib.sh

predicted() { # OUT KIND: prints the bytes that a run predicted for that kind of memory
    sed -n "1s/.*\"$2\":\([0-9]*\).*/\1/p" "$1/metrics.jsonl"
}
is_half() { # OUT OUT KIND
    echo "$3: $(predicted "$1" "$3") bytes, and $(predicted "$2" "$3")"
    [ "$(($(predicted "$1" "$3") * 2))" -eq "$(predicted "$2" "$3")" ]
}
as_predicted() { # the table that ends a run
    cat "$1"
    [ "$(grep -c 'as predicted$' "$1")" -ge 6 ] && ! grep -q 'than predicted' "$1"
}
logged_run() { reference_run "$1" --out "$work/$1" > "$work/$1.log"; }

check "a run in fp32" logged_run fp32
# bounds over 20 steps, relative: a quarter of the format's roundoff (2^-8, 2^-11) for losses, all of it for gradient norms
for numbers in "bf16 1e-3 4e-3" "fp16 1.2e-4 5e-4"; do
    read -r precision loss_bound norm_bound <<< "$numbers"
    out=$work/$precision
    check "a run in $precision" logged_run $precision
    check "  has PyTorch's losses within $loss_bound" \
        "$COMPARE" metrics $REFERENCE/pytorch_fp64.jsonl "$out/metrics.jsonl" --rtol $loss_bound --only loss
    check "  has PyTorch's gradient norms within $norm_bound" \
        "$COMPARE" metrics $REFERENCE/pytorch_fp64.jsonl "$out/metrics.jsonl" --rtol $norm_bound --only grad_norm
    check "  does not really compute in fp32" \
        not "$COMPARE" metrics $REFERENCE/pytorch_fp64.jsonl "$out/metrics.jsonl" --rtol 1e-5 --only loss
    check "  has half the bytes of parameters" is_half "$out" "$work/fp32" parameters
    check "  and of gradients" is_half "$out" "$work/fp32" gradients
    check "  all of its memory is as predicted" as_predicted "$out.log"
done
done_testing
