/*
cpu/attention.h - causal self-attention without the (T,T) matrix, after FlashAttention (Dao et al., arXiv 2205.14135).

A head of a sequence belongs to one thread. It takes ATTENTION_ROWS queries at a time, and their scores against the keys
up to the last of them, (rows, keys), are all that exists of the matrix. Backward makes the same blocks again from q, k
and the stats that forward left. Matrix products are dnnl_sgemm, which stays in the thread that calls it when that is
inside a parallel region.
*/
#ifndef LLMC_CPU_ATTENTION_H
#define LLMC_CPU_ATTENTION_H
#include "math.h"
#include "workspace.h"
#include <oneapi/dnnl/dnnl.h>

#define ATTENTION_ROWS 64

// fp32 rows of one head: (T, HS), rows `stride` floats apart
typedef struct { const float* data; int stride; } HeadRows;

// Rows of scores lie an odd number of cache lines apart. At a power of two they would all compete for the same few lines.
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

// dst = src in floatX, rows `stride` apart
static void head_store(floatX* dst, int stride, const float* src, int rows, int HS) {
    for (int t = 0; t < rows; t++)
        convert_slice(dst + (size_t)t * stride, FLOATX_DTYPE, src + (size_t)t * HS, DTYPE_F32, (size_t)HS);
}

// Masks a row of scores, of which the first n are wanted: -Inf up to a whole number of vectors, 0 in the rest of its `keys`.
// Returns the number of elements in those vectors, which loops over the row must cover.
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

// out = softmax(q k^T / sqrt(HS), masked so that query t sees keys 0..t) v, for one head
static void attention_head_forward(floatX* out, float* stats, const floatX* qkv, float* scratch, int T, int C, int HS) {
    size_t head = (size_t)T * HS;
    HeadRows q = head_rows(qkv, 3 * C, scratch, T, HS), k = head_rows(qkv + C, 3 * C, scratch + head, T, HS);
    HeadRows v = head_rows(qkv + 2 * C, 3 * C, scratch + 2 * head, T, HS);
    float *o = scratch + 3 * head, *scores = scratch + 4 * head;
    float scale = 1.0f / sqrtf((float)HS);
    int stride = attention_stride(T);
    for (int t = 0; t < T; t += ATTENTION_ROWS) {
        int rows = T - t < ATTENTION_ROWS ? T - t : ATTENTION_ROWS, keys = t + rows;
        float inverse_sum[ATTENTION_ROWS];
        dnnl_sgemm('N', 'T', rows, keys, HS, scale, head_row(q, t), q.stride, k.data, k.stride, 0.0f, scores, stride);
        for (int r = 0; r < rows; r++) {
            float* row = scores + (size_t)r * stride;
            inverse_sum[r] = attention_row_softmax(row, stats + t + r, attention_mask_row(row, t + r + 1, keys));
        }
        dnnl_sgemm('N', 'N', rows, HS, keys, 1.0f, scores, stride, v.data, v.stride, 0.0f, o, HS);
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < HS; i++) o[(size_t)r * HS + i] *= inverse_sum[r];
        }
        head_store(out + (size_t)t * C, C, o, rows, HS);
    }
}

void attention_forward(floatX* out, float* stats, const floatX* qkv, int B, int T, int C, int NH) {
    int HS = C / NH;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        size_t b = (size_t)(head / NH), h = (size_t)(head % NH) * (size_t)HS;
        attention_head_forward(out + b * T * C + h, stats + (size_t)head * T, qkv + b * T * 3 * C + h, thread_scratch(), T, C, HS);
    }
}

// forward, for query t with probabilities P[u] = exp(S[u] - stats[t]) and S[u] = q[t].k[u] / sqrt(HS): out[t] = sum P[u] v[u].
// So dv[u] += P[u] dout[t] and dP[u] = dout[t].v[u]; through the softmax dS[u] = P[u] (dP[u] - sum over u of P[u] dP[u]),
// where that sum is dout[t].out[t]; and dq[t] = sum dS[u] k[u] / sqrt(HS), dk[u] += dS[u] q[t] / sqrt(HS).
static void attention_head_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                                    float* scratch, int T, int C, int HS) {
    size_t head = (size_t)T * HS;
    HeadRows q = head_rows(qkv, 3 * C, scratch, T, HS), k = head_rows(qkv + C, 3 * C, scratch + head, T, HS);
    HeadRows v = head_rows(qkv + 2 * C, 3 * C, scratch + 2 * head, T, HS), d = head_rows(dout, C, scratch + 3 * head, T, HS);
    HeadRows o = head_rows(out, C, scratch + 4 * head, T, HS);
    float *dk = scratch + 5 * head, *dv = dk + head, *dq = dv + head;
    int stride = attention_stride(T);
    float *p = dq + head, *ds = p + ATTENTION_ROWS * (size_t)stride;
    float scale = 1.0f / sqrtf((float)HS);
    for (int t = 0; t < T; t += ATTENTION_ROWS) {
        int rows = T - t < ATTENTION_ROWS ? T - t : ATTENTION_ROWS, keys = t + rows;
        dnnl_sgemm('N', 'T', rows, keys, HS, scale, head_row(q, t), q.stride, k.data, k.stride, 0.0f, p, stride);
        dnnl_sgemm('N', 'T', rows, keys, HS, 1.0f, head_row(d, t), d.stride, v.data, v.stride, 0.0f, ds, stride);
        for (int r = 0; r < rows; r++) {
            float *pr = p + (size_t)r * stride, *dr = ds + (size_t)r * stride, dot = 0, lse = stats[t + r];
            const float *dor = head_row(d, t + r), *outr = head_row(o, t + r);
            for (int i = 0; i < HS; i++) dot += dor[i] * outr[i];
            int n = attention_mask_row(pr, t + r + 1, keys);
            #pragma omp simd
            for (int u = 0; u < n; u++) {
                float e = exp_f32(pr[u] - lse);
                pr[u] = e;
                dr[u] = e * (dr[u] - dot) * scale;
            }
            if (keys > n) memset(dr + n, 0, (size_t)(keys - n) * sizeof(float));
        }
        dnnl_sgemm('N', 'N', rows, HS, keys, 1.0f, ds, stride, k.data, k.stride, 0.0f, dq + (size_t)t * HS, HS);
        // the products below add to dk and dv; keys t.. are new in this block and start from 0
        memset(dk + (size_t)t * HS, 0, (size_t)rows * HS * sizeof(float));
        memset(dv + (size_t)t * HS, 0, (size_t)rows * HS * sizeof(float));
        dnnl_sgemm('T', 'N', keys, HS, rows, 1.0f, ds, stride, head_row(q, t), q.stride, 1.0f, dk, HS);
        dnnl_sgemm('T', 'N', keys, HS, rows, 1.0f, p, stride, head_row(d, t), d.stride, 1.0f, dv, HS);
    }
    head_store(dqkv, 3 * C, dq, T, HS);
    head_store(dqkv + C, 3 * C, dk, T, HS);
    head_store(dqkv + 2 * C, 3 * C, dv, T, HS);
}

void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* stats,
                        int B, int T, int C, int NH) {
    int HS = C / NH;
    #pragma omp parallel for schedule(dynamic) num_threads(cpu_layers.threads)
    for (int head = 0; head < B * NH; head++) {
        size_t b = (size_t)(head / NH), h = (size_t)(head % NH) * (size_t)HS;
        attention_head_backward(dqkv + b * T * 3 * C + h, dout + b * T * C + h, qkv + b * T * 3 * C + h, out + b * T * C + h,
                                stats + (size_t)head * T, thread_scratch(), T, C, HS);
    }
}
#endif
