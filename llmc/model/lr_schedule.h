/*
lr_schedule.h - numbers that change from step to step: the learning rate, and the loss scale of fp16.
*/
#ifndef LLMC_LR_SCHEDULE_H
#define LLMC_LR_SCHEDULE_H
#include "../base/precision.h"
#include "training_options.h"

// Returns how far a span of steps is done at `step`: 0 at its first step, 1 at its last and beyond.
static inline double schedule_progress(long long step, long long first, long long last) {
    if (step >= last) return 1;
    return step <= first ? 0 : (double)(step - first) / (double)(last - first);
}

// Returns the learning rate of a step, counted from 0. Linear warm-up that reaches --lr at its last step, then by
// --lr-schedule down to the final fraction at the run's last step: cosine (Loshchilov and Hutter, arXiv 1608.03983),
// linear, or warm-up-stable-decay, which falls linearly over the last fifth of the run (Hu et al., arXiv 2404.06395).
static inline double learning_rate(const Options* o, long long step) {
    if (step < o->warmup_steps) return o->lr * (double)(step + 1) / (double)o->warmup_steps;
    const double pi = 3.14159265358979323846;
    long long last = o->steps - 1, first = o->lr_schedule == SCHEDULE_WSD ? last - o->steps / 5 : o->warmup_steps;
    double progress = schedule_progress(step, first, last);
    double share = o->lr_schedule == SCHEDULE_CONSTANT ? 1 // of the difference to the final learning rate
                 : o->lr_schedule == SCHEDULE_COSINE ? 0.5 * (1 + cos(pi * progress)) : 1 - progress;
    return o->lr * (o->final_lr_fraction + share * (1 - o->final_lr_fraction));
}

// Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2), with the rule and numbers of
// torch.amp.GradScaler. The loss is multiplied by `scale`, so that small gradients do not become 0 in fp16, and the
// update divides by it again.
typedef struct {
    double scale;
    long long good_steps; // in a row, since the scale last changed
    long long interval;   // good steps after which the scale doubles; 0: it never changes
    int bad_in_a_row;     // steps, up to the last one, whose gradients were Inf or NaN
} LossScaler;

// fp16 starts at --loss-scale. The exponent bits of fp32 and bf16 suffice without scaling: their scale stays 1.
static inline LossScaler loss_scaler_init(const Options* o) {
    bool scaled = FLOATX_DTYPE == DTYPE_F16;
    LossScaler s = { scaled ? o->loss_scale : 1, 0, scaled ? o->loss_scale_interval : 0, 0 };
    return s;
}

// After each step: `finite` says whether its gradients were. If not, the step was skipped and the scale halves, but not
// below 1: if gradients overflow without any scaling, a smaller scale does not help, and bad_in_a_row will end the run.
static inline void loss_scaler_update(LossScaler* s, bool finite) {
    const double largest = 0x1p100; // still far from Inf as a float, even if gradients stay 0
    s->bad_in_a_row = finite ? 0 : s->bad_in_a_row + 1;
    s->good_steps = finite ? s->good_steps + 1 : 0;
    if (s->interval == 0) return;
    if (!finite) s->scale = fmax(s->scale / 2, 1);
    if (s->good_steps < s->interval) return;
    s->scale = fmin(s->scale * 2, largest);
    s->good_steps = 0;
}

// Dies after --max-bad-steps steps in a row that were skipped for NaN or Inf; `step`, counted from 1, is the last of
// them. fp16 expects some, and lowers its loss scale until they are gone.
static inline void require_progress(const LossScaler* s, const Options* o, long long step, double loss) {
    require(s->bad_in_a_row < o->max_bad_steps,
            "NaN or Inf in the gradients of %lld steps in a row, up to step %lld (loss %g): a lower --lr (or in fp16 "
            "--loss-scale), more --warmup-steps or --grad-clip may help; the weights are those of step %lld",
            o->max_bad_steps, step, loss, step - o->max_bad_steps);
}
#endif
