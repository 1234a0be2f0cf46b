// plan_compress.c - the bytes of a planned run of train_gpt2_compress, by its own formulas (plan_stage.h), and what its gradients
// travel in.
#define main train_main // plan has its own
#include "../../train_gpt2_compress.cu"
#define PLAN_SENT(g, b) gpt2_predict_sent(g, LLONG_MAX) // in a step that is compressed
#include "plan_formulas.h"
#include <limits.h>

// As gpt2_configure and compress_configure, without the options.
static void plan_compress(const Plan* p, GPT2* g) {
    Compress* c = &g->compress;
    const CompressMethod* method = &compress_methods[p->compress.method];
    CompressOptions o = { p->compress.method, p->compress.feedback == PLAN_USUAL ? method->feedback : p->compress.feedback,
                          p->compress.fraction, p->compress.rank, method->from, 0 };
    require(!NEEDS_MASTER || (o.method != COMPRESS_BF16 && o.method != COMPRESS_FP16),
            "--compress %s saves nothing: this program's gradients (" FLOATX_NAME ") have 16 bits already; use none",
            method->name);
    c->o = o;
    c->method = method;
    c->comm = g->dp;
    c->num_elements = gpt2_num_elements(p->config);
    g->bucket_mb = p->compress.bucket_mb > 0 ? p->compress.bucket_mb : 25; // as main
    gpt2_init_buckets(g);
}

// Bytes that packing and unpacking a compressed bucket of n elements read and write, kernel by kernel (compress_api.h), each array once
// a pass. Gram-Schmidt and the sums of scales are not counted, because their arrays are small.
static void plan_touched(const Compress* c, const CompressedBucket* p, PlanPackets* u) {
    double n = (double)p->n, N = compress_ranks(c), X = sizeof(floatX), F = sizeof(float), fed = c->o.feedback ? 2 * F : 0;
    double row = (double)c->method->cost(c, p).sent; // all N parts, or N rows
    double part = (n + (c->o.feedback ? 2 * n : 0) + n) * F / N; // fp32: a sum is written and read, its error too
    switch (c->o.method) {
    case COMPRESS_BF16: case COMPRESS_FP16:
        u->packing += n * (X + 2 + fed);
        u->unpacking += n * (2 + X);
        return;
    case COMPRESS_INT8: case COMPRESS_INT4:
        u->packing += n * (X + fed) + row;
        u->unpacking += row + part + row / N + row + n * X;
        return;
    case COMPRESS_TOP_K: // the k largest take four passes for the digits of |x|, one that counts and one that sends
        u->packing += n * (X + F + fed / 2) + 6 * n * F + fed / 2 * n + row / N;
        u->unpacking += row + n * (F + F + X);
        return;
    case COMPRESS_SIGN: // one pass for the scale, one for the signs
        u->packing += n * (X + F + fed / 2) + 2 * n * F + fed / 2 * n + row / N;
        u->unpacking += row + n * X;
        return;
    case COMPRESS_ONEBIT_ADAM:
        u->packing += n * (F + X + F + fed / 2) + 2 * n * F + fed / 2 * n + row;
        u->unpacking += row + part + row / N + row + n * F;
        return;
    default: // powersgd: two products read x, and the last kernel as well
        u->packing += n * (X + F + fed / 2) + 2 * n * F;
        u->unpacking += n * (F + X + fed / 2);
    }
}
// Adds what a compressed bucket is sent in.
static void plan_packet(const Compress* c, const CompressedBucket* p, PlanPackets* u) {
    BucketCost cost = c->method->cost(c, p);
    bool exchanged = c->o.method == COMPRESS_INT8 || c->o.method == COMPRESS_INT4 || c->o.method == COMPRESS_ONEBIT_ADAM;
    plan_touched(c, p, u);
    if (exchanged) {
        u->exchanges++;
        u->exchanged += (double)cost.sent;
    }
    if (exchanged || c->o.method == COMPRESS_TOP_K || c->o.method == COMPRESS_SIGN) {
        u->gathers++;
        u->gathered += (double)cost.sent;
        return;
    }
    u->sums += c->method->middle ? 2 : 1;
    u->summed += (double)(cost.sent + cost.received);
}
// Of all buckets that begin in elements [begin, end).
static PlanPackets plan_packets(const GPT2* g, size_t begin, size_t end) {
    const Compress* c = &g->compress;
    size_t X = c->o.method == COMPRESS_ONEBIT_ADAM ? sizeof(float) : sizeof(floatX);
    PlanPackets u;
    memset(&u, 0, sizeof u);
    for (int i = 0; i < g->num_buckets; i++) {
        const Bucket* b = &g->buckets[i];
        if (b->begin < begin || b->begin >= end) continue;
        if (b->compressed != WHOLE) plan_packet(c, &c->buckets[b->compressed], &u);
        else {
            u.sums++;
            u.summed += (double)(b->size * X);
        }
    }
    return u;
}

PLAN_EXPORT PlanBytes PLAN_FORMULA(const Plan* p, PlanStage stage) {
    GPT2 g;
    PlannedRanks ranks;
    (void)stage;
    plan_configure(p, &g, &ranks);
    plan_compress(p, &g);
    PlanBytes b = plan_ask(p, &g);
    size_t root = unit_elements(p->config, 0);
    b.root = plan_packets(&g, 0, root);
    b.blocks = plan_packets(&g, root, SIZE_MAX);
    free(g.buckets);
    free(g.compress.buckets);
    return b;
}
