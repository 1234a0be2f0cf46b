#!/bin/bash
# What dev/bench/bench_gpu.sh measures and computes, without a GPU: on numbers that are known beforehand, on small programs whose output
# looks like that of our programs, llm.c and PyTorch, and on our own program for the CPU.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
says() { grep -qe "$1" "$work/table" || { cat "$work/table"; echo "it did not say '$1'"; return 1; }; }

# --- the table, from numbers ---
table() { # MODEL PROGRAMS, results on stdin
    local sizes="12 768"
    [ "$1" = gpt2 ] || sizes="48 1600"
    awk -v model="$1" -v T=1024 -v programs="$2" -v batches=8 -v sizes="$sizes" \
        -f dev/bench/median.awk -f dev/bench/gpu_table.awk > "$work/table"
}
peers="ours llmc-ge0-r0 llmc-ge2-r0 torch-autocast torch-bf16"
# 8 x 1024 tokens of 124439808 parameters: 6 x 124439808 + 6 x 12 x 768 x 1024 = 803261952 FLOPs each, 6580 GFLOP a step.
known_numbers() { cat << END
peak 0 copy 3000
peak 0 product 400
peak 0 product 800
peak 0 product 900
peak 0 sheet 1000
ours 8 ms 20
ours 8 ms 10
ours 8 ms 40
ours 8 ms 20
ours 8 counted 5100000000
ours 8 used 5500000000
ours 8 used 6400000000
llmc-ge0-r0 8 ms 30
llmc-ge2-r0 8 ms 23
torch-autocast 8 ms 30
torch-bf16 8 ms 24
END
}
medians_and_mfu() { # the median of 20, 10, 40, 20 is 20: 409600 tokens/s, 329.0 TFLOP/s of 1000, and of 800
    known_numbers | table gpt2 "$peers" &&
        says '^124439808 parameters, 8.033e+08 FLOPs a token. .* product 800 TFLOP/s, 1000 by the data sheet; a copy 3000 GB/s' &&
        says '^| ours | 409600 | 20.00 | 10.0 to 40.0 | 32.9 % | 41.1 % | 5.1 | 6.4 |$' &&
        says '^| llm.c -ge 0 -r 0 | 273067 | 30.00 | 30.0 to 30.0 | 21.9 % | 27.4 % | - | - |$'
}
ratios_and_goals() { # llm.c's best is 23 ms
    known_numbers | table gpt2 "$peers" &&
        says '^- ours over llm.c -ge 2 -r 0: 1.150 times as fast. Goal 1.2: MISSED.$' &&
            not says '^- ours over llm.c -ge 0' > /dev/null &&
        says '^- ours over PyTorch, fp32 weights, autocast: 1.500 times as fast. Goal 1.3: reached.$' &&
        says '^- ours over PyTorch, bf16, no master weights: 1.200 times as fast. Goal 1.3: MISSED.$'
}
failures_have_a_row() { # one failure is enough: then times of other rounds do not count
    { known_numbers; echo "llmc-ge2-r0 8 failed out of memory in round 2"; } | table gpt2 "$peers" &&
        says '^| llm.c -ge 2 -r 0 | failed: out of memory in round 2 |' && says '^- ours over llm.c -ge 0 -r 0: 1.500' || return 1
    { known_numbers; echo "ours 8 failed it was unwell"; } | table gpt2 "$peers" &&
        says '^| ours | failed: it was unwell |' && not says ' over ' > /dev/null && not says NaN > /dev/null
}
what_was_not_measured_is_not_judged() {
    known_numbers | sed '/^llmc\|^torch/d' | table gpt2 ours && says '^| ours ' && not says 'llm.c\|PyTorch\| over ' > /dev/null
}
# 6 x 1557611200 + 6 x 48 x 1600 x 1024 = 9817526272 FLOPs a token; 8192 tokens in 125 ms: 643 TFLOP/s
of_a_larger_model() {
    { known_numbers | sed '/^ours/d'; echo "ours 8 ms 200"; echo "ours-recompute 8 ms 125"; } |
        table gpt2-xl "ours ours-recompute ours-fsdp llmc-ge0-r0" && says '^1557611200 parameters, 9.818e+09 FLOPs' &&
        says '^| ours, --recompute block | 65536 | 125.00 |.*| 64.3 % | 80.4 % |' && not says FSDP > /dev/null &&
        says '^- ours, --recompute block over llm.c -ge 0 -r 0: 0.240 times as fast.$' &&
        says '^- ours, --recompute block: 64.3 % MFU. Goal 60: reached.$'
}
without_a_data_sheet() {
    known_numbers | sed 's/^peak 0 sheet.*/peak 0 sheet 0/' | table gpt2 "$peers" && says 'not known by the data sheet' &&
        says '^| ours | 409600 | 20.00 | 10.0 to 40.0 | - | 41.1 % |'
}
check "medians, tokens/s, MFU and memory stand in the table" medians_and_mfu
check "ratios are over llm.c's best setting and both of PyTorch's, and goals are judged" ratios_and_goals
check "a program that failed has a row that says why, and no figures" failures_have_a_row
check "what was not measured has no row and no ratio" what_was_not_measured_is_not_judged
check "1.5B: its own FLOPs, the best of ours, and a goal for MFU" of_a_larger_model
check "a GPU whose data sheet's rate we do not know" without_a_data_sheet

# --- a profile: two steps of two kernels, of which only the second step counts ---
profile() {
    local id=0 kernel metric
    echo '==PROF== Connected to process 7'
    echo '"ID","Process ID","Process Name","Host Name","Kernel Name",...,"Metric Name","Metric Unit","Metric Value"'
    while IFS='|' read -r kernel ns; do
        for metric in "dram__throughput.avg.pct_of_peak_sustained_elapsed\",\"%\",\"$((30 + id))" \
            "gpu__time_duration.sum\",\"ns\",\"$ns" "sm__throughput.avg.pct_of_peak_sustained_elapsed\",\"%\",\"10.5"; do
            echo "\"$id\",\"7\",\"train\",\"host\",\"$kernel\",\"1\",\"7\",\"(256, 1, 1)\",\"(96, 1, 1)\",\"0\",\"9.0\",\"metrics\",\"$metric\""
        done
        id=$((id + 1))
    done << 'END'
try_kernel(int)|9,000,000
encoder_forward_kernel(floatX *, const int *)|5,000
encoder_forward_kernel(floatX *, const int *)|1,000,000
void layernorm_backward_kernel<(int)8>(float, int)|2,000,000
void layernorm_backward_kernel<(int)8>(float, int)|4,000,000
END
}
profile_is_summed_up() { # 33 % and 34 % of 2 and 4 ms
    profile | awk -f dev/bench/profile.awk > "$work/table" && says '^3 kernels, 7.00 ms$' && not says try_kernel > /dev/null &&
        says '^| encoder_forward_kernel | 1 | 1.000 | 14.3 % | 32 % | 10 % |$' &&
            says '^| layernorm_backward_kernel | 2 | 6.000 | 85.7 % | 34 % | 10 % |$' &&
        [ "$(grep -n layernorm "$work/table" | cut -d: -f1)" -lt "$(grep -n encoder "$work/table" | cut -d: -f1)" ]
}
check "the kernels of the last step, by name, the longest first" profile_is_summed_up
check "  a profile without a step is an error" \
    fails_with "there is no encoder_forward_kernel" -- awk -f dev/bench/profile.awk /dev/null

# --- the whole script, with small programs in place of large ones ---
stand_in() { cat > "$1" && chmod +x "$1"; }
mkdir -p "$work/build" "$work/llm.c" "$work/bin"
stand_in "$work/build/train_gpt2_single" << 'END'
#!/bin/sh
seconds=0.03 i=0
case "$*" in *"--recompute block"*) seconds=0.1 ;; *"--batch-size 3"*) echo "error: too many" >&2; exit 1 ;; esac
while i=$((i + 1)); do
    sleep $seconds
    echo "step $i/1000000 | loss 10.9 | grad norm 1.0 | param norm 9.00 | lr 1.00e-04 | mem 12.3 GB | 100 tok/s | MFU 1.0%"
done
END
# It records its options and the beginning of its model file.
stand_in "$work/llm.c/train_gpt2cu" << 'END'
#!/bin/sh
echo "$*" >> "$0.asked"
while [ $# -gt 1 ]; do
    case $1 in -ge) ge=$2 ;; -r) r=$2 ;; -e) head -c 8 "$2" | od -An -td4 >> "$0.asked" ;; esac
    shift 2
done
seconds=0.07 i=0
case $ge$r in
    20) seconds=0.01 ;;
    11|21) if [ -e "$0.fails" ]; then echo "[CUDA ERROR] at file x.cu:9:"; echo "out of memory"; exit 1; fi ;;
esac
echo "num_parameters: 124475904 => bytes: 248951808"
echo "device memory usage: 7629 MiB / 81920 MiB"
echo "val loss 10.9"
while i=$((i + 1)); do
    sleep $seconds
    echo "step    $i/1000000 | loss 10.9 (+nanz)| norm 1.0 (+nanz)| lr 1.00e-04 | 9.99 ms | 1.0% bf16 MFU | 7 tok/s"
done
END
stand_in "$work/bin/python" << 'END'
#!/bin/sh
seconds=0.06 i=0
case $* in -c*) exit 0 ;; *bf16*) [ ! -e "$0.hangs" ] || exec sleep 987; seconds=0.04 ;; esac
while i=$((i + 1)); do sleep $seconds; echo "step $i | loss 10.9 | grad norm 1.0 | mem 20.250 GB"; done
END
stand_in "$work/build/bench_layers" << 'END'
#!/bin/sh
echo "peaks: copy 3000 GB/s, product 800.0 TFLOP/s, data sheet 989.0 TFLOP/s"
END
# 400 MiB at rest, up to 30000 while something runs
stand_in "$work/bin/nvidia-smi" << 'END'
#!/bin/sh
echo 400
case $* in *lms*) echo 30000; echo 2000; exec sleep 987 ;; esac
END

bench_gpu() { sh dev/bench/bench_gpu.sh --model d1 --seq-len 16 --rounds 1 --steps 3 --out "$work/out" "$@"; }
bench() { PATH=$work/bin:$PATH PYTHON=${python:-$work/bin/python} BUILD=$work/build bench_gpu "$@" > "$work/table"; }
programs_are_measured() {
    rm -f "$work/llm.c"/*.asked
    bench --batch 2,4 --rounds 2 --llmc "$work/llm.c" || return 1
    says '^| B=2 |' && says '^| B=4 |' && says '^| ours | [0-9]* | .*| 12.3 | 31.5 |$' && says '^| ours, --recompute block |' &&
        says '^| PyTorch, bf16, no master weights | .* | 20.2 | 31.5 |$' && says '^| PyTorch, fp32 weights, autocast |' &&
        says '^| llm.c -ge 2 -r 0 | .* | 8.0 | 31.5 |$' && says '^- ours over llm.c -ge 2 -r 0: 0\.' &&
            says '^- ours over PyTorch, fp32 weights, autocast: [1-9]' &&
        says '^- llm.c with cuDNN: .* was built without' && says '^- FSDP on one rank: there is no' || return 1
    # every setting in every round and for every batch, with 3 steps each; the 5 steps before them do not count
    [ "$(grep -c '^| llm.c' "$work/table")" = 10 ] && [ "$(grep -c '^llmc-ge[012]-r[01] [24] ms' "$work/out/results")" = 60 ] &&
        [ "$(grep -c 'peak 0 product 800' "$work/out/results")" = 2 ] || return 1
    # programs take turns: the second round begins only after the first has run them all
    [ "$(awk '$3 == "ms" && $2 == 2 && $1 != last { print last = $1 }' "$work/out/results" | grep -cx ours)" = 2 ]
}
llmc_is_asked_rightly() { # it gets a model in its format in bf16, and options that it knows
    grep -q -- '-b 4 -t 16 -x 1000000 -v 1000000 .*-ge 1 -r 0$' "$work/llm.c/train_gpt2cu.asked" &&
        grep -q '^ *20240326 *5$' "$work/llm.c/train_gpt2cu.asked"
}
peers_may_fail() {
    touch "$work/llm.c/train_gpt2cu.fails" "$work/bin/python.hangs"
    BENCH_SECONDS=5 bench --batch 2 --llmc "$work/llm.c/train_gpt2cu"
    local status=$?
    rm "$work/llm.c/train_gpt2cu.fails" "$work/bin/python.hangs"
    [ $status = 0 ] && says '^| llm.c -ge 2 -r 1 | failed: .CUDA ERROR. at file x.cu:9: out of memory |' &&
        says '^| PyTorch, bf16, no master weights | failed: not done after 5 s |' &&
        says '^| llm.c -ge 2 -r 0 | [0-9]' && says '^- ours over PyTorch, fp32' && not says 'over PyTorch, bf16' > /dev/null
}
ours_may_not() {
    bench --batch 3 2> "$work/stderr"
    [ $? = 1 ] && says '^| ours | failed: error: too many |' && grep -q '^  ours, B=3 failed: error: too many$' "$work/stderr"
}
a_time_limit_leaves_what_there_is() { # PyTorch in bf16 would take longer
    local i status
    touch "$work/bin/python.hangs"
    rm -f "$work/out/results"
    PATH=$work/bin:$PATH PYTHON=$work/bin/python BUILD=$work/build \
        timeout 100 sh dev/bench/bench_gpu.sh --model d1 --seq-len 16 --batch 2 --rounds 2 --steps 3 --out "$work/out" > "$work/table" &
    for i in $(seq 500); do
        ! grep -q '^torch-autocast 2 counted' "$work/out/results" 2> /dev/null || break
        sleep 0.2
    done
    kill $! # `timeout` passes the signal on to everything it started
    wait $!
    status=$?
    rm "$work/bin/python.hangs"
    [ $status != 0 ] && says 'rounds: 2, stopped in round 1, steps a round: 3$' && says '^| ours | [0-9]' &&
        says '^| PyTorch, fp32 weights, autocast | [0-9]' && not says '^| PyTorch, bf16' > /dev/null &&
        cmp "$work/table" "$work/out/table.md"
}
absent_peers_are_named() {
    PYTHON=no-such-python BUILD=$work/build bench_gpu --batch 2 > "$work/table" &&
        says '^- llm.c: neither --llmc nor LLMC' && says '^- PyTorch: no-such-python has no torch that sees a GPU' &&
            says '^- memory as nvidia-smi sees it' &&
        says '^| ours | [0-9].* | - |$' && not says '^| llm.c\|^| PyTorch' > /dev/null
}
bad_input() {
    local bad=(sh dev/bench/bench_gpu.sh)
    fails_with "there is no model 'gpt5'; there are gpt2" -- "${bad[@]}" --model gpt5 &&
        fails_with "batch must be a whole number, not 'x'" -- "${bad[@]}" --batch 8,x &&
            fails_with "batch must be a list of whole numbers, not ' '" -- "${bad[@]}" --batch , &&
        fails_with "rounds must be at least 1, not 0" -- "${bad[@]}" --rounds 0 &&
            fails_with "steps must be a whole number, not '-3'" -- "${bad[@]}" --steps -3 &&
        fails_with "steps needs a value" -- "${bad[@]}" --steps && fails_with "there is no option 'gpt2'" -- "${bad[@]}" gpt2 &&
        fails_with "there is no $work/none/train_gpt2_single: make DEVICE=cuda" -- env BUILD="$work/none" "${bad[@]}" &&
        fails_with "there is no program $work/bin/train_gpt2cu; in llm.c's folder: make train_gpt2cu USE_CUDNN=1" -- \
            env BUILD="$work/build" "${bad[@]}" --llmc "$work/bin"
}
nothing_is_left_running() { sleep 0.5; not pgrep -f "$work/" && not pgrep -xf "sleep 987"; }
check "programs are measured in turns, llm.c in all settings, of which the best counts" programs_are_measured
check "llm.c is given a model in its format and options that it knows" llmc_is_asked_rightly
check "a peer that fails, or hangs, is named, and left out" peers_may_fail
check "if one of our programs fails, the script fails" ours_may_not
check "after a time limit there is a table of what was measured" a_time_limit_leaves_what_there_is
check "peers that are not installed are named" absent_peers_are_named
check "odd input is refused" bad_input
check "no program is left running" nothing_is_left_running

# --- our own program, and PyTorch's ---
our_own() {
    ln -sf "$PWD/build/train_gpt2_single" "$work/build/train_gpt2_single"
    python=no-such-python bench --batch 2 && says '^| ours | [0-9]* | .*| 0.1 | 31.5 |$'
}
pytorch() { # on the CPU: three precisions begin with about the same loss
    local way loss
    for way in "eager fp32" "eager autocast" "eager bf16"; do
        # shellcheck disable=SC2086 # two words
        loss=$("${PYTHON:-python3}" dev/bench/pytorch_cuda.py $way d1 2 16 cpu 2> /dev/null | head -n 1 | tee /dev/stderr |
            sed -n 's/^step 1 | loss \([0-9.]*\) | grad norm [0-9.]* | mem 0.000 GB$/\1/p')
        awk -v loss="$loss" 'BEGIN { exit !(loss > 10.5 && loss < 11.2) }' || return 1
    done
}
pytorch_errors() {
    fails_with "there is no model 'gpt5'" -- "${PYTHON:-python3}" dev/bench/pytorch_cuda.py eager fp32 gpt5 1 1 cpu &&
        not "${PYTHON:-python3}" dev/bench/pytorch_cuda.py lazy fp32 gpt2 1 1
}
check "our program on the CPU" our_own
if "${PYTHON:-python3}" -c 'import torch' 2> /dev/null; then
    check "PyTorch's program on the CPU, in each precision" pytorch
    check "  its options" pytorch_errors
else skip "PyTorch's program on the CPU" "${PYTHON:-python3} has no torch"; fi
done_testing
