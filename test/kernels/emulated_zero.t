#!/bin/bash
# ZeRO on GPUs, under the emulator: ranks that share a GPU and talk by MPI through pinned host memory, and ranks with a GPU each
# over NCCL's stand-in. Every stage has the CPU's losses and norms, and in rank order DDP's bits on the same GPUs.
. test/lib.sh
. test/kernels/emulated.sh
# 3 blocks: the third reuses the first one's bucket
small=(--model d3 --seq-len 16 --batch-size 2 --total-batch-size 64 --steps 3)
ddp=build/emulated/train_gpt2_ddp zero=build/emulated/train_gpt2_zero cpu=build/train_gpt2_zero

same_bits() { same_run "$work/$1" "$work/$2" 00000003; } # OUT OUT

check "make DEVICE=emulated" build $zero $ddp
check "the CPU's 2 ranks" trains cpu on_ranks 2 $cpu --
check "  with accumulation" trains cpu-2 on_ranks 2 $cpu -- --total-batch-size 128
for comm in mpi nccl; do
    check "$comm, 2 ranks: DDP in rank order" trains ddp on_gpus $comm 2 $ddp -- --deterministic --bucket-mb 0.01
    for stage in 1 2 3; do
        options="--zero-stage $stage --deterministic"
        check "$comm, 2 ranks: stage $stage" trains $stage on_gpus $comm 2 $zero -- $options
        check "  has the CPU's losses, norms and weights, and bytes as predicted" as_cpu cpu $stage
        check "  and DDP's bits" same_bits ddp $stage
        [ $stage = 1 ] && continue
        check "  with accumulation, in strict mode" strict trains strict on_gpus $comm 2 $zero -- --zero-stage $stage --total-batch-size 128
        check "    has the CPU's numbers as well" as_cpu cpu-2 strict
    done
    # streams and blocks in another order: a buffer that is reused too early shows
    CUDA_EMULATOR_SEED=5 check "  stage 3 under another seed of the emulator" trains seed on_gpus $comm 2 $zero -- $options
    check "    has the same bits" same_bits ddp seed
done
check "nccl, 3 ranks, whose shards have padding: DDP in rank order" trains ddp on_gpus nccl 3 $ddp -- --deterministic --total-batch-size 96
check "  stage 3" trains 3 on_gpus nccl 3 $zero -- --deterministic --total-batch-size 96 --zero-stage 3
check "  has its bits" same_bits ddp 3
done_testing
