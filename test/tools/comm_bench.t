#!/bin/bash
# comm_bench: its table is right for every collective, type and number of ranks, wrong numbers are counted, and the latency and
# bandwidth in --json follow from the table.
. test/lib.sh
bench=$BUILD/comm_bench

# bench_on RANKS OPTION...: runs comm_bench; its output goes to $work/said.
bench_on() {
    on_ranks "$1" "$bench" --comm-timeout 60 "${@:2}" > "$work/said" 2> "$work/errors" ||
        { cat "$work/said"; tail -n 20 "$work/errors"; return 1; }
}
# table RANKS TYPE SIZE...: the last run covered every collective, and its lines have these sizes, rounded down to whole elements
# per rank; times, bandwidths and the factor between them agree to the last digit printed; no number is wrong.
table() {
    awk -v ranks="$1" -v type="$2" -v sizes="${*:3}" '
    function fail(why) { print FILENAME ": " why ": " $0; failed = 1 }
    function near(a, b, digits) { return a - b <= digits && b - a <= digits }
    BEGIN {
        split("all-reduce reduce-scatter all-gather all-to-all broadcast", names); split("sum sum none none none", redops)
        split("in both both out in", places); split("1 ranks ranks ranks 1", parts); n = split(sizes, size)
        factor[1] = 2 * (ranks - 1) / ranks; factor[2] = factor[3] = factor[4] = (ranks - 1) / ranks; factor[5] = 1
        element = type == "fp64" ? 8 : type == "fp32" ? 4 : 2
    }
    /^# comm_bench on/ && $4 != ranks { fail("other ranks") }
    /^#  Rank / { if ($3 != members++) fail("rank " members) }
    /^# [a-z-]*, / { k++; line = 0; if ($2 != names[k] ",") fail("expected " names[k]) }
    /^# Out of bounds/ { verdicts++; if ($0 != "# Out of bounds values : 0 OK") fail("verdict"); if (line != n) fail("lines") }
    /^# Avg bus/ { if (!near($6, sum / times, 0.0011)) fail("average"); sum = times = 0 }
    /^ / {
        each = parts[k] == "ranks" ? ranks : 1; count = int(size[++line] / element / each)
        if (NF != 13 || $1 != count * each * element || $2 != count || $3 != type || $4 != redops[k]) fail("expected " count)
        if ($5 != (k == 5 ? 0 : -1)) fail("root")
        for (at = 6; at <= 10; at += 4) {
            if (places[k] == (at == 6 ? "in" : "out")) {
                if ($(at) $(at + 1) $(at + 2) $(at + 3) != "N/AN/AN/AN/A") fail("there is no such place")
                continue
            }
            if ($(at) !~ /^[0-9]+\.[0-9]+$/ || $(at) <= 0) fail("time")
            if (!near($(at + 1), $1 / $(at) / 1000, 0.0006 + 0.006 / $(at) * $(at + 1))) fail("algbw is size / time")
            if (!near($(at + 2), $(at + 1) * factor[k], 0.0006 + 0.0005 * factor[k])) fail("busbw is " factor[k] " algbw")
            if ($(at + 3) != "0") fail("#wrong")
            sum += $(at + 2); times++
        }
    }
    END {
        if (members != ranks || k != 5 || verdicts != 5) { print members " ranks, " k " tables"; failed = 1 }
        exit failed
    }' "$work/said" || { cat "$work/said"; return 1; }
}

# ---- the table. No number of ranks divides these sizes, and one is less than an element ----
awkward=(--op all -b 3 -e 160000 -f 6.1 -n 2 -w 1) awkward_sizes="3 18 109 664 4050 24705 150700"
right() { # RANKS TYPE OPTION...
    # shellcheck disable=SC2086 # a list of words
    bench_on "$1" "${awkward[@]}" -d "$2" "${@:3}" && table "$1" "$2" $awkward_sizes
}
[ "$BUILD" = build ] && types="fp32 bf16 fp16 fp64" all_ranks="1 2 3 4" || types=bf16 all_ranks="1 3"
for ranks in $all_ranks; do
    for type in $types; do
        check "$ranks ranks, $type: columns, sizes, bandwidths, and nothing is wrong" right "$ranks" "$type"
    done
done
check "all-reduce by our own ring" right 3 fp32 --allreduce ring
check "  in rank order" right 3 bf16 --deterministic
check "  strict mode, each number checked three times" strict right 3 fp32 -c 3
sizes_are() { # SIZE... -- OPTION...
    local sizes=
    while [ "$1" != -- ]; do sizes="$sizes$1 "; shift; done
    bench_on 1 -n 1 -w 0 "${@:2}" && [ "$(awk '/^ / { printf "%s ", $1 }' "$work/said")" = "$sizes" ] ||
        { cat "$work/said"; return 1; }
}
check "sizes may be K and M, and grow by a factor" sizes_are 2048 32768 524288 -- --minbytes 2K --maxbytes 1M --stepfactor 16
check "  or by a number of bytes" sizes_are 1024 3072 5120 -- --minbytes=1k --maxbytes=6k --stepbytes=2048
unchecked() {
    bench_on 2 -o broadcast -r 1 -b 64 -e 64 -c 0 && grep -qx '# Out of bounds values : not checked' "$work/said" &&
        [ "$(awk '/^ / { print $2, $5, $9, $13 }' "$work/said")" = "16 1 N/A N/A" ] || { cat "$work/said"; return 1; }
}
check "--check 0 says that nothing was checked; --root is the root" unchecked
one_operation() { # 1000 times the time of one operation is no more than the whole run took, in microseconds
    local begin=${EPOCHREALTIME//[!0-9]/}
    bench_on 1 -o all-gather -b 64K -e 64K -n 1000 -w 0 -c 0 || return 1
    awk -v whole=$((${EPOCHREALTIME//[!0-9]/} - begin)) '/^ / { spent = 1000 * ($6 + $10) } END {
        print spent " of " whole; exit !(spent > 0 && spent <= whole) }' "$work/said"
}
check "a time is that of one operation" one_operation

# ---- wrong numbers ----
# wrong "COUNT COUNT" COLLECTIVE OPTION...: the second of 3 ranks has a wrong input in the second of three lines. Only that line
# counts wrong elements: so many out of place and in place. The status is that of a failure.
wrong() {
    local status expected=0 clean=${1//[1-9]/0}
    on_ranks 3 "$bench" -o "$2" -b 60 -e 240 -f 2 -n 1 -w 0 --fault 1:2:bitflip "${@:3}" > "$work/said" 2> "$work/errors"
    status=$?
    cat "$work/said" "$work/errors"
    [ "$1" = "$clean" ] || expected=1
    [ $status = $expected ] && grep -q '^FAULT ON PURPOSE' "$work/said" &&
        grep -qx "# Out of bounds values : [0-9]* $([ $expected = 1 ] && echo FAILED || echo OK)" "$work/said" &&
        [ "$(awk '/^ / { printf "%s %s,", $9, $13 }' "$work/said")" = "$clean,$1,$clean," ]
}
check "a wrong number of one rank is wrong on all after an all-reduce" wrong "N/A 3" all-reduce
check "  in 16 bits, by the ring" wrong "N/A 3" all-reduce -d bf16 --allreduce ring
check "  on the one that owns it after a reduce-scatter" wrong "1 1" reduce-scatter -d fp64
check "  on all after an all-gather" wrong "3 3" all-gather -d fp16
check "  on the one that its row goes to after an all-to-all" wrong "1 N/A" all-to-all -d bf16
check "  on all after its broadcast, as often as is checked" wrong "N/A 6" broadcast --root 1 -c 2
check "  and on none after another's" wrong "N/A 0" broadcast --root 2
check "a rank that hangs is named" fails_with "rank 2 has not reached" "step 2" -- \
    on_ranks 3 "$bench" -b 8 -e 64 --comm-timeout 2 --fault 2:2:hang

# ---- latency and bandwidth ----
# links FILE: JSON as dev/comm/README.md describes it. No line with a larger or smaller alpha or beta is nearer to the times in
# the table; busbw follows from beta. In the table's last line, whose bandwidths have enough digits, the factor is also right.
links() {
    bench_on 3 --op all -b 64 -e 4M -f 4 -n 5 -w 2 --json "$1" || return 1
    perl -MJSON::PP - "$1" "$work/said" << 'END' || { cat "$1" "$work/said"; return 1; }
        my ($json, $table) = map { local $/; open my $f, "<", $_ or die; <$f> } @ARGV;
        my $all = decode_json($json);
        my %factor = ("all-reduce" => 4 / 3, "broadcast" => 1, map { $_ => 2 / 3 } "reduce-scatter", "all-gather", "all-to-all");
        die "who" unless $all->{ranks} == 3 && $all->{backend} =~ /^MPI / && keys %{$all->{collectives}} == 5;
        for my $one (split /^# (?=[a-z-]+, )/m, $table) {
            my ($name) = $one =~ /^([a-z-]+), / or next;
            my ($place, $at) = $name eq "all-to-all" ? ("out of", 5) : ("in", 9);
            my @rows = map { my @x = split; [$x[0], 1e-6 * $x[$at], $x[$at + 1], $x[$at + 2]] } $one =~ /^ .*/mg;
            my ($alpha, $beta, $bus) = @{$all->{collectives}{$name}}{qw(alpha beta busbw)};
            my $miss = sub { my ($a, $b) = @_; my $sum = 0; $sum += (($a + $b * $_->[0]) / $_->[1] - 1) ** 2 for @rows; $sum };
            die "$name: rows" unless @rows == 9 && $alpha >= 0 && $beta > 0;
            my ($size, $seconds, $algbw, $busbw) = @{$rows[-1]}; # bandwidths have digits there
            die "$name: algbw" unless abs($algbw - 1e-9 * $size / $seconds) < 1e-3;
            die "$name: factor" unless abs($busbw - $factor{$name} * $algbw) < 2e-3 && $algbw > 0.02;
            die "$name: busbw" unless abs($bus * $beta / $factor{$name} - 1) < 1e-4;
            my ($da, $db, $best) = (0.03 * ($alpha || 1e-6), 0.03 * $beta, $miss->($alpha, $beta));
            for ([$da, 0], [$alpha > 0 ? -$da : 0, 0], [0, $db], [0, -$db]) {
                die "$name: not the best line" if $miss->($alpha + $_->[0], $beta + $_->[1]) < $best - 1e-9;
            }
            die "$name: printed" unless $one =~ /^# Fit to times $place place: latency ([0-9.]+) us, bus bandwidth ([0-9.]+) GB/m
                && abs($1 - 1e6 * $alpha) < 0.02 && abs($2 - 1e-9 * $bus) < 0.002;
        }
END
}
check "--json has the latency and bandwidth that fit the table best" links "$work/links.json"

# ---- mistakes ----
mistake() { # PATTERN... -- OPTION...: on one rank
    local patterns=()
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    fails_with "${patterns[@]}" -- "$bench" "${@:2}"
}
check "a size must be a number with K, M or G" mistake "--minbytes wants a size like 512, 64K, 8M or 1G, not '1T'" -- -b 1T
check "  with nothing after it" mistake "--maxbytes wants a size .* not '8MB'" -- --maxbytes 8MB
check "  and not negative" mistake "--stepbytes wants a size .* not '-1'" -- --stepbytes=-1
check "  or too large" mistake "--maxbytes must be between 1 and 1024G, not 99999999999G" -- -e 99999999999G
check "sizes must grow" mistake "--minbytes 64 is more than --maxbytes 8" -- -b 64 -e 8
check "by a factor or by bytes, not both" mistake "leave one of them out" -- -i 8 -f 2
check "a collective must exist" mistake "--op must be one of all-reduce|reduce-scatter|.* not 'sum'" -- -o sum
check "a type must exist" mistake "--datatype must be one of fp32|bf16|fp16|fp64, not 'byte'" -- -d byte
check "a root must exist" mistake "--root 1: there is no such rank, the last one is 0" -- -r 1
check "iterations are bounded" mistake "--iters must be between 1 and 1000, not 0" -- -n 0
check "one rank has no link" mistake "a single rank has no link to measure" -- --json "$work/none.json"
check "a file that cannot be written is named before anything is measured" \
    fails_with "--json /nowhere/links.json: cannot be opened for writing" -- on_ranks 2 "$bench" --json /nowhere/links.json
check "one size is not enough to tell latency from bandwidth" \
    fails_with "do not tell all-reduce's latency from its bandwidth: try a larger --maxbytes" -- \
    on_ranks 2 "$bench" -b 64 -e 64 -n 1 --json "$work/one.json"

# ---- a GPU's program, under the emulator ----
if [ "$BUILD" = build ]; then
    if sh dev/emulator/find_headers.sh > /dev/null 2>&1 && sh dev/find_cuda.sh compile cublasLt cudnn nccl > /dev/null 2>&1; then
        bench=build/emulated/comm_bench
        emulated() { # NAME DEVICES OPTION...
            CUDA_EMULATOR_DEVICES=$2 CUDA_EMULATOR_WORKERS=1 TMPDIR=$work right 2 fp32 "${@:3}" &&
                grep -q "^# comm_bench on 2 ranks: $1 " "$work/said"
        }
        build() { env -u MAKEFLAGS -u MAKELEVEL make DEVICE=emulated $bench; }
        check "make DEVICE=emulated" build
        check "two GPUs, over NCCL" emulated NCCL 2
        check "  by our ring" emulated NCCL 2 --allreduce ring
        check "two ranks that share a GPU, over MPI" emulated MPI 1
    else
        skip "two GPUs" "the headers of CUDA, cuBLAS, cuDNN or NCCL are not here"
    fi
fi
done_testing
