#!/bin/bash
# Several ranks on GPUs, under the emulator: collectives by MPI between ranks that share a GPU, and by NCCL where each has its
# own. Training over both has the CPU's losses and norms in every mode, and the same bits in rank order.
. test/lib.sh
. test/kernels/emulated.sh
small=(--model d2 --seq-len 16 --batch-size 2 --steps 2)
test_comm=build/emulated/test/test_comm_cuda emulated=build/emulated/train_gpt2_ddp cpu=build/train_gpt2_ddp

check "make DEVICE=emulated" build $emulated $test_comm

# ---- collectives ----
passes() { # mpi|nccl RANKS OPTION...: every claim holds; --comm auto chooses MPI or NCCL itself
    on_gpus "$1" "$2" $test_comm --comm-timeout 60 "${@:3}" > "$work/said" 2>&1 && grep -qi "^# $1 " "$work/said" &&
        grep -qx '1\.\.[0-9]*' "$work/said" ||
        { cat "$work/said"; return 1; }
}
for comm in mpi nccl; do
    check "$comm: every claim of test_comm_cuda holds on 2 ranks" passes $comm 2
    check "  in rank order" passes $comm 2 --deterministic
    check "  on 3 ranks, in rank order and strict mode" strict passes $comm 3 --deterministic
    check "  on 3 ranks, by our own ring" passes $comm 3 --allreduce ring
    check "  on 4 ranks" passes $comm 4
    if [ $comm = nccl ]; then
        check "  with windows, on 3 ranks" passes nccl 3 --nccl-windows
        CUDA_EMULATOR_NCCL=early check "  where NCCL gives communicators and windows before they are ready" \
            passes nccl 3 --nccl-windows
        CUDA_EMULATOR_NCCL=local-windows check "  where windows are local, which the log does not call windows" \
            passes nccl 2 --nccl-windows --windows-are local
        CUDA_EMULATOR_NCCL=no-windows check "  where there are no windows" passes nccl 2 --nccl-windows --windows-are none
    fi
    for seed in 2 3; do
        CUDA_EMULATOR_SEED=$seed check "  on 2 ranks, under the emulator's seed $seed" passes $comm 2
    done
done
check "nccl: a single rank, if it is asked for" passes nccl 1 --comm nccl
# Starts two ranks as torchrun does: the meeting place is in their environment, and MPI is not used. Prints the statuses of ranks 1
# and 0; their output is in $work/rank0 and $work/rank1. `fault`: the operation of rank 1 that NCCL fails.
torchrun() ( # SECONDS COMMAND...
    pids= statuses=
    export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 20000)) CUDA_EMULATOR_DEVICES=2
    for rank in 1 0; do
        RANK=$rank LOCAL_RANK=$rank CUDA_EMULATOR_NCCL_FAULT=$((rank * ${fault:-0})) \
            timeout "$1" "${@:2}" > "$work/rank$rank" 2>&1 & pids="$pids $!"
    done
    for pid in $pids; do wait "$pid"; statuses="$statuses $?"; done
    echo $statuses
)
by_torchrun() {
    [ "$(torchrun 120 $test_comm --comm-timeout 60)" = "0 0" ] && grep -q '^# NCCL ' "$work/rank0" &&
        grep -qx '1\.\.[0-9]*' "$work/rank0" || { cat "$work/rank0" "$work/rank1"; return 1; }
}
check "nccl: ranks that torchrun started" by_torchrun

# ---- training ----
train_cpu() { trains "cpu$1" on_ranks "$1" $cpu -- --total-batch-size "$2"; }
# TOTAL: tokens of a step, all ranks together
train_gpus() { # OUT mpi|nccl RANKS TOTAL OPTION...
    trains "$1" on_gpus "$2" "$3" $emulated -- --total-batch-size "$4" "${@:5}"
}
gets_there() { # NAME mpi|nccl RANKS TOTAL OPTION...: the CPU's numbers
    train_gpus "$@" && as_cpu "cpu$3" "$1"
}
check "the CPU's 2 ranks, two micro-batches each" train_cpu 2 128
check "the CPU's 4 ranks" train_cpu 4 128
for comm in mpi nccl; do
    check "$comm, 2 ranks: the CPU's losses, norms and weights, in buckets" gets_there $comm-buckets $comm 2 128 --bucket-mb 0.01
    check "  naively" gets_there $comm-naive $comm 2 128 --ddp naive
    check "  in strict mode" strict gets_there $comm-strict $comm 2 128 --bucket-mb 0.01
    check "  in rank order" gets_there $comm-ordered $comm 2 128 --bucket-mb 0.01 --deterministic
    check "$comm, 4 ranks, in rank order" gets_there $comm-four $comm 4 128 --bucket-mb 0.01 --deterministic
done
same_bits() { same_run "$work/$1" "$work/$2" 00000002; }
check "in rank order MPI and NCCL have the same bits on 2 ranks" same_bits mpi-ordered nccl-ordered

# ---- masks: tokens that do not count, another number of them on each rank ----
masks=$(masked_data)
check "the CPU's 2 ranks with masks" trains cpu-masked on_ranks 2 $cpu -- --total-batch-size 128 $masks
for comm in mpi nccl; do
    check "$comm: the CPU's losses, norms and weights with masks" eval \
        "train_gpus run-masked $comm 2 128 $masks && as_cpu cpu-masked run-masked && ! as_cpu cpu2 run-masked"
done

# ---- memory ----
comes_to() { # none|block mpi|nccl: what --recompute auto chooses for 2 ranks that need 34 MB each, on GPUs of 60 MB
    CUDA_EMULATOR_MEMORY=60 train_gpus auto "$2" 2 64 && grep '^memory  ' "$work/auto.log" &&
        grep -q "\"recompute\":\"$1\"" "$work/auto/metrics.jsonl"
}
check "nccl: ranks keep all activations if each fits on its own GPU" comes_to none nccl
check "mpi: they recompute if together they do not fit on the GPU that they share" comes_to block mpi
check "  and on 4" same_bits mpi-four nccl-four
CUDA_EMULATOR_SEED=5 check "the same again, naively and under another seed" \
    train_gpus again nccl 2 128 --ddp naive --deterministic
check "  has the same bits" same_bits again nccl-ordered

# ---- errors ----
check "NCCL refuses ranks that share a GPU, and the error says so" \
    fails_with "ranks 0-1 share a GPU" "use --comm mpi" -- on_gpus mpi 2 $test_comm --comm nccl
check "there are no windows over MPI" fails_with "nccl-windows: these ranks communicate by MPI" -- on_gpus mpi 2 $test_comm --nccl-windows
check "a rank that does not come is named" \
    fails_with "rank 1 has not reached all-reduce" -- on_gpus nccl 2 $emulated --data $REFERENCE/tokens.bin --val-data= \
    --model d1 --channels 16 --heads 2 --seq-len 16 --batch-size 2 --fault 1:2:hang --comm-timeout 3
# Where NCCL fails while one of its kernels waits for a rank, destructors would wait for that kernel: exit() would not return.
failed="error: NCCL: communication failed: remote process exited or there was a network error"
ends_by_itself() {
    CUDA_EMULATOR_NCCL_FAULT=5 fails_with "$failed" -- timeout 20 $test_comm --comm nccl --journal "$work/journal" &&
        grep "collectives of every type" "$work/journal"
}
tells_the_others() {
    local out=$work/fault fault=12 statuses
    statuses=$(torchrun 30 $emulated --data $REFERENCE/tokens.bin --val-data= --model d1 --channels 16 --heads 2 --seq-len 16 \
        --batch-size 2 --steps 30 --sample-every 0 --eval-every 0 --out "$out")
    echo "statuses of ranks 1 and 0: $statuses"
    cat "$work/rank1" "$work/rank0"
    [ "$statuses" = "1 1" ] && grep -q "^rank 1: $failed" "$work/rank1" && grep -q "^rank 0: error: rank 1 has left" "$work/rank0" &&
        [ -s "$out/ops_rank_0000.txt" ] && [ -s "$out/ops_rank_0001.txt" ]
}
check "an error of NCCL ends a rank while a kernel waits, and its files have all that was written" ends_by_itself
check "  in training it also tells the other rank, and both leave their last operations" tells_the_others
done_testing
