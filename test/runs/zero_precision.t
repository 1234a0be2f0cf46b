#!/bin/bash
# ZeRO in 16 bits, where each rank also has its shard of the fp32 master weights: every stage's numbers are DDP's to the bit in
# rank order, and fp16 skips the same steps.
. test/lib.sh

# 24 sequences a step: they divide over 1, 2, 3, 4 and 8 ranks
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d3 --heads 2 --channels 16 --seq-len 16 --total-batch-size 384
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --steps 20 --deterministic)
trains() { # PROGRAM PRECISION RANKS MICRO_BATCHES OUT OPTION...
    local out=$5
    rm -rf "$out"
    on_ranks "$3" "$(of "$1" "$2")" "${small[@]}" --batch-size $((24 / $3 / $4)) --out "$out" "${@:6}" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}

holds() { # RANKS STAGE OUT: per parameter 2 bytes, 2 for its gradient, and 12 for master weight and moments
    local kept=$(($(shard $(((384 + 16 + 2) * 16)) $1) + 3 * $(shard $((12 * 16 * 16 + 13 * 16)) $1))) expected
    expected="\"parameters\":$((2 * kept * ($2 < 3 ? $1 : 1))),\"gradients\":$((2 * kept * ($2 < 2 ? $1 : 1))),\"optimizer state\":$((12 * kept)),"
    echo "expected: $expected"
    cat "$3.log"
    grep -F "$expected" "$3/metrics.jsonl" && ! grep 'than predicted$' "$3.log" && grep -q 'optimizer state .*as predicted$' "$3.log"
}
skipped() { "$COMPARE" show "$1/metrics.jsonl" skipped; } # OUT
same_skips() { # OUT OUT: at the same steps, some but not all
    paste <(skipped "$1") <(skipped "$2")
    cmp <(skipped "$1") <(skipped "$2") && skipped "$1" | grep -q true && skipped "$1" | grep -q false
}
near() { # OUT OUT BOUND: losses. Two micro-batches round in 16 bits, in different places in different stages.
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol "$3" --only loss
}

[ "$BUILD" = build ] && all="1 2 3 4 8" || all=3
for numbers in "bf16 1e-4" "fp16 1e-5"; do # a fortieth of the format's roundoff
    read -r precision bound <<< "$numbers"
    [ "$BUILD" = build ] || [ $precision = bf16 ] || continue # the same code, for the sanitizers
    scale=() # fp16 begins with scales too large for its gradients, so that steps are skipped
    [ $precision = fp16 ] && scale=(--loss-scale 8388608 --max-bad-steps 20)
    for ranks in $all; do
        case $precision-$ranks in bf16-3|bf16-4) for_tier quick ;; *) for_tier rest ;; esac
        check "$precision, $ranks rank(s): DDP" trains train_gpt2_ddp $precision $ranks 1 "$work/ddp" "${scale[@]}"
        [ $ranks != 3 ] || [ "$BUILD" != build ] || check "  with accumulation" trains train_gpt2_ddp $precision $ranks 2 "$work/ddp-2" "${scale[@]}"
        for stage in 1 2 3; do
            check "$precision, $ranks rank(s), stage $stage" trains train_gpt2_zero $precision $ranks 1 "$work/zero" "${scale[@]}" --zero-stage $stage
            check "  has DDP's metrics, weights, master weights and moments to the bit" same_run "$work/ddp" "$work/zero"
            check "  each rank holds what the formula says, of each kind" holds $ranks $stage "$work/zero"
            [ $precision = bf16 ] || check "  it skips the steps that DDP skips" same_skips "$work/ddp" "$work/zero"
            [ $ranks = 3 ] && [ "$BUILD" = build ] || continue
            check "  with accumulation" trains train_gpt2_zero $precision $ranks 2 "$work/zero" "${scale[@]}" --zero-stage $stage
            if [ $stage = 1 ]; then check "    to the bit" same_run "$work/ddp-2" "$work/zero"
            else check "    has DDP's losses within $bound" near "$work/ddp-2" "$work/zero" $bound; fi
            [ $precision = bf16 ] || check "    and skips its steps" same_skips "$work/ddp-2" "$work/zero"
        done
    done
done
done_testing
