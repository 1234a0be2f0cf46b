/* cpu/adamw.h - AdamW over flat memory, which here is the host's: host_adamw.h updates it. */
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H
#include "../host_adamw.h"

void adamw_update(AdamW a, floatX* params, float* master, float* m, float* v, const floatX* grads,
                  const float* grad_scale, size_t n, size_t no_decay, double* square) {
    bool own_master = !NEEDS_MASTER && master == NULL;
    host_adamw_update(a, own_master ? NULL : params, own_master ? (float*)(void*)params : master, m, v, grads,
                      FLOATX_DTYPE, *grad_scale, n, no_decay, square);
}

void adamw_update_fp32(AdamW a, float* params, float* m, float* v, const float* grads, const float* grad_scale,
                       size_t n, size_t no_decay) {
    host_adamw_update(a, NULL, params, m, v, grads, DTYPE_F32, *grad_scale, n, no_decay, NULL);
}
#endif
