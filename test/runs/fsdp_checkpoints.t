#!/bin/bash
# Checkpoints of FSDP, full and sharded: FSDP continues checkpoints of every program, from any number of ranks, and every program
# continues FSDP's. Whatever goes wrong while ranks write or read their files, the last good checkpoint stays, and all ranks end.
. test/lib.sh
# 24 sequences a step: they divide over 1, 2, 3 and 4 ranks, and 10 steps are more than one epoch. 3 blocks: two and one.
small=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d3 --heads 2 --channels 16 --seq-len 16 --total-batch-size 384
    --lr 3e-3 --warmup-steps 5 --eval-every 0 --sample-every 0 --steps 10 --save-every 5 --deterministic)

# The options that a short name stands for.
options_of() {
    case $1 in
        zero?) echo --zero-stage "${1#zero}" ;;
        full) echo --wrap-blocks 2 ;;
        sharded) echo --checkpoint sharded --wrap-blocks 2 ;;
        offload) echo --checkpoint sharded --cpu-offload --sharding grad-op ;;
        hybrid) echo --checkpoint sharded --sharding hybrid --shard-group 2 ;;
        model) echo --wrap-blocks 0 ;;
        whole) echo --checkpoint sharded --wrap-blocks 0 ;;
        sharded16) echo --checkpoint sharded --reduce-dtype model ;;
    esac
}
# trains NAME RANKS OUT OPTION...: PRECISION is fp32 if it is not set
trains() {
    local name=$1 ranks=$2 out=$3 stage
    stage=$(options_of "$1")
    shift 3
    case $name in single|ddp) ;; zero?) name=zero ;; *) name=fsdp ;; esac
    on_ranks "$ranks" "$(of train_gpt2_$name "${PRECISION:-fp32}")" "${small[@]}" --batch-size $((24 / ranks)) --out "$out" $stage "$@" \
        > "$out.log" 2>&1 || { tail -n 20 "$out.log"; return 1; }
}
saves() { trains "$1" "$2" "$work/$1" && close "$work/single" "$work/$1"; } # NAME RANKS
close() { # OUT OUT
    local a=$1/step_00000010 b=$2/step_00000010
    "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --rtol 1e-5 --atol 1e-6 || return 1
    [ ! -e "$a/model.safetensors" ] || [ ! -e "$b/model.safetensors" ] || # a sharded one is tested when it is continued
        "$COMPARE" weights "$a/model.safetensors" "$b/model.safetensors" --rtol 1e-5 --atol 1e-6
}
goes_on() { # FROM NAME RANKS: NAME continues from step 5 of the run FROM
    half "$work/$1" "$work/second" && trains "$2" "$3" "$work/second" --resume && grep -q "step 5 of 10" "$work/second.log" &&
        close "$work/$1" "$work/second"
}
same_files() { # OUT OUT: the last checkpoint, except state.json, which names the folder; and the metrics
    diff -r -x state.json "$1/step_00000010" "$2/step_00000010" && "$COMPARE" metrics "$1/metrics.jsonl" "$2/metrics.jsonl" --bits
}
goes_on_to_the_bit() { goes_on "$@" && same_files "$work/$1" "$work/second"; }

# ---- the matrix: saved by one, continued by another ----
# The quick tier has some of its pairs.
for_tier both
check "single trains 10 steps without a break, and saves halfway" trains single 1 "$work/single"
if [ "$BUILD" = build ]; then
    for x in ddp:2 zero3:4 zero1:3 zero2:2; do
        case $x in ddp*|zero3*) for_tier both ;; *) for_tier rest ;; esac
        check "${x%:*} on ${x#*:} ranks does the same" saves ${x%:*} ${x#*:}
    done
    for x in single:sharded:3 ddp:offload:2 ddp:full:4 zero1:hybrid:4 zero2:full:3 zero3:sharded:1 zero3:model:2; do
        IFS=: read -r from by ranks <<< "$x"
        case $x in single:*|zero3:model:*) for_tier quick ;; *) for_tier rest ;; esac
        check "  $from, continued by fsdp $by on $ranks rank(s)" goes_on $from $by $ranks
    done
fi
[ "$BUILD" = build ] && all="full:3 sharded:3 offload:2 hybrid:4 whole:3" || all=sharded:3
for x in $all; do
    from=${x%:*} n=${x#*:}
    for_tier both
    check "fsdp $from on $n ranks does the same" saves $from $n
    for_tier quick
    check "  continued by the same program: the same files to the bit" goes_on_to_the_bit $from $from $n
    case $BUILD-$from in
        build-full) by="single:1 zero3:2 hybrid:4 sharded:4 model:2" ;;
        build-sharded) by="single:1 ddp:3 zero1:4 zero2:2 zero3:3 offload:1 hybrid:2 full:4 model:3" ;;
        build-offload) by="ddp:1 zero3:4 sharded:3 full:2" ;;
        build-hybrid) by="single:1 zero2:3 full:4 offload:3" ;;
        build-whole) by="zero3:4 sharded:3 full:2 offload:4" ;;
        *) by=offload:2 ;;
    esac
    for y in $by; do
        case $from-$y in *-single:1|*-hybrid:*|*-full:2|whole-zero3:*) for_tier quick ;; *) for_tier rest ;; esac
        check "  by ${y%:*} on ${y#*:} rank(s)" goes_on $from ${y%:*} ${y#*:}
    done
done
# --steps 0 saves what training would begin with, and the run that continues it is one without a break.
begins() { # NAME RANKS BY RANKS
    rm -rf "$work/zero" && trains $1 $2 "$work/zero" --steps 0 && [ -e "$work/zero/step_00000000/state.json" ] &&
        trains $3 $4 "$work/zero" --resume && grep -q "step 0 of 10" "$work/zero.log" && close "$work/$1" "$work/zero"
}
begins_to_the_bit() { begins $1 $2 $1 $2 && same_files "$work/$1" "$work/zero"; }
for x in $all; do
    case $x in sharded:*) for_tier quick ;; *) for_tier rest ;; esac
    check "fsdp ${x%:*} saves step 0, and continues from it to the bit" begins_to_the_bit ${x%:*} ${x#*:}
    check "  in strict mode" eval 'strict begins_to_the_bit ${x%:*} ${x#*:}'
done
for_tier quick
check "sharded step 0 of 3 ranks is continued by single" begins sharded 3 single 1
exported() { # a sharded step 0
    rm -rf "$work/zero" "$work/hf" && trains sharded 3 "$work/zero" --steps 0 && [ -e "$work/zero/step_00000000/model-00003-of-00003.safetensors" ] &&
        build/hf_export "$work/zero/step_00000000" "$work/hf"
}
check "  hf_export reads it" exported

# In rank order and without accumulation all programs have the same bits on the same number of ranks, so they may even take turns.
if [ "$BUILD" = build ]; then
    check "fsdp continues DDP's checkpoint to the bit" eval 'goes_on ddp full 2 && same_run "$work/ddp" "$work/second" 00000010'
    check "  and DDP fsdp's sharded one" eval 'goes_on sharded ddp 3 && same_run "$work/full" "$work/second" 00000010'
    check "  and the one of its offloaded shards" eval 'goes_on offload ddp 2 && same_run "$work/ddp" "$work/second" 00000010'
    # right after an update, when the previous step's gathers are over
    strict_saves() { strict trains sharded 3 "$work/strict" && same_files "$work/sharded" "$work/strict"; }
    check "sharded saves the same in strict mode" strict_saves
    # ---- 16 bits: the shards are fp32, the model is rounded ----
    export PRECISION=bf16
    check "bf16: fsdp sharded on 3 ranks" trains sharded16 3 "$work/sharded16"
    check "  continued by the same program to the bit" eval 'half "$work/sharded16" "$work/second" && trains sharded16 3 "$work/second" --resume && same_files "$work/sharded16" "$work/second"'
    near() { half "$work/sharded16" "$work/second" && trains "$1" "$2" "$work/second" --resume &&
        "$COMPARE" metrics "$work/sharded16/metrics.jsonl" "$work/second/metrics.jsonl" --rtol 1e-4 --only loss; }
    check "  by zero3 on 2, with nearly the same losses" near zero3 2
    check "  and by train_gpt2_single" near single 1
    unset PRECISION
fi

# ---- damage: a file of another rank's shard ----
how= # further options of the runs
damaged() { # PATTERN FILE COMMAND...: the run from a checkpoint whose file COMMAND has changed is refused by every rank
    half "$work/sharded" "$work/damaged" && "${@:3}" "$work/damaged/step_00000005/$2" &&
        every_rank 2 ".*$1" "$BUILD/train_gpt2_fsdp" "${small[@]}" \
            --batch-size 12 --out "$work/damaged" --resume $how
}
check "a shard's file that is missing is named" damaged "optimizer-00002-of-00003.safetensors: .*No such file" optimizer-00002-of-00003.safetensors rm
for_tier rest
check "  also the model's" damaged "model-00003-of-00003.safetensors: .*No such file" model-00003-of-00003.safetensors rm
check "one that ends early is named" damaged "optimizer-00003-of-00003.safetensors" optimizer-00003-of-00003.safetensors truncate -s -100
[ "$BUILD" = build ] || { done_testing; exit; } # the sanitizers would see nothing new
check "an index that is missing is named" damaged "model.safetensors.index.json" model.safetensors.index.json rm
check "a flipped bit in one rank's first moments is found" damaged 'optimizer-\*-of-00003.safetensors.*: .*"m" do not match their checksum' \
    optimizer-00001-of-00003.safetensors flip 40
check "  and in its weights" damaged 'model-\*-of-00003.safetensors.*: .*do not match their checksum' model-00002-of-00003.safetensors flip 60
for how in "--sharding none" "--sharding hybrid --shard-group 1"; do
    check "  also where every rank reads all of it: $how" damaged 'model-\*-of-00003.safetensors.*: .*do not match their checksum' \
        model-00002-of-00003.safetensors flip 60
done

# ---- ranks that cannot write, and ranks that die while they do ----
large=(--eps 1e-5 --data $REFERENCE/tokens.bin --val-data= --model d5 --heads 2 --channels 160 --seq-len 16 --batch-size 1 --warmup-steps 0
    --lr-schedule constant --eval-every 0 --sample-every 0 --save-every 1 --keep 2 --checkpoint sharded --out "$work/large")
saver=$BUILD/train_gpt2_fsdp cannot_write_file=optimizer-00002-of-00002.safetensors
. test/runs/saving_ranks.sh
done_testing
