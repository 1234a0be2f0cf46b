/*
cpu/attention.h - causal self-attention without the (T,T) matrix, after FlashAttention (Dao et al., arXiv 2205.14135).

A head of a sequence belongs to one thread. It takes ATTENTION_ROWS queries at a time, and their scores against the keys
up to the last of them, (rows, keys), are all that exists of the matrix. Backward makes the same blocks again from q, k
and the stats that forward left. Matrix products are dnnl_sgemm, which stays in the thread that calls it when that is
inside a parallel region. Attention in parts makes these blocks, too; their results are added up in fp32.
*/
#ifndef LLMC_CPU_ATTENTION_H
#define LLMC_CPU_ATTENTION_H
#include "math.h"
#include "workspace.h"
#include <oneapi/dnnl/dnnl.h>

#define ATTENTION_ROWS 64

// fp32 rows of one head: (T, HS), rows `stride` floats apart
typedef struct { const float* data; int stride; } HeadRows;

// Rows of scores lie an odd number of cache lines apart.
// At a power of two they would all compete for the same few lines.
static inline int attention_stride(int T) { return (int)round_up((size_t)T, 16) | 16; }

// forward: q, k, v and a block of scores and of out; backward: q, k, v, dout, out, dq, dk, dv and two blocks of scores
static inline size_t attention_scratch_floats(int T, int HS) {
    return 8 * (size_t)T * (size_t)HS + 2 * ATTENTION_ROWS * (size_t)attention_stride(T);
}

// Returns the head whose first element is src, in fp32: where it lies if it is fp32, else a copy in `copy` (T,HS).
static HeadRows head_rows(const floatX* src, int stride, float* copy, int T, int HS) {
    HeadRows h = { (const float*)src, stride };
    if (!NEEDS_MASTER) return h;
    for (int t = 0; t < T; t++)
        convert_slice(copy + (size_t)t * HS, DTYPE_F32, src + (size_t)t * stride, FLOATX_DTYPE, (size_t)HS);
    h.data = copy;
    h.stride = HS;
    return h;
}
static inline const float* head_row(HeadRows h, int t) { return h.data + (size_t)t * h.stride; }

// A head of a call in a thread: q, k, v (T,HS). causal: query t sees keys 0..t; else all T.
typedef struct { HeadRows q, k, v; float* scratch; bool causal; int T, HS; } AttentionHead;

// Returns the index of a head's first element in an array whose rows have so many elements.
static inline size_t head_begin(int head, int row, int T, int HS, int NH) {
    return (size_t)(head / NH) * T * row + (size_t)(head % NH) * HS;
}
// q lies in qkv (B,T,3C), k and v side by side in kv, whose rows are kv_row elements apart.
static AttentionHead attention_head(int head, const floatX* qkv, const floatX* kv, int kv_row, bool causal, int T,
                                    int C, int NH) {
    int HS = C / NH;
    size_t n = (size_t)T * HS;
    float* scratch = thread_scratch();
    qkv += head_begin(head, 3 * C, T, HS, NH);
    kv += head_begin(head, kv_row, T, HS, NH);
    AttentionHead a = { head_rows(qkv, 3 * C, scratch, T, HS), head_rows(kv, kv_row, scratch + n, T, HS),
                        head_rows(kv + C, kv_row, scratch + 2 * n, T, HS), scratch + 3 * n, causal, T, HS };
    return a;
}
// Blocks of queries: how many there are from t on, how many keys these see, and how many query t does.
static inline int block_rows(AttentionHead a, int t) { return a.T - t < ATTENTION_ROWS ? a.T - t : ATTENTION_ROWS; }
static inline int block_keys(AttentionHead a, int t) { return a.causal ? t + block_rows(a, t) : a.T; }
static inline int query_keys(AttentionHead a, int t) { return a.causal ? t + 1 : a.T; }

// dst = src in floatX, rows `stride` apart
static void head_store(floatX* dst, int stride, const float* src, int rows, int HS) {
    for (int t = 0; t < rows; t++)
        convert_slice(dst + (size_t)t * stride, FLOATX_DTYPE, src + (size_t)t * HS, DTYPE_F32, (size_t)HS);
}

// Masks a row of scores, of which the first n are wanted: -Inf up to a whole number of vectors, 0 in the rest of its
// `keys`. Returns the number of elements in those vectors, which loops over the row must cover.
static int attention_mask_row(float* row, int n, int keys) {
    int padded = (int)round_up((size_t)n, 16);
    for (int u = n; u < padded; u++) row[u] = -INFINITY;
    if (keys > padded) memset(row + padded, 0, (size_t)(keys - padded) * sizeof(float));
    return padded;
}

// n scores become exp(score - max), unnormalised; *lse = log of the sum of exp(score); returns 1/sum.
static float attention_row_softmax(float* row, float* lse, int n) {
    float max = row[0], sum = 0;
    #pragma omp simd reduction(max:max)
    for (int u = 0; u < n; u++) max = row[u] > max ? row[u] : max;
    #pragma omp simd reduction(+:sum)
    for (int u = 0; u < n; u++) {
        float e = exp_f32(row[u] - max);
        row[u] = e;
        sum += e;
    }
    *lse = max + logf(sum);
    return 1.0f / sum;
}

// o (rows,HS) = softmax(q k^T / sqrt(HS)) v of the block of queries from t on, lse (rows) the stats;
// returns o, in the head's scratch.
static const float* attention_block_forward(float* lse, AttentionHead a, int t) {
    float *o = a.scratch, *scores = o + (size_t)a.T * a.HS, scale = 1.0f / sqrtf((float)a.HS),
          inverse_sum[ATTENTION_ROWS];
    int HS = a.HS, rows = block_rows(a, t), keys = block_keys(a, t), stride = attention_stride(a.T);
    dnnl_sgemm('N', 'T', rows, keys, HS, scale, head_row(a.q, t), a.q.stride, a.k.data, a.k.stride, 0.0f, scores,
               stride);
    for (int r = 0; r < rows; r++) {
        float* row = scores + (size_t)r * stride;
        inverse_sum[r] = attention_row_softmax(row, lse + r, attention_mask_row(row, query_keys(a, t + r), keys));
    }
    dnnl_sgemm('N', 'N', rows, HS, keys, 1.0f, scores, stride, a.v.data, a.v.stride, 0.0f, o, HS);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < HS; i++) o[(size_t)r * HS + i] *= inverse_sum[r];
    }
    return o;
}

void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        AttentionHead a = attention_head(head, qkv, qkv + C, 3 * C, true, T, C, NH);
        for (int t = 0; t < T; t += ATTENTION_ROWS) {
            const float* o = attention_block_forward(stats + (size_t)head * T + t, a, t);
            head_store(out + head_begin(head, C, T, HS, NH) + (size_t)t * C, C, o, block_rows(a, t), HS);
        }
    }
}

// A query's out (HS) over keys whose exponentials sum to exp(*l), and o over others with exp(lse), become those over
// both. With m, the larger log, the weights are exp(l - m) and exp(lse - m) over their sum, which is between 1 and 2,
// and the new *l is m + log(sum).
static void attention_merge(float* out, float* l, const float* o, float lse, int HS) {
    float m = *l > lse ? *l : lse, before = exp_f32(*l - m), now = exp_f32(lse - m), sum = before + now;
    *l = m + logf(sum);
    for (int i = 0; i < HS; i++) out[i] = out[i] * (before / sum) + o[i] * (now / sum);
}

void attention_part_forward(float* out, float* stats, const floatX* qkv, const floatX* kv, bool causal, bool merge,
                            int B, int T, int C, int NH) {
    int HS = C / NH;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        AttentionHead a = attention_head(head, qkv, kv, 2 * C, causal, T, C, NH);
        for (int t = 0; t < T; t += ATTENTION_ROWS) {
            float lse[ATTENTION_ROWS], *l = stats + (size_t)head * T + t,
                                       *row = out + head_begin(head, C, T, HS, NH) + (size_t)t * C;
            const float* o = attention_block_forward(lse, a, t);
            for (int r = 0; r < block_rows(a, t); r++, row += C, o += HS) {
                if (merge) attention_merge(row, l + r, o, lse[r], HS);
                else memcpy(row, o, (size_t)HS * sizeof(float)), l[r] = lse[r];
            }
        }
    }
}

// forward, for query t with probabilities P[u] = exp(S[u] - stats[t]) and S[u] = q[t].k[u] / sqrt(HS): out[t] = sum
// P[u] v[u]. So dv[u] += P[u] dout[t] and dP[u] = dout[t].v[u]; through the softmax dS[u] = P[u] (dP[u] - sum over u of
// P[u] dP[u]), where that sum is dout[t].out[t]; and dq[t] = sum dS[u] k[u] / sqrt(HS), dk[u] += dS[u] q[t] / sqrt(HS).
// dout and out begin with the head's first element; out and stats (T) are those of all parts together. Returns dk, dv
// and dq (T,HS), one after another.
static const float* attention_head_backward(AttentionHead a, const floatX* dout, const floatX* out, const float* stats,
                                            int C) {
    int T = a.T, HS = a.HS, stride = attention_stride(T);
    size_t n = (size_t)T * HS;
    HeadRows d = head_rows(dout, C, a.scratch, T, HS), o = head_rows(out, C, a.scratch + n, T, HS);
    float *dk = a.scratch + 2 * n, *dv = dk + n, *dq = dv + n, *p = dq + n, *ds = p + ATTENTION_ROWS * (size_t)stride;
    float scale = 1.0f / sqrtf((float)HS);
    memset(dk, 0, 2 * n * sizeof(float)); // every block of queries adds to dk and dv
    for (int t = 0; t < T; t += ATTENTION_ROWS) {
        int rows = block_rows(a, t), keys = block_keys(a, t);
        dnnl_sgemm('N', 'T', rows, keys, HS, scale, head_row(a.q, t), a.q.stride, a.k.data, a.k.stride, 0.0f, p,
                   stride);
        dnnl_sgemm('N', 'T', rows, keys, HS, 1.0f, head_row(d, t), d.stride, a.v.data, a.v.stride, 0.0f, ds, stride);
        for (int r = 0; r < rows; r++) {
            float *pr = p + (size_t)r * stride, *dr = ds + (size_t)r * stride, dot = 0, lse = stats[t + r];
            const float *dor = head_row(d, t + r), *outr = head_row(o, t + r);
            for (int i = 0; i < HS; i++) dot += dor[i] * outr[i];
            int wanted = attention_mask_row(pr, query_keys(a, t + r), keys);
            #pragma omp simd
            for (int u = 0; u < wanted; u++) {
                float e = exp_f32(pr[u] - lse);
                pr[u] = e;
                dr[u] = e * (dr[u] - dot) * scale;
            }
            if (keys > wanted) memset(dr + wanted, 0, (size_t)(keys - wanted) * sizeof(float));
        }
        dnnl_sgemm('N', 'N', rows, HS, keys, 1.0f, ds, stride, a.k.data, a.k.stride, 0.0f, dq + (size_t)t * HS, HS);
        dnnl_sgemm('T', 'N', keys, HS, rows, 1.0f, ds, stride, head_row(a.q, t), a.q.stride, 1.0f, dk, HS);
        dnnl_sgemm('T', 'N', keys, HS, rows, 1.0f, p, stride, head_row(d, t), d.stride, 1.0f, dv, HS);
    }
    return dk;
}

void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH) {
    int HS = C / NH;
    size_t n = (size_t)T * HS;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        AttentionHead a = attention_head(head, qkv, qkv + C, 3 * C, true, T, C, NH);
        size_t begin = head_begin(head, C, T, HS, NH);
        const float* dk = attention_head_backward(a, dout + begin, out + begin, stats + (size_t)head * T, C);
        floatX* dst = dqkv + head_begin(head, 3 * C, T, HS, NH);
        head_store(dst, 3 * C, dk + 2 * n, T, HS);
        head_store(dst + C, 3 * C, dk, T, HS);
        head_store(dst + 2 * C, 3 * C, dk + n, T, HS);
    }
}

// dst += src, rows of dst `stride` apart
static void head_add(float* dst, int stride, const float* src, int rows, int HS) {
    for (int t = 0; t < rows; t++)
        for (int i = 0; i < HS; i++) dst[(size_t)t * stride + i] += src[(size_t)t * HS + i];
}

void attention_part_backward(float* dq, float* dkv, const floatX* dout, const floatX* qkv, const floatX* kv,
                             const floatX* out, const float* stats, bool causal, int B, int T, int C, int NH) {
    int HS = C / NH;
    size_t n = (size_t)T * HS;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        AttentionHead a = attention_head(head, qkv, kv, 2 * C, causal, T, C, NH);
        size_t begin = head_begin(head, C, T, HS, NH), kv_begin = head_begin(head, 2 * C, T, HS, NH);
        const float* dk = attention_head_backward(a, dout + begin, out + begin, stats + (size_t)head * T, C);
        head_add(dq + begin, C, dk + 2 * n, T, HS);
        head_add(dkv + kv_begin, 2 * C, dk, T, HS);
        head_add(dkv + kv_begin + C, 2 * C, dk + n, T, HS);
    }
}
#endif
