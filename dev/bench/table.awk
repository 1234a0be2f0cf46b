# table.awk - what bench.sh measured ("PROGRAM T ms|rss|predicted|counted|exposed VALUE" and "peak 0 sgemm|bf16|copy VALUE" lines),
# as a table with the goals below it. A value is the median of all its lines, for memory their maximum, for DDP's exposed time
# their minimum. With -v "only=PROGRAM T" it prints only this row. Load median.awk before it.

{ key = $1 " " $2 " " $3; value[key, ++count[key]] = $4 + 0 }

function most(key,   i, x) {
    for (i = 1; i <= count[key]; i++) if (value[key, i] > x) x = value[key, i]
    return x + 0
}
function minimum(key,   i, x) {
    x = value[key, 1]
    for (i = 2; i <= count[key]; i++) if (value[key, i] < x) x = value[key, i]
    return x + 0
}
function ms(program, T) { return median(program " " T " ms") }
function memory(program, T, what) { return most(program " " T " " what) * 1e-9 }

# 6 FLOPs a parameter and token; at T=1024 also the causal half of attention's two (T,T) products: 6 L C T.
function gflop(T) { return 1e-9 * 4 * T * (6 * 124439808 + (T == 1024 ? 6 * 12 * 768 * T : 0)) }
function rate(program, T) { return ms(program, T) ? gflop(T) / ms(program, T) * 1e3 : 0 }

function row(program, T, peak,   r, name) {
    r = rate(program, T)
    if (!r) return
    name = program
    sub(/^ours-/, "ours, ", name); sub(/^torch-/, "PyTorch, ", name); sub(/^llmc-/, "llm.c, ", name)
    printf "  %-14s %9.0f %10.0f %9.0f %9s %10.2f", name, ms(program, T), 4 * T / ms(program, T) * 1e3, r, peak ? sprintf("%.0f %%", 100 * r / peak) : "-",
           memory(program, T, "rss")
    if (count[program " " T " predicted"]) printf " %10.2f %10.2f", memory(program, T, "predicted"), memory(program, T, "counted")
    printf "\n"
}
function head(text) { printf "\n%-16s %9s %10s %9s %9s %10s %10s %10s\n", text, "ms/step", "tokens/s", "GFLOP/s", "of peak", "GB in RAM", "predicted", "counted" }

# Prints one goal beside the value reached, or nothing if that is 0: not measured.
function goal(text, reached, least, unit) {
    if (reached) printf "  %-58s %7.2f %s   goal %g: %s\n", text, reached, unit, least, (reached >= least ? "reached" : "MISSED")
}
function shown(text, reached) { if (reached) printf "  %-58s %7.2f times\n", text, reached }
function ratio(a, b) { return a && b ? a / b : 0 }

END {
    sgemm = median("peak 0 sgemm"); bf16 = median("peak 0 bf16")
    if (only) {
        split(only, which, " ")
        if (count[only " ms"] == 0) exit 1
        printf "T=%d", which[2]
        row(which[1], which[2], which[1] ~ /bf16/ ? bf16 : sgemm)
        exit
    }
    printf "This machine at best: %.0f GFLOP/s in fp32, ", sgemm
    printf "%s", (bf16 ? sprintf("%.0f in bf16", bf16) : "no bf16")
    printf " (oneDNN, 2048-cubed); copying %.0f GB/s\n", median("peak 0 copy")
    head("T=64")
    row("ours-fp32", 64, sgemm)
    row("torch-fp32", 64, sgemm)
    row("llmc-fp32", 64, sgemm)
    row("ours-bf16", 64, bf16)
    row("torch-bf16", 64, bf16)
    if (count["ours-fp32 1024 ms"] + count["torch-fp32 1024 ms"]) {
        head("T=1024")
        row("ours-fp32", 1024, sgemm)
        row("torch-fp32", 1024, sgemm)
    }
    print "\nGoals"
    goal("faster than PyTorch (eager, fused AdamW), fp32, T=64", ratio(ms("torch-fp32", 64), ms("ours-fp32", 64)), 1.5, "times")
    goal("faster than llm.c, fp32, T=64", ratio(ms("llmc-fp32", 64), ms("ours-fp32", 64)), 3.5, "times")
    goal("of the fp32 matrix product's rate, T=64", ratio(100 * rate("ours-fp32", 64), sgemm), 82, "%    ")
    goal("bf16 faster than our fp32, T=64", ratio(ms("ours-fp32", 64), ms("ours-bf16", 64)), 1.5, "times")
    goal("FLOP/s at T=1024 over FLOP/s at T=64, fp32", ratio(rate("ours-fp32", 1024), rate("ours-fp32", 64)), 1, "times")
    goal("memory predicted over memory counted, fp32, T=1024", ratio(memory("ours-fp32", 1024, "predicted"), memory("ours-fp32", 1024, "counted")), 1, "times")
    # 10.9 GB: a PyTorch step in which gradients stay allocated and logits are copied; the PyTorch program here needs less
    goal("half of 10.9 GB over memory in RAM, fp32, T=1024", ratio(5.45, memory("ours-fp32", 1024, "rss")), 1, "times")
    goal("less memory than PyTorch, fp32, T=1024", ratio(memory("torch-fp32", 1024, "rss"), memory("ours-fp32", 1024, "rss")), 1, "times")
    # the minimum: a step that rank 0 reached last, so that waiting for a rank that was slowed down does not count
    goal("communication exposed, naive over bucketed DDP, 2 ranks", ratio(minimum("ddp-naive 2048 exposed"), minimum("ddp-bucketed 2048 exposed")), 1, "times")
    none = median("fsdp-none 256 exposed"); post = median("fsdp-backward-post 256 exposed"); pre = median("fsdp-backward-pre 256 exposed")
    goal("communication exposed, FSDP without prefetch over -pre", ratio(none, pre), 1, "times")
    # no goal: on two busy cores a gather that starts a little earlier gains less than they differ from run to run
    shown("communication exposed, FSDP without prefetch over post", ratio(none, post))
}
