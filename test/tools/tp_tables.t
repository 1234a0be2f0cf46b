#!/bin/bash
# The scripts that make chapter 5's tables: on small models, and on programs that count wrongly.
. test/lib.sh
[ "$BUILD" = build ] || { echo "1..0 # SKIP it is the same in every build"; exit 0; }
program=$BUILD/train_gpt2_tp
small=(--data $REFERENCE/tokens.bin --layers 2 --heads 4 --channels 16 --seq-len 16 --batch-size 4)

# skewed SED: a program like it whose metrics.jsonl says something else
skewed() {
    cat > "$work/skewed" << END
#!/bin/bash
"$PWD/$program" "\$@" || exit 1
while [ \$# -gt 1 ]; do [ "\$1" = --out ] && out=\$2; shift; done
[ "\${OMPI_COMM_WORLD_RANK:-0}" != 0 ] || sed -i '$1' "\$out/metrics.jsonl"
END
    chmod +x "$work/skewed"
}
line() { grep -E "^$1 +$2 +$3( |\$)" "$work/table" || { cat "$work/table"; return 1; }; } # PART OPERATION NUMBER

sums() { PROGRAM=$program sh dev/bench/tp_sums.sh "${small[@]}" "$@" > "$work/table"; }
# 2 blocks, 64 tokens of 16 channels: 4096 bytes each
check "tp_sums.sh finds two sums a block, forward and backward" eval 'sums && line "forward, blocks" all-reduce 4 &&
    line "backward, blocks" all-reduce "4 +4096 +4096 +16384" && line "forward, embedding" all-reduce 1 && line head all-gather "1 +1536 +768 +768"'
check "  and halves of them with --sequence-parallel, on several copies" eval 'sums --ranks 4 --tensor-parallel 2 --sequence-parallel &&
    line "backward, blocks" all-gather "8 +4096 +2048" && line "backward, blocks" reduce-scatter 4 && grep "all-reduce, copies" "$work/table"'
skewed '2s/"comm_bytes":[0-9]*/"comm_bytes":1000/'
wrong_sums() { PROGRAM=$work/skewed sh dev/bench/tp_sums.sh "${small[@]}"; }
check "  a program that has counted other bytes is found" eval '! wrong_sums > "$work/log" 2>&1 && grep "has counted 1000 bytes" "$work/log"'

memory() { sh dev/bench/tp_memory.sh --tp "1 2" "${small[@]}"; }
check "tp_memory.sh: the state is that of the formula; a block keeps 16, 10, 8 and 9 C" eval 'PROGRAM=$program memory > "$work/table" &&
    [ "$(awk "NR > 1 { printf \"%s \", \$(NF-3) }" "$work/table")" = "16 10 8 9 " ]'
skewed '1s/"gradients":[0-9]*/"gradients":1000/'
check "  another state is found" eval '! PROGRAM=$work/skewed memory > "$work/log" 2>&1 && grep "by formula" "$work/log"'

for_tier rest
channels() { BUILD=$BUILD sh dev/bench/tp_channels.sh --channels "128 256" --rounds 1 --steps 2 --svg "$work/plot.svg" --layers 1 --seq-len 16 --batch-size 2; }
drift() { BUILD=build sh dev/bench/tp_drift.sh --tp 2 --at "1 2" "${small[@]}"; }
check "tp_channels.sh makes a table and a picture" eval 'channels > "$work/table" && grep "^| 256 | .* | 4 | .* | 2 | .* %" "$work/table" &&
    [ "$(tail -n 1 "$work/plot.svg")" = "</svg>" ] && ! grep -i nan "$work/plot.svg"'
check "tp_drift.sh: fp32 differs by less than bf16" eval 'drift > "$work/table" && awk -F "[|/]" "/fp32, 2/ { a = \$6 } /bf16, 2 ranks [|]/ { b = \$6 } END { exit !(a < 1e-5 && b > 1e-5) }" "$work/table" || { cat "$work/table"; false; }'
done_testing
