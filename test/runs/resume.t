#!/bin/bash
# A run that is continued from a checkpoint ends in the same bits as one that was never interrupted. An epoch has 13 steps:
# step 10 is in the first, 15 in the second.
. test/lib.sh

run() { # PRECISION OUT OPTION...: 20 steps with evaluations and samples
    local precision=$1 out=$2
    shift 2
    tiny "$precision" --save-every 5 --keep 0 --loss-scale-interval 4 --val-data $REFERENCE/tokens.bin --eval-every 4 --eval-steps 2 \
        --sample-every 10 --sample-tokens 8 --out "$out" "$@"
}
forget_after() { # OUT STEP: leaves OUT as after a crash: with metrics of steps whose weights are lost
    local folder
    for folder in "$1"/step_*; do [ "$((10#${folder##*_}))" -le "$2" ] || rm -r "$folder"; done
}

for precision in fp32 bf16 fp16; do
    whole=$work/$precision
    check "$precision: 20 steps without a break" run $precision "$whole"
    for step in 10 15; do
        part=$work/$precision-$step
        cp -r "$whole" "$part"
        forget_after "$part" $step
        check "$precision: continued from step $step" run $precision "$part" --resume
        check "  has the same metrics, weights and optimizer state to the bit" same_run "$whole" "$part"
    done
done
# --steps 0 saves what training would begin with.
begins() { # PRECISION
    run $1 "$work/zero-$1" --steps 0 && [ "$(ls -A "$work/zero-$1" | tr '\n' ' ')" = "metrics.jsonl step_00000000 " ] &&
        grep -q '"step": 0' "$work/zero-$1/step_00000000/state.json" && grep -q '"position": 0' "$work/zero-$1/step_00000000/state.json" &&
        grep -q '"adamw_t": 0' "$work/zero-$1/step_00000000/state.json"
}
for precision in fp32 bf16 fp16; do
    check "$precision: --steps 0 saves step 0" begins $precision
    before=$(stat -c %Y.%i "$work/zero-$precision"/step_00000000)
    check "  continued with --steps 0 it stays as it is" run $precision "$work/zero-$precision" --resume --steps 0
    check "  and is not saved again" [ "$(stat -c %Y.%i "$work/zero-$precision"/step_00000000)" = "$before" ]
    check "  Hugging Face's programs can have it" build/hf_export "$work/zero-$precision/step_00000000" "$work/hf-$precision"
    check "  continued from step 0" run $precision "$work/zero-$precision" --resume
    check "  the run is the same as one without a break, to the bit" same_run "$work/$precision" "$work/zero-$precision"
done
check "a run of 20 steps does not save step 0" [ ! -e "$work/fp32/step_00000000" ]
check "--steps 0 saves weights to start from as a run's first step" \
    run fp32 "$work/copy" --init-from "$work/fp32/step_00000010" --steps 0
check "  they are the same" cmp "$work/fp32/step_00000010/model.safetensors" "$work/copy/step_00000000/model.safetensors"

cp -r "$work/fp32" "$work/torn"
forget_after "$work/torn" 10
printf '{"step":21,"loss":4.' >> "$work/torn/metrics.jsonl"
check "a line that was torn by a crash is cut off" run fp32 "$work/torn" --resume
check "  and the metrics are whole" "$COMPARE" metrics "$work/fp32/metrics.jsonl" "$work/torn/metrics.jsonl" --bits
check "a run with another seed" run fp32 "$work/other" --seed 1
check "  differs, and the comparison sees it" not same_run "$work/fp32" "$work/other"
check "a run without evaluations and samples" tiny fp32 --out "$work/silent"
check "  has the same weights" cmp "$work/fp32/step_00000020/model.safetensors" "$work/silent/step_00000020/model.safetensors"

cp -r "$work/fp32" "$work/complete"
check "a complete run is left as it is" run fp32 "$work/complete" --resume
check "  to the bit" diff -r "$work/fp32" "$work/complete"
check "--steps below the checkpoint's is an error" \
    refused "resume" "step 20" "steps 15" -- fp32 --out "$work/complete" --resume --steps 15
check "--resume without --out is an error" refused "--resume" "--out" -- fp32 --resume
check "--resume from a missing folder is an error" refused "$work/nothing" "no checkpoint" -- fp32 --resume --out "$work/nothing"
check "  and does not create it" [ ! -e "$work/nothing" ]
check "--resume with --init-from is an error" \
    refused "--resume" "--init-from" -- fp32 --resume --out "$work/fp32" --init-from "$work/fp32/step_00000010"
check "another --seq-len is an error" refused "--seq-len" 16 8 -- fp32 --resume --out "$work/fp32" --steps 30 --seq-len 8
check "another --seed is an error" refused "--seed" 1337 7 -- fp32 --resume --out "$work/fp32" --steps 30 --seed 7
check "another shape is an error" refused "$work/fp32/step_00000020" layers 2 3 -- fp32 --resume --out "$work/fp32" --steps 30 --layers 3
check "weights alone cannot be resumed" rm "$work/torn/step_00000020/optimizer.safetensors"
check "  the error names the file" refused "step_00000020" "optimizer" -- fp32 --resume --out "$work/torn" --steps 30
check "after all this nothing has changed" same_run "$work/fp32" "$work/fp32-10"
done_testing
