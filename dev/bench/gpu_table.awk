# gpu_table.awk - what bench_gpu.sh measured ("PROGRAM B ms|counted|used VALUE", "PROGRAM B failed WHY", "peak 0
# copy|product|sheet VALUE") as a table for each batch, with ratios and goals. A value is the median of all its lines, for memory
# their maximum.
# Load median.awk before it. Variables: model, T, and lists of words: programs, batches, sizes (layers, channels).

$3 == "failed" { why[$1, $2] = substr($0, index($0, " failed ") + 8); next }
{ key = $1 " " $2 " " $3; value[key, ++count[key]] = $4 + 0 }

function range(key,   n, sorted) {
    n = sorted_copy(key, sorted)
    return sprintf("%.1f to %.1f", sorted[1], sorted[n])
}
function most_gb(key,   i, x) {
    for (i = 1; i <= count[key]; i++) if (value[key, i] > x) x = value[key, i]
    return x ? sprintf("%.1f", 1e-9 * x) : "-"
}
# A program that failed in one round has no figure for the others.
function ms(program, B) { return (program, B) in why ? 0 : median(program " " B " ms") }
function flops_per_second(program, B) { return 1e3 * B * T * flops_per_token / ms(program, B) }
function percent(a, b) { return b ? sprintf("%.1f %%", 100 * a / b) : "-" }

# The name shown in the table; llmc-ge2-r0 becomes its command line's "-ge 2 -r 0".
function title(program) {
    if (program ~ /^llmc/) { sub(/^llmc-ge/, "llm.c -ge ", program); sub(/-r/, " -r ", program); return program }
    if (program == "torch-autocast") return "PyTorch, fp32 weights, autocast"
    if (program == "torch-bf16") return "PyTorch, bf16, no master weights"
    return "ours" (program ~ /fsdp/ ? ", FSDP on one rank" : "") (program ~ /recompute/ ? ", --recompute block" : "")
}
function row(program, B,   rate) {
    if ((program, B) in why) { printf "| %s | failed: %s | | | | | | |\n", title(program), why[program, B]; return }
    if (!ms(program, B)) return
    rate = flops_per_second(program, B)
    printf "| %s | %.0f | %.2f | %s | %s | %s | %s | %s |\n", title(program), 1e3 * B * T / ms(program, B), ms(program, B),
        range(program " " B " ms"), percent(rate, sheet), percent(rate, product), most_gb(program " " B " counted"),
        most_gb(program " " B " used")
}
# The fastest program whose name begins with prefix; "" if there is none.
function best(prefix, B,   i, found) {
    for (i = 1; i <= n_programs; i++)
        if (index(program[i], prefix) == 1 && ms(program[i], B) && (!found || ms(program[i], B) < ms(found, B)))
            found = program[i]
    return found
}
function judged(reached, goal) { return goal ? sprintf(" Goal %s: %s.", goal, reached >= goal ? "reached" : "MISSED") : "" }
function ratio(us, prefix, B, goal,   them, times) {
    them = best(prefix, B)
    if (!us || !them) return
    times = ms(them, B) / ms(us, B)
    printf "%s- %s over %s: %.3f times as fast.%s\n", said++ ? "" : "\n", title(us), title(them), times, judged(times, goal)
}

END {
    split(sizes, size); L = size[1]; C = size[2]
    parameters = (50257 + 1024) * C + L * (12 * C + 13) * C + 2 * C
    flops_per_token = 6 * parameters + 6 * L * C * T
    product = 1e12 * median("peak 0 product"); sheet = 1e12 * median("peak 0 sheet")
    printf "\n%d parameters, %.4g FLOPs a token. ", parameters, flops_per_token
    printf "This GPU: a large product %.0f TFLOP/s, %s by the data sheet; a copy %.0f GB/s.\n",
        1e-12 * product, sheet ? sprintf("%.0f", 1e-12 * sheet) : "not known", median("peak 0 copy")
    n_programs = split(programs, program); n_batches = split(batches, batch)
    named = model == "gpt2" && T == 1024
    for (b = 1; b <= n_batches; b++) {
        B = batch[b]
        printf "\n| B=%d | tokens/s | ms a step | from, to | MFU | of the product | GB by its own count | GB by nvidia-smi |\n", B
        printf "|---|---|---|---|---|---|---|---|\n"
        for (i = 1; i <= n_programs; i++) row(program[i], B)
        us = best("ours", B)
        said = 0
        ratio(us, "llmc", B, named ? 1.2 : 0)
        ratio(us, "torch-autocast", B, named ? 1.3 : 0)
        ratio(us, "torch-bf16", B, named ? 1.3 : 0)
        if (us && model == "gpt2-xl" && sheet) {
            rate = flops_per_second(us, B)
            printf "%s- %s: %s MFU.%s\n", said++ ? "" : "\n", title(us), percent(rate, sheet), judged(100 * rate / sheet, 60)
        }
    }
}
