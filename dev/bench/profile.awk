# profile.awk - a table of the kernels of a run's last step, as Nsight Compute saw them: a row for each name, the slowest first.
# Input: the output of ncu --csv --print-units base for gpu__time_duration.sum and, as avg.pct_of_peak_sustained_elapsed,
# dram__throughput and sm__throughput, one line per launch and metric. A step begins with encoder_forward_kernel.

BEGIN { FS = "\",\"" }
/^"[0-9]+",/ {
    id = substr($1, 2) + 0
    number = $15
    gsub(/[",]/, "", number)
    if (!(id in name)) { name[id] = $5; last = id; if ($5 ~ /encoder_forward_kernel/) first = id }
    metric[id, substr($13, 1, 3)] = number
}
# Drops arguments and template parameters, which make a library's kernel names very long.
function short(text) { sub(/^void /, "", text); sub(/\(.*/, "", text); sub(/<.*/, "", text); return substr(text, 1, 70) }
END {
    if (first == "") { print "error: there is no encoder_forward_kernel in the profile" > "/dev/stderr"; exit 1 }
    for (id = first; id <= last; id++) {
        if (!(id in name)) continue
        key = short(name[id])
        if (!(key in calls)) order[++n] = key
        calls[key]++
        ns = metric[id, "gpu"]
        time[key] += ns; sum += ns; launched++
        dram[key] += ns * metric[id, "dra"]; sm[key] += ns * metric[id, "sm_"]
    }
    for (i = 2; i <= n; i++) { # the longest first
        key = order[i]
        for (j = i - 1; j > 0 && time[order[j]] < time[key]; j--) order[j + 1] = order[j]
        order[j + 1] = key
    }
    printf "%d kernels, %.2f ms\n\n", launched, 1e-6 * sum
    printf "| kernel | launches | ms | share | of the memory's rate | of the multiprocessors' |\n|---|---|---|---|---|---|\n"
    for (i = 1; i <= n; i++) {
        key = order[i]
        printf "| %s | %d | %.3f | %.1f %% | %.0f %% | %.0f %% |\n", key, calls[key], 1e-6 * time[key], 100 * time[key] / sum,
            dram[key] / time[key], sm[key] / time[key]
    }
}
