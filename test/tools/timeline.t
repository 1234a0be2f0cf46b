#!/bin/bash
# build/overlap on made-up timelines, whose numbers are known, and on a program's own timeline.
. test/lib.sh
overlap=$BUILD/overlap

# slice RANK TRACK NAME BEGIN DURATION STEP; times in milliseconds
slice() { printf '{"ph":"X","name":"%s","pid":%d,"tid":%d,"ts":%de3,"dur":%de3,"args":{"step":%d}}' "$3" "$1" "$2" "$4" "$5" "$6"; }
trace() { printf '{"traceEvents":['; for s in "$@"; do printf '%s,\n' "$s"; done; printf '{"ph":"M","name":"process_name","pid":0}]}\n'; }
# Two ranks; steps 1 (not counted), 2 and 3. In step 2 rank 0 sends for 30 ms, 10 of them hidden; in step 3 for 20 ms, all hidden.
both_steps() { # RANK
    slice "$1" 0 "forward, block 0" 1000 40 2; echo
    slice "$1" 0 "backward, block 0" 1040 50 2; echo
    slice "$1" 0 "wait for gradients" 1090 20 2; echo
    slice "$1" 0 "update" 1110 10 2; echo
    slice "$1" 0 "forward, block 0" 2000 40 3; echo
    slice "$1" 0 "backward, block 0" 2040 50 3; echo
    slice "$1" 0 "update" 2090 10 3; echo
    slice "$1" 1 "all-reduce #1" 1080 30 2; echo
    slice "$1" 1 "all-reduce #2" 2060 20 3; echo
}
mapfile -t slices < <(slice 0 0 "forward" 0 500 1; echo; both_steps 0; both_steps 1)
trace "${slices[@]}" > "$work/trace.json"
says() { # PATTERN...
    local pattern
    "$overlap" "$work/trace.json" "${options[@]}" > "$work/said" || return 1
    cat "$work/said"
    for pattern; do grep -qe "$pattern" "$work/said" || { echo "there is no '$pattern' in it"; return 1; }; done
}
boxes() { # COLOUR N: there are N boxes of this colour, without the legend's
    [ "$(grep -c "height=\"18\" fill=\"$1\"" "$work/a.svg")" -eq "$2" ] || { echo "not $2 boxes of $1"; return 1; }
}
options=()
# (100 + 100) / 2 ms of compute, 25 of communication, 10 exposed, 20 ms before the end of the backward pass on average
check "mean times a step, without the first one" says '^rank 0 *100.00 *25.00 *10.00 *90.9% *20.00$' '^rank 1 *100.00 *25.00 *10.00'
check "the shortest step is drawn" says '^step 3, 100.00 ms'
options=(--step 2 --columns 12)
check "or the one that --step names, slice by slice" says '^step 2, 120.00 ms' '|ffffbbbbb..u|' '|        ### |'
options=(--step 2 --svg "$work/a.svg")
check "it draws a picture" says "^picture: $work/a.svg"
command -v python3 > /dev/null && check "  which is well-formed XML" sh -c "python3 -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' '$work/a.svg'"
check "  with a box for each slice, and one for what hides communication" eval 'boxes "#c1121f" 2 && boxes "#7fb069" 2 && boxes "#eeeeee" 2 && boxes "#8d99ae" 2'
# 800 pixels are 120 ms: communication begins after 80 of them and takes 30, of which the first 10 are hidden
check "  at the right place and width" grep -q '<rect x="593.33" y="52" width="200.00" height="18" fill="#c1121f"' "$work/a.svg"
check "  so is what hides it" grep -q '<rect x="593.33" y="52" width="66.67" height="18" fill="#7fb069"' "$work/a.svg"
options=(--step 2 --svg "$work/a.svg" --svg-ms 240)
check "  at another scale, with --svg-ms" says "^picture"
check "    half as wide" grep -q '<rect x="326.67" y="52" width="100.00" height="18" fill="#c1121f"' "$work/a.svg"
check "a missing step is an error" fails_with "the trace has no such step" -- "$overlap" "$work/trace.json" --step 9
check "a picture that cannot be written is an error" fails_with "cannot be opened for writing" -- "$overlap" "$work/trace.json" --svg /no/such/folder/a.svg
echo '{"traceEvents":[' > "$work/torn.json"
check "a torn trace is an error" fails_with "torn.json.*is not JSON" -- "$overlap" "$work/torn.json"

# ZeRO's stage 3 waits for gathers in the middle of the forward and the backward pass: each wait splits the slice around it.
slices_of() { sed -n 's/.*"name":"\([^"]*\)","ph":"X","pid":'$1',"tid":'$2',"ts":\([0-9.]*\),"dur":\([0-9.]*\),.*/\2 \3 \1/p' "$work/zero.json" | sort -g; }
waits_are_cut_out() {
    on_ranks 2 "$BUILD/train_gpt2_zero" --zero-stage 3 --data $REFERENCE/tokens.bin --val-data= --model d3 --heads 2 --channels 16 \
        --seq-len 16 --batch-size 4 --steps 3 --sample-every 0 --trace "$work/zero.json" > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    local rank
    for rank in 0 1; do
        slices_of $rank 0 > "$work/compute"
        grep -c "wait for all-gather" "$work/compute"
        # blocks' gathers: 3 forward and 3 backward in each step; the root's waits may be between slices
        [ "$(grep -c "wait for all-gather" "$work/compute")" -ge 18 ] || return 1
        awk '$1 < end - 0.01 { print "slices overlap at " $0; exit 1 } { end = $1 + $2 }' "$work/compute" || return 1
        awk '{ name = substr($0, index($0, $3)) } # after a wait the slice before it continues
             gather && name != before { print name " follows a wait within " before; exit 1 }
             { gather = name ~ /wait for all-gather/; if (!gather) before = name }' "$work/compute" || return 1
    done
}
check "a wait is cut out of the slice around it" waits_are_cut_out
done_testing
