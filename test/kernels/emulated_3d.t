#!/bin/bash
# Meshes of data, tensor and pipeline parallelism on GPUs, under the emulator: over MPI between ranks that share a GPU, over NCCL where
# each has its own. Every mesh has the CPU's losses, norms and weights, with ZeRO and without, and holds and sends the bytes that were
# predicted. Over NCCL a step has no more waits of the host than DDP's. Every product of a step is tried before ranks exchange anything.
. test/lib.sh
. test/kernels/emulated.sh
small=(--model d2 --layers 4 --seq-len 16 --batch-size 2 --total-batch-size 128 --steps 2)
emulated=build/emulated/train_gpt2_3d ddp=build/emulated/train_gpt2_ddp cpu=build/train_gpt2_3d
emulated_bf16=build/emulated-bf16/train_gpt2_3d cpu_bf16=build/bf16/train_gpt2_3d

# A mesh is DxTxP: D copies of the model, T parts of each matrix, P stages.
settings() { cat << END
2x1x1
2x1x1 --zero-stage 1 --recompute block
1x2x1 --sequence-parallel --keep-gathered
1x2x1 --no-overlap
1x1x2 --schedule zb-h1
1x1x2 --schedule interleaved --recompute block
2x2x1 --zero-stage 1 --sequence-parallel --recompute block
2x1x2 --zero-stage 1 --schedule zb-h1
1x2x2 --sequence-parallel --schedule zb-h1
END
}
on() { # MESH: sets `mesh` to its options, n to its ranks
    local d t p
    IFS=x read -r d t p <<< "$1"
    n=$((d * t * p)) mesh=(--mesh "dp=$d,tp=$t,pp=$p")
}
on_cpu() { on $1 && trains "cpu-$1" on_ranks $n $cpu -- "${mesh[@]}"; } # MESH
has_cpus() { on $3 && gets_there "cpu-$3" "$1" $2 $n "${mesh[@]}" "${@:4}"; } # OUT COMM MESH OPTION...
on_mesh() { on $2 && bf16 "$1" nccl $n "${mesh[@]}" "${@:3}"; } # CPU MESH OPTION...

check "make DEVICE=emulated" build $emulated $ddp
check "  in bf16" build PRECISION=bf16 $emulated_bf16
for size in 2x1x1 1x2x1 1x1x2 2x2x1 2x1x2 1x2x2 2x2x2; do check "the CPU's $size ranks" on_cpu $size; done

# ---- what cuBLASLt is asked for ----
check "every product of a step was tried, none after the first collective" counts 4 "$tried" $emulated --mesh dp=2,tp=2 --zero-stage 1 --recompute block
check "  with delayed gradients of weights" counts 4 "$tried" $emulated --mesh tp=2,pp=2 --schedule zb-h1 --sequence-parallel
check "  in bf16, with sums in fp32" counts 4 "$tried" $emulated_bf16 --mesh dp=2,tp=2 --zero-stage 1 --tp-reduce-dtype fp32

# ---- training ----
seed=0
for comm in mpi nccl; do
    while read -r size options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "$comm, $size $options, seed $seed: the CPU's losses, norms and weights" has_cpus run $comm $size $options
    done < <(settings)
    check "  in strict mode" strict has_cpus run $comm 2x2x1 --zero-stage 1
    check "  in strict mode, with delayed gradients of weights and parts of rows" strict has_cpus run $comm 1x2x2 --schedule zb-h1 --sequence-parallel
    check "  in rank order" has_cpus $comm-ordered $comm 2x2x1 --deterministic
    check "  in which ZeRO has the same bits" eval "has_cpus run $comm 2x2x1 --deterministic --zero-stage 1 && same_run $work/$comm-ordered $work/run 00000002"
done
unset CUDA_EMULATOR_SEED
check "in rank order MPI and NCCL have the same bits" same_run "$work/mpi-ordered" "$work/nccl-ordered" 00000002
check "nccl, 2x2x2, ZeRO and windows" has_cpus run nccl 2x2x2 --zero-stage 1 --nccl-windows --sequence-parallel
evaluates=(--val-data $REFERENCE/tokens.bin --eval-every 2 --eval-steps 2 --sample-every 2 --sample-tokens 5)
check "nccl, with evaluations and samples" eval "trains cpu-eval on_ranks 4 $cpu -- --mesh tp=2,pp=2 ${evaluates[*]} &&
    gets_there cpu-eval run nccl 4 --mesh tp=2,pp=2 ${evaluates[*]} --sequence-parallel && grep -q '\"val_loss\":[0-9]' $work/run/metrics.jsonl"

# ---- 16 bits ----
check "bf16: the CPU's 2x2x1 ranks" trains cpu-bf16 on_ranks 4 $cpu_bf16 -- --mesh dp=2,tp=2
check "  with sums in fp32" trains cpu-wide on_ranks 4 $cpu_bf16 -- --mesh dp=2,tp=2 --tp-reduce-dtype fp32
check "bf16, nccl: own attention" on_mesh cpu-bf16 2x2x1 --attention own --zero-stage 1
check "  all attention is cuDNN's, of this rank's heads" by_cudnn cpu-bf16 nccl 4 --mesh dp=2,tp=2 --zero-stage 1
check "  in stages, in strict mode" strict on_mesh cpu-bf16 1x2x2 --sequence-parallel --schedule zb-h1
check "  with sums in fp32" on_mesh cpu-wide 1x2x2 --tp-reduce-dtype fp32 --schedule interleaved

# ---- waits of the host ----
check "nccl: the host waits as often in a step as DDP's" as_often_as_ddp --mesh dp=2 --zero-stage 1
check "  with parts of matrices" as_often_as_ddp --mesh tp=2 --sequence-parallel --recompute block
check "  with stages and delayed gradients of weights" as_often_as_ddp --mesh pp=2 --schedule zb-h1
done_testing
