#!/bin/sh
# run_variants.sh PROGRAM... - runs programs of dev/cpu or dev/cuda one after the other, also after one that finds a variant wrong,
# and lists at the end the wrong variants, each with the first element that is wrong. Status 1 if there are any.
# WRONG=FILE: appends the list to this file instead, for somebody who runs more.
set -u
said=$(mktemp) && list=$(mktemp) || exit 1
trap 'rm -f "$said" "$said.status" "$list"' EXIT
for program; do
    { "$program"; echo $? >"$said.status"; } | tee "$said"
    status=$(cat "$said.status")
    # "# NAME: ..." or "# NAME, 32 threads a block: ...": the first line of each
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
