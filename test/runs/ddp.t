#!/bin/bash
# Data parallelism: training runs on 1 to 4 ranks agree with PyTorch DDP's in every mode, with any buckets and accumulation;
# strict mode changes nothing.
. test/lib.sh
ddp=$BUILD/train_gpt2_ddp

# ddp_run RANKS BATCH TOTAL OUT OPTION...: the training run of test/reference/ddp_reference.py.
ddp_run() {
    local ranks=$1 batch=$2 total=$3 out=$4
    shift 4
    rm -rf "$out"
    on_ranks "$ranks" "$ddp" "${reference_options[@]}" --batch-size "$batch" --total-batch-size "$total" --out "$out" "$@" > "$out.log" 2>&1 ||
        { tail -n 20 "$out.log"; return 1; }
}
is_pytorchs() { # NAME OUT
    "$COMPARE" metrics "$REFERENCE/ddp/$1.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" metrics "$REFERENCE/ddp/$1.jsonl" "$2/metrics.jsonl" --atol 1e-6 --only param_norm &&
        "$COMPARE" weights "$REFERENCE/ddp/$1.safetensors" "$2/step_00000020/model.safetensors" --rtol 1e-5 --atol 1e-6
}
matches() { # NAME RANKS BATCH TOTAL OPTION...
    local name=$1
    shift
    ddp_run "$1" "$2" "$3" "$work/$name" "${@:4}" && is_pytorchs "$name" "$work/$name"
}

[ "$BUILD" = build ] && all="1 2 3 4" || all=3 # with 4 ranks the sanitizers would see nothing more
for ranks in $all; do
    total=$((ranks == 3 ? 384 : 512)) batch=$((ranks == 3 ? 4 : 16 / ranks)) # 16 sequences do not divide over 3 ranks
    name=ranks_$ranks
    check "$ranks rank(s), bucketed: PyTorch DDP's losses, norms and weights" matches $name $ranks $batch $total --bucket-mb 0.02
    check "  with accumulation" matches ${name}_accumulate_2 $ranks $((batch / 2)) $total --bucket-mb 0.02
    check "  naive" matches $name $ranks $batch $total --ddp naive
    check "  in strict mode" strict matches $name $ranks $batch $total --bucket-mb 0.02
    [ $ranks = 1 ] && continue
    check "  by our own ring" matches $name $ranks $batch $total --bucket-mb 0.02 --allreduce ring
    check "  in rank order" matches $name $ranks $batch $total --bucket-mb 0.02 --deterministic
    cp -r "$work/$name" "$work/first"
    check "  and again: the same to the bit" ddp_run $ranks $batch $total "$work/second" --bucket-mb 0.02 --deterministic
    check "    (compared)" same_run "$work/first" "$work/second"
    check "  in one bucket, in rank order" ddp_run $ranks $batch $total "$work/second" --deterministic
    check "    is the same to the bit" same_run "$work/first" "$work/second"
    check "  naive, in rank order" ddp_run $ranks $batch $total "$work/second" --ddp naive --deterministic
    check "    is the same to the bit" same_run "$work/first" "$work/second"
    rm -rf "$work/first" "$work/second"
done
done_testing
