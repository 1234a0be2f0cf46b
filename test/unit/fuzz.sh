#!/bin/sh
# test/unit/fuzz.sh SECONDS [TARGET...]: runs each fuzz target for SECONDS, starting from the inputs that earlier runs kept.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:?how many seconds for each target}
shift
[ $# -gt 0 ] || set -- tokens mask tokenizer safetensors
for name in "$@"; do
    corpus=build/fuzz/corpus-$name
    mkdir -p "$corpus"
    echo "fuzzing the reader of $name for $seconds s"
    build/fuzz/$name -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 -detect_leaks=0 -close_fd_mask=3 \
        -artifact_prefix=build/fuzz/crash-"$name"- "$corpus"
done
