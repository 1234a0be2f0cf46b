# emulated.sh - what the tests of ranks on emulated GPUs share; sourced after lib.sh. Skips the test where headers are missing.
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
sh dev/emulator/find_headers.sh > /dev/null 2>&1 || { echo "1..0 # SKIP CUDA's headers are not here"; exit 0; }
sh dev/find_cuda.sh compile cublasLt cudnn nccl > /dev/null 2>&1 ||
    { echo "1..0 # SKIP cuBLAS, cuDNN or NCCL is not here"; exit 0; }
export TMPDIR=$work CUDA_EMULATOR_WORKERS=1 # the stand-in for NCCL meets in folders

build() { # TARGET...: by a make of its own, whatever started this test
    env -u MAKEFLAGS -u MAKELEVEL make DEVICE=emulated "$@" > "$work/make.log" 2>&1 || { tail -n 20 "$work/make.log"; return 1; }
}
# with NCCL every rank has a GPU of its own
on_gpus() { # mpi|nccl RANKS COMMAND...
    local devices=1
    [ "$1" = nccl ] && devices=$2
    CUDA_EMULATOR_DEVICES=$devices on_ranks "$2" "${@:3}"
}
# trains OUT COMMAND... -- OPTION...: a small model, whose steps and shape are the test's to choose, in `small`
trains() {
    local out=$work/$1 command=()
    shift
    while [ "$1" != -- ]; do command+=("$1"); shift; done
    rm -rf "$out"
    "${command[@]}" --data $REFERENCE/tokens.bin --val-data= --heads 2 --channels 16 --lr 3e-3 --warmup-steps 2 --eps 1e-5 \
        --eval-every 0 --sample-every 0 "${small[@]}" --out "$out" "${@:2}" > "$out.log" 2>&1 < /dev/null ||
        { tail -n 20 "$out.log"; return 1; }
}
# as_cpu CPU OUT: the CPU's numbers; and all bytes, held and sent, as predicted
as_cpu() {
    local model
    model=$(cd "$work/$1" && echo step_*/model.safetensors)
    "$COMPARE" metrics "$work/$1/metrics.jsonl" "$work/$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$work/$1/$model" "$work/$2/$model" --rtol 1e-4 --atol 1e-6 && as_predicted "$2"
}
as_predicted() { # OUT: no line says otherwise, and those that count all are there
    local line
    for line in total peak bytes; do grep -q "^  $line .*as predicted\$" "$work/$1.log" || return 1; done
    grep -q '^allocations while training: 0;' "$work/$1.log" && ! grep 'than predicted$' "$work/$1.log"
}

# masked_data: options of a training program, with data of which not all tokens count.
masked_data() { mkdir -p "$work/with-masks" && cp $REFERENCE/tokens.bin $REFERENCE/masked/tokens.mask "$work/with-masks" && echo "--data $work/with-masks/tokens.bin"; }

# ---- stages that communicate in every micro-batch: `emulated`, `emulated_bf16` and `ddp` are programs ----
# gets_there CPU OUT mpi|nccl RANKS OPTION...: has the numbers of the CPU's run CPU. (Other stages have their own.)
gets_there() { trains "$2" on_gpus "$3" "$4" "$emulated" -- "${@:5}" && as_cpu "$1" "$2"; }
# What cuBLASLt is asked for. counts RANKS PATTERN PROGRAM OPTION...: every rank's line has the pattern.
counts() (
    export CUDA_EMULATOR_CUBLASLT_COUNTS=$work/counts
    rm -f "$work/counts"
    trains counted on_gpus nccl "$1" "$3" -- --steps 2 "${@:4}" && as_predicted counted && cat "$work/counts" &&
        [ "$(grep -cE "$2" "$work/counts")" -eq "$1" ]
)
tried='untried shapes 0, .* repeated [1-9][0-9]*, after a collective 0$'
# 16 bits: CPU and GPU round in different places
bf16() { # CPU COMM RANKS OPTION...: the CPU's losses and norms in bf16, within the bound of emulated_run.t
    trains run-bf16 on_gpus "$2" "$3" "$emulated_bf16" -- --eps 1e-5 "${@:4}" && as_predicted run-bf16 &&
        "$COMPARE" metrics "$work/$1/metrics.jsonl" "$work/run-bf16/metrics.jsonl" --rtol 2e-3
}
# An own kernel for attention would fail.
by_cudnn() { CUDA_EMULATOR_FAULT=cuda/attention bf16 "$@" --attention cudnn && grep '^device .*cuDNN .*attention' "$work/run-bf16.log"; }
# waits PROGRAM OPTION...: prints how often the hosts of two ranks wait in four steps
waits() (
    export CUDA_EMULATOR_WAITS=$work/waits
    local program=$1 steps counted=()
    shift
    for steps in 2 6; do
        rm -f "$work/waits"
        trains waited on_gpus nccl 2 "$program" -- --steps $steps "$@" >&2 || return 1
        [ "$(wc -l < "$work/waits")" = 2 ] || return 1
        counted+=("$(awk '{ n += $4 } END { print n }' "$work/waits")")
    done
    echo $((counted[1] - counted[0]))
)
as_often_as_ddp() { # OPTION...
    local of_stage
    [ -n "${of_ddp-}" ] || of_ddp=$(waits $ddp) || return 1
    of_stage=$(waits $emulated "$@") || return 1
    echo "waits in four steps of two ranks: ddp $of_ddp, $emulated $of_stage"
    [ "$of_ddp" -ge 8 ] && [ "$of_stage" = "$of_ddp" ]
}
