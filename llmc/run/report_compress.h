/*
report_compress.h - what a run says about compressed gradients: their share of P, the bytes beside ddp's, and the compression error.
*/
#ifndef LLMC_REPORT_COMPRESS_H
#define LLMC_REPORT_COMPRESS_H
#include "../parallel/compress_methods.h"
#include "ranks_run.h"

// Returns why nothing will be compressed, or NULL.
static inline const char* compress_idle(const Compress* c, long long steps) {
    if (c->o.method == COMPRESS_NONE) return "--compress none";
    if (compress_ranks(c) == 1) return "there is one rank";
    if (c->compressed == 0) return "every matrix has fewer elements than twice its P and Q; lower --rank";
    return c->o.from >= steps ? "the run has no more steps than --compress-from; lower that" : NULL;
}

// whole: bytes per rank and step without compression; run->ranks->sent are those with it.
static inline void report_compress(const Compress* c, const Run* run, double whole) {
    char a[32], b[32], from[64] = "";
    const char* idle = compress_idle(c, run->o.steps);
    double share = (double)c->compressed / (double)gpt2_num_parameters(run->config);
    if (c->o.from > 0) snprintf(from, sizeof from, ", from step %lld on", c->o.from + 1);
    if (idle) printf("compress   nothing: %s\n", idle);
    else printf("compress   %s: %s; %.2f %% of the parameters%s; errors are %s; %s sent per rank and step, ddp sends %s"
                " (%.1f times)\n", c->method->name, c->method->text, 100 * share, from, c->o.feedback ? "kept" : "dropped",
                format_bytes(a, sizeof a, run->ranks->sent), format_bytes(b, sizeof b, whole), whole / run->ranks->sent);
    fflush(stdout);
}

// For --predict: of each segment its first element, its elements, and the bytes of its buffers; 0: it is sent whole.
static inline json_t* compress_predict_segments(const void* self) {
    const Compress* c = (const Compress*)self;
    json_t* segments = json_array();
    for (const Segment* p = c->segments; p < c->segments + c->num_segments; p++) {
        SegmentCost cost = p->method->cost(c, p);
        json_array_append_new(segments, json_pack("[I, I, I, I]", (json_int_t)p->at, (json_int_t)p->n, (json_int_t)cost.sent,
                                                  (json_int_t)cost.received));
    }
    return segments;
}

// After a step, counted from 1, in which it was measured.
static inline void report_compression_error(const Compress* c, Logger* log, long long step) {
    if (!c->measures) return;
    Comparison all;
    device_to_host(&all, c->comparison, sizeof all);
    double error = comparison_error(all), ratio = comparison_norm_ratio(all), cosine = comparison_cosine(all);
    logger_say("step %*lld/%lld | compressed: relative error %.4f, norm ratio %.4f, cosine %.4f\n", logger_step_digits(log),
               step, log->steps, error, ratio, cosine);
    logger_write(log, json_pack("{sI, so, so, so}", "step", (json_int_t)step, "compression_error", json_number(error),
                                "compression_norm_ratio", json_number(ratio), "compression_cosine", json_number(cosine)));
}
#endif
