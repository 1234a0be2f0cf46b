#!/bin/bash
# FSDP on GPUs, under the emulator: ranks that share a GPU and talk by MPI through pinned host memory, and ranks with a GPU each
# over NCCL's stand-in. Every sharding and prefetch has DDP's bits, each run under another seed of the emulator: the order in which
# streams go on. A room, a bucket or a host's shard that is used too early shows. With offload AdamW runs on the host, where it
# rounds otherwise: such runs have one another's bits. Hybrid, whose sums round elsewhere, has the CPU's numbers.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh test/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
sh dev/find_cuda.sh compile cublasLt cudnn nccl > /dev/null 2>&1 ||
    { echo "1..0 # SKIP cuBLAS, cuDNN or NCCL is not here"; exit 0; }
export TMPDIR=$work CUDA_EMULATOR_WORKERS=1 # the stand-in for NCCL meets in folders
ddp=build/emulated/train_gpt2_ddp fsdp=build/emulated/train_gpt2_fsdp cpu=build/train_gpt2_fsdp

build() { # TARGET...: by a make of its own, whatever started this test
    env -u MAKEFLAGS -u MAKELEVEL make DEVICE=emulated "$@" > "$work/make.log" 2>&1 || { tail -n 20 "$work/make.log"; return 1; }
}
# with NCCL every rank has a GPU of its own
on_gpus() { # mpi|nccl RANKS COMMAND...
    local devices=1
    [ "$1" = nccl ] && devices=$2
    CUDA_EMULATOR_DEVICES=$devices on_ranks "$2" "${@:3}"
}
# 3 blocks: the third has the bucket that the first had, and with 2 rooms its room
trains() { # OUT COMMAND... -- OPTION...
    local out=$work/$1 command=()
    shift
    while [ "$1" != -- ]; do command+=("$1"); shift; done
    rm -rf "$out"
    "${command[@]}" --data $REFERENCE/tokens.bin --val-data= --model d3 --heads 2 --channels 16 --seq-len 8 --batch-size 1 \
        --steps 2 --lr 3e-3 --warmup-steps 2 --eps 1e-5 --eval-every 0 --sample-every 0 --deterministic --out "$out" "${@:2}" \
        > "$out.log" 2>&1 < /dev/null || { tail -n 20 "$out.log"; return 1; }
}
as_predicted() { grep -q '^allocations while training: 0;' "$work/$1.log" && ! grep 'than predicted$' "$work/$1.log"; } # OUT
has_bits() { trains fsdp "${@:2}" && as_predicted fsdp && same_run "$work/$1" "$work/fsdp" 00000002; } # OUT COMMAND... -- OPTION...
near() { # OUT OUT
    local model=step_00000002/model.safetensors
    "$COMPARE" metrics "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$work/$1/$model" "$work/$2/$model" --rtol 1e-4 --atol 1e-6
}
as_cpu() { trains fsdp "${@:2}" && as_predicted fsdp && near "$1" fsdp; } # CPU COMMAND... -- OPTION...
settings() { cat << END
--sharding full --prefetch backward-pre
--sharding full --prefetch backward-pre --wrap layer --limit-all-gathers 3 --no-forward-prefetch
--sharding full --prefetch backward-post --wrap layer --cpu-offload
--sharding full --prefetch none --no-forward-prefetch --limit-all-gathers 1 --recompute block
--sharding grad-op --prefetch backward-pre --cpu-offload --recompute block
--sharding grad-op --prefetch backward-post --wrap layer
--sharding grad-op --prefetch none --no-forward-prefetch --wrap model
--sharding none --prefetch backward-pre --wrap layer --cpu-offload
--sharding none --prefetch backward-post --wrap model
--sharding none --prefetch none
END
}
hybrids() { cat << END
--prefetch backward-pre
--prefetch backward-post --wrap layer --cpu-offload --no-forward-prefetch
--prefetch none --wrap model --recompute block
END
}

check "make DEVICE=emulated" build $fsdp $ddp
check "the CPU's 4 ranks, hybrid" trains cpu-4 on_ranks 4 $cpu -- --sharding hybrid --shard-group 2
check "the CPU's 2 ranks, with accumulation" trains cpu-2 on_ranks 2 $cpu -- --total-batch-size 32
seed=0
for comm in mpi nccl; do
    check "$comm, 2 ranks: DDP" trains ddp on_gpus $comm 2 $ddp --
    check "  offloaded, in strict mode" strict trains offloaded on_gpus $comm 2 $fsdp -- --cpu-offload
    check "    has DDP's numbers" near ddp offloaded
    while read -r options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        same_as=ddp
        case $options in *offload*) same_as=offloaded ;; esac
        check "  $options, seed $seed: the bits" has_bits $same_as on_gpus $comm 2 $fsdp -- $options
    done < <(settings)
    for options in "--wrap block" "--wrap layer --cpu-offload --no-forward-prefetch"; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "  $options, with accumulation, seed $seed: the CPU's numbers" \
            as_cpu cpu-2 on_gpus $comm 2 $fsdp -- $options --total-batch-size 32
    done
    check "  in strict mode: DDP's bits" strict has_bits ddp on_gpus $comm 2 $fsdp --
    while read -r options; do
        export CUDA_EMULATOR_SEED=$((++seed))
        check "  $comm, hybrid, 2 x 2 ranks, $options, seed $seed: the CPU's numbers" \
            as_cpu cpu-4 on_gpus $comm 4 $fsdp -- --sharding hybrid --shard-group 2 $options
    done < <(hybrids)
done
done_testing
