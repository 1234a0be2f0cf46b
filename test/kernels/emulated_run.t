#!/bin/bash
# The whole training program on the CUDA code path, under the emulator, against the CPU's: the same losses, norms, samples and
# checkpoints, in whatever order the emulator's seed runs streams, blocks and threads; and the errors of a missing or failing GPU.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh dev/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
sh dev/find_cuda.sh compile cublasLt cudnn > /dev/null 2>&1 || { echo "1..0 # SKIP cuBLAS or cuDNN is not here"; exit 0; }

emulated_program() { # fp32|bf16|fp16|debug
    [ "$1" = fp32 ] && echo build/emulated/train_gpt2_single || echo "build/emulated-$1/train_gpt2_single"
}
build_emulated() { # fp32|bf16|fp16|debug: with a separate make, whatever started this test
    local how="PRECISION=$1"
    [ "$1" = debug ] && how="DEBUG=1"
    env -u MAKEFLAGS -u MAKELEVEL make DEVICE=emulated "$how" "$(emulated_program "$1")" > "$work/$1.log" 2>&1 && return
    cat "$work/$1.log"
    return 1
}
# 128 tokens in a micro-batch, two micro-batches in a step; T is 64, a whole tile of our attention.
train() { # PROGRAM OPTION...
    "$1" --data $REFERENCE/tokens.bin --val-data= --model d2 --heads 2 --channels 32 --seq-len 64 --batch-size 2 \
        --total-batch-size 256 --steps 6 --lr 3e-3 --warmup-steps 3 --eps 1e-5 --eval-every 0 --sample-every 0 "${@:2}"
}
on_cpu() { train "$(program "$1")" "${@:2}"; }
emulated() { train "$(emulated_program "$1")" "${@:2}"; }
same_metrics() { "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol "$3"; }
same_first_steps() { # a shorter run has the numbers of the longer one's first lines
    head -n "$(wc -l < "$2/metrics.jsonl")" "$1/metrics.jsonl" > "$work/first.jsonl"
        "$COMPARE" metrics "$work/first.jsonl" "$2/metrics.jsonl" --rtol 1e-5
}
same_weights() { "$COMPARE" weights "$1/step_00000006/$3" "$2/step_00000006/$3" --rtol 1e-4 --atol 1e-6; }
sample_of() { sed -n '/^sample after/,/^saved/p' "$1" | grep -v '^saved'; }
same_text() { sample_of "$1" && diff <(sample_of "$1") <(sample_of "$2"); }

# Two at a time. The first is built alone: it compiles the emulator's own parts, which all programs share.
build_all() {
    build_emulated fp32 || return 1
    build_emulated bf16 & local other=$!
    build_emulated fp16 && wait $other || return 1
    build_emulated debug
}
check "make DEVICE=emulated, in every precision and for debugging" build_all

# ---- fp32: the CPU's numbers ----
often="--save-every 3 --keep 0 --val-data $REFERENCE/tokens.bin --eval-every 6 --eval-steps 6" # enough that buffers are reused
often="$often --sample-every 6 --sample-tokens 5 --prompt ab"
run_cpu() { on_cpu fp32 $often --out "$work/cpu" > "$work/cpu.txt"; }
run_emulated() { emulated fp32 $often --out "$work/emulated" > "$work/emulated.txt" 2> "$work/emulated.err"; }
said_nothing() { cat "$1"; [ ! -s "$1" ]; } # for example no message that a library refused a call
check "fp32: 6 steps on the CPU, of two micro-batches each" run_cpu
check "fp32: the same under the emulator" run_emulated
check "  it has the CPU's losses and norms within 1e-5" same_metrics "$work/cpu" "$work/emulated" 1e-5
check "  its weights" same_weights "$work/cpu" "$work/emulated" model.safetensors
check "  its optimizer state" same_weights "$work/cpu" "$work/emulated" optimizer.safetensors
check "  and its sample, a text that grows token by token" same_text "$work/cpu.txt" "$work/emulated.txt"
check "  no call was refused" said_nothing "$work/emulated.err"
check "  nothing is allocated while it trains" grep -q '^allocations while training: 0;' "$work/emulated.txt"
check "  and its memory is as predicted, by kind" grep -Eq '^  peak .* as predicted$' "$work/emulated.txt"
check "  the log names the device, the precision and the libraries" \
    grep -Eq '^device .*CUDA emulator; fp32; cuBLASLt .*own attention' "$work/emulated.txt"

check "fp32: 6 steps on the CPU without evaluations and samples" on_cpu fp32 --out "$work/plain"
check "fp32, --attention own, one micro-batch a step" emulated fp32 --attention own --batch-size 4 --out "$work/own"
check "  has the CPU's losses and norms within 1e-5" same_metrics "$work/plain" "$work/own" 1e-5
check "fp32, --recompute block" emulated fp32 --recompute block --out "$work/recomputed"
check "  has the CPU's losses and norms within 1e-5" same_metrics "$work/plain" "$work/recomputed" 1e-5
old_cudnn() { CUDA_EMULATOR_CUDNN=90905 emulated bf16 "$@"; }
check "a cuDNN that is too old is refused" fails_with "cuDNN cannot be used: libcudnn.so.9 is cuDNN 9.9.5, but the minimum is 9.10.2" -- \
    old_cudnn --attention cudnn
check "  and not used if it was not asked for" eval 'old_cudnn --steps 1 > "$work/old.txt" && grep -q "own attention .*(cuDNN: .*9.9.5" "$work/old.txt"'
check "fp32, --attention cudnn is refused" \
    fails_with "cuDNN cannot be used: its attention is for bf16 and fp16" -- emulated fp32 --attention cudnn
check "fp32, another learning rate" emulated fp32 --lr 2.99e-3 --steps 3 --out "$work/other"
check "  differs, and the comparison sees it" not same_first_steps "$work/plain" "$work/other"

# ---- the order in which things happen ----
for seed in 1 2 3; do
    CUDA_EMULATOR_SEED=$seed check "--deterministic under the emulator's seed $seed" \
        emulated fp32 --deterministic --steps 3 --out "$work/seed-$seed"
    [ $seed = 1 ] && continue
    check "  has the bits of seed 1: metrics, weights, optimizer state" same_run "$work/seed-1" "$work/seed-$seed" 00000003
done

# ---- each continues the other's checkpoints ----
continued_from() { # OUT RUN: makes the folder OUT as RUN had it after 3 steps
    cp -r "$2" "$1" && rm -r "$1/step_00000006"
}
check "the CPU's checkpoint after 3 steps" continued_from "$work/from-cpu" "$work/cpu"
check "  the emulated program continues" emulated fp32 $often --out "$work/from-cpu" --resume
check "  with the CPU's losses and norms within 1e-5" same_metrics "$work/cpu" "$work/from-cpu" 1e-5
check "the emulated program's checkpoint after 3 steps" continued_from "$work/to-cpu" "$work/emulated"
check "  the CPU continues" on_cpu fp32 $often --out "$work/to-cpu" --resume
check "  with its own losses and norms within 1e-5" same_metrics "$work/cpu" "$work/to-cpu" 1e-5

# ---- 16 bits: CPU and GPU round in different places ----
for numbers in "bf16 2e-3" "fp16 3e-4"; do
    read -r precision bound <<< "$numbers"
    check "$precision: 6 steps on the CPU" on_cpu $precision --out "$work/cpu-$precision"
    for attention in own cudnn; do
        check "$precision: the same under the emulator, --attention $attention" \
            emulated $precision --attention $attention --out "$work/$precision-$attention"
        check "  has the CPU's losses and norms within $bound" \
            same_metrics "$work/cpu-$precision" "$work/$precision-$attention" $bound
    done
done

# in 16 bits these use tensor cores; 72 is not a multiple of the tile
heads="--heads 1 --channels 64 --seq-len 72 --total-batch-size 144 --steps 4"
on_tensor_cores() { emulated bf16 $heads --attention own --out "$work/tensor" | grep '^device .*own attention on tensor cores'; }
check "bf16: 4 steps on the CPU, with heads of 64 channels" on_cpu bf16 $heads --out "$work/cpu-heads"
check "  the same under the emulator, on tensor cores" on_tensor_cores
check "  has the CPU's losses and norms within 2e-3" same_metrics "$work/cpu-heads" "$work/tensor" 2e-3

# ---- with the address sanitizer, a wait after every kernel, and recomputation ----
check "a debug build is clean" emulated debug --recompute block --steps 2 --sample-every 2 --sample-tokens 2 --out "$work/debug"
check "  and has the CPU's losses and norms within 1e-5" same_first_steps "$work/plain" "$work/debug"

# ---- a missing or failing GPU ----
unlucky() { # VARIABLE=VALUE PROGRAM-KIND PATTERN...
    local setting=$1 kind=$2
    shift 2
    local functions
    functions=$(declare -f train emulated emulated_program)
    fails_with "$@" -- env "$setting" bash -c "$functions; REFERENCE=$REFERENCE; emulated $kind"
}
check "no GPU is an error that says so" unlucky CUDA_EMULATOR_DEVICES=0 fp32 "no GPU is visible" "DEVICE=cpu"
check "so is a missing driver" unlucky CUDA_EMULATOR_DRIVER=0 fp32 "no NVIDIA driver is loaded"
check "a driver older than the toolkit names both" \
    unlucky CUDA_EMULATOR_DRIVER=11080 fp32 "driver is for CUDA 11.8" "built with CUDA 1[2-9]"
check "if memory is too small the error names what was asked for, and options" \
    unlucky CUDA_EMULATOR_MEMORY=20 fp32 "out of memory: .* for workspace" "the GPU's 0.02 GB" "--batch-size"
check "more than --memory-limit is an error" memory_limit_holds emulated fp32
check "a kernel's error says how to learn more" \
    unlucky CUDA_EMULATOR_FAULT=encoder fp32 "illegal memory access" "DEBUG=1 names its layer"
check "  and a debug build names the layer" unlucky CUDA_EMULATOR_FAULT=encoder debug "encoder_forward: .*illegal memory access"
done_testing
