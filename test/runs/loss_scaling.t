#!/bin/bash
# fp16's dynamic loss scale: a step whose gradients overflow is skipped and logged, changes nothing and halves the scale; good
# steps double it again. If gradients stay NaN, the run ends, in every precision.
. test/lib.sh

column() { "$COMPARE" show "$1/metrics.jsonl" "$2" | awk '{ print $2 }'; } # OUT FIELD: prints its values, a line for each step
halves_until_good() { # OUT: each skipped step is followed by half the scale, and after the last of them no step is skipped
    paste <(column "$1" loss_scale) <(column "$1" skipped) | tee /dev/stderr | awk '
        NR > 1 && $1 != (skipped ? last / 2 : last) { exit 1 }
        { last = $1; skipped = $2 == "true"; skips += skipped }
        skips > 0 && !skipped { good = 1 }
        good && skipped { exit 1 }
        NR == 1 && !skipped { exit 1 }
        END { if (!good) exit 1 }'
}
doubles_every() { # OUT STEPS: each scale lasts STEPS good steps, from the first step on
    column "$1" loss_scale | tee /dev/stderr | awk -v interval="$2" '
        NR > 1 && $1 != ((NR - 1) % interval == 0 ? 2 * last : last) { exit 1 }
        { last = $1 }'
}
learns() { column "$1" loss | tee /dev/stderr | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(last < first - 0.25) }'; }
last_skipped_step() { "$COMPARE" show "$1/metrics.jsonl" skipped | awk '$2 == "true" { step = $1 } END { print step + 0 }'; }
same_state() { # OUT STEP STEP: weights, master weights and moments are equal
    local a b
    a=$1/$(printf 'step_%08d' "$2") b=$1/$(printf 'step_%08d' "$3")
    cmp "$a/model.safetensors" "$b/model.safetensors" && cmp "$a/optimizer.safetensors" "$b/optimizer.safetensors"
}

out=$work/overflow
check "fp16 with a loss scale of 2^40 completes 40 steps" \
    tiny fp16 --loss-scale 1099511627776 --max-bad-steps 100 --steps 40 --save-every 1 --keep 0 --out "$out"
check "  the scale halves at every skipped step until gradients are finite" halves_until_good "$out"
last=$(last_skipped_step "$out")
check "  several steps were skipped" [ "$last" -ge 3 ]
check "  skipped steps change neither weights nor optimizer" same_state "$out" 1 "$last"
check "  the step after them does" not same_state "$out" "$last" $((last + 1))
check "  AdamW's bias correction counts updates, not steps" grep "\"adamw_t\": $((40 - last))," "$out/step_00000040/state.json"
check "  and the model learns from there on" learns "$out"

check "fp16 with --loss-scale-interval 4" tiny fp16 --loss-scale 16 --loss-scale-interval 4 --out "$work/growth"
check "  doubles its scale every 4 steps" doubles_every "$work/growth" 4
check "fp16 with a loss scale of 16" tiny fp16 --loss-scale 16 --out "$work/scale-16"
check "fp16 with a loss scale of 1024" tiny fp16 --loss-scale 1024 --out "$work/scale-1024"
check "  has the same gradient norms: they are reported without the scale" \
    "$COMPARE" metrics "$work/scale-16/metrics.jsonl" "$work/scale-1024/metrics.jsonl" --rtol 1e-3 --only grad_norm
check "fp16 stops after --max-bad-steps that overflow, and names the last of them" \
    refused "3 steps in a row" "step 3" -- fp16 --loss-scale 1e30 --max-bad-steps 3 --out "$work/stopped"
check "  all of them are in the log" [ "$(last_skipped_step "$work/stopped")" -eq 3 ]

# weight decay that multiplies every matrix by -1e5 each step: Inf - Inf is NaN within a few steps
diverge="--lr 1000 --weight-decay 100 --lr-schedule constant --warmup-steps 0 --steps 100 --max-bad-steps 4"
for precision in fp32 bf16; do
    check "$precision: a run that diverges to NaN is stopped" \
        refused "NaN or Inf" "4 steps in a row" "step [0-9]" -- $precision $diverge --out "$work/$precision"
    check "  after exactly 4 bad steps" [ "$(column "$work/$precision" skipped | grep -c true)" -eq 4 ]
    check "  its loss scale is 1 all the time" [ "$(column "$work/$precision" loss_scale | sort -u)" = 1.0 ]
done
done_testing
