# profile.awk - the kernels of a run's last step, as Nsight Compute saw them, in a table: a row for each name, those that take
# most first. Input: what ncu --csv --print-units base says of gpu__time_duration.sum and, as avg.pct_of_peak_sustained_elapsed,
# of dram__throughput and sm__throughput, a line a launch and metric. A step begins with encoder_forward_kernel.

BEGIN { FS = "\",\"" }
/^"[0-9]+",/ {
    id = substr($1, 2) + 0
    number = $15
    gsub(/[",]/, "", number)
    if (!(id in name)) { name[id] = $5; last = id; if ($5 ~ /encoder_forward_kernel/) first = id }
    metric[id, substr($13, 1, 3)] = number
}
# Without arguments and templates, which make a library's names endless.
function short(text) { sub(/^void /, "", text); sub(/\(.*/, "", text); sub(/<.*/, "", text); return substr(text, 1, 70) }
END {
    if (first == "") { print "error: there is no encoder_forward_kernel in it" > "/dev/stderr"; exit 1 }
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
