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

# After one step the moments are (1 - beta) g and (1 - beta) g^2, here 1e-7 of what they are with betas of 0.
moments() { # OUT: all numbers of the checkpoint's moments
    perl -e 'local $/; $_ = <>; print join("\n", unpack("f<*", substr($_, 8 + unpack("Q<", $_)))), "\n"' \
        "$1/step_00000001/optimizer.safetensors"
}
one_step() { reference_run fp32 --steps 1 --beta1 "$2" --beta2 "$2" --out "$1"; }
are_1e7_parts() {
    paste <(moments "$1") <(moments "$2") | awk '
        $2 != 0 { n++; if (!($1 / $2 > 0.999999e-7 && $1 / $2 < 1.000001e-7)) { print $1, "of", $2; exit bad = 1 } }
        END { exit bad || n < 1000 }'
}
check "a step with betas of 0" one_step "$work/zero" 0
check "a step with betas of 0.9999999" one_step "$work/near-1" 0.9999999
check "  1 - beta has its digits, which a beta in fp32 has lost" are_1e7_parts "$work/near-1" "$work/zero"
done_testing
