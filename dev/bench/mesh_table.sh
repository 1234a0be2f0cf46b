#!/bin/sh
# mesh_table.sh - the tables of chapter 8: what meshes of ranks keep on a rank, send along each axis, and gain, measured here.
#
#   sh dev/bench/mesh_table.sh [--meshes "4x1x1 1x2x2z ..."] [--steps 5] [--rounds 3] [OPTION OF THE PROGRAMS...]
#
# A mesh is DxTxP: replicas of the model, parts of each matrix, stages; with z behind it --zero-stage 1, with s --sequence-parallel. All
# have the same 16 sequences a step: where there are stages in micro-batches of 2 each, elsewhere in one micro-batch. Memory is that of
# the rank that keeps most, bytes are those of rank 0; a run in which a rank keeps or sends anything but what it predicted, in all or
# along an axis, ends this script. Times are medians over all steps but each run's first; the meshes take turns in every round, with a
# thread for each rank. efficiency: the time of one device with the whole batch on one thread, over the time of the mesh and the number
# of cores. waits: the share of a step in which rank 0 waits for others. computes: how much of a step ranks compute if each of F, B and
# W of the whole model lasts 160 ms (--emulate-ms), by the formula and measured: what cores that are shared cannot show.
#
# BUILD   folder of the programs (default build; make builds them)    MPIRUN  how to start ranks (dev/on_ranks.sh)
set -eu
cd "$(dirname -- "$0")/../.."
usage() { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit "$1"; }
fail() { echo "error: $*" >&2; exit 1; }
. dev/on_ranks.sh
. dev/bench/busy.sh
. dev/bench/options.sh

meshes='4x1x1 4x1x1z 1x4x1 1x4x1s 1x1x4 2x2x1 2x2x1z 2x1x2 1x2x2' steps=5 rounds=3
take_options "--meshes --steps --rounds" "$@"
eval "set -- $others"
whole_number() { case $2 in ''|*[!0-9]*|0*) fail "$1 wants a whole number from 1 on, not '$2'" ;; esac; }
whole_number --steps "$steps"
whole_number --rounds "$rounds"
[ "$steps" -ge 2 ] || fail "--steps must be at least 2: the first is not counted"
sequences=16 most=1
# axes MESH: sets d, t, p, N, and options of the mesh.
axes() {
    echo "$1" | grep -qE '^[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*[zs]*$' || fail "--meshes wants meshes such as 2x2x1 or 4x1x1z, not '$1'"
    d=${1%%x*} t=${1#*x} p=${1##*x}
    t=${t%%x*} p=${p%%[zs]*} options=
    case $1 in *z*) options='--zero-stage 1' ;; esac
    case $1 in *s*) options="$options --sequence-parallel" ;; esac
    N=$((d * t * p))
    [ $((sequences % d)) = 0 ] || fail "mesh $1 has $d replicas of the model, and $sequences sequences cannot be divided among them"
    micro=$((sequences / d))
    if [ "$p" -gt 1 ]; then micro=2; fi
}
for mesh in $meshes; do
    axes "$mesh"
    [ "$N" -le "$most" ] || most=$N
done
build=${BUILD:-build}
for program in train_gpt2_single train_gpt2_3d; do [ -x "$build/$program" ] || fail "there is no $build/$program; make $program"; done
ranks_can_start "$most"
cores=$(getconf _NPROCESSORS_ONLN)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
busy=$(busy_percent)

T=128 # as given below, or by a --seq-len among the options
for word; do
    [ "${before:-}" != --seq-len ] || T=$word
    before=$word
done
common='--layers 8 --channels 256 --heads 4 --seq-len 128 --lr 1e-3 --val-data= --sample-every 0'
# values KEY: of the steps in the last run's metrics.jsonl, without the first.
values() { sed -n "s/^{\"step\":[0-9]*,\"loss\".*\"$1\":\([-+0-9.eE]*\).*/\1/p" "$work/out/metrics.jsonl" | tail -n +2; }
# measure NAME COMMAND...: a run, whose times are added to $work/NAME.ms and .waits; its log is $work/NAME.log.
measure() {
    name=$1
    shift
    rm -rf "$work/out"
    OMP_NUM_THREADS=1 "$@" --steps "$steps" --out "$work/out" >"$work/$name.log" 2>&1 || { tail -n 20 "$work/$name.log" >&2; fail "$name failed"; }
    values step_ms >"$work/step_ms"
    cat "$work/step_ms" >>"$work/$name.ms"
    values comm_exposed_ms | paste -d ' ' - "$work/step_ms" | awk 'NF == 2 { print 100 * $1 / $2 }' >>"$work/$name.waits"
    head -n 1 "$work/out/metrics.jsonl" >"$work/$name.run"
}
for round in $(seq "$rounds"); do
    # shellcheck disable=SC2086 # several options
    measure single "$build/train_gpt2_single" $common --batch-size $sequences "$@"
    for mesh in $meshes; do
        axes "$mesh"
        # shellcheck disable=SC2086
        measure "$mesh" on_ranks "$N" "$build/train_gpt2_3d" $common --mesh "dp=$d,tp=$t,pp=$p" $options --batch-size $micro \
            --total-batch-size $((sequences * T)) "$@"
        echo "  round $round: $mesh" >&2
    done
done
# With one round more, of actions that last as long as they would on so many devices. A copy's sums last no time then.
for mesh in $meshes; do
    axes "$mesh"
    [ "$p" -gt 1 ] || continue
    ms=$(echo "160 $t $p" | awk '{ printf "%g", $1 / $2 / $3 }')
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 on_ranks "$N" "$build/train_gpt2_3d" --mesh "dp=$d,tp=$t,pp=$p" $options --layers 8 --channels 64 --heads 4 \
        --seq-len 32 --batch-size 2 --total-batch-size $((sequences * 32)) --val-data= --sample-every 0 --steps 3 --emulate-ms "$ms,$ms,$ms" >"$work/$mesh.emulated" 2>&1 ||
        { tail -n 20 "$work/$mesh.emulated" >&2; fail "$mesh with --emulate-ms failed"; }
done

sed -n 's/^model  *//p' "$work/single.log"
echo
echo "| dp x tp x pp | parameters | gradients | optimizer | activations | communication | all |"
echo "|---|---|---|---|---|---|---|"
# title MESH
title() { echo "$1" | sed 's/x/ x /g; s/z/, ZeRO/; s/s$/, `--sequence-parallel`/'; }
for mesh in $meshes; do
    # "memory of rank 0, most        predicted     measured", and a line for each kind; workspace counts as activations
    awk -v title="$(title "$mesh")" '
        function mb(value, unit) { return value * (unit == "GB" ? 1e3 : unit == "MB" ? 1 : unit == "kB" ? 1e-3 : 1e-6) }
        /^memory (of|per) rank.*measured$/ { inside = 1; next }
        /^[^ ]/ { inside = 0 }
        inside { name = $1; for (i = 2; i <= NF && $i !~ /^[0-9.]+$/; i++) name = name " " $i; kept[name] = mb($(i + 2), $(i + 3)) }
        END {
            split("parameters,gradients,optimizer state,activations,communication,total", kind, ",")
            printf "| %s |", title
            for (k = 1; k <= 6; k++) {
                bytes = kept[kind[k]] + (k == 4 ? kept["workspace"] : 0)
                printf bytes < 99.95 ? " %.1f MB |" : " %.0f MB |", bytes # the log has three digits
            }
            print ""
        }' "$work/$mesh.log"
done
echo
echo "| dp x tp x pp | micro-batches | along tp | along pp | along dp | step | efficiency of $cores cores | waits | computes: formula, measured |"
echo "|---|---|---|---|---|---|---|---|---|"
for mesh in $meshes; do
    axes "$mesh"
    along() { sed -n "s/.*\"predicted_comm_bytes_along\":{[^}]*\"$1\":\([0-9.e+]*\).*/\1/p" "$work/$mesh.run"; }
    computes=
    if [ "$p" -gt 1 ]; then
        # "bubble     ranks computed for 67.2 % (...", "  the formula says 66.7 % and ..."
        computes="$(sed -n 's/^  the formula says \([0-9.]* %\).*/\1/p' "$work/$mesh.emulated"),"
        computes="$computes $(sed -n 's/^bubble .*computed for \([0-9.]* %\).*/\1/p' "$work/$mesh.emulated")"
    fi
    used=$((N < cores ? N : cores))
    {
        sort -g "$work/single.ms" | sed 's/^/single /'
        sort -g "$work/$mesh.ms" | sed 's/^/mesh /'
        sort -g "$work/$mesh.waits" | sed 's/^/waits /'
    } | awk -v start="| $(title "$mesh") | $((sequences / d / micro)) |" -v sent="$(along tp) $(along pp) $(along dp)" -v cores=$used \
        -v computes="$computes" '
        function median(name,   n) { n = count[name]; return n % 2 ? x[name, (n + 1) / 2] : (x[name, n / 2] + x[name, n / 2 + 1]) / 2 }
        { x[$1, ++count[$1]] = $2 }
        END {
            printf "%s", start
            split(sent, bytes, " ")
            for (i = 1; i <= 3; i++) printf bytes[i] < 1000 ? " |" : " %.1f MB |", bytes[i] / 1e6
            share = 100 * median("single") / median("mesh") / cores
            printf " %.0f ms | %.0f %% | %.0f %% | %s\n", median("mesh"), share, median("waits"), computes == "" ? "|" : computes " |"
        }'
done
if [ "$busy" -gt 5 ]; then printf '\nOther programs used %s %% of this machine before the first run: do not trust these times.\n' "$busy"; fi
