/*
cpu/adamw.h - AdamW over flat memory: elementwise, and bound by memory alone. Included by cpu/layers.h.

That needs -fno-math-errno: else each sqrtf must be ready to set errno, nothing becomes vector code, and it takes six times
as long.
*/
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H

// What every element needs, worked out once in double, in the form in which PyTorch's AdamW rounds it.
typedef struct { float beta1_rest, beta2, beta2_rest, step_size, root_correction, eps, grad_scale; } AdamWFactors;

static AdamWFactors adamw_factors(AdamW a, float grad_scale) {
    AdamWFactors f;
    f.beta1_rest = (float)(1.0 - (double)a.beta1);
    f.beta2 = a.beta2;
    f.beta2_rest = (float)(1.0 - (double)a.beta2);
    f.step_size = (float)((double)a.lr / (1.0 - pow((double)a.beta1, a.t)));
    f.root_correction = (float)sqrt(1.0 - pow((double)a.beta2, a.t));
    f.eps = a.eps;
    f.grad_scale = grad_scale;
    return f;
}

// Elements [begin, end) with p multiplied by `decay` first:
// m = b1 m + (1-b1) g, v = b2 v + (1-b2) g^2, p = p decay - lr/(1-b1^t) m / (sqrt(v) / sqrt(1-b2^t) + eps)
static void adamw_update_range(AdamWFactors f, float decay, floatX* params, float* master, float* m, float* v,
                               const floatX* grads, size_t begin, size_t end) {
    #pragma omp simd
    for (size_t i = begin; i < end; i++) {
        float g = to_float(grads[i]) * f.grad_scale;
        float mi = m[i] + f.beta1_rest * (g - m[i]);
        float vi = v[i] * f.beta2 + f.beta2_rest * g * g;
        float denominator = sqrtf(vi) / f.root_correction + f.eps;
        float p = (NEEDS_MASTER ? master[i] : to_float(params[i])) * decay - f.step_size * mi / denominator;
        m[i] = mi;
        v[i] = vi;
        if (NEEDS_MASTER) master[i] = p;
        params[i] = to_floatX(p);
    }
}

void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads, const float* grad_scale,
                  size_t n, size_t no_decay) {
    if (*grad_scale == 0) return;
    AdamWFactors f = adamw_factors(a, *grad_scale);
    float decay = (float)(1.0 - (double)a.lr * (double)a.weight_decay);
    const size_t slice = 8192;
    #pragma omp parallel for schedule(static)
    for (size_t s = 0; s < ceil_div(n, slice); s++) {
        size_t begin = s * slice, end = size_min(n, begin + slice);
        size_t split = size_max(begin, size_min(end, no_decay)); // decay begins here
        adamw_update_range(f, 1.0f, params, master, m, v, grads, begin, split);
        adamw_update_range(f, decay, params, master, m, v, grads, split, end);
    }
}
#endif
