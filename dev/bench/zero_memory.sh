#!/bin/sh
# zero_memory.sh - what each stage keeps on a rank and sends, measured in a step of training beside the formulas.
#
#   sh dev/bench/zero_memory.sh [--ranks "1 2 4 8"] [--stages "ddp zero-1 zero-2 zero-3"] [--svg FILE] [OPTION OF THE PROGRAMS...]
#
# --stages also takes fsdp, tp, pp and 3d; ddp comes first. tp and pp share one replica of the model among all ranks; 3d has two copies,
# two parts of each matrix if there are four ranks or more, --zero-stage 1, and the rest of the ranks as stages.
# Megabytes per rank by kind. state: parameters, gradients and optimizer state together, as a share of what DDP keeps; beside it
# the same by the formulas of the ZeRO paper, which know of no padding, nor of what tp and pp do not divide. communication: buckets,
# gathered units, scratch. other: activations and workspace. micro: micro-batches in a step. sent: numbers that a rank sends in it, per
# parameter, and by formula if that does not depend on the tokens. Where ranks differ (pp, 3d), it is rank 0. A run that
# measures another number of bytes than it predicted, for any kind, ends this script. --svg draws a bar for each line.
#
# BUILD   folder of the programs (default .)    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/options.sh

ranks='1 2 4 8' stages='ddp zero-1 zero-2 zero-3' svg=''
take_options "--ranks --stages --svg" "$@"
eval "set -- $others"
most=0
for N in $ranks; do
    case $N in *[!0-9]*|0*) fail "--ranks wants whole numbers from 1 on, not '$N'" ;; esac
    [ "$N" -le "$most" ] || most=$N
done
[ "$most" -gt 0 ] || fail "--ranks is empty"
case $stages in ddp|"ddp "*) ;; *) fail "--stages begins with ddp, which the others are compared with, not '$stages'" ;; esac
folder=${BUILD:-.}
for stage in $stages; do
    case $stage in
        ddp|fsdp|tp|pp|3d) program=train_gpt2_$stage ;;
        zero-[123]) program=train_gpt2_zero ;;
        *) fail "--stages wants some of ddp, zero-1, zero-2, zero-3, fsdp, tp, pp and 3d, not '$stage'" ;;
    esac
    [ -x "$folder/$program" ] || fail "there is no $folder/$program; make $program"
done
ranks_can_start "$most"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# number KEY: from the text on stdin, a line of metrics.jsonl or a part of one.
number() { sed -n "s/.*\"$1\":\([0-9.e+]*\).*/\1/p"; }
# run N STAGE OPTION...: a step; adds "N STAGE PARAMETERS GRADIENTS OPTIMIZER COMMUNICATION OTHER TOTAL SENT A BYTES COPIES", a line.
# What is predicted by kind is what was measured, or the program would have failed; the total and what was sent are measured.
run() {
    N=$1 stage=$2 copies=$1 # replicas of the model, each of which has micro-batches of its own
    shift 2
    program=train_gpt2_$stage
    case $stage in
        zero-*) program=train_gpt2_zero; set -- "$@" --zero-stage "${stage#zero-}" ;;
        tp|pp) copies=1 ;;
        3d)
            copies=$((N % 2 ? 1 : 2)) t=$((N % 4 ? 1 : 2))
            set -- "$@" --mesh "dp=$copies,tp=$t,pp=$((N / copies / t))" --zero-stage 1 ;;
    esac
    rm -rf "$work/out"
    on_ranks "$N" "$folder/$program" "$@" --steps 1 --val-data= --sample-every 0 --save-every 0 --out "$work/out" >"$work/log" 2>&1 ||
        { tail -n 20 "$work/log" >&2; fail "$program on $N rank(s) failed"; }
    kinds=$(sed -n '1s/.*"predicted_bytes":{\([^}]*\)}.*/\1/p' "$work/out/metrics.jsonl")
    head -n 1 "$work/out/metrics.jsonl" >"$work/run"
    tail -n 1 "$work/out/metrics.jsonl" >"$work/step"
    tokens=$(number tokens <"$work/step")
    micro=$(($(number batch-size <"$work/run") * $(number seq-len <"$work/run") * copies))
    bytes=4
    grep -q '"precision":"fp32"' "$work/run" || bytes=2
    kept=$(for kind in parameters gradients 'optimizer state' communication; do echo "$kinds" | number "$kind"; done | tr '\n' ' ')
    other=$(($(echo "$kinds" | number activations) + $(echo "$kinds" | number workspace)))
    echo "$N $stage $kept $other" \
        "$(number mem_peak_bytes <"$work/step") $(number comm_bytes <"$work/step") $((tokens / micro)) $bytes $copies" >>"$work/results"
    if [ ! -e "$work/model" ]; then sed -n 's/^model  *//p' "$work/log" >"$work/model"; fi
}
for N in $ranks; do
    for stage in $stages; do run "$N" "$stage" "$@"; done
done

cat "$work/model"
awk '
    NR == 1 { print ($11 == 4 ? "fp32" : "16 bits") "; MB per rank\n"
              print "ranks stage  parameters gradients optimizer    state formula communication  other   total micro   sent formula" }
    $2 == "ddp" { ddp = $3 + $4 + $5; P = $3 / $11; if (NR > 1) print "" }
    {
        N = $1; name = $2; A = $10; X = $11; K = X == 4 ? 8 : 12; copies = $12
        stage = name == "ddp" ? 0 : name ~ /^zero/ ? substr(name, 6) + 0 : name == "fsdp" ? 3 : 4
        formula = (stage < 3 ? X : X / N) + (stage < 2 ? X : X / N) + (stage < 1 ? K : K / N)
        if (name == "3d") formula = (2 * X + K / copies) * copies / N
        times = stage < 2 ? 2 : stage == 2 ? A + 1 : name == "fsdp" ? (2 + 4 / X) * A : 3 * A # FSDP sums gradients in fp32
        sub("-", " ", name)
        printf "%5d %-6s %10.1f %9.1f %9.1f", N, name, $3 / 1e6, $4 / 1e6, $5 / 1e6
        printf " %6.1f %% %5.1f %%", 100 * ($3 + $4 + $5) / ddp, 100 * formula / (2 * X + K)
        printf " %13.1f %6.1f %7.1f %5d %6.3f", $6 / 1e6, $7 / 1e6, $8 / 1e6, A, $9 / X / P
        if (stage < 4) printf " %7.3f\n", times * (N - 1) / N
        else printf " %7s\n", "-"
    }' "$work/results"
[ -n "$svg" ] || exit 0

awk -v model="$(cat "$work/model")" -v bars="$(echo "$stages" | wc -w)" '
    function rect(x, y, w, h, colour) {
        printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, w, h, colour
    }
    function text(x, y, anchor, s) { printf "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor, s }
    { line[NR] = $0; if ($8 > top) top = $8; if ($1 != last) groups++; last = $1 }
    END {
        split("parameters,gradients,optimizer state,communication,activations and workspace", kind, ",")
        split("#3a86b7 #f4a259 #1d3557 #c1121f #d9d9d9", colour, " ")
        bar = 34; group = bars * bar + 30; width = 60 + groups * group; if (width < 700) width = 700 # of the legend
        high = 260; base = 330
        for (tick = 1e6; top / tick > 8; n++) tick *= n % 3 == 1 ? 2.5 : 2 # 1, 2, 5, 10, ...
        n = 0
        printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d 380\" width=\"%d\" height=\"380\" ", width, width
        print "font-family=\"sans-serif\" font-size=\"12\">"
        print "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        text(60, 16, "start", model)
        x = 60
        for (k = 1; k <= 5; k++) {
            rect(x, 26, 12, 12, colour[k])
            text(x + 16, 36, "start", kind[k])
            x += 28 + 6.8 * length(kind[k])
        }
        for (bytes = 0; bytes <= top; bytes += tick) {
            y = base - high * bytes / top
            rect(54, y, width - 54, 0.5, "#cccccc")
            text(50, y + 4, "end", bytes / 1e6 (bytes ? "" : " MB"))
        }
        for (i = 1; i <= NR; i++) {
            split(line[i], v, " ")
            if (v[1] != N) {
                N = v[1]
                n++
                b = 0
                text(60 + (n - 1) * group + bars * bar / 2, base + 36, "middle", N " rank" (N > 1 ? "s" : ""))
            }
            x = 60 + (n - 1) * group + b++ * bar
            y = base
            for (k = 1; k <= 5; k++) { h = high * v[k + 2] / top; y -= h; rect(x, y, bar - 4, h, colour[k]) }
            text(x + bar / 2 - 2, y - 4, "middle", sprintf("%.0f", v[8] / 1e6))
            sub("zero-", "", v[2])
            text(x + bar / 2 - 2, base + 16, "middle", v[2])
        }
        print "</svg>"
    }' "$work/results" >"$svg"
echo
echo "picture: $svg"
