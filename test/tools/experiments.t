#!/bin/bash
# experiments/: pages are what report.pl makes of the stored results, its sentences follow from the numbers, and every script runs.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
perl -MJSON::PP -e 1 2> /dev/null || { echo "1..0 # SKIP perl has no JSON::PP"; exit 0; }
report() { perl experiments/report.pl "$@"; }

# pages OF FOLDER: the pages in FOLDER are those in experiments/, and there is no plot too many.
pages_are_those_of() {
    local page
    for page in experiments/README.md experiments/*/README.md experiments/*/plot.svg; do cmp "$page" "$1/${page#experiments/}" || return 1; done
    [ "$(find "$1" -name plot.svg | wc -l)" = "$(find experiments -name plot.svg | wc -l)" ]
}
stored() { rm -rf "$work/pages" && report --out "$work/pages" && pages_are_those_of "$work/pages"; }
check "the stored pages and plots are made from the stored results (perl experiments/report.pl makes them anew)" stored
each_has_all() {
    local folder
    for folder in experiments/*/; do [ -s "$folder/run.sh" ] && [ -s "$folder/answer.pl" ] && [ -s "$folder/README.md" ] || { echo "$folder"; return 1; }; done
    [ "$(find experiments/*/results -name '*.jsonl' | xargs grep -l '"quick":"yes"')" = "" ]
}
check "each experiment has a script, an answer and a page, and no results of --quick are stored" each_has_all
changed_number() {
    cp "$(ls experiments/zero1_bf16/results/*.jsonl | tail -n 1)" "$work/changed.jsonl" && report --results "$work/changed.jsonl" --out "$work/same" experiments/zero1_bf16 || return 1
    sed -i '/"run":"zero1-2"/s/"memory":[0-9]*/"memory":3000000000/' "$work/changed.jsonl"
    report --results "$work/changed.jsonl" --out "$work/other" experiments/zero1_bf16 || return 1
    diff "$work/same" "$work/other" && return 1
    grep -q '^| stage 1, 2 ranks .* 3.00 GB ' "$work/other/README.md" && ! cmp -s "$work/same/plot.svg" "$work/other/plot.svg"
}
check "another number in the results makes another page and plot" changed_number

# Results by hand: header, then lines of "RUN ROUND KEY=VALUE...".
header='{"record":"header","experiment":"x","date":"2000-01-02","machine":"a machine","device":"cpu","commit":"abc","busy_percent":0,"quick":"","speed":"yes"}'
results() {
    echo "$header"
    awk '{ printf "{\"run\":\"%s\",\"round\":%s,\"ranks\":2,\"stage\":\"fsdp\",\"options\":\"--steps 3\"", $1, $2
        for (i = 3; i <= NF; i++) { split($i, a, "="); printf ",\"%s\":%s", a[1], a[2] }
        print "}" }'
}
# page EXPERIMENT: of results on stdin, as one line.
page() { results > "$work/made.jsonl" && report --results "$work/made.jsonl" --out "$work/made" "experiments/$1" && tr '\n' ' ' < "$work/made/README.md" > "$work/page"; }
# says SENTENCE...: the page has each.
says() {
    local sentence
    for sentence; do grep -qF "$sentence" "$work/page" || { echo "not on the page: $sentence"; fold -s "$work/page"; return 1; }; done
}
sentences() {
    page recompute <<'END_OF_RESULTS' || return 1
short-none 1 memory=100e6 sent=1000 step_ms=10 kinds={"activations":60e6}
short-none 2 memory=100e6 sent=1000 step_ms=20 kinds={"activations":60e6}
short-none 3 memory=100e6 sent=1000 step_ms=10 kinds={"activations":60e6}
short-block 1 memory=50e6 sent=1000 step_ms=12 kinds={"activations":10e6}
short-block 2 memory=50e6 sent=1000 step_ms=26 kinds={"activations":10e6}
short-block 3 memory=50e6 sent=1000 step_ms=12.5 kinds={"activations":10e6}
long-none 1 memory=200e6 sent=1000 step_ms=10 kinds={"activations":160e6}
long-block 1 memory=80e6 sent=1000 step_ms=13 kinds={"activations":40e6}
END_OF_RESULTS
    says "With short sequences a rank keeps 50.0 MB instead of 100 MB, which is 50 %. A step takes 1.25 (1.20 to 1.30) times as long." \
        "With long sequences a rank keeps 80.0 MB instead of 200 MB, which is 40 %. A step takes 1.30 times as long." "Measured on 2000-01-02 on a machine, at commit abc." \
        "| short-block | 50.0 MB | 10.0 MB | 1.00 kB | 1.25 (1.20 to 1.30) |" || return 1
    ! grep -q "do not trust\|--quick" "$work/page"
}
check "ratios are formed within a round, and the median, least and most of them are on the page" sentences
# two_ranks_with RATIO RATIO RATIO: of 16, 32 and 64 channels; with longer sequences two ranks are always faster.
two_ranks_with() {
    local channels=16 ratio length
    for ratio; do
        for length in 32 128; do
            [ $length = 32 ] || ratio=160
            echo "one-$length-$channels 1 memory=1e6 sent=0 step_ms=10 comm_exposed_ms=0 tokens_per_s=100 parameters=${channels}000"
            echo "two-$length-$channels 1 memory=1e6 sent=1 step_ms=10 comm_exposed_ms=2 tokens_per_s=$ratio parameters=${channels}000"
        done
        channels=$((2 * channels))
    done | page two_ranks
}
two_ranks() {
    two_ranks_with 50 90 130 && says "With sequences of 32 tokens two ranks are slower than one up to 32 channels (32 thousand parameters), and faster from 64 on (64 thousand parameters)." \
        "With 16 channels they reach 0.50 times one rank's tokens per second, and with 64 channels 1.30 times." \
        "With sequences of 128 tokens two ranks are faster at every size that was tried, even with 16 thousand parameters." &&
        two_ranks_with 50 130 90 && says "are mixed, so these runs do not answer it" &&
        two_ranks_with 50 60 90 && says "32 tokens two ranks are slower at every size that was tried, even with 64 thousand parameters."
}
# prefetch_with MS MS: how long a step with backward-pre takes in two rounds; 100 ms with anything else.
prefetch_with() {
    local link mode round=0 ms pre
    for pre; do
        round=$((round + 1))
        for link in "" link-; do
            for mode in none backward-post backward-pre no-forward; do
                ms=100
                [ $mode != backward-pre ] || ms=$pre
                echo "$link$mode $round memory=1e6 sent=1 step_ms=$ms comm_exposed_ms=20"
            done
        done
    done | results | sed '/"link-/s/--steps 3/--emulate-link 8/' > "$work/made.jsonl"
    report --results "$work/made.jsonl" --out "$work/made" experiments/prefetch && tr '\n' ' ' < "$work/made/README.md" > "$work/page"
}
no_difference() {
    prefetch_with 80 90 && says "one with backward-pre 0.85 (0.80 to 0.90) times. " "Over a link of 8 Gbit/s exposed communication takes 20 %" &&
        ! grep "include" "$work/page" && prefetch_with 80 110 || return 1
    ! grep "no difference" "$work/page" || return 1 # one range does not include 1
    { echo "fp32 1 memory=1 sent=2 step_ms=10 loss=3 steps=4"; echo "model 1 memory=1 sent=2 step_ms=9 loss=3 steps=4"
        echo "fp32 2 memory=1 sent=2 step_ms=10 loss=3 steps=4"; echo "model 2 memory=1 sent=2 step_ms=13 loss=3 steps=4"; } | page reduce_dtype
    says "a step takes 1.10 (0.90 to 1.30) times as long. The range includes 1, so these rounds show no difference."
}
check "the size at which two ranks stop being slower, and what is said where there is none" two_ranks
check "rounds that differ by more than what is compared are said to show no difference" no_difference
causes() {
    for stage in ddp fsdp; do
        echo "$stage-strong-1 1 memory=4e6 sent=0 step_ms=100 comm_exposed_ms=0 tokens_per_s=100"
        echo "$stage-weak-1 1 memory=3e6 sent=0 step_ms=50 comm_exposed_ms=0 tokens_per_s=100"
        echo "$stage-strong-2 1 memory=2e6 sent=5e6 step_ms=65 comm_exposed_ms=10 tokens_per_s=154" \
            'shares={"computing":54,"all-gather":6,"data":5,"rest":0,"waiting":0.1,"total":65}'
    done | page scaling
    says "DDP on two ranks reaches 1.54 times the tokens per second of one rank with the same batch: an efficiency of 77 %." \
        "Its step is longer than half of one rank's by these parts, as shares of that half: exposed all-gathers 12 %, waiting for data 10 %, slower computing 8.0 %."
}
check "where the second half of a step went" causes
warnings() {
    header=${header/'"busy_percent":0'/'"busy_percent":40'} two_ranks_with 50 90 130 && says "Other programs used 40 % of the machine before the first run: do not trust the speeds." || return 1
    header=${header/'"quick":""'/'"quick":"yes"'} two_ranks_with 50 90 130 && says "show that the script works, and nothing else" || return 1
    header=${header/'"speed":"yes"'/'"speed":""'} two_ranks_with 50 90 130 && says "Speeds are not in these results" && ! grep -q "tokens per second of two" "$work/page"
}
check "a page says if the machine was busy, if it was --quick, and if speeds were left out" warnings

no_header() { echo '{"run":"a","round":1}' > "$work/bad.jsonl"; report --results "$work/bad.jsonl" --out "$work/bad" experiments/recompute; }
check "results without a header are an error" fails_with "bad.jsonl: there is no line with .record.:.header." -- no_header
no_json() { { echo "$header"; echo '{"run":"a",'; } > "$work/bad.jsonl"; report --results "$work/bad.jsonl" --out "$work/bad" experiments/recompute; }
check "a torn line is an error, with its number" fails_with "bad.jsonl:2: this line is no JSON object" -- no_json
no_run() { echo "short-none 1 memory=1" | results > "$work/bad.jsonl"; report --results "$work/bad.jsonl" --out "$work/bad" experiments/recompute; }
check "a run that is missing is an error" fails_with "there is no run 'short-block'" -- no_run
twice_there() { printf 'short-none 1 memory=1\nshort-none 1 memory=2\n' | results > "$work/bad.jsonl"; report --results "$work/bad.jsonl" --out "$work/bad" experiments/recompute; }
check "a round that is there twice is an error" fails_with "bad.jsonl:3: round 1 of short-none is there twice" -- twice_there
check "a folder that is no experiment is an error" fails_with "test/tools has no answer.pl" -- report test/tools
check "an option that does not exist is an error" fails_with "no option of experiments/recompute/run.sh" -- sh experiments/recompute/run.sh --fast
check "a wrong number of rounds is an error" fails_with "not 'many'" -- sh experiments/recompute/run.sh --rounds many
check "a program that is missing is an error that names the make" fails_with "there is no build/nothing/train_gpt2_fsdp; make experiments-programs" -- \
    env DEVICE=nothing sh experiments/recompute/run.sh --quick --into "$work/none.jsonl"
wrong_bytes() {
    echo '{"run":{"parameters":1,"precision":"fp32","predicted_bytes":{"parameters":8,"state on the host":3}}}' > "$work/metrics.jsonl"
    echo '{"step":1,"loss":5,"tokens":1,"tokens_per_s":1,"step_ms":1,"comm_exposed_ms":0,"comm_bytes":2,"mem_peak_bytes":'"$1"'}' >> "$work/metrics.jsonl"
    perl experiments/summary.pl run speed=yes log=/dev/null metrics="$work/metrics.jsonl" run=a round=1
}
check "a run's bytes are taken as they are" eval 'wrong_bytes 8 | grep -q "\"memory\":8,"'
check "a run that kept other bytes than it predicted is an error" fails_with "a kept 9 bytes and predicted 8" -- wrong_bytes 9

# A launcher whose ranks write their steps and then go on, unless they are told to end.
cat > "$work/endless" <<'END'
#!/bin/bash
while [ $# -gt 0 ]; do case $1 in --out) out=$2 ;; esac; shift; done
mkdir -p "$out"
echo '{"run":{"parameters":1,"precision":"bf16","predicted_bytes":{"activations":3,"communication":5,"state on the host":0}}}' > "$out/metrics.jsonl"
for step in 1 2; do echo '{"step":'$step',"loss":5,"tokens":1,"tokens_per_s":1,"step_ms":1,"comm_exposed_ms":0,"comm_bytes":2,"mem_peak_bytes":8}'; done >> "$out/metrics.jsonl"
exec sleep 31.25
END
chmod +x "$work/endless"
ended() {
    MPIRUN=$work/endless timeout 25 sh experiments/one_billion/run.sh --quick --into "$work/ended.jsonl" || return 1
    [ "$(grep -c '"memory":8,' "$work/ended.jsonl")" = 2 ] && ! pgrep -f 'sleep 31.25'
}
check "a run that is ended after some steps leaves no process" ended

# run_all.sh with two experiments that only count; the second one fails until $work/fixed is there.
copy=$work/copy
mkdir -p "$copy"/experiments/{one,two} && cp experiments/run_all.sh "$copy/experiments" && echo 'open my $f, ">>", "said"; print $f "pages\n"' > "$copy/experiments/report.pl"
echo 'echo one "$@" >> said' > "$copy/experiments/one/run.sh"
echo "echo two >> said; [ -e $work/fixed ]" > "$copy/experiments/two/run.sh"
resumed() {
    ! sh "$copy/experiments/run_all.sh" --rounds 2 || return 1
    touch "$work/fixed"
    sh "$copy/experiments/run_all.sh" && sh "$copy/experiments/run_all.sh" && sh "$copy/experiments/run_all.sh" --quick || return 1
    cat "$copy/said"
    [ "$(tr '\n' ' ' < "$copy/said")" = "one --rounds 2 two pages two pages pages one --quick two " ]
}
check "all experiments run one after the other, also after one that fails, and what is done is left out the next time" resumed

for_tier rest
all_quick() {
    local before after experiment
    before=$(find experiments -type f | xargs cksum)
    rm -rf build/experiments/*.jsonl
    sh experiments/run_all.sh --quick || return 1
    for experiment in experiments/*/; do
        experiment=$(basename "$experiment")
        report --results "build/experiments/$experiment.jsonl" --out "$work/quick/$experiment" "experiments/$experiment" &&
            grep -q '^## Answer' "$work/quick/$experiment/README.md" && grep -q 'results of `--quick`' "$work/quick/$experiment/README.md" || return 1
    done
    after=$(find experiments -type f | xargs cksum)
    [ "$before" = "$after" ]
}
check "every experiment runs to its end in its quick form, has a page, and stores nothing" all_quick
done_testing
