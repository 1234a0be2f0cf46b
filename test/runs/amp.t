#!/bin/bash
# Data parallelism in bf16 against PyTorch's DDP under AMP: autocast to bf16, with weights and AdamW's state in fp32.
# test/reference/README.md has the reasons of the bounds. PyTorch with either of two mistakes is outside of them.
. test/lib.sh
ddp=$(of train_gpt2_ddp bf16)
initial=$REFERENCE/initial/model.safetensors

run_in_bf16() { # RANKS BATCH OUT
    on_ranks "$1" "$ddp" "${reference_options[@]}" --batch-size "$2" --bucket-mb 0.02 --out "$3" > "$3.log" 2>&1 ||
        { tail -n 20 "$3.log"; return 1; }
}
metrics_near() { # A.jsonl B.jsonl FIELD...: within an eighth of bf16's roundoff (2^-8), all of it, and a sixteenth
    local field bound
    for field in "${@:3}"; do
        case $field in loss) bound=5e-4 ;; grad_norm) bound=4e-3 ;; param_norm) bound=2.5e-4 ;; esac
        "$COMPARE" metrics "$1" "$2" --rtol $bound --only "$field" || return 1
    done
}
weights_near() { # NAME B.safetensors
    "$COMPARE" weights $REFERENCE/ddp/$1.safetensors "$2" --from $initial --rtol 0.04 --but qkv.bias &&
        "$COMPARE" weights $REFERENCE/ddp/$1.safetensors "$2" --from $initial --rtol 0.4 --only qkv.bias
}
memory() { sed -n "/\"$1\"/s/.*\"$2\": \([0-9]*\)[,}].*/\1/p" $REFERENCE/ddp/memory.jsonl; } # RUN FIELD
predicted() { sed -n "1s/.*\"predicted_bytes\":{[^}]*\"$2\":\([0-9]*\).*/\1/p" "$1/metrics.jsonl"; } # OUT KIND
same_state() { # NAME OUT: as many bytes for weights, gradients and AdamW together, though divided otherwise
    local ours theirs padding=$(((384 - 257) * 32))
    ours=$(($(predicted "$2" parameters) + $(predicted "$2" gradients) + $(predicted "$2" "optimizer state")))
    theirs=$(($(memory "$1" parameters) + $(memory "$1" gradients) + $(memory "$1" optimizer_state)))
    echo "ours: $ours bytes with $padding parameters of padding; PyTorch's: $theirs with 4 for each tensor's step"
    [ $((ours - 16 * padding)) -eq $((theirs - 4 * $(memory "$1" tensors))) ] &&
        [ "$(predicted "$2" parameters)" -eq $(($(memory "$1" parameters) / 2 + 2 * padding)) ]
}

[ "$BUILD" = build ] && all="2 4" || all=2
for ranks in $all; do
    name=ranks_$ranks batch=8 out=$work/$ranks
    [ $ranks = 2 ] || { name=${name}_accumulate_2 batch=2; }
    check "$ranks ranks in bf16, with $((16 / ranks / batch)) micro-batch(es)" run_in_bf16 $ranks $batch "$out"
    check "  have the losses and norms of PyTorch's DDP under AMP" \
        metrics_near $REFERENCE/ddp/${name}_amp.jsonl "$out/metrics.jsonl" loss grad_norm param_norm
    check "  and its weights" weights_near ${name}_amp "$out/step_00000020/optimizer.safetensors"
    check "    which the rounded ones are not" not weights_near ${name}_amp "$out/step_00000020/model.safetensors"
    check "  do not really compute in fp32" \
        not "$COMPARE" metrics $REFERENCE/ddp/$name.jsonl "$out/metrics.jsonl" --rtol 2e-5 --only loss
    check "  need as many bytes a parameter" same_state ${name}_amp "$out"
done
mistake() { # NAME FIELD: PyTorch with that mistake, compared with PyTorch without
    not metrics_near $REFERENCE/ddp/ranks_2_amp.jsonl $REFERENCE/ddp/ranks_2_amp_$1.jsonl "$2"
}
check "gradients that are not divided by the ranks would be noticed" mistake summed grad_norm
check "weights without fp32 masters would be noticed by the losses" mistake without_masters loss
check "  by the gradient norms" mistake without_masters grad_norm
check "  and by the parameter norms" mistake without_masters param_norm
done_testing
