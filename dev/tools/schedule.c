/*
schedule - draws a pipeline's schedule and says where its bubble comes from: of numbers that you give, or of a run.

    build/schedule --p 4 --m 8 --schedule 1f1b
    build/schedule --p 4 --m 8 --schedule interleaved --v 2 --times 20,24,16 --svg interleaved.svg
    build/schedule --p 4 --m 8 --model gpt2 --batch-size 4 --seq-len 1024 --precision bf16
    build/schedule --p 4 --m 8 --costs 3,3,3,8.5
    build/schedule --p 8 --m 32 --compare
    build/schedule --trace run.json

The picture has a row per rank. F0 is the forward pass of micro-batch 0, D0 its backward pass, B0 and W0 the two halves of
one: the gradient of the input, and those of the weights. Each chunk after the first has a prime; dots are waiting. Below
the picture are each rank's times, its peak of activations, and the bubble: as played, with its parts, and by the formula of
balanced stages (llmc/parallel/pipeline.h). Papers state it as a share of the step or of the work; both are printed.

--times are those of 1/p of the model. --costs make stages unequal, and so does --model, which also gives the bytes that
ranks keep and send (schedule_model.h). --trace shows a step of a run of train_gpt2_pp as it was, and finds out its schedule:
the same picture, and a bubble that also has jitter and late messages. --compare prints a line per schedule, and why three
of them are not in train_gpt2_pp.
*/
#include "schedule_play.h"
#include "schedule_model.h"
#include "schedule_trace.h"
#include "../../llmc/run/logger.h"
#include "../../llmc/run/start.h"

typedef struct {
    long long p, m, v, columns, step;
    int schedule, compare, precision;
    const char *times, *costs, *split, *svg, *trace;
    double message_ms, svg_ms;
    Options of_model;           // options that a training program also has
    PlayModel model;            // X is 0 without --model
    TaskTrace seen;             // of --trace,
    TaskStep* step_list;        // and (steps) its whole steps, owned
    size_t steps;
    Times of_stage;             // --times: of 1/p of the model, ms
    int blocks[PLAY_CHUNKS];    // of each chunk, with --model
    Times of_chunk[PLAY_CHUNKS];
} ScheduleOptions;

// ---- options ----
// Reads n numbers with commas between.
static void read_numbers(const char* option, const char* text, double* out, int n) {
    const char* at = text;
    for (int i = 0; i < n; i++) {
        char* end = NULL;
        out[i] = strtod(at, &end);
        bool good = end > at && out[i] >= 0 && isfinite(out[i]) && *end == (i < n - 1 ? ',' : '\0');
        require(good, "--%s %s is not %d numbers from 0 on with commas between", option, text, n);
        at = end + 1;
    }
}

static void read_times(ScheduleOptions* o) {
    double ms[3];
    read_numbers("times", o->times, ms, 3);
    require(ms[0] + ms[1] + ms[2] > 0, "--times %s: all are 0; give milliseconds of F, B, W", o->times);
    Times t = { ms[0], ms[1], ms[2] };
    o->of_stage = t;
}

// Chunks of a rank, where --v does not say: several only where the schedule has them.
static int default_chunks(int schedule) {
    return schedule == SCHEDULE_INTERLEAVED || schedule == SCHEDULE_ZB_V || schedule == SCHEDULE_DUALPIPE ? 2 : 1;
}
static bool can_dualpipe(const ScheduleOptions* o) { return o->p % 2 == 0 && o->m % 2 == 0 && o->m >= 2 * o->p; }

static Pipeline pipeline_of(const ScheduleOptions* o, int schedule, int v) {
    Pipeline l = { (Schedule)schedule, (int)o->p, (int)o->m, v };
    return l;
}

static void check_schedule(const ScheduleOptions* o) {
    const char* name = schedule_names[o->schedule];
    int v = default_chunks(o->schedule);
    bool interleaved = o->schedule == SCHEDULE_INTERLEAVED;
    require(interleaved || o->v == v, "--v %lld: --schedule %s has %d chunk%s a rank, and only --schedule interleaved has any"
            " number; leave --v out", o->v, name, v, v == 1 ? "" : "s");
    require(!interleaved || o->v > 1, "--v 1: --schedule interleaved with one chunk a rank interleaves nothing; choose 2 or"
            " more, or --schedule 1f1b");
    require(!interleaved || o->m % o->p == 0, "--m %lld: --schedule interleaved takes micro-batches in groups of %lld, one"
            " per stage; choose an --m that --p divides", o->m, o->p);
    require(o->schedule != SCHEDULE_DUALPIPE || can_dualpipe(o), "--schedule dualpipe needs an even --p, and an even --m"
            " of at least 2p; --p %lld and --m %lld are not", o->p, o->m);
    require(o->p * o->v <= PLAY_CHUNKS, "--p %lld with --v %lld are more than %d chunks; lower one of them", o->p,
            o->v, PLAY_CHUNKS);
}

// ---- a run's trace ----
static bool fits(const ScheduleOptions* o, int schedule, int v, char* why, size_t size) {
    if (schedule == SCHEDULE_INTERLEAVED && o->m % o->p != 0) return false;
    return task_fits(&o->seen, pipeline_of(o, schedule, v), o->step, why, size);
}

// Finds the schedule and the chunks of the run: those that were given, or the first whose actions are those of the trace.
static void find_schedule(ScheduleOptions* o, bool schedule_given) {
    static const Schedule tried[] = { SCHEDULE_1F1B, SCHEDULE_GPIPE, SCHEDULE_ZB_H1, SCHEDULE_INTERLEAVED };
    char why[256] = "interleaved takes micro-batches in groups of as many as there are stages", first[256] = "";
    for (int i = 0; i < 4; i++) {
        bool chunks = tried[i] == SCHEDULE_INTERLEAVED;
        int least = o->v > 0 ? (int)o->v : chunks ? 2 : 1;
        int most = o->v > 0 ? (int)o->v : chunks ? PLAY_CHUNKS / (int)o->p : 1;
        if ((schedule_given && o->schedule != (int)tried[i]) || chunks != (least > 1)) continue;
        for (int v = least; v <= most; v++) {
            if (fits(o, tried[i], v, why, sizeof why)) { o->schedule = tried[i]; o->v = v; return; }
            if (first[0] == '\0') snprintf(first, sizeof first, "%s", why);
        }
    }
    die("--trace %s: %s; %s", o->trace, first[0] ? first : why, schedule_given || o->v > 0 || o->p != o->seen.ranks
        ? "leave --schedule, --v and --p out, or give the run's" : "it is no whole step of train_gpt2_pp");
}

// Without --step the shortest: other programs disturbed it least.
static void choose_step(ScheduleOptions* o) {
    bool found = o->step == 0;
    o->steps = task_steps(&o->seen, (int)o->p, &o->step_list);
    require(o->steps > 0, "--trace %s has no step with all of its actions", o->trace);
    const TaskStep* shortest = o->step_list;
    for (size_t i = 1; i < o->steps; i++) {
        const TaskStep* y = &o->step_list[i];
        if (y->end - y->begin < shortest->end - shortest->begin) shortest = y;
    }
    if (found) o->step = shortest->step;
    for (size_t i = 0; i < o->seen.n && !found; i++) found = o->seen.slices[i].step == o->step;
    require(found, "--step %lld: the trace has no such step; it has %lld to %lld", o->step, o->seen.slices[0].step,
            o->seen.slices[o->seen.n - 1].step);
}

// The numbers of stages and micro-batches are those of the run, and so is the schedule.
static void read_trace(ScheduleOptions* o, OptionTable* t) {
    static const char* const others[] = { "m", "times", "costs", "model", "message-ms", "compare" };
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        require(!option_given(t, others[i]), "--%s cannot be used with --trace, which has the run's own times", others[i]);
    require(o->schedule <= SCHEDULE_ZB_H1, "--schedule %s: no run has it; leave it out, and the trace shows the run's",
            schedule_names[o->schedule]);
    o->seen = task_trace_read(o->trace);
    int copies = o->seen.copies > 0 && o->seen.ranks % o->seen.copies == 0 ? o->seen.copies : 1;
    if (!option_given(t, "p")) o->p = o->seen.ranks / copies;
    o->m = o->seen.m;
    require(o->seen.ranks % o->p == 0, "--p %lld does not divide the %d ranks of --trace; leave it out, or give the run's"
            " --pipeline-parallel", o->p, o->seen.ranks);
    require(o->p > 1, "--trace %s is of one stage, which has no bubble; give the trace of a run with more", o->trace);
    choose_step(o);
    find_schedule(o, option_given(t, "schedule"));
}

static void model_options(OptionTable* t, ScheduleOptions* o) {
    Options* y = &o->of_model;
    *y = options_defaults();
    y->model = "";
    option_text(t, "model", &y->model, "NAME",
                "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, 64N channels, N heads:"
                " chunks take as long as their blocks and their head, and bytes are printed; '': equal chunks, no bytes");
    option_int(t, "layers", &y->layers, 0, 256, "number of layers; 0: the model's");
    option_int(t, "heads", &y->heads, 0, 65536, "number of heads; 0: the model's");
    option_int(t, "channels", &y->channels, 0, 65536, "number of channels, C; 0: the model's");
    option_int(t, "vocab-size", &y->vocab_size, 0, 1 << 24, "number of tokens, V; 0: 257 (bytes) for dN, 50257 for gpt2*");
    option_int(t, "seq-len", &y->seq_len, 1, 1 << 20, "tokens per sequence, T");
    option_letter(t, 't');
    option_int(t, "batch-size", &y->batch_size, 1, 1 << 20, "sequences per micro-batch, B");
    option_letter(t, 'b');
    option_choice(t, "precision", &o->precision, "fp32|bf16|fp16", "of activations and messages");
    option_text(t, "split", &o->split, "auto|even|9,3", "blocks of each chunk, in the model's order; auto: balanced by cost");
}

static void check_model(ScheduleOptions* o, OptionTable* t) {
    static const char* const of_models[] = {
        "layers", "heads", "channels", "vocab-size", "seq-len", "batch-size", "precision", "split"
    };
    bool has = o->of_model.model[0] != '\0';
    for (size_t i = 0; i < sizeof of_models / sizeof of_models[0] && !has; i++)
        require(!option_given(t, of_models[i]), "--%s is one of --model's; give both", of_models[i]);
    require(!has || o->costs[0] == '\0', "--costs and --model both say what chunks cost; give one of them");
    if (!has) return;
    Tokenizer bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.vocab_size = 257;
    o->model.config = config_from_options(&o->of_model, &bytes, (int)o->of_model.seq_len);
    o->model.B = o->of_model.batch_size;
    o->model.T = o->of_model.seq_len;
    o->model.X = o->precision == 0 ? 4 : 2;
    require(o->model.T <= o->model.config.max_T, "--seq-len %lld is longer than the %d positions of the model; lower it, or"
            " choose a model with more", o->model.T, o->model.config.max_T);
}

static void schedule_options(ScheduleOptions* o, int argc, char** argv) {
    memset(o, 0, sizeof *o);
    o->p = 4; o->m = 8;
    o->schedule = SCHEDULE_1F1B;
    o->times = "1,1,1"; o->costs = ""; o->split = "auto"; o->svg = ""; o->trace = "";
    OptionTable t = options_table("schedule", "draw a pipeline's schedule, and say where its bubble comes from");
    option_choice(&t, "schedule", &o->schedule, SCHEDULE_WORDS "|zb-h2|zb-v|dualpipe", "the order of a rank's actions");
    option_int(&t, "p", &o->p, 1, PLAY_RANKS, "stages, each on a rank of its own");
    option_int(&t, "m", &o->m, 1, 4096, "micro-batches in a step");
    option_int(&t, "v", &o->v, 0, 64, "chunks of blocks on each rank; 0: 2 if the schedule has several, else 1");
    option_text(&t, "times", &o->times, "F,B,W",
                "ms that a micro-batch takes in 1/p of the model: forward, gradient of the input, gradients of the weights");
    option_text(&t, "costs", &o->costs, "A,B,..",
                "what each chunk costs, in the model's order, in any unit; '': all the same");
    model_options(&t, o);
    option_float(&t, "message-ms", &o->message_ms, 0, 1e6, "how long a message between two ranks takes");
    option_flag(&t, "compare", &o->compare, "print a line for each schedule, instead of one's picture");
    option_text(&t, "trace", &o->trace, "FILE", "show a step of a run of train_gpt2_pp, which wrote FILE with --trace; its"
                " --schedule, --p and --v are found out, and may be given");
    option_int(&t, "step", &o->step, 0, 1e9, "with --trace: the step to show; 0: the shortest without the first");
    option_int(&t, "columns", &o->columns, 0, 10000,
               "width of the picture, in characters; 0: wide enough to read, at most 150");
    option_text(&t, "svg", &o->svg, "FILE", "also draw the picture into FILE");
    option_float(&t, "svg-ms", &o->svg_ms, 0, 1e9, "ms that the width of --svg's picture stands for; 0: the step");
    options_parse(&t, argc, argv);
    require(!o->compare || (o->costs[0] == '\0' && o->svg[0] == '\0' && !option_given(&t, "split")
                            && !option_given(&t, "schedule") && !option_given(&t, "v")),
            "--compare shows all schedules, and draws nothing; leave out --schedule, --v, --costs, --split and --svg");
    require(o->svg_ms == 0 || o->svg[0] != '\0', "--svg-ms is one of --svg's; give both");
    require(o->trace[0] != '\0' || o->step == 0, "--step is one of --trace's; give both");
    read_times(o);
    check_model(o, &t);
    if (o->trace[0] != '\0') { read_trace(o, &t); return; }
    if (o->v == 0) o->v = default_chunks(o->schedule);
    check_schedule(o);
}

// ---- times ----
static Pipeline pipeline_now(const ScheduleOptions* o) { return pipeline_of(o, o->schedule, (int)o->v); }

static void set_equal_times(ScheduleOptions* o) {
    double share = chunk_share(pipeline_now(o));
    for (int g = 0; g < o->p * o->v; g++) {
        Times t = { share * o->of_stage.F, share * o->of_stage.B, share * o->of_stage.W };
        o->of_chunk[g] = t;
    }
}

// By --costs, whose mean over the ranks is 1/p of the model.
static void set_times_by_costs(ScheduleOptions* o) {
    double costs[PLAY_CHUNKS], sum = 0;
    int parts = model_parts(pipeline_now(o));
    read_numbers("costs", o->costs, costs, parts);
    for (int g = 0; g < parts; g++) sum += costs[g];
    require(sum > 0, "--costs %s: all are 0; at least one chunk must cost something", o->costs);
    for (int g = 0; g < o->p * o->v; g++) {
        double share = costs[g % parts] / sum * (double)o->p;
        Times t = { share * o->of_stage.F, share * o->of_stage.B, share * o->of_stage.W };
        o->of_chunk[g] = t;
    }
}

static void set_times_by_model(ScheduleOptions* o, const char* split) {
    Pipeline l = pipeline_now(o);
    require(model_parts(l) <= o->model.config.L, "--p %d with --v %d makes %d parts of the model, more than its %d blocks;"
            " lower one of them", l.p, model_parts(l) / l.p, model_parts(l), o->model.config.L);
    model_blocks(o->blocks, l, o->model.config, split);
    model_times(o->of_chunk, o->blocks, l, o->model.config, o->of_stage);
}

static void set_times(ScheduleOptions* o) {
    if (o->model.X > 0) set_times_by_model(o, o->split);
    else if (o->costs[0] != '\0') set_times_by_costs(o);
    else set_equal_times(o);
}

static void play_with_times(const ScheduleOptions* o, Play* y) {
    PlayTimes t = { o->of_chunk, NULL, o->message_ms };
    play(y, pipeline_now(o), t);
}

static double work_ms(const ScheduleOptions* o) { return (double)o->m * (o->of_stage.F + o->of_stage.B + o->of_stage.W); }

// ---- the picture as text ----
// A box's name: its letter, its micro-batch, a prime for each chunk after the first.
static void box_name(char* out, size_t size, Action a) {
    snprintf(out, size, "%c%d%.*s", "FDBW"[a.kind], a.micro, a.chunk, "''''''''");
}

static void draw_row(const Play* y, int rank, double per_column, int columns, char* row) {
    memset(row, '.', (size_t)columns);
    row[columns] = '\0';
    for (int k = 0; k < y->counts[rank]; k++) {
        const Box* box = &y->boxes[rank][k];
        char name[32];
        box_name(name, sizeof name, box->action);
        int first = (int)(box->begin / per_column + 0.5), end = (int)(box->end / per_column + 0.5), length = (int)strlen(name);
        for (int c = first; c < end && c < columns; c++) row[c] = c - first < length ? name[c - first] : '-';
    }
}

static void draw_text(const ScheduleOptions* o, const Play* y) {
    double shortest = INFINITY; // action that lasts
    for (int r = 0; r < o->p; r++)
        for (int k = 0; k < y->counts[r]; k++) {
            double lasts = y->boxes[r][k].end - y->boxes[r][k].begin;
            if (lasts > 0) shortest = fmin(shortest, lasts);
        }
    int letters = (o->m > 10 ? 3 : 2) + (int)o->v, columns = (int)o->columns;
    if (columns == 0) columns = (int)fmin(150, ceil(letters * y->step / shortest));
    char* row = (char*)xcalloc((size_t)columns + 1, 1);
    for (int r = 0; r < o->p; r++) {
        draw_row(y, r, y->step / columns, columns, row);
        printf("rank %-3d |%s|\n", r, row);
    }
    free(row);
}

// ---- the same as a picture for a page: numbers are pixels ----
enum { SVG_LEFT = 60, SVG_WIDTH = 800, SVG_TOP = 34, SVG_RANK = 26, SVG_ROW = 22 };
static const char* const svg_colours[] = { "#3a86b7", "#f4a259", "#f4a259", "#7fb069" }; // by ActionKind
static const char* const svg_names[] = { "forward", "backward", "backward, input", "backward, weights" };

static void svg_legend(FILE* out, bool cut, bool several_chunks) {
    const int kinds[2][3] = { { ACT_FORWARD, ACT_BACKWARD, -1 }, { ACT_FORWARD, ACT_BACKWARD_INPUT, ACT_BACKWARD_WEIGHT } };
    int x = SVG_LEFT;
    for (int i = 0; i < 3 && kinds[cut][i] >= 0; i++) {
        fprintf(out, "<rect x=\"%d\" y=\"10\" width=\"12\" height=\"12\" fill=\"%s\"/>\n", x, svg_colours[kinds[cut][i]]);
        fprintf(out, "<text x=\"%d\" y=\"20\">%s</text>\n", x + 16, svg_names[kinds[cut][i]]);
        x += 34 + 7 * (int)strlen(svg_names[kinds[cut][i]]);
    }
    fprintf(out, "<rect x=\"%d\" y=\"10\" width=\"12\" height=\"12\" fill=\"#eeeeee\"/>\n", x);
    fprintf(out, "<text x=\"%d\" y=\"20\">waiting%s</text>\n", x + 16, several_chunks ? "; paler: later chunks" : "");
}
static void svg_title(FILE* out, const ScheduleOptions* o, const Play* y) {
    fprintf(out, "<text x=\"%d\" y=\"20\" text-anchor=\"end\" font-weight=\"bold\">%s", SVG_LEFT + SVG_WIDTH,
            schedule_names[o->schedule]);
    for (int g = 0; g < model_parts(y->l) && o->model.X > 0; g++)
        fprintf(out, "%s%d", g ? "," : ", split ", o->blocks[g]);
    fprintf(out, ": %.4g ms, of which the bubble is %.1f %%</text>\n", y->step, 100 * (1 - work_ms(o) / y->step));
}

// Later chunks are paler.
static void svg_box(FILE* out, const Box* box, double per_ms, int y, int v) {
    double x = SVG_LEFT + box->begin * per_ms, width = (box->end - box->begin) * per_ms;
    if (box->begin * per_ms >= SVG_WIDTH || width < 0.1) return;
    width = fmin(width, SVG_LEFT + SVG_WIDTH - x);
    fprintf(out, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" fill-opacity=\"%.2f\" stroke=\"white\"/>\n",
            x, y, width, SVG_ROW, svg_colours[box->action.kind], 1 - 0.6 * box->action.chunk / v);
    if (width >= 7 * (box->action.micro > 9 ? 2 : 1) + 3)
        fprintf(out, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", x + width / 2, y + 15, box->action.micro);
}

static void svg_axis(FILE* out, double ms, int bottom) {
    double tick = pow(10, floor(log10(ms)));
    if (ms / tick < 2) tick /= 5;
    else if (ms / tick < 5) tick /= 2;
    for (int i = 0; i * tick <= ms * (1 + 1e-9); i++)
        fprintf(out, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%g%s</text>\n",
                SVG_LEFT + i * tick / ms * SVG_WIDTH, bottom, i * tick, i ? "" : " ms");
}

static void write_svg(const ScheduleOptions* o, const Play* y) {
    FILE* out = fopen(o->svg, "w");
    require(out != NULL, "--svg %s: cannot be opened for writing: %s", o->svg, strerror(errno));
    double ms = o->svg_ms > 0 ? o->svg_ms : y->step;
    int width = SVG_LEFT + SVG_WIDTH + 30, height = SVG_TOP + (int)o->p * SVG_RANK + 22;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
                 "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height, width, height);
    svg_legend(out, cuts_backward(y->l), o->v > 1);
    svg_title(out, o, y);
    for (int r = 0; r < o->p; r++) {
        int top = SVG_TOP + r * SVG_RANK;
        fprintf(out, "<text x=\"8\" y=\"%d\">rank %d</text>\n", top + 15, r);
        fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"#eeeeee\"/>\n", SVG_LEFT, top,
                fmin(1, y->step / ms) * SVG_WIDTH, SVG_ROW);
        for (int k = 0; k < y->counts[r]; k++) svg_box(out, &y->boxes[r][k], SVG_WIDTH / ms, top, (int)o->v);
    }
    svg_axis(out, ms, height - 6);
    fprintf(out, "</svg>\n");
    bool written = !ferror(out);
    written &= fclose(out) == 0;
    require(written, "--svg %s: cannot be written: %s", o->svg, strerror(errno));
    printf("\npicture: %s\n", o->svg);
}

// ---- numbers ----
static const char* plural(double n) { return n == 1 ? "" : "s"; }

static void print_ranks(const ScheduleOptions* o, const Play* y) {
    printf("\n           computes, ms   waits, ms   share   activations at most        by the formula\n");
    for (int r = 0; r < o->p; r++) {
        int formula = schedule_peak(y->l, r);
        char peak[64];
        snprintf(peak, sizeof peak, "%d micro-batch%s%s", y->peak[r], y->peak[r] == 1 ? "" : "es",
                 o->v > 1 ? ", a chunk each" : "");
        printf("rank %-3d %14.6g %11.6g %6.1f%%   %-30s", r, y->busy[r], y->step - y->busy[r], 100 * y->busy[r] / y->step,
               peak);
        if (formula < 0) printf(" -\n");
        else printf(" %d\n", formula);
    }
}

// What a rank keeps at its peak, and sends in a step, with --model.
static void print_bytes(const ScheduleOptions* o, const Play* y) {
    const PlayModel* model = &o->model;
    double message = model_message_bytes(model), all = 0, C = model->config.C, BT = (double)(model->B * model->T);
    char text[32], kept[96], sent[96];
    printf("\n           blocks   activations at the peak, bytes                     messages in a step, bytes\n");
    for (int r = 0; r < o->p; r++) {
        double slot = model_slot_bytes(model, o->blocks, y->l, r), peak = y->peak[r] * slot;
        int n = play_messages(y, r), blocks = 0;
        for (int c = 0; c < o->v; c++) blocks += o->blocks[chunk_number(y->l, r, c)];
        all += n;
        snprintf(kept, sizeof kept, "%d x %.0f = %.0f (%s)", y->peak[r], slot, peak, format_bytes(text, sizeof text, peak));
        snprintf(sent, sizeof sent, "%d x %.0f = %.0f (%s)", n, message, n * message,
                 format_bytes(text, sizeof text, n * message));
        printf("rank %-3d %9d   %-50s %s\n", r, blocks, kept, sent);
    }
    printf("a micro-batch in a chunk of n blocks: BT (n (%dC X + 4 (4 + NH)) + 8) bytes; with the head BT (2C X + 8) more;"
           " BT %g, C %g, NH %d, X %d\n", cuts_backward(y->l) ? 25 : 16, BT, C, model->config.NH, model->X);
    printf("messages: %g of BT C X bytes in all; by the formula %g\n", all, schedule_messages(y->l));
}

static void print_part(const char* name, double ms, double step, double work) {
    printf("%-26s %10.6g ms   %6.2f %% of the step   %6.2f %% of the work\n", name, ms, 100 * ms / step, 100 * ms / work);
}

static void print_formula(double ms, double work) {
    if (isnan(ms)) printf("bubble by the formula      there is none for these numbers\n");
    else print_part("bubble by the formula", ms, work + ms, work);
}

// The bubble as it was played = the ramp, when some ranks have nothing to do yet or any more + imbalance, by which the
// slowest rank's work exceeds the mean + messages, without which the step would be shorter.
static void print_bubbles(const ScheduleOptions* o, const Play* y) {
    double work = work_ms(o), slowest = 0, formula = schedule_bubble(y->l, o->of_stage);
    for (int r = 0; r < o->p; r++) slowest = fmax(slowest, y->busy[r]);
    Play silent;
    PlayTimes t = { o->of_chunk, NULL, 0 };
    play(&silent, y->l, t);
    printf("\nstep %.6g ms: %.6g ms of work, which is the mean of the ranks, and the bubble\n", y->step, work);
    print_part("bubble as played", y->step - work, y->step, work);
    if (slowest > work * (1 + 1e-9) || o->message_ms > 0) {
        print_part("  ramp (start and end)", silent.step - slowest, y->step, work);
        print_part("  imbalance", slowest - work, y->step, work);
        print_part("  messages", y->step - silent.step, y->step, work);
    }
    play_free(&silent);
    print_formula(formula, work);
}

// ---- a run's step ----
enum { PART_RAMP, PART_IMBALANCE, PART_JITTER, PART_MESSAGES, PARTS };
typedef struct { double part[PARTS], all, slowest; int slowest_rank; } MeasuredBubble; // ms

// Takes a run's bubble apart. Imbalance is by how much the slowest rank's work exceeds the mean. The ramp is what is left
// if the step is played with each chunk's mean times and messages that take no time: ranks wait until work has reached them,
// and after the last has left them. Jitter is what the actual time of each action adds to that. The rest of the step passed
// while messages were on their way, or were sent late.
static MeasuredBubble measured_bubble(const MeasuredStep* seen, double work) {
    Play mean, each;
    MeasuredBubble b = { { 0 }, seen->seen.step - work, 0, 0 };
    PlayTimes means = { seen->of_chunk, NULL, 0 }, all = { NULL, seen->of_action, 0 };
    play(&mean, seen->seen.l, means);
    play(&each, seen->seen.l, all);
    for (int r = 0; r < seen->seen.l.p; r++)
        if (seen->seen.busy[r] > b.slowest) { b.slowest = seen->seen.busy[r]; b.slowest_rank = r; }
    b.part[PART_IMBALANCE] = b.slowest - work;
    b.part[PART_RAMP] = mean.step - b.slowest;
    b.part[PART_JITTER] = each.step - mean.step;
    b.part[PART_MESSAGES] = seen->seen.step - each.step;
    play_free(&mean);
    play_free(&each);
    return b;
}

// Names the largest part, and what makes it smaller.
static void print_cause(const MeasuredBubble* b, double work) {
    int largest = 0;
    for (int i = 1; i < PARTS; i++) if (b->part[i] > b->part[largest]) largest = i;
    printf("largest part: ");
    switch (largest) {
    case PART_RAMP:
        printf("the ramp; more micro-batches, or a schedule with a smaller bubble, make it a smaller share (--compare)\n");
        return;
    case PART_IMBALANCE:
        printf("imbalance; rank %d computes %.2f times the mean, and the others wait for it: choose another --split\n",
               b->slowest_rank, b->slowest / work);
        return;
    case PART_JITTER:
        printf("jitter; the same action takes now more, now less time: does anything else run on these devices?\n");
        return;
    default:
        printf("late messages; they are large for these links, or their sender delays them: try fewer sequences in a"
               " micro-batch, or fewer chunks\n");
    }
}

static void print_measured_bubble(const ScheduleOptions* o, const MeasuredStep* seen) {
    double work = work_ms(o), step = seen->seen.step, formula = schedule_bubble(seen->seen.l, o->of_stage);
    MeasuredBubble b = measured_bubble(seen, work);
    printf("\nstep %.6g ms, from its first action to its last: %.6g ms of work, which is the mean of the ranks, and the"
           " bubble\n", step, work);
    print_part("bubble as measured", b.all, step, work);
    print_part("  ramp (start and end)", b.part[PART_RAMP], step, work);
    print_part("  imbalance", b.part[PART_IMBALANCE], step, work);
    print_part("  jitter", b.part[PART_JITTER], step, work);
    print_part("  late messages", b.part[PART_MESSAGES], step, work);
    if (b.part[PART_JITTER] < -0.01 * step)
        printf("  (jitter is below 0 where actions were short when others waited for them)\n");
    if (b.part[PART_MESSAGES] < -0.01 * step)
        printf("  (late messages are below 0 where a rank sends before its action ends)\n");
    print_formula(formula, work);
    print_cause(&b, work);
    if (o->steps < 2) return;
    qsort(o->step_list, o->steps, sizeof(TaskStep), task_compare_bubbles);
    double half = (task_bubble(&o->step_list[o->steps / 2]) + task_bubble(&o->step_list[(o->steps - 1) / 2])) / 2;
    printf("bubble of %zu steps, without the first: median %.6g ms, from %.6g to %.6g\n", o->steps, half,
           task_bubble(&o->step_list[0]), task_bubble(&o->step_list[o->steps - 1]));
}

static void show_trace(ScheduleOptions* o) {
    static MeasuredStep seen;
    measured_step(&seen, &o->seen, pipeline_of(o, o->schedule, (int)o->v), o->step);
    Times t = { 0, 0, 0 };
    for (int g = 0; g < o->p * o->v; g++) {
        t.F += seen.of_chunk[g].F / (double)o->p;
        t.B += seen.of_chunk[g].B / (double)o->p;
        t.W += seen.of_chunk[g].W / (double)o->p;
    }
    o->of_stage = t;
    printf("%s, %lld stages, %lld micro-batches, %lld chunk%s each; step %lld of %s, mean of stages: F %.4g ms, ",
           schedule_names[o->schedule], o->p, o->m, o->v, o->v == 1 ? "" : "s", o->step, o->trace, t.F);
    if (o->schedule == SCHEDULE_ZB_H1) printf("B %.4g ms, W %.4g ms\n\n", t.B, t.W);
    else printf("D %.4g ms\n\n", t.B);
    draw_text(o, &seen.seen);
    print_ranks(o, &seen.seen);
    print_measured_bubble(o, &seen);
    if (o->svg[0] != '\0') write_svg(o, &seen.seen);
    measured_free(&seen);
    free(o->step_list);
    free(o->seen.slices);
}

// Of schedules whose papers count the bubble between a rank's own first and last action.
static void print_unclipped(const ScheduleOptions* o, const Play* y) {
    double work = work_ms(o), step = play_longest_rank(y);
    if (o->schedule < SCHEDULE_ZB_H1 || o->p == 1) return;
    print_part("bubble without clipping", step - work, step, work);
    printf("  if a rank could begin its next step before the others have ended this one. Clipping by the norm of all\n"
           "  gradients makes it wait for them, before its first action or after its last (--compare).\n");
}

// ---- a model's blocks ----
static void print_blocks(const char* name, const ScheduleOptions* o, const char* split) {
    ScheduleOptions with = *o;
    Play y;
    Pipeline l = pipeline_now(o);
    set_times_by_model(&with, split);
    play_with_times(&with, &y);
    printf("%s ", name);
    for (int g = 0; g < model_parts(l); g++) printf("%s%d", g ? "," : "", with.blocks[g]);
    printf(": ranks compute for %.1f %% of the time without a bubble, for %.1f %% with it; step %.6g ms\n",
           100 * model_efficiency(with.blocks, l, o->model.config), 100 * work_ms(o) / y.step, y.step);
    play_free(&y);
}

static void print_model(const ScheduleOptions* o, const Play* y) {
    print_bytes(o, y);
    printf("\n%s: %d blocks; the head costs as much as %.2f of them\n", o->of_model.model, o->model.config.L,
           split_costs(o->model.config.Vp, o->model.config.C).head);
    print_blocks("split", o, o->split);
    if (strcmp(o->split, "even") != 0) print_blocks("even ", o, "even");
    if (strcmp(o->split, "auto") != 0) print_blocks("auto ", o, "auto");
}

// ---- all schedules ----
typedef struct { double bubble, unclipped, peak, bytes, sent; } Compared; // ms, ms, micro-batches of a stage, bytes, 1f1b's

// Why o cannot be played, or NULL.
static const char* unplayable(const ScheduleOptions* o) {
    Pipeline l = pipeline_now(o);
    if (o->schedule == SCHEDULE_INTERLEAVED && o->m % o->p != 0) return "needs an --m that --p divides";
    if (o->schedule == SCHEDULE_DUALPIPE && !can_dualpipe(o)) return "needs an even --p, and an even --m of at least 2p";
    if (l.p * l.v > PLAY_CHUNKS) return "has too many chunks";
    return o->model.X > 0 && model_parts(l) > o->model.config.L ? "needs more blocks than the model has" : NULL;
}

static Compared compare_one(const ScheduleOptions* with) {
    ScheduleOptions o = *with;
    Play y;
    Compared c = { 0, 0, 0, 0, 0 };
    set_times(&o);
    play_with_times(&o, &y);
    c.bubble = y.step - work_ms(&o);
    c.unclipped = play_longest_rank(&y) - work_ms(&o);
    for (int r = 0; r < o.p; r++) {
        c.peak = fmax(c.peak, y.peak[r] * chunk_share(y.l));
        if (o.model.X > 0) c.bytes = fmax(c.bytes, y.peak[r] * model_slot_bytes(&o.model, o.blocks, y.l, r));
    }
    c.sent = o.p == 1 ? 1 : schedule_messages(y.l) / (2.0 * (double)(o.m * (o.p - 1)));
    play_free(&y);
    return c;
}

static Compared print_compared(const ScheduleOptions* with, int schedule, int v) {
    ScheduleOptions o = *with;
    Compared c = { NAN, NAN, NAN, NAN, NAN };
    char name[32], text[32];
    o.schedule = schedule;
    o.v = v;
    snprintf(name, sizeof name, v > 1 && schedule == SCHEDULE_INTERLEAVED ? "%s v=%d" : "%s", schedule_names[schedule], v);
    if (unplayable(&o)) {
        printf("%-16s %s\n", name, unplayable(&o));
        return c;
    }
    c = compare_one(&o);
    double work = work_ms(&o), formula = schedule_bubble(pipeline_now(&o), o.of_stage);
    printf("%-16s %10.6g %11.2f%% %11.2f%%", name, c.bubble, 100 * c.bubble / (work + c.bubble), 100 * c.bubble / work);
    if (isnan(formula)) printf(" %12s", "-");
    else printf(" %12.6g", formula);
    printf(" %12.4g %8.3g %9.3g %11d", c.unclipped, c.peak, c.sent, schedule == SCHEDULE_DUALPIPE ? 2 : 1);
    if (o.model.X > 0) printf(" %12s", format_bytes(text, sizeof text, c.bytes));
    printf("\n");
    return c;
}

// What the three schedules that train_gpt2_pp does not have are worth there.
static void print_why(const ScheduleOptions* o, Compared h1, Compared h2, Compared zbv, Compared dual) {
    printf("\nwhy the last three are not in train_gpt2_pp: it clips by the norm of all gradients, so a step ends with a sum over"
           " all ranks,\nand a rank waits for the others before its first action or after its last.\n");
    printf("  zb-h2     a bubble of %.4g ms without clipping, of %.4g ms with it; zb-h1 has %.4g ms, and keeps %g micro-batches"
           " instead of %g\n", h2.unclipped, h2.bubble, h1.bubble, h1.peak, h2.peak);
    printf("  zb-v      a bubble of %.4g ms without clipping, of %.4g ms with it; zb-h1 has %.4g ms, and sends 1/%.3g of its"
           " messages\n", zbv.unclipped, zbv.bubble, h1.bubble, zbv.sent / h1.sent);
    if (isnan(dual.bubble)) return;
    ScheduleOptions half = *o; // as many parameters a rank
    half.schedule = SCHEDULE_ZB_V;
    half.v = 2; half.p /= 2; half.m /= 2;
    half.of_stage.F *= 2; half.of_stage.B *= 2; half.of_stage.W *= 2;
    printf("  dualpipe  a bubble of %.4g ms, with 2 stages on each rank, so twice the parameters; 2 replicas of the model in %lld"
           " stage%s have as\n            many, and a bubble of %.4g ms with zb-v\n", dual.bubble, half.p,
           plural((double)half.p), compare_one(&half).bubble);
}

static void compare(const ScheduleOptions* o) {
    Times t = o->of_stage;
    printf("%lld stage%s, %lld micro-batch%s; F, B, W of 1/%lld of the model %g, %g, %g ms\n\n", o->p, plural((double)o->p),
           o->m, o->m == 1 ? "" : "es", o->p, t.F, t.B, t.W);
    printf("%16s %10s %12s %12s %12s %12s %8s %9s %11s%s\n", "", "bubble, ms", "of the step", "of the work", "formula, ms",
           "no clip, ms", "peak", "messages", "parameters", o->model.X > 0 ? "  activations" : "");
    print_compared(o, SCHEDULE_GPIPE, 1);
    print_compared(o, SCHEDULE_1F1B, 1);
    print_compared(o, SCHEDULE_INTERLEAVED, 2);
    print_compared(o, SCHEDULE_INTERLEAVED, 4);
    Compared h1 = print_compared(o, SCHEDULE_ZB_H1, 1), h2 = print_compared(o, SCHEDULE_ZB_H2, 1);
    Compared zbv = print_compared(o, SCHEDULE_ZB_V, 2), dual = print_compared(o, SCHEDULE_DUALPIPE, 2);
    printf("\nno clip: the bubble if a rank could begin its next step before the others have ended this one;"
           "\npeak: activations on the rank with the most, in micro-batches of a stage; messages and parameters: relative to"
           " 1f1b's\n");
    if (o->p > 1 && !isnan(zbv.bubble)) print_why(o, h1, h2, zbv, dual);
}

int main(int argc, char** argv) {
    static ScheduleOptions o;
    schedule_options(&o, argc, argv);
    if (o.compare) { compare(&o); return EXIT_SUCCESS; }
    if (o.trace[0] != '\0') { show_trace(&o); return EXIT_SUCCESS; }
    Play y;
    set_times(&o);
    play_with_times(&o, &y);
    printf("%s, %lld stage%s, %lld micro-batch%s, %lld chunk%s each; F, B, W of 1/%lld of the model %g, %g, %g ms\n\n",
           schedule_names[o.schedule], o.p, plural((double)o.p), o.m, o.m == 1 ? "" : "es", o.v, plural((double)o.v), o.p,
           o.of_stage.F, o.of_stage.B, o.of_stage.W);
    draw_text(&o, &y);
    print_ranks(&o, &y);
    print_bubbles(&o, &y);
    print_unclipped(&o, &y);
    if (o.model.X > 0) print_model(&o, &y);
    if (o.svg[0] != '\0') write_svg(&o, &y);
    play_free(&y);
    return EXIT_SUCCESS;
}
