#!/bin/bash
# Tensor parallelism on GPUs, under the emulator: over MPI between ranks that share a GPU, over NCCL where each has its own. Every
# mode has the CPU's losses, norms and weights, and holds and sends the bytes that were predicted. Over NCCL a step has no more waits of
# the host than DDP's, whatever it sends inside its blocks. Every product of a step is tried before ranks exchange anything.
. test/lib.sh
. test/kernels/emulated.sh
small=(--model d2 --seq-len 16 --batch-size 2 --steps 2)
emulated=build/emulated/train_gpt2_tp ddp=build/emulated/train_gpt2_ddp cpu=build/train_gpt2_tp
emulated_bf16=build/emulated-bf16/train_gpt2_tp cpu_bf16=build/bf16/train_gpt2_tp

settings() { cat << END
--tensor-parallel 2
--no-overlap
--sequence-parallel
--sequence-parallel --keep-gathered --no-overlap
--sequence-parallel --recompute block
--recompute block --keep-gathered --sequence-parallel
END
}

check "make DEVICE=emulated" build $emulated $ddp
check "  in bf16" build PRECISION=bf16 $emulated_bf16
check "the CPU's 2 ranks that share a model, two micro-batches each" trains cpu-2 on_ranks 2 $cpu -- --total-batch-size 64
check "the CPU's 2 copies of 2 ranks" trains cpu-4 on_ranks 4 $cpu -- --total-batch-size 128 --tensor-parallel 2

# ---- what cuBLASLt is asked for ----
check "every product of a step was tried, none after the first collective" counts 2 "$tried" $emulated
check "  with parts of rows, recomputation and accumulation" counts 2 "$tried" $emulated \
    --sequence-parallel --recompute block --total-batch-size 64
check "  in a mesh of 2 x 2 ranks" counts 4 "$tried" $emulated --tensor-parallel 2
check "  in a mesh of 2 x 2 ranks, in bf16" counts 4 "$tried" $emulated_bf16 --tensor-parallel 2
check "  and with sums in fp32" counts 2 "$tried" $emulated_bf16 --tp-reduce-dtype fp32
check "in a deterministic run none is" counts 2 'with a bias gradient 0, failed 0, repeated 0, after a collective 0$' $emulated \
    --deterministic

# ---- training ----
seed=0
for comm in mpi nccl; do
    while read -r options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "$comm, 2 ranks, $options, seed $seed: the CPU's losses, norms and weights" \
            gets_there cpu-2 run $comm 2 --total-batch-size 64 $options
    done < <(settings)
    check "  in strict mode" strict gets_there cpu-2 run $comm 2 --total-batch-size 64
    check "  in strict mode, with parts of rows" strict gets_there cpu-2 run $comm 2 --total-batch-size 64 --sequence-parallel
    check "  in rank order" gets_there cpu-2 $comm-ordered $comm 2 --total-batch-size 64 --deterministic
    check "$comm, 2 copies of 2 ranks" gets_there cpu-4 run $comm 4 --total-batch-size 128 --tensor-parallel 2
    check "  with parts of rows, naively" gets_there cpu-4 run $comm 4 --total-batch-size 128 --tensor-parallel 2 --sequence-parallel \
        --ddp naive
done
unset CUDA_EMULATOR_SEED
check "in rank order MPI and NCCL have the same bits" same_run "$work/mpi-ordered" "$work/nccl-ordered" 00000002
check "nccl, with windows" gets_there cpu-4 run nccl 4 --total-batch-size 128 --tensor-parallel 2 --nccl-windows
check "nccl, a copy on each rank" eval "trains cpu-1 on_ranks 2 $cpu -- --total-batch-size 64 --tensor-parallel 1 &&
    gets_there cpu-1 run nccl 2 --total-batch-size 64 --tensor-parallel 1"

masks=$(masked_data)
check "the CPU's 2 ranks with masks" trains cpu-masked on_ranks 2 $cpu -- --total-batch-size 64 $masks
check "nccl, with masks: the CPU's losses, norms and weights" gets_there cpu-masked run nccl 2 --total-batch-size 64 $masks

# ---- 16 bits ----
check "bf16: the CPU's 2 ranks" trains cpu-bf16 on_ranks 2 $cpu_bf16 -- --total-batch-size 64
check "  with sums in fp32" trains cpu-wide on_ranks 2 $cpu_bf16 -- --total-batch-size 64 --tp-reduce-dtype fp32
for comm in mpi nccl; do
    check "bf16, $comm: own attention" bf16 cpu-bf16 $comm 2 --total-batch-size 64 --attention own
    check "  all attention is cuDNN's, of this rank's heads" by_cudnn cpu-bf16 $comm 2 --total-batch-size 64
    check "  also with parts of rows" by_cudnn cpu-bf16 $comm 2 --total-batch-size 64 --sequence-parallel
    check "  with sums in fp32" bf16 cpu-wide $comm 2 --total-batch-size 64 --tp-reduce-dtype fp32
    check "  in strict mode, with parts of rows" strict bf16 cpu-wide $comm 2 --total-batch-size 64 --tp-reduce-dtype fp32 --sequence-parallel
done
# Rows that are no whole pieces of 16 bytes: heads of 3 channels, one on each of 4 ranks.
odd=(--heads 4 --channels 12 --vocab-size 300 --total-batch-size 64)
check "4 ranks that have 3 channels each: the CPU's" trains cpu-odd on_ranks 4 $cpu -- "${odd[@]}"
check "  fp32" gets_there cpu-odd run nccl 4 "${odd[@]}" --sequence-parallel
check "  the CPU's in bf16" trains cpu-odd-bf16 on_ranks 4 $cpu_bf16 -- "${odd[@]}"
check "  bf16" bf16 cpu-odd-bf16 nccl 4 "${odd[@]}"

# ---- waits of the host ----
check "nccl: the host waits as often in a step as DDP's" as_often_as_ddp
check "  with three micro-batches" as_often_as_ddp --total-batch-size 96
check "  with parts of rows that are gathered twice, and recomputation" as_often_as_ddp --sequence-parallel --recompute block
check "  without overlap" as_often_as_ddp --no-overlap
done_testing
