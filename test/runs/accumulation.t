#!/bin/bash
# Gradient accumulation: a step over several micro-batches is the step over one large batch, up to the order of sums.
. test/lib.sh

# eps 1e-5: with a smaller one, AdamW turns the rounding noise in gradients that are 0 in theory (key biases) into whole steps
check "one batch of 32 sequences" tiny fp32 --batch-size 32 --eps 1e-5 --out "$work/whole"
for micro in 8 1; do
    check "$((32 / micro)) micro-batches of $micro" tiny fp32 --batch-size $micro --eps 1e-5 --out "$work/parts"
    check "  have the same losses and norms" \
        "$COMPARE" metrics "$work/whole/metrics.jsonl" "$work/parts/metrics.jsonl" --rtol 1e-5 --atol 1e-6
    check "  and the same weights" \
        "$COMPARE" weights "$work/whole/step_00000020/model.safetensors" "$work/parts/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
    rm -rf "$work/parts"
done

# In 16 bits each addition to the gradients rounds once more. One step, so that nothing else can differ.
for numbers in "bf16 4e-3" "fp16 5e-4"; do
    read -r precision bound <<< "$numbers"
    check "$precision: one batch of 32 sequences" tiny $precision --steps 1 --batch-size 32 --out "$work/$precision-whole"
    check "$precision: 4 micro-batches of 8" tiny $precision --steps 1 --batch-size 8 --out "$work/$precision-parts"
    check "  have the same loss and norms within $bound" \
        "$COMPARE" metrics "$work/$precision-whole/metrics.jsonl" "$work/$precision-parts/metrics.jsonl" --rtol $bound
done

check "a run with half the batch" tiny fp32 --batch-size 16 --total-batch-size 256 --eps 1e-5 --out "$work/half"
check "  differs, and the comparison sees it" \
    not "$COMPARE" metrics "$work/whole/metrics.jsonl" "$work/half/metrics.jsonl" --rtol 1e-5 --atol 1e-6 --only loss
done_testing
