# busy.sh - tells scripts that measure whether anything else is running.

# Prints the percentage of the processor that was busy during a second in which this script only waited.
busy_percent() {
    { cat /proc/stat; sleep 1; cat /proc/stat; } 2>/dev/null | awk '
        $1 == "cpu" { all = 0; for (i = 2; i <= NF; i++) all += $i; idle = $5 + $6; n++; if (n == 1) { all1 = all; idle1 = idle } }
        END { printf "%d", (n == 2 && all > all1 ? 100 - 100 * (idle - idle1) / (all - all1) : 0) }'
}
