#!/bin/bash
# A run of each stage under the sanitizers for addresses, leaks and undefined behaviour: two micro-batches a step, evaluation, samples,
# a checkpoint, and a second run that continues from it. All other tests with sanitized programs look for no leaks of ranks.
. test/lib.sh
BUILD=build/debug
options=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data $REFERENCE/tokens.bin --model d3 --heads 2 --channels 16 --seq-len 16
    --batch-size 2 --lr 3e-3 --warmup-steps 2 --eval-every 2 --eval-steps 1 --sample-every 3 --sample-tokens 4 --save-every 2 --keep 1)

# clean RANKS PROGRAM OPTION...: 3 steps, then 2 more from the checkpoint, in which no sanitizer finds anything.
clean() {
    local ranks=$1 program=$BUILD/train_gpt2_$2 steps
    shift 2
    rm -rf "$work/out"
    for steps in 3 5; do
        set -- "$@" --resume
        [ $steps = 5 ] || set -- "${@:1:$#-1}"
        LEAKS=1 on_ranks "$ranks" "$program" "${options[@]}" --total-batch-size $((64 * ranks)) --out "$work/out" --steps $steps "$@" \
            < /dev/null > "$work/log" 2>&1 || { tail -n 60 "$work/log"; return 1; }
        ! grep -E 'Sanitizer|runtime error' "$work/log" || return 1
    done
    [ -d "$work/out/step_00000005" ] && grep -q '^sample after step 5' "$work/log" && grep -q 'start .* step 3 of 5' "$work/log"
}
single() { # as clean, without mpirun
    on_ranks() { shift; OMP_NUM_THREADS=1 "$@"; }
    clean 1 single "$@"
}
seen() { # the leak detector is on: a program that leaks is not clean
    printf '#include <stdlib.h>\nvoid* volatile p;\nint main(void) { p = malloc(3); p = 0; return 0; }\n' > "$work/leak.c"
    gcc -fsanitize=address "$work/leak.c" -o "$work/leak" && ! LEAKS=1 on_ranks 1 "$work/leak" > "$work/log" 2>&1 && grep -q LeakSanitizer "$work/log"
}
check "a leak is found" seen
check "single" eval '(single)'
check "ddp, bucketed, on 3 ranks" clean 3 ddp --bucket-mb 0.02 --check-every 1
check "fsdp on 3 ranks" clean 3 fsdp --check-every 1
for_tier rest
check "ddp, naive, with our own ring" clean 3 ddp --ddp naive --allreduce ring
check "zero, stage 1" clean 3 zero --zero-stage 1 --recompute block
check "zero, stage 2" clean 3 zero --zero-stage 2 --deterministic
check "zero, stage 3, on 3 ranks" clean 3 zero --zero-stage 3 --check-every 1
check "tp, 2 ranks that share a copy of the model, and rows" clean 2 tp --total-batch-size 64 --sequence-parallel --check-every 1
check "pp, 2 stages" clean 2 pp --check-every 1
check "3d, 2 copies of 2 ranks with half of each matrix, with ZeRO" clean 4 3d --mesh dp=2,tp=2 --total-batch-size 128 --zero-stage 1 --check-every 1
check "compress, int8 on 3 ranks, with errors and their bias" clean 3 compress --compress int8 --error-feedback --measure-bias 2 --check-every 1
for method in fp16 int4 top-k sign "onebit-adam --compress-from 1" "powersgd --rank 2 --compress-from 1 --recompute block"; do
    check "compress, $method" clean 2 compress --error-feedback --compress $method
done
check "pp, 2 copies of 2 stages, with gradients of weights put off" clean 4 pp --pipeline-parallel 2 --schedule zb-h1 --check-every 1 --bucket-mb 0.02
check "pp, 3 stages, one after another with gpipe, of which the last has nothing but the head, with recomputation" \
    clean 3 pp --schedule gpipe --split 1,2,0 --recompute block --ddp naive --deterministic
check "pp, 2 ranks with 2 chunks each" clean 2 pp --layers 4 --schedule interleaved
check "pp, one rank with 3 chunks" clean 1 pp --schedule interleaved --chunks 3
check "3d, 2 x 2 x 2 ranks, with ZeRO, rows in parts and gradients of weights put off" \
    clean 8 3d --mesh dp=2,tp=2,pp=2 --total-batch-size 128 --zero-stage 1 --sequence-parallel --schedule zb-h1 --check-every 1
check "3d, 2 copies of 2 stages, with chunks and recomputation" clean 4 3d --mesh pp=2,dp=2 --layers 4 --schedule interleaved --recompute block
check "3d, 2 stages of 2 ranks that keep gathered rows, the last with nothing but the head" \
    clean 4 3d --mesh tp=2,pp=2 --total-batch-size 128 --split 3,0 --sequence-parallel --keep-gathered --no-overlap --deterministic
check "3d, one rank" clean 1 3d --zero-stage 1
check "tp, 2 copies of 2 ranks" clean 4 tp --tensor-parallel 2 --total-batch-size 128 --sequence-parallel --check-every 1 --bucket-mb 0.02
check "tp, 4 ranks, of which the last has nothing but padding of the vocabulary, with recomputation" \
    clean 4 tp --heads 4 --total-batch-size 64 --recompute block --no-overlap
check "tp, 2 ranks that keep gathered rows, one all-reduce after another" \
    clean 2 tp --total-batch-size 64 --sequence-parallel --keep-gathered --ddp naive --deterministic
check "tp, 2 copies of one rank" clean 2 tp --tensor-parallel 1
check "fsdp, hybrid, by 2 blocks, offloaded, with sharded checkpoints" \
    clean 4 fsdp --sharding hybrid --shard-group 2 --wrap-blocks 2 --cpu-offload --checkpoint sharded --prefetch backward-post
check "fsdp, grad-op, no prefetch" clean 2 fsdp --sharding grad-op --prefetch none --no-forward-prefetch
check "fsdp, the whole model at once" clean 2 fsdp --wrap-blocks 0 --checkpoint sharded
done_testing
