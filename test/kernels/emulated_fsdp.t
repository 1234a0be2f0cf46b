#!/bin/bash
# FSDP on GPUs, under the emulator: ranks that share a GPU and talk by MPI through pinned host memory, and ranks with a GPU each
# over NCCL's stand-in. Every sharding and prefetch has DDP's bits. Each run has another emulator seed, and so another order
# of streams: a room, a bucket or a shard on the host that is used too early shows. With offload AdamW runs on the host, where it
# rounds differently: such runs agree with one another to the bit. Hybrid sums in another order and agrees with the CPU.
. test/lib.sh
. test/kernels/emulated.sh
# 3 blocks: the third reuses the first one's bucket and, with 2 rooms, its room. By 2 blocks the last group is smaller than the others.
small=(--model d3 --seq-len 8 --batch-size 1 --steps 2 --deterministic)
ddp=build/emulated/train_gpt2_ddp fsdp=build/emulated/train_gpt2_fsdp cpu=build/train_gpt2_fsdp

has_bits() { trains fsdp "${@:2}" && as_predicted fsdp && same_run "$work/$1" "$work/fsdp" 00000002; } # OUT COMMAND... -- OPTION...
gets_there() { trains fsdp "${@:2}" && as_cpu "$1" fsdp; } # CPU COMMAND... -- OPTION...
settings() { cat << END
--sharding full --prefetch backward-pre
--sharding full --prefetch backward-pre --wrap-blocks 2 --limit-all-gathers 3 --no-forward-prefetch
--sharding full --prefetch backward-post --wrap-blocks 2 --cpu-offload
--sharding full --prefetch none --no-forward-prefetch --limit-all-gathers 1 --recompute block
--sharding grad-op --prefetch backward-pre --cpu-offload --recompute block
--sharding grad-op --prefetch backward-post --wrap-blocks 2
--sharding grad-op --prefetch none --no-forward-prefetch --wrap-blocks 0
--sharding none --prefetch backward-pre --wrap-blocks 2 --cpu-offload
--sharding none --prefetch backward-post --wrap-blocks 0
--sharding none --prefetch none
END
}
hybrids() { cat << END
--prefetch backward-pre
--prefetch backward-post --wrap-blocks 2 --cpu-offload --no-forward-prefetch
--prefetch none --wrap-blocks 0 --recompute block
END
}

check "make DEVICE=emulated" build $fsdp $ddp
check "the CPU's 4 ranks, hybrid" trains cpu-4 on_ranks 4 $cpu -- --sharding hybrid --shard-group 2
check "the CPU's 2 ranks, with accumulation" trains cpu-2 on_ranks 2 $cpu -- --total-batch-size 32
# What cuBLASLt is asked for by each of two ranks over NCCL.
# counts PATTERN OPTION...: every rank's line has the pattern.
counts() (
    small=(--model d3 --seq-len 8 --batch-size 1 --steps 2)
    export CUDA_EMULATOR_CUBLASLT_COUNTS=$work/counts
    rm -f "$work/counts"
    trains counted on_gpus nccl 2 $fsdp -- "${@:2}" && as_predicted counted && cat "$work/counts" &&
        [ "$(grep -cE "$1" "$work/counts")" -eq 2 ]
)
timed_early='repeated [1-9][0-9]*, after a collective 0$'
check "algorithms of products are timed, none of them after the first collective" counts "$timed_early"
check "  with gathers ahead, recomputation and accumulation" counts "$timed_early" \
    --limit-all-gathers 3 --wrap-blocks 2 --recompute block --total-batch-size 32
check "  those that fail are skipped" eval 'CUDA_EMULATOR_CUBLASLT_FAILS=4 counts "failed [1-9].*, after a collective 0$"'
check "in a deterministic run none is timed, and no bias gradient is cuBLASLt's" \
    counts 'with a bias gradient 0, failed 0, repeated 0, after a collective 0$' --deterministic
seed=0
for comm in mpi nccl; do
    check "$comm, 2 ranks: DDP" trains ddp on_gpus $comm 2 $ddp --
    check "  offloaded, in strict mode" strict trains offloaded on_gpus $comm 2 $fsdp -- --cpu-offload
    check "    has DDP's numbers" as_cpu ddp offloaded
    while read -r options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        same_as=ddp
        case $options in *offload*) same_as=offloaded ;; esac
        check "  $options, seed $seed: the bits" has_bits $same_as on_gpus $comm 2 $fsdp -- $options
    done < <(settings)
    for options in "--wrap-blocks 1" "--wrap-blocks 2 --cpu-offload --no-forward-prefetch"; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "  $options, with accumulation, seed $seed: the CPU's numbers" \
            gets_there cpu-2 on_gpus $comm 2 $fsdp -- $options --total-batch-size 32
    done
    [ $comm = mpi ] || check "  with windows: DDP's bits" has_bits ddp on_gpus nccl 2 $fsdp -- --nccl-windows
    check "  in strict mode: DDP's bits" strict has_bits ddp on_gpus $comm 2 $fsdp --
    while read -r options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "  $comm, hybrid, 2 x 2 ranks, $options, seed $seed: the CPU's numbers" \
            gets_there cpu-4 on_gpus $comm 4 $fsdp -- --sharding hybrid --shard-group 2 $options
    done < <(hybrids)
done
done_testing
