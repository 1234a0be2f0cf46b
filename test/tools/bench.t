#!/bin/bash
# The tools of `make bench` and what they compute, on programs and numbers that are known beforehand.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
${CC:-cc} -std=c11 -O2 dev/bench/measure.c -o "$work/measure" -lm || exit 1

# A program of 20 MB whose steps take 0.2 s, the first one longer; it never ends on its own.
cat > "$work/steps.c" <<'END'
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char* memory = malloc(20 << 20);
    memset(memory, 1, 20 << 20);
    printf("not a step\n");
    for (int i = 1; ; i++) {
        usleep(i == 1 ? 500000 : 200000);
        printf("step %d: %d\n", i, memory[i]);
        fflush(stdout);
    }
}
END
${CC:-cc} -O1 "$work/steps.c" -o "$work/steps"

steps_are_timed() { # on a busy machine a line may be seen late: the step seems longer and the next one shorter
    "$work/measure" 1 3 "$work/steps" | tee "$work/measured"
    awk '$1 == "ms" { n++; sum += $2; good += $2 > 150 && $2 < 450 } $1 == "rss" { rss = $2 }
         END { exit !(n == 3 && good > 0 && sum > 400 && rss > 20e6 && rss < 60e6) }' "$work/measured"
}
table() { printf '%s\n' "$@" | awk -f dev/bench/median.awk -f dev/bench/table.awk | tee "$work/table"; }
says() { grep -qe "$1" "$work/table" || { echo "it did not say '$1'"; return 1; }; }
goals_are_judged() {
    table "peak 0 sgemm 400" "peak 0 bf16 800" "peak 0 copy 40" \
        "ours-fp32 64 ms 700" "ours-fp32 64 ms 500" "ours-fp32 64 ms 400" "ours-fp32 64 rss 2e9" "ours-fp32 64 predicted 1990000000" \
        "torch-fp32 64 ms 1000" "llmc-fp32 64 ms 1500" "ours-bf16 64 ms 250" \
        "ours-fp32 1024 ms 10000" "ours-fp32 1024 rss 4e9" "torch-fp32 1024 ms 20000" "torch-fp32 1024 rss 1e10" \
        "ddp-naive 2048 exposed 900" "ddp-naive 2048 exposed 40" "ddp-naive 2048 exposed 300" "ddp-bucketed 2048 exposed 16" \
        "fsdp-none 256 exposed 9" "fsdp-none 256 exposed 30" "fsdp-none 256 exposed 31" "fsdp-backward-post 256 exposed 20" "fsdp-backward-pre 256 exposed 25" || return 1
    # 191.14 GFLOP in the median step of 500 ms: 382 GFLOP/s of 400
    says 'ours, fp32 *500 *512 *382 *96 % *2.00 *1.99' && says 'faster than PyTorch.* 2.00 times *goal 1.5: reached' &&
        says 'faster than llm.c.* 3.00 times *goal 3.5: MISSED' && says 'of the fp32 matrix product.* 95.57 % *goal 82: reached' &&
        says 'bf16 faster.* 2.00 times' && says 'FLOP/s at T=1024 .* 0.86 times *goal 1: MISSED' && says 'less memory .* 2.50 times *goal 1: reached' &&
        says 'naive over bucketed .* 2.50 times *goal 1: reached' &&
        says 'FSDP without prefetch over -pre .* 1.20 times *goal 1: reached' && says 'FSDP without prefetch over post .* 1.50 times$'
}
what_was_not_measured_is_not_judged() {
    table "peak 0 sgemm 400" "peak 0 bf16 0" "peak 0 copy 40" "ours-fp32 64 ms 500" && says 'no bf16' &&
        says 'of the fp32 matrix product' && not says 'PyTorch' && not says 'llm.c' && not says 'T=1024' && not says 'exposed'
}
check "steps and memory are measured from outside, and the program is stopped" steps_are_timed
check "a program that ends too early is an error with its last words" fails_with "ended after 0 of 3 steps" "sorry" -- "$work/measure" 1 2 echo sorry
check "a program that cannot be started is an error" fails_with "no-such-program cannot be started" -- "$work/measure" 1 2 no-such-program
check "medians, rates and ratios stand in the table, and goals are judged" goals_are_judged
check "a peer that was not measured has no row and no goal" what_was_not_measured_is_not_judged
# Whether one mode exposes less than another can only be tested on a machine that runs nothing else.
ranks_are_measured() {
    BUILD=$BUILD sh dev/bench/exposed.sh 2 > "$work/exposed" && cat "$work/exposed" || return 1
    for mode in ddp-naive ddp-bucketed fsdp-none fsdp-backward-post fsdp-backward-pre; do
        [ "$(awk -v mode=$mode '$1 == mode && $3 == "exposed" && $4 > 0' "$work/exposed" | wc -l)" = 2 ] || return 1
    done
}
check "every mode's exposed communication is measured, without the first step" ranks_are_measured
check "  a program that fails says why, and is left out" eval 'BUILD=$work sh dev/bench/exposed.sh 1 2> "$work/table" > "$work/exposed" && says "fsdp-none failed" && [ ! -s "$work/exposed" ]'
# A program in place of ours whose steps take 20 ms, at T=1024 300 ms.
mkdir -p "$work/fake"
cat > "$work/fake/train_gpt2_single" <<'END'
#!/bin/sh
pause=0.02
while [ $# -gt 0 ]; do
    case $1 in --seq-len) [ "$2" = 64 ] || pause=0.3 ;; --out) out=$2 ;; esac
    shift
done
mkdir -p "$out"
echo '{"predicted_bytes":{"params":7},"mem_peak_bytes":7}' > "$out/metrics.jsonl"
i=0
while [ $i -lt 1000 ]; do i=$((i + 1)); sleep $pause; echo "step $i: ..."; done
END
chmod +x "$work/fake/train_gpt2_single"
bench() { exec env BUILD="$work/fake" PYTHON=false BENCH_STEPS=2 "$@" sh dev/bench/bench.sh > "$work/table" 2> "$work/rows"; }
time_is_limited() {
    (bench BENCH_SECONDS=0) && cat "$work/rows" "$work/table" && grep -q '^T=64  *ours, fp32' "$work/rows" &&
        says 'finished rounds: 1,' && says '^  ours, fp32 ' && says 'ours-fp32 at T=1024: it would take about .* BENCH_SECONDS is 0'
}
interrupted() {
    bench BENCH_ROUNDS=50 & pid=$!
    for try in $(seq 300); do ! grep -qs '^T=64  *ours, fp32' "$work/rows" || break; sleep 0.1; done
    kill -TERM $pid
    ! wait $pid && cat "$work/rows" "$work/table" && grep -q interrupted "$work/rows" && says '^  ours, fp32 ' && says 'finished rounds: 0,'
}
check "a benchmark that has no time left leaves out the rest, and says so" time_is_limited
: > "$work/rows"
check "an interrupted benchmark still prints its table" interrupted
check "words for numbers are refused" fails_with "must be whole numbers, not 'many'" -- env BENCH_STEPS=many sh dev/bench/bench.sh
done_testing
