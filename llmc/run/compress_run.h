/*
compress_run.h - the additions of compressed gradients to a run on several ranks (ranks_run.h): options, errors in
checkpoints, and reports of the bytes sent and of the compression error.
*/
#ifndef LLMC_COMPRESS_RUN_H
#define LLMC_COMPRESS_RUN_H
#include "../parallel/compress_state.h"
#include "ranks_run.h"

// ---- before the model ----

// For --predict: each segment's first element, elements, bytes of its two buffers, and 1 if it is compressed.
static inline json_t* compress_predict_segments(const void* self) {
    const Compress* c = (const Compress*)self;
    json_t* segments = json_array();
    for (const Segment* s = c->segments; s < c->segments + c->num_segments; s++) {
        SegmentCost cost = segment_cost(c, s);
        bool whole = s->method == COMPRESS_NONE || s->method == COMPRESS_VECTORS;
        json_array_append_new(segments, json_pack("[I, I, I, I, i]", (json_int_t)s->at, (json_int_t)s->n,
                                                  (json_int_t)cost.packed, (json_int_t)cost.received, !whole));
    }
    return segments;
}

// Declares the options; each rank will save its errors; --predict also prints the segments, by which the planner times
// messages.
static inline void compress_options(Compress* c, Run* run) {
    options_compress(&run->table, &c->o);
    run->ranks->share.beside = compress_beside(c);
    run->ranks->sharing.predict = compress_predict_segments;
    run->ranks->sharing.self = c;
}

// ---- errors in checkpoints ----

// Call before ranks_load: each rank loads its errors if this run resumes another. m (num_elements):
// AdamW's first moment, by which a file of errors knows its checkpoint; a view.
static inline void compress_before_load(Compress* c, Run* run, const float* m) {
    c->m = m;
    c->resumed = run->o.resume && run->from_checkpoint ? xstrdup(run->checkpoint.path) : NULL;
}
// Call when the moments are loaded.
static inline void compress_after_load(Compress* c) { compress_load(c); }

// ---- reports ----

// Returns why nothing will be compressed, or NULL.
static inline const char* compress_idle(const Compress* c, long long steps) {
    if (c->o.method == COMPRESS_NONE) return "--compress none";
    if (compress_ranks(c) == 1) return "there is one rank";
    if (c->compressed == 0) return "every matrix has fewer elements than twice its P and Q; lower --rank";
    return c->o.from >= steps ? "the run has no more steps than --compress-from; lower that" : NULL;
}

// Reports the method, and its traffic compared with ddp's.
static inline void report_compress(const Compress* c, const Run* run) {
    double whole = compress_whole_bytes(c) + ring_bytes(STEP_SUMS * sizeof(double), compress_ranks(c)); // gradients
    char a[32], b[32], from[64] = "";
    const char* idle = compress_idle(c, run->o.steps);
    double share = (double)c->compressed / (double)gpt2_num_parameters(run->config);
    if (c->o.from > 0) snprintf(from, sizeof from, ", from step %lld on", c->o.from + 1);
    if (idle) printf("compress   nothing: %s\n", idle);
    else printf("compress   %s: %s; %.2f %% of the parameters%s; errors are %s; %s sent per rank and step, ddp sends %s"
                " (%.1f times)\n", compress_method(c)->name, compress_method(c)->text, 100 * share, from,
                c->o.feedback ? "kept" : "dropped", format_bytes(a, sizeof a, run->ranks->sent),
                format_bytes(b, sizeof b, whole), whole / run->ranks->sent);
    fflush(stdout);
}

// After a step, counted from 1, in which it was measured.
static inline void report_compression_error(const Compress* c, Logger* log, long long step) {
    if (!c->measures) return;
    Comparison all;
    device_to_host(&all, c->comparison, sizeof all);
    double error = comparison_error(all), ratio = comparison_norm_ratio(all), cosine = comparison_cosine(all);
    logger_say("step %*lld/%lld | compressed: relative error %.4f, norm ratio %.4f, cosine %.4f\n",
               logger_step_digits(log), step, log->steps, error, ratio, cosine);
    logger_write(log, json_pack("{sI, so, so, so}", "step", (json_int_t)step, "compression_error", json_number(error),
                                "compression_norm_ratio", json_number(ratio),
                                "compression_cosine", json_number(cosine)));
}

// Call at the end of a step, counted from 0. skipped: it did not change the weights, because the gradients were not
// finite. Keeps the errors for the next step, counts the bytes of a step that is not typical, and reports the
// compression error if this step measures it.
static inline void compress_step_end(Compress* c, Run* run, long long step, bool skipped) {
    if (c->measures) compress_measure_end(c);
    compress_keep_errors(c, skipped);
    double typical = compress_predict_sent(c, c->steps - 1);
    run->ranks->all.otherwise = compress_predict_sent(c, step) - typical + compress_measure_bytes(c);
    report_compression_error(c, &run->log, step + 1);
}
#endif
