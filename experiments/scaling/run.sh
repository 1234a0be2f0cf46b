#!/bin/sh
# Why are two ranks not twice as fast as one? DDP and FSDP on one and two ranks (dev/bench/scaling.sh makes the runs), with the same batch
# in all (strong) and with the same batch on each rank (weak).
set -eu
. "$(dirname -- "$0")/../lib.sh"
begin scaling 5 ddp,fsdp "$@"

model="--model d6 --seq-len 64" batch=4 steps=25
[ -z "$quick" ] || model="--layers 2 --channels 32 --heads 2 --seq-len 16" batch=2 steps=3
for round in $rounds; do
    for stage in ddp fsdp; do
        echo "  $name, round $round: $stage" >&2
        PROGRAM=$(program $stage) sh dev/bench/scaling.sh --ranks "1 2" --batch-size $batch --steps $steps --out "$work/runs" \
            --data test/reference/tokens.bin $model --eval-every 0 $more > "$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "scaling.sh failed"; }
        for ranks in 1 2; do
            for kind in strong weak; do
                [ $kind$ranks != weak2 ] || continue # scaling.sh makes it once: with two ranks both are the same
                summary "$work/runs/${kind}_$ranks" run="$stage-$kind-$ranks" ranks=$ranks stage=$stage \
                    options="$model --batch-size $([ $kind$ranks = strong1 ] && echo $((2 * batch)) || echo $batch)"
            done
        done
    done
done
finish
