#!/bin/bash
# A run that is continued from a checkpoint ends in the same bits as one that was never interrupted. An epoch has 13 steps:
# step 10 is in the first, 15 in the second.
. test/lib.sh

resume() { tiny "$1" --save-every 5 --keep 0 --loss-scale-interval 4 --out "$2" --resume; } # PRECISION OUT
forget_after() { # OUT STEP: as a crash would have left it, that is with metrics of steps whose weights are lost
    local folder
    for folder in "$1"/step_*; do [ "$((10#${folder##*_}))" -le "$2" ] || rm -r "$folder"; done
}

for precision in fp32 bf16 fp16; do
    whole=$work/$precision
    check "$precision: 20 steps at once" tiny $precision --save-every 5 --keep 0 --loss-scale-interval 4 --out "$whole"
    for step in 10 15; do
        part=$work/$precision-$step
        cp -r "$whole" "$part"
        forget_after "$part" $step
        check "$precision: continued from step $step" resume $precision "$part"
        check "  has the same metrics, weights and optimizer state to the bit" same_run "$whole" "$part"
    done
done
cp -r "$work/fp32" "$work/torn"
forget_after "$work/torn" 10
printf '{"step":21,"loss":4.' >> "$work/torn/metrics.jsonl"
check "a line that was torn by a crash is cut off" resume fp32 "$work/torn"
check "  and the metrics are whole" "$COMPARE" metrics "$work/fp32/metrics.jsonl" "$work/torn/metrics.jsonl" --bits
check "another seed is another run" tiny fp32 --seed 1 --out "$work/other"
check "  and the comparison sees it" not same_run "$work/fp32" "$work/other"

cp -r "$work/fp32" "$work/complete"
check "a run that is complete is left as it is" resume fp32 "$work/complete"
check "  to the bit" diff -r "$work/fp32" "$work/complete"
check "--steps below the checkpoint's is an error" \
    refused "resume" "step 20" "steps 15" -- fp32 --out "$work/complete" --resume --steps 15
check "--resume without --out is an error" refused "--resume" "--out" -- fp32 --resume
check "--resume with nothing there is an error" refused "$work/nothing" "no checkpoint" -- fp32 --resume --out "$work/nothing"
check "  and makes nothing" [ ! -e "$work/nothing" ]
check "--resume with --init-from is an error" \
    refused "--resume" "--init-from" -- fp32 --resume --out "$work/fp32" --init-from "$work/fp32/step_00000010"
check "another --seq-len is an error" refused "--seq-len" 16 8 -- fp32 --resume --out "$work/fp32" --steps 30 --seq-len 8
check "another --seed is an error" refused "--seed" 1337 7 -- fp32 --resume --out "$work/fp32" --steps 30 --seed 7
check "another shape is an error" refused "$work/fp32/step_00000020" layers 2 3 -- fp32 --resume --out "$work/fp32" --steps 30 --layers 3
check "weights alone cannot be resumed" rm "$work/torn/step_00000020/optimizer.safetensors"
check "  is an error that names the file" refused "step_00000020" "optimizer" -- fp32 --resume --out "$work/torn" --steps 30
check "after all this nothing has changed" same_run "$work/fp32" "$work/fp32-10"
done_testing
