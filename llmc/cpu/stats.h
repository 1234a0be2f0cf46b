/* cpu/stats.h - the numbers of a step: sums, norms, the clipping factor. Included by cpu/layers.h. */
#ifndef LLMC_CPU_STATS_H
#define LLMC_CPU_STATS_H

// An array of n elements is cut into at most STATS_CHUNKS equal chunks of 16384 elements at least, so that the order of
// summation is a function of n. Each chunk is summed in double by one thread, the chunks' sums are added in order.
#define STATS_CHUNKS 1024
static inline size_t stats_chunk(size_t n) { return size_max(16384, round_up(ceil_div(n, STATS_CHUNKS), 16)); }
static inline size_t stats_scratch_floats(void) { return STATS_CHUNKS * sizeof(double) / sizeof(float); }

static inline void stats_add_partial(double* acc, const double* partial, size_t chunks) {
    double sum = 0;
    for (size_t k = 0; k < chunks; k++) sum += partial[k];
    *acc += sum;
}

void add_sum(double* acc, const float* x, size_t n) {
    double* partial = (double*)cpu_layers.shared;
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        double sum = 0;
        size_t end = size_min(n, (k + 1) * chunk);
        #pragma omp simd reduction(+:sum)
        for (size_t i = k * chunk; i < end; i++) sum += (double)x[i];
        partial[k] = sum;
    }
    stats_add_partial(acc, partial, chunks);
}

void add_sum_squares(double* acc, const floatX* x, size_t n) {
    double* partial = (double*)cpu_layers.shared;
    size_t chunk = stats_chunk(n), chunks = ceil_div(n, chunk);
    #pragma omp parallel for schedule(static)
    for (size_t k = 0; k < chunks; k++) {
        double sum = 0;
        size_t end = size_min(n, (k + 1) * chunk);
        #pragma omp simd reduction(+:sum)
        for (size_t i = k * chunk; i < end; i++) sum += (double)to_float(x[i]) * (double)to_float(x[i]);
        partial[k] = sum;
    }
    stats_add_partial(acc, partial, chunks);
}

void scale_in_place(floatX* x, float factor, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = to_floatX(to_float(x[i]) * factor);
}

void add_in_place(floatX* x, const floatX* y, size_t n) {
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = to_floatX(to_float(x[i]) + to_float(y[i]));
}

void clip_gradients(StepStats* stats, float max_norm, float loss_scale) {
    double norm = sqrt(stats->grad_square) / (double)loss_scale;
    double factor = max_norm > 0 ? fmin(1.0, (double)max_norm / (norm + 1e-6)) : 1.0;
    stats->grad_norm = (float)norm;
    stats->grad_scale = isfinite(norm) ? (float)(factor / (double)loss_scale) : 0.0f;
}
#endif
