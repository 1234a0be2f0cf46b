#!/bin/bash
# What ranks do together: checkpoints that any number of ranks can continue, equal state, bytes as predicted, communication
# during the backward pass and, when a rank fails or differs, an end within seconds that names it.
. test/lib.sh
ddp=$BUILD/train_gpt2_ddp
# eps: with a small one, the key biases' rounding noise would become whole steps (test/reference/README.md)
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d2 --heads 2 --channels 16 --seq-len 16 --total-batch-size 512
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --steps 20)

train() { # RANKS BATCH OUT OPTION...
    local ranks=$1 batch=$2 out=$3
    shift 3
    on_ranks "$ranks" "$ddp" "${small[@]}" --batch-size "$batch" --out "$out" --bucket-mb 0.01 "$@" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
single() { # OUT OPTION...
    local out=$1
    shift
    "$(program fp32)" "${small[@]}" --batch-size 32 --out "$out" "$@" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
close() { # OUT OUT
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$1/step_00000020/model.safetensors" "$2/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
}
only_step_10() { mkdir -p "$2" && cp -r "$1/step_00000010" "$1/metrics.jsonl" "$2"; } # FROM TO: as if the run had been stopped there

# ---- checkpoints. 20 steps of 32 sequences are more than one epoch, so the second one's order also counts ----
check "4 ranks train and save" train 4 8 "$work/four" --save-every 10 --deterministic
check "one rank does the same with accumulation" train 1 8 "$work/one" --save-every 10
check "  and its losses, norms and weights agree" close "$work/one" "$work/four"
check "train_gpt2_single does the same" single "$work/single" --save-every 10
check "  and agrees" close "$work/single" "$work/four"
only_step_10 "$work/four" "$work/again" && only_step_10 "$work/four" "$work/on-two" && only_step_10 "$work/four" "$work/on-single"
only_step_10 "$work/single" "$work/from-single"
check "4 ranks resume from step 10" train 4 8 "$work/again" --save-every 10 --deterministic --resume
check "  to the bit" same_run "$work/four" "$work/again"
check "2 ranks resume from the checkpoint of 4" train 2 16 "$work/on-two" --resume
check "  and agree" close "$work/four" "$work/on-two"
check "train_gpt2_single resumes from the checkpoint of 4 ranks" single "$work/on-single" --resume
check "  and agrees" close "$work/four" "$work/on-single"
check "4 ranks resume from train_gpt2_single's checkpoint" train 4 8 "$work/from-single" --resume
check "  and agree" close "$work/single" "$work/from-single"
evaluated() { # on all of the data; its last batch is padded, so ranks see different numbers of tokens
    rm -rf "$work"/{single,three}
    single "$work/single" --total-batch-size 384 --batch-size 24 --val-data $REFERENCE/tokens.bin --eval-every 10 --eval-steps 1000 &&
        train 3 4 "$work/three" --total-batch-size 384 --val-data $REFERENCE/tokens.bin --eval-every 10 --eval-steps 1000 &&
        [ "$(grep -c val_loss "$work/three/metrics.jsonl")" -eq 3 ] && close "$work/single" "$work/three"
}
check "3 ranks' validation losses are train_gpt2_single's" evaluated
check "ranks that compare their state find it equal" train 3 4 "$work/checked" --total-batch-size 384 --check-every 5

# ---- what is sent ----
sent_as_predicted() { # RANKS BATCH OPTION...
    local ranks=$1 batch=$2 parameters=12992 bytes # (384 + 16 + 2) 16 + 2 (12 16^2 + 13 16)
    shift 2
    rm -rf "$work/sent"
    train "$ranks" "$batch" "$work/sent" --steps 3 "$@" || return 1
    bytes=$((2 * (ranks - 1) * (4 * parameters + 8) / ranks)) # plus the loss, a double
    cat "$work/sent.log"
    grep -q "^  bytes .* as predicted" "$work/sent.log" && [ "$(grep -c "\"comm_bytes\":$bytes," "$work/sent/metrics.jsonl")" -eq 3 ]
}
check "3 ranks send 2P(N-1)/N elements a step, and the loss" sent_as_predicted 3 8 --total-batch-size 384
for ranks in 1 2 4; do
    check "$ranks rank(s) send 2P(N-1)/N elements a step, and the loss" sent_as_predicted $ranks $((32 / ranks))
    check "  with 4 micro-batches no more" sent_as_predicted $ranks $((8 / ranks))
done
check "  naive with 4 micro-batches no more" sent_as_predicted 4 2 --ddp naive
begins() { # MODE SIGN: with SIGN 1 communication begins before the end of the backward pass, with -1 after it
    on_ranks 2 "$ddp" "${small[@]}" --model d4 --batch-size 16 --seq-len 32 --channels 128 --heads 4 --total-batch-size 1024 --steps 5 --bucket-mb 0.25 --ddp "$1" \
        --trace "$work/trace.json" > "$work/log" 2>&1 && $BUILD/overlap "$work/trace.json" > "$work/overlap" || { cat "$work/log"; return 1; }
    cat "$work/overlap"
    awk -v sign="$2" '/^rank.*%/ { n++; if (sign * $NF <= 0) exit 1 } END { exit n != 2 }' "$work/overlap"
}
early() { begins bucketed 1 || begins bucketed 1 || begins bucketed 1; } # other programs may hold the thread up that sends
check "buckets are sent before the backward pass ends" early
check "  naive DDP begins after it" begins naive -1

# ---- ranks that fail ----
# mpirun decides the status and how long the end takes; the messages are ours.
ends() { # PATTERN OPTION...: the run fails within a minute, and every surviving rank prints the pattern
    local pattern=$1
    shift
    rm -rf "$work/fault"
    timeout 60 $MPIRUN -np 4 "$ddp" "${small[@]}" --batch-size 8 --out "$work/fault" --save-every 5 "$@" > "$work/log" 2>&1
    local status=$?
    cat "$work/log"
    [ $status -ne 0 ] && [ $status -ne 124 ] && grep -q "^rank 0: error: .*$pattern" "$work/log" && grep -q "^rank 3: error: .*$pattern" "$work/log"
}
export OMP_NUM_THREADS=1
check "a rank that is killed is named by the others" ends "rank 2 has died.* during step [67]" --fault 2:7:kill
check "  and the last checkpoint continues to the bit" train 4 8 "$work/fault" --save-every 10 --deterministic --resume --seed 1337
check "a rank that hangs is named" patiently ends "rank 2 has not reached all-reduce #.*step 7" --fault 2:7:hang
for_tier rest
check "rank 0 is named when it hangs" patiently ends "rank 0 has not reached" --fault 0:7:hang
for_tier quick
check "a flipped bit is found, with the rank that has it" ends "after step 10 the parameters of unit 0 differ between rank 0 and rank 1" --fault 1:7:bitflip --check-every 5
parted() { # a rank leaves out an operation: MPI may crash and mpirun end all ranks; the logs of operations say which
    rm -rf "$work/fault"
    ! timeout 60 $MPIRUN -np 4 "$ddp" "${small[@]}" --batch-size 8 --out "$work/fault" --fault 2:7:skip "$@" > "$work/log" 2>&1 || return 1
    cat "$work/log"
    "$BUILD/ranks" "$work"/fault/ops_rank_*.txt > "$work/said"
    cat "$work/said"
    grep -q "rank 2" "$work/said"
}
check "build/ranks finds the rank that left out an operation" patiently parted

# ---- ranks that differ, and options that do not fit the number of ranks ----
on_two() { on_ranks 1 "$ddp" "${small[@]}" --batch-size 8 "$1" "$2" : -np 1 "$ddp" "${small[@]}" --batch-size 8 "$3" "$4"; } # OPTION VALUE, for each rank
check "ranks with different options end and name the option" fails_with "do not agree: --lr is \"0.01\" on rank 0 and \"0.02\" on rank 1" -- on_two --lr 0.01 --lr 0.02
check "  also with different data" fails_with "do not agree: --data" -- on_two --data $REFERENCE/tokens.bin --data README.md
check "a batch that does not divide over the ranks" every_rank 3 "--total-batch-size 512 must be a multiple.*3 ranks" \
    "$ddp" "${small[@]}" --batch-size 8
check "fewer sequences than ranks" fails_with "a step on 4 ranks needs" -- on_ranks 4 "$ddp" "${small[@]}" --seq-len 2048 --batch-size 1 --total-batch-size 0
windows_alone() { # PROGRAM
    on_ranks 1 "$BUILD/train_gpt2_$1" "${small[@]}" --batch-size 8 --steps 1 --out= --nccl-windows > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    grep -q '^ranks  *1, .*; --nccl-windows does nothing' "$work/log"
}
for program in ddp zero fsdp tp pp 3d compress; do check "--nccl-windows on one rank says that it does nothing: $program" windows_alone $program; done
check "a fault for an unknown rank" fails_with "there is no rank 4" -- on_ranks 4 "$ddp" "${small[@]}" --batch-size 8 --fault 4:1:kill
done_testing
