#!/bin/bash
# Checkpoints of parts of matrices are the same files as every other stage's: each program continues each other's.
. test/lib.sh
# 48 sequences a step: they divide over 1, 2, 3 and 4 ranks, and 10 steps are more than one epoch.
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d2 --heads 4 --channels 16 --seq-len 16 --total-batch-size 768
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --steps 10 --save-every 5 --deterministic)

# trains NAME RANKS OUT OPTION...: NAME is single, ddp, zero3, fsdp, or tpT: T ranks share a copy
trains() {
    local name=$1 ranks=$2 out=$3 copies=$2 stage=()
    shift 3
    case $name in
        zero3) stage=(--zero-stage 3) name=zero ;;
        tp*) stage=(--tensor-parallel "${name#tp}") copies=$((ranks / ${name#tp})) name=tp ;;
    esac
    on_ranks "$ranks" "$(of "train_gpt2_$name" "${PRECISION:-fp32}")" "${small[@]}" --batch-size $((48 / copies)) --out "$out" "${stage[@]}" \
        "$@" > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
close() { # OUT OUT
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 &&
        "$COMPARE" weights "$1/step_00000010/model.safetensors" "$2/step_00000010/model.safetensors" --rtol 1e-5 --atol 1e-6
}
goes_on() { # FROM NAME RANKS OPTION...: NAME continues from step 5 of the run FROM
    half "$work/$1" "$work/second" && trains "$2" "$3" "$work/second" --resume "${@:4}" && grep -q "step 5 of 10" "$work/second.log" &&
        close "$work/$1" "$work/second"
}
goes_on_to_the_bit() { goes_on "$@" && same_run "$work/$1" "$work/second" 00000010; }
tensors() { # FILE: its header without what it says of itself
    perl -e 'local $/; $_ = <>; print substr($_, 8, unpack("Q<", $_))' "$1"
}
same_files() { # OUT OUT: the names, shapes and places of all tensors
    for file in model optimizer; do
        [ "$(tensors "$1/step_00000010/$file.safetensors")" = "$(tensors "$2/step_00000010/$file.safetensors")" ] || return 1
    done
    [ "$(ls "$1/step_00000010")" = "$(ls "$2/step_00000010")" ]
}

programs=(single:1 ddp:3 zero3:3 fsdp:4 tp2:4 tp4:4)
[ "$BUILD" = build/debug ] && programs=(single:1 tp2:4)
for x in "${programs[@]}"; do
    name=${x%:*} n=${x#*:}
    case $name in single|tp2) first=both ;; *) first=rest ;; esac
    for_tier $first
    check "$name on $n rank(s): 10 steps without a break, saved halfway" trains $name $n "$work/$name"
    for_tier ${first/both/quick}
    check "  has train_gpt2_single's losses, norms and weights" close "$work/single" "$work/$name"
    check "  and its files" same_files "$work/single" "$work/$name"
    for y in "${programs[@]}"; do
        case $name-${y%:*} in single-tp2|tp2-single|tp2-tp2) for_tier quick ;; *) for_tier rest ;; esac
        case $name-${y%:*} in
            $name-$name) check "  continued by itself: the same to the bit" goes_on_to_the_bit $name $name $n ;;
            *tp*) check "  continued by ${y%:*}" goes_on $name ${y%:*} ${y#*:} ;; # other tests have the rest of the matrix
        esac
    done
done
for_tier rest
check "tp2 continues its own with --sequence-parallel" goes_on tp2 tp2 4 --sequence-parallel
check "  on two ranks" goes_on tp2 tp2 2
begins() { # step 0 of NAME RANKS, continued by NAME RANKS
    rm -rf "$work/zero" && trains $1 $2 "$work/zero" --steps 0 && trains $3 $4 "$work/zero" --resume && close "$work/$3" "$work/zero"
}
check "tp4's step 0 is continued by single" begins tp4 4 single 1
check "  and single's by tp2" begins single 1 tp2 4

damaged() { # PATTERN FILE COMMAND...: a file that COMMAND has changed is refused by every rank
    half "$work/tp2" "$work/damaged" && "${@:3}" "$work/damaged/step_00000005/$2" &&
        fails_with "^rank 0: error: .*$1" "^rank 1: error: .*$1" "^rank 3: error: .*$1" -- on_ranks 4 "$(of train_gpt2_tp fp32)" "${small[@]}" \
            --batch-size 24 --tensor-parallel 2 --out "$work/damaged" --resume
}
for_tier quick
check "a flipped bit in the weights is found" damaged 'model.safetensors: .*do not match their checksum' model.safetensors flip 50
for_tier rest
check "  and in the moments" damaged 'optimizer.safetensors: .*do not match their checksum' optimizer.safetensors flip 97
check "a file of moments that ends early is found" damaged 'optimizer.safetensors' optimizer.safetensors truncate -s -100
check "  one of weights" damaged 'model.safetensors' model.safetensors truncate -s -1

# ---- 16 bits: master weights are also state ----
if [ "$BUILD" = build ]; then
    export PRECISION=bf16
    check "bf16: tp2 on 2 x 2 ranks" trains tp2 4 "$work/bf16"
    check "  continued by itself: the same to the bit" goes_on_to_the_bit bf16 tp2 4
    near() { half "$work/bf16" "$work/second" && trains "$1" "$2" "$work/second" --resume "${@:3}" &&
        "$COMPARE" metrics "$work/bf16/metrics.jsonl" "$work/second/metrics.jsonl" --rtol 1e-4 --only loss; }
    check "  continued by 4 ranks that share one copy and its rows, with nearly the same losses" near tp4 4 --sequence-parallel
    check "  and by DDP" near ddp 3
    unset PRECISION
fi

# ---- ranks that cannot write, and ranks that die while they do: of 2 ranks with half of every matrix each ----
large=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d5 --heads 6 --channels 120 --seq-len 16 --batch-size 1 --warmup-steps 0
    --lr-schedule constant --eval-every 0 --sample-every 0 --save-every 1 --keep 2 --out "$work/large")
saver=$BUILD/train_gpt2_tp cannot_write_file=optimizer.safetensors
. test/runs/saving_ranks.sh
done_testing
