/*
schedule_play.h - plays a pipeline's schedule: when each action begins and ends, if every rank does its actions in order
and each as early as its input is there. Also three schedules that no stage file has:

    zb-h2     (Qi et al. 2023, arXiv 2401.10241, section 2.2) runs ahead twice as far as zb-h1: min(m, 2p-1) activations
    zb-v      (section 6 there) two chunks a rank, r and 2p-1-r, so that rank 0 has the first and the last; p activations
    dualpipe  (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) half of the micro-batches begin at each end, so a rank has the
              stages r and p-1-r: twice the parameters, p+1 activations. It is made for overlapping an F and a B of the other
              direction; here B follows F. The paper's bubble is longer, because there both end when the pair ends

The bubble of zb-h2 and zb-v is 0 only if a rank may begin its next step before the others have ended this one. A step that
ends in a sum over ranks, as that of the gradient norm, waits for the last stage, which cannot begin before (p-1) tF (zb-v:
half of that).
*/
#ifndef DEV_SCHEDULE_PLAY_H
#define DEV_SCHEDULE_PLAY_H
#include "../../llmc/parallel/pipeline.h"

enum { SCHEDULE_ZB_H2 = SCHEDULE_ZB_H1 + 1, SCHEDULE_ZB_V, SCHEDULE_DUALPIPE, SCHEDULES }; // after those of pipeline.h
static const char* const schedule_names[SCHEDULES] = { "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe" };

enum { PLAY_RANKS = 256, PLAY_CHUNKS = 1024 };              // at most
typedef struct { double F, I, W; } Times;                   // of an action, in any unit
typedef struct { Action action; double begin, end; } Box;   // an action as it was played
typedef struct {
    Pipeline l;
    Box* boxes[PLAY_RANKS];  // (counts[r]) of rank r in order, owned
    int counts[PLAY_RANKS];
    double busy[PLAY_RANKS]; // time in which rank r computes
    int peak[PLAY_RANKS];    // the most (micro-batch, chunk) that rank r keeps activations of
    double step;             // from the first action's begin to the last one's end
} Play;

// The number in the model of a rank's chunk, and the rank of a chunk. Those of dualpipe's second direction are p..2p-1.
static inline bool turns_back(Pipeline l) { return (int)l.schedule == SCHEDULE_ZB_V || (int)l.schedule == SCHEDULE_DUALPIPE; }
static inline int chunk_number(Pipeline l, int rank, int chunk) {
    return turns_back(l) && chunk == 1 ? 2 * l.p - 1 - rank : chunk * l.p + rank;
}
static inline int chunk_rank(Pipeline l, int number) {
    return turns_back(l) && number >= l.p ? 2 * l.p - 1 - number : number % l.p;
}
// A micro-batch begins and ends in these. A chunk is the part 1/v of a stage, or a whole one.
static inline bool chunk_is_first(Pipeline l, int g) { return g == 0 || ((int)l.schedule == SCHEDULE_DUALPIPE && g == l.p); }
static inline bool chunk_is_last(Pipeline l, int g) {
    return g == l.p * l.v - 1 || ((int)l.schedule == SCHEDULE_DUALPIPE && g == l.p - 1);
}
static inline double chunk_share(Pipeline l) { return (int)l.schedule == SCHEDULE_DUALPIPE ? 1 : 1.0 / l.v; }

// ---- actions ----
static inline void play_add(Play* y, int rank, ActionKind kind, int micro, int chunk) {
    if (micro >= y->l.m) return; // zb-v is made for 2p-1 micro-batches at least
    Box box = { { kind, micro, chunk }, 0, 0 };
    y->boxes[rank][y->counts[rank]++] = box;
}

static inline void play_add_zb_h2(Play* y, int rank) {
    int m = y->l.m, ahead = 2 * (y->l.p - 1 - rank), f = 0, w = 0;
    while (f < ahead && f < m) play_add(y, rank, ACT_FORWARD, f++, 0);
    for (int b = 0; b < m; b++) {
        if (f < m) play_add(y, rank, ACT_FORWARD, f++, 0);
        play_add(y, rank, ACT_BACKWARD_INPUT, b, 0);
        if (b >= 2 * rank) play_add(y, rank, ACT_BACKWARD_WEIGHT, w++, 0);
    }
    while (w < m) play_add(y, rank, ACT_BACKWARD_WEIGHT, w++, 0);
}

// By the rule of PyTorch's ScheduleZBVZeroBubble.
static inline void play_add_zb_v(Play* y, int rank) {
    const ActionKind F = ACT_FORWARD, I = ACT_BACKWARD_INPUT, W = ACT_BACKWARD_WEIGHT;
    int p = y->l.p, n = y->l.m > 2 * p - 1 ? y->l.m : 2 * p - 1, f[2] = { 0, 0 }, b[2] = { 0, 0 }, w[2];
    for (int i = 0; i < 2 * (p - rank) - 1; i++) play_add(y, rank, F, f[0]++, 0);
    for (int i = 0; i < rank; i++) { play_add(y, rank, F, f[1]++, 1); play_add(y, rank, F, f[0]++, 0); }
    for (int i = 0; i < p - rank; i++) {
        play_add(y, rank, F, f[1]++, 1); play_add(y, rank, I, b[1], 1); play_add(y, rank, W, b[1]++, 1);
    }
    while (f[1] < f[0] || f[0] < n) {
        if (f[0] < n) play_add(y, rank, F, f[0]++, 0);
        play_add(y, rank, I, b[0], 0); play_add(y, rank, W, b[0]++, 0);
        play_add(y, rank, F, f[1]++, 1); play_add(y, rank, I, b[1], 1); play_add(y, rank, W, b[1]++, 1);
    }
    w[0] = b[0]; w[1] = b[1];
    for (int i = 0; i < rank; i++) { play_add(y, rank, I, b[0]++, 0); play_add(y, rank, I, b[1]++, 1); }
    for (int i = 0; i < p - rank; i++) { play_add(y, rank, I, b[0]++, 0); play_add(y, rank, W, w[0]++, 0); }
    while (w[1] < b[1]) play_add(y, rank, W, w[1]++, 1);
    while (w[0] < b[0]) play_add(y, rank, W, w[0]++, 0);
}

// Of a rank in dualpipe, whose own direction is the one that reaches it first. Micro-batches of the second direction are
// those from m/2 on.
typedef struct { Play* y; int rank, own, f[2], b[2], w, delayed; Action owed[2 * 4096]; } Dual;
static inline void dual_forward(Dual* d, int other) {
    int chunk = d->own ^ other, half = d->y->l.m / 2;
    play_add(d->y, d->rank, ACT_FORWARD, chunk * half + d->f[chunk]++, chunk);
}
static inline void dual_backward(Dual* d, int other, bool cut) {
    int chunk = d->own ^ other, micro = chunk * (d->y->l.m / 2) + d->b[chunk]++;
    Action owed = { ACT_BACKWARD_WEIGHT, micro, chunk };
    play_add(d->y, d->rank, cut ? ACT_BACKWARD_INPUT : ACT_BACKWARD, micro, chunk);
    if (cut) d->owed[d->delayed++] = owed;
}
static inline void dual_weight(Dual* d) {
    Action a = d->owed[d->w++];
    play_add(d->y, d->rank, a.kind, a.micro, a.chunk);
}

// The eight steps of github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py.
static inline void play_add_dualpipe(Play* y, int rank) {
    int p = y->l.p, own = rank < p / 2 ? 0 : 1, outer = own ? p - 1 - rank : rank, inner = p / 2 - 1 - outer;
    Dual* d = (Dual*)xcalloc(1, sizeof(Dual));
    d->y = y; d->rank = rank; d->own = own;
    for (int i = 0; i < 2 * inner; i++) dual_forward(d, 0);
    for (int i = 0; i < outer + 1; i++) { dual_forward(d, 0); dual_forward(d, 1); }
    for (int i = 0; i < inner; i++) { dual_backward(d, 1, true); dual_weight(d); dual_forward(d, 1); }
    for (int i = 0; i < y->l.m / 2 - p + outer + 1; i++) {
        dual_forward(d, 0); dual_backward(d, 1, false);
        dual_forward(d, 1); dual_backward(d, 0, false);
    }
    for (int i = 0; i < inner; i++) { dual_backward(d, 1, false); dual_forward(d, 1); dual_backward(d, 0, false); }
    int all = outer + 1, cut_from = all / 2; // odd ones begin one pass earlier
    for (int i = 0; i < all; i++) {
        dual_backward(d, 1, i > cut_from || (i == cut_from && outer % 2 == 1));
        dual_backward(d, 0, i >= cut_from);
    }
    for (int i = 0; i < inner; i++) { dual_weight(d); dual_backward(d, 0, true); }
    for (int i = 0; i < outer + 1; i++) dual_weight(d);
    free(d);
}

static inline void play_add_actions(Play* y, int rank) {
    Pipeline l = y->l;
    y->boxes[rank] = (Box*)xcalloc(3 * (size_t)l.m * (size_t)l.v, sizeof(Box));
    if ((int)l.schedule == SCHEDULE_ZB_H2) play_add_zb_h2(y, rank);
    else if ((int)l.schedule == SCHEDULE_ZB_V) play_add_zb_v(y, rank);
    else if ((int)l.schedule == SCHEDULE_DUALPIPE) play_add_dualpipe(y, rank);
    else for (int k = 0; k < pipeline_actions(l, rank); k++) {
        Action a = pipeline_action(l, rank, k);
        play_add(y, rank, a.kind, a.micro, a.chunk);
    }
}

// ---- time ----
typedef struct {
    const Times* of_chunk;    // (p*v) of an action in each chunk of the model
    double* const* of_action; // (p, actions of a rank) how long each action takes, instead of the above; NULL: as above
    double message;           // between two ranks
} PlayTimes;

// When the gradients and outputs of each micro-batch were computed: (p*v, m) each, owned; NAN: not yet.
typedef struct { double *forward, *backward; } Done;

// When an action's input is there, or NAN. message: how long a message between two ranks takes.
static inline double play_ready(const Play* y, const Done* d, int rank, Action a, double message) {
    Pipeline l = y->l;
    int g = chunk_number(l, rank, a.chunk), at = g * l.m + a.micro;
    if (a.kind == ACT_BACKWARD_WEIGHT) return d->backward[at];
    if (a.kind == ACT_FORWARD && chunk_is_first(l, g)) return 0;
    if (a.kind == ACT_FORWARD) return d->forward[at - l.m] + (chunk_rank(l, g - 1) != rank ? message : 0);
    if (chunk_is_last(l, g) || isnan(d->forward[at])) return d->forward[at];
    return d->backward[at + l.m] + (chunk_rank(l, g + 1) != rank ? message : 0);
}

static inline double action_time(ActionKind kind, Times t) {
    return kind == ACT_FORWARD ? t.F : kind == ACT_BACKWARD_INPUT ? t.I : kind == ACT_BACKWARD_WEIGHT ? t.W : t.I + t.W;
}

// Plays rank's action number k after the one before it; returns false if its input does not come yet.
static inline bool play_action(Play* y, Done* d, int rank, int k, PlayTimes t) {
    Box* box = &y->boxes[rank][k];
    int g = chunk_number(y->l, rank, box->action.chunk), at = g * y->l.m + box->action.micro;
    double ready = play_ready(y, d, rank, box->action, t.message), before = k > 0 ? box[-1].end : 0;
    if (isnan(ready)) return false;
    box->begin = ready > before ? ready : before;
    box->end = box->begin + (t.of_action ? t.of_action[rank][k] : action_time(box->action.kind, t.of_chunk[g]));
    y->busy[rank] += box->end - box->begin;
    y->step = fmax(y->step, box->end);
    if (box->action.kind == ACT_FORWARD) d->forward[at] = box->end;
    else if (box->action.kind != ACT_BACKWARD_WEIGHT) d->backward[at] = box->end;
    return true;
}

static inline int play_peak(const Play* y, int rank) {
    int alive = 0, peak = 0;
    for (int k = 0; k < y->counts[rank]; k++) {
        ActionKind kind = y->boxes[rank][k].action.kind;
        alive += kind == ACT_FORWARD ? 1 : kind == ACT_BACKWARD_INPUT ? 0 : -1;
        if (alive > peak) peak = alive;
    }
    return peak;
}

// Plays a step. Dies if a rank waits for what never comes.
static inline void play(Play* y, Pipeline l, PlayTimes t) {
    memset(y, 0, sizeof *y);
    y->l = l;
    size_t n = (size_t)l.p * (size_t)l.v * (size_t)l.m;
    Done d = { (double*)xcalloc(n, sizeof(double)), (double*)xcalloc(n, sizeof(double)) };
    for (size_t i = 0; i < n; i++) d.forward[i] = d.backward[i] = NAN;
    int next[PLAY_RANKS] = { 0 }, left = 0;
    for (int r = 0; r < l.p; r++) { play_add_actions(y, r); left += y->counts[r]; y->peak[r] = play_peak(y, r); }
    while (left > 0) {
        int before = left;
        for (int r = 0; r < l.p; r++)
            for (; next[r] < y->counts[r] && play_action(y, &d, r, next[r], t); next[r]++) left--;
        require(left < before, "%s deadlocks: %d actions wait for others", schedule_names[l.schedule], left);
    }
    free(d.forward);
    free(d.backward);
}
static inline void play_free(Play* y) { for (int r = 0; r < y->l.p; r++) free(y->boxes[r]); }

// The bubble of a balanced pipeline by formula, in the unit of t, which are the times of all chunks of a rank; NAN: there
// is none.
static inline double schedule_bubble(Pipeline l, Times t) {
    int schedule = l.schedule, least = schedule <= SCHEDULE_INTERLEAVED ? 1 : schedule == SCHEDULE_ZB_H1 ? l.p : 2 * l.p - 1;
    bool equal = t.F == t.I && t.I == t.W;
    if (schedule == SCHEDULE_DUALPIPE) return (l.p / 2 - 1) * fmax(t.F + t.I - t.W, t.F);
    if (l.m < least || (schedule == SCHEDULE_ZB_V && !equal)) return NAN;
    if (schedule <= SCHEDULE_ZB_H1) return pipeline_bubble(l, t.F, t.I, t.W);
    return (l.p - 1) * t.F / (schedule == SCHEDULE_ZB_V ? 2 : 1);
}

// The most (micro-batch, chunk) whose activations a rank keeps, by formula; -1: there is none.
static inline int schedule_peak(Pipeline l, int rank) {
    int schedule = l.schedule;
    if (schedule <= SCHEDULE_ZB_H1) return pipeline_slots(l, rank);
    if (schedule == SCHEDULE_ZB_H2) return l.m < 2 * l.p - 1 ? l.m : 2 * l.p - 1;
    if (schedule == SCHEDULE_DUALPIPE) return l.p + 1;
    return l.m >= 2 * l.p - 1 ? 2 * l.p : -1;
}

// The longest time between a rank's own first action and its last one. A step takes so long if each rank begins its next one
// before the others have ended this one.
static inline double play_longest_rank(const Play* y) {
    double longest = 0;
    for (int r = 0; r < y->l.p; r++) longest = fmax(longest, y->boxes[r][y->counts[r] - 1].end - y->boxes[r][0].begin);
    return longest;
}
#endif
