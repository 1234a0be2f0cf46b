#!/bin/bash
# ZeRO on GPUs, under the emulator: ranks that share a GPU and talk by MPI through pinned host memory, and ranks with a GPU each
# over NCCL's stand-in. Every stage has the CPU's losses and norms, and in rank order DDP's bits on the same GPUs.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh test/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
sh dev/find_cuda.sh compile cublasLt cudnn nccl > /dev/null 2>&1 ||
    { echo "1..0 # SKIP cuBLAS, cuDNN or NCCL is not here"; exit 0; }
export TMPDIR=$work CUDA_EMULATOR_WORKERS=1 # the stand-in for NCCL meets in folders
ddp=build/emulated/train_gpt2_ddp zero=build/emulated/train_gpt2_zero cpu=build/train_gpt2_zero

build() { # TARGET...: by a make of its own, whatever started this test
    env -u MAKEFLAGS -u MAKELEVEL make DEVICE=emulated "$@" > "$work/make.log" 2>&1 || { tail -n 20 "$work/make.log"; return 1; }
}
# with NCCL every rank has a GPU of its own
on_gpus() { # mpi|nccl RANKS COMMAND...
    local devices=1
    [ "$1" = nccl ] && devices=$2
    CUDA_EMULATOR_DEVICES=$devices on_ranks "$2" "${@:3}"
}
# 3 blocks: the third has the bucket that the first had
trains() { # OUT COMMAND... -- OPTION...
    local out=$work/$1 command=()
    shift
    while [ "$1" != -- ]; do command+=("$1"); shift; done
    rm -rf "$out"
    "${command[@]}" --data $REFERENCE/tokens.bin --val-data= --model d3 --heads 2 --channels 16 --seq-len 16 --batch-size 2 \
        --total-batch-size 64 --steps 3 --lr 3e-3 --warmup-steps 2 --eps 1e-5 --eval-every 0 --sample-every 0 --out "$out" "${@:2}" \
        > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
as_cpu() { # CPU OUT: and all bytes, held and sent, as predicted
    local model=step_00000003/model.safetensors
    "$COMPARE" metrics "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$work/$1/$model" "$work/$2/$model" --rtol 1e-4 --atol 1e-6 &&
        grep -q '^allocations while training: 0;' "$work/$2.log" && [ "$(grep -c 'as predicted$' "$work/$2.log")" = 9 ]
}
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
        check "    has the CPU's, too" as_cpu cpu-2 strict
    done
    # streams and blocks in other orders: what is used again too early shows
    CUDA_EMULATOR_SEED=5 check "  stage 3 under another seed of the emulator" trains seed on_gpus $comm 2 $zero -- $options
    check "    has the same bits" same_bits ddp seed
done
check "nccl, 3 ranks, whose shards have padding: DDP in rank order" trains ddp on_gpus nccl 3 $ddp -- --deterministic --total-batch-size 96
check "  stage 3" trains 3 on_gpus nccl 3 $zero -- --deterministic --total-batch-size 96 --zero-stage 3
check "  has its bits" same_bits ddp 3
done_testing
