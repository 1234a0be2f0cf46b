#!/bin/bash
# Strict mode, where what a stage must not read is NaN: every stage has the bits that it has without it. Sequences have 16 tokens and
# the model 1024 positions, so most rows of the position embedding's gradient are written by no layer: a buffer in which something
# else has been must be zero there. In rank order many settings have the same bits; each is also compared with a setting that keeps
# its gradients elsewhere.
. test/lib.sh
last=00000003
short=(--model gpt2 --layers 3 --heads 2 --channels 16 --data $REFERENCE/tokens.bin --val-data= --seq-len 16 --batch-size 1 --steps 3
    --lr 3e-3 --warmup-steps 1 --eval-every 0 --sample-every 0 --deterministic)

# runs OUT RANKS STAGE OPTION...: two micro-batches a step, or four where two ranks share a copy of the model
runs() {
    local out=$1 ranks=$2 program=$BUILD/train_gpt2_$3 start="on_ranks $2"
    [ "$3" = single ] && start=
    rm -rf "$out"
    $start "$program" "${short[@]}" --total-batch-size $((32 * ranks)) --out "$out" "${@:4}" > "$out.log" 2>&1 < /dev/null ||
        { tail -n 20 "$out.log"; return 1; }
}
is_finite() { # OUT: JSON has no NaN, so it is null in the log
    [ "$(grep -c '"grad_norm":[0-9]' "$1/metrics.jsonl")" -eq 3 ] && ! grep '^{"step".*\(null\|"skipped":true\)' "$1/metrics.jsonl"
}
both_ways() { # RANKS STAGE OPTION...
    runs "$work/plain" "$@" && strict runs "$work/strict" "$@" && is_finite "$work/strict" &&
        same_run "$work/plain" "$work/strict" $last
}

# Settings with the same first word have the same bits: those of a stage that adds up micro-batches in another place have others.
seldom() { cat << END
single 1 single --recompute block
alone 1 fsdp --cpu-offload
whole 2 zero --zero-stage 1
shards 4 zero --zero-stage 2
shards 4 zero --zero-stage 3 --recompute block
shards 4 fsdp --sharding full --wrap-blocks 2
none 4 fsdp --sharding none
none 4 fsdp --sharding none --cpu-offload
parts 2 tp --no-overlap
parts 2 tp --recompute block
stages 2 pp --schedule gpipe --recompute block
stages 2 pp --schedule zb-h1
copies 4 3d --mesh dp=2,pp=2 --zero-stage 1
copies 4 pp --pipeline-parallel 2 --bucket-mb 0.01
copies 4 pp --pipeline-parallel 2 --schedule zb-h1 --ddp naive
mesh 4 3d --mesh tp=2,pp=2 --schedule gpipe --recompute block
mesh 4 3d --mesh tp=2,pp=2 --schedule zb-h1 --no-overlap
spread 4 3d --mesh dp=2,tp=2 --zero-stage 1 --sequence-parallel
spread 4 3d --mesh dp=2,tp=2 --sequence-parallel
spread 4 3d --mesh dp=2,tp=2 --sequence-parallel --zero-stage 1 --keep-gathered --recompute block
signs 2 compress --compress sign --error-feedback
signs 2 compress --compress sign --error-feedback --bucket-mb 0.001 --recompute block
low 3 compress --compress powersgd --rank 2 --compress-from 1
low 3 compress --compress powersgd --rank 2 --compress-from 1 --bucket-mb 0.001 --recompute block
momentum 3 compress --compress onebit-adam --compress-from 1 --no-error-feedback
rows 4 tp --tensor-parallel 2 --sequence-parallel
rows 4 tp --tensor-parallel 2 --sequence-parallel --no-overlap
rows 4 tp --tensor-parallel 2 --sequence-parallel --keep-gathered --recompute block
hybrid 4 fsdp --sharding hybrid --shard-group 2 --cpu-offload --wrap-blocks 2
END
}
often() { cat << END
ddp 2 ddp --recompute block
hybrid 4 fsdp --sharding hybrid --shard-group 2
bits 3 compress --compress int8 --error-feedback
parts 2 tp
stages 2 pp
mesh 4 3d --mesh tp=2,pp=2
END
}
always() { cat << END
pair 2 zero --zero-stage 3
pair 2 fsdp --sharding full --cpu-offload --recompute block
pair 2 fsdp --sharding grad-op --cpu-offload --wrap-blocks 0
END
}
tried() {
    local bits ranks stage options
    while read -r bits ranks stage options; do
        # shellcheck disable=SC2086 # options are several words
        check "$ranks rank(s), $stage $options: strict mode has the same bits, and they are finite" \
            both_ways "$ranks" "$stage" $options
        if [ -e "$work/$bits" ]; then check "  and those of the setting before" same_run "$work/$bits" "$work/strict" $last
        elif [ -e "$work/strict" ]; then cp -r "$work/strict" "$work/$bits"; fi
    done
}
tried < <(always)
if [ "$BUILD" = build ]; then
    tried < <(often)
    for_tier rest
    tried < <(seldom)
fi
done_testing
