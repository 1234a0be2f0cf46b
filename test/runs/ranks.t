#!/bin/bash
# What build/ranks says about files like those of a failed run, and its exit status.
. test/lib.sh

# ring RANK LAST [RUN]: writes the file of a rank whose last operation is number LAST.
ring() {
    local file k
    file=$work/ops_rank_000$1.txt
    printf 'shard.c operations 1\nrun %s rank %d of 3 step 2 operations %d\n' "${3:-a}" "$1" $(($2 + 1)) > "$file"
    printf 'channel world collective - %d %d\n' $(($2 + 1)) $(($2 + 1)) >> "$file"
    for k in $(seq 0 "$2"); do echo "op $k world all-reduce 100 fp32 - 2 finished 0.1 0.2 0.3" >> "$file"; done
    echo end >> "$file"
}
compare() { # STATUS PATTERN: build/ranks ends with STATUS on all files and prints PATTERN
    local status
    "$BUILD/ranks" "$work"/ops_rank_*.txt > "$work/said" 2>&1
    status=$?
    cat "$work/said"
    [ "$status" -eq "$1" ] && grep -qe "$2" "$work/said"
}

ring 0 7; ring 1 7; ring 2 7
check "ranks that agree: status 0" compare 0 'world: the same on all: 8 operations'
ring 1 5
check "a rank that stopped is named: status 2" compare 2 'world: rank 1 never issued all-reduce #6 of world (100 fp32, step 2)'
ring 1 7 another-run
check "files of different runs: an error" compare 1 'error: .*are of different runs'
echo more >> "$work/ops_rank_0001.txt"
check "a damaged file: an error with its line" compare 1 'error: .*ops_rank_0001.txt:13: .*damaged'
rm "$work/ops_rank_0001.txt"
check "a missing file is reported" compare 0 'no file of rank 1 of 3'
check "no file at all: it says how to use it" not "$BUILD/ranks"
done_testing
