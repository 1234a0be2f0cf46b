/*
cpu/adamw.h - AdamW over flat memory: host_adamw.h updates in fp32; this file converts around it where floatX has 16 bits.
Included by cpu/layers.h.
*/
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H

void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay) {
    host_adamw_update(a, params, m, v, grads, *grad_scale, n, no_decay);
}

void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads, const float* grad_scale,
                  size_t n, size_t no_decay) {
    enum { SLICE = 2048 }; // stays in the cache
    const float scale = *grad_scale;
    AdamWFactors f = adamw_factors(a);
    if (!NEEDS_MASTER) {
        host_adamw_update(a, (float*)(void*)params, m, v, (const float*)(const void*)grads, scale, n, no_decay);
        return;
    }
    if (scale == 0) return;
    #pragma omp parallel for schedule(static)
    for (size_t s = 0; s < ceil_div(n, SLICE); s++) {
        float wide[SLICE];
        size_t at = s * SLICE, count = size_min(SLICE, n - at);
        for (size_t k = 0; k < count; k++) wide[k] = to_float(grads[at + k]);
        host_adamw_piece(f, scale, master + at, m + at, v + at, wide, count, no_decay - size_min(no_decay, at));
        for (size_t k = 0; k < count; k++) params[at + k] = to_floatX(master[at + k]);
    }
}
#endif
