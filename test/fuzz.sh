#!/bin/sh
# test/fuzz.sh SECONDS: runs each fuzz target that long, from the inputs found before (build/fuzz/corpus-*).
set -eu
cd "$(dirname "$0")/.."
seconds=${1:?how many seconds for each target}
for target in build/fuzz/*; do
    [ -f "$target" ] && [ -x "$target" ] || continue
    name=$(basename "$target")
    corpus=build/fuzz/corpus-$name
    mkdir -p "$corpus"
    echo "fuzzing the reader of $name for $seconds s"
    "$target" -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 -detect_leaks=0 -close_fd_mask=3 \
        -artifact_prefix=build/fuzz/crash-"$name"- "$corpus"
done
