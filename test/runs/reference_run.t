#!/bin/bash
# A training run of 20 steps against the same run by PyTorch: initial weights, tokens and options are those of
# test/reference/make_reference.py. Losses, gradient norms, parameter norms and final weights agree within
# 1e-6 + 1e-5 |reference|, with PyTorch both in fp32 and in fp64, which is nearer the truth than any fp32 run. Parameter norms
# agree with fp32's within 1e-6.
. test/lib.sh

for batch in 16 4; do
    out=$work/batch-$batch
    check "a run of 20 steps with $((16 / batch)) micro-batch(es) a step" reference_run fp32 --batch-size $batch --out "$out"
    for pytorch in fp32 fp64; do
        check "  its losses and norms agree with PyTorch's in $pytorch" \
            "$COMPARE" metrics $REFERENCE/pytorch_$pytorch.jsonl "$out/metrics.jsonl" --rtol 1e-5 --atol 1e-6
        check "  its final weights agree with PyTorch's in $pytorch" \
            "$COMPARE" weights $REFERENCE/pytorch_$pytorch.safetensors "$out/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
    done
    check "  its parameter norms agree with PyTorch's in fp32 within 1e-6" \
        "$COMPARE" metrics $REFERENCE/pytorch_fp32.jsonl "$out/metrics.jsonl" --atol 1e-6 --only param_norm
done
check "the comparison notices weights that are not those of the last step" \
    not "$COMPARE" weights $REFERENCE/pytorch_fp64.safetensors $REFERENCE/initial/model.safetensors --rtol 1e-5 --atol 1e-6
done_testing
