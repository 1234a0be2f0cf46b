#!/bin/sh
# run_variants.sh PROGRAM... - runs programs of dev/kernels/cpu or dev/kernels/cuda one after another. It continues after a wrong variant, and at
# the end lists the wrong variants, each with its first wrong element. The status is 1 if there are any.
# WRONG=FILE: appends the list to this file instead, for a caller that runs this script several times.
set -u
said=$(mktemp) && list=$(mktemp) || exit 1
trap 'rm -f "$said" "$said.status" "$list"' EXIT
for program; do
    { "$program"; echo $? >"$said.status"; } | tee "$said"
    status=$(cat "$said.status")
    # "# NAME: ..." or "# NAME, 32 threads a block: ...": takes the first line of each variant
    lists='/^# / { split($2, name, "[,:]"); if (!seen[name[1]]++) print "  " substr($0, 3); any = 1 } END { exit !any }'
    if [ "$status" != 0 ]; then
        # A program that names no variant has failed for another reason, whatever its status.
        { awk "$lists" "$said" >>"$list" && [ "$status" = 1 ]; } || echo "  $program ended with status $status" >>"$list"
    fi
    echo
done
[ -s "$list" ] || exit 0
if [ -n "${WRONG:-}" ]; then cat "$list" >>"$WRONG"; else echo "wrong:" && cat "$list"; fi
exit 1
