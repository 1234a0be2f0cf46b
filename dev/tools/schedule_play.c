/*
schedule_play - plays schedules for tools in Python, so that their order, their formulas and the split of blocks are those of
train_gpt2_pp. It reads a JSON object a line, and answers each with a line:

    {"model": {"model": "gpt2", "layers": 0, "heads": 0, "channels": 0, "vocab-size": 0, "seq-len": 1024}}
        {"L", "C", "NH", "Vp", "max_T", "head": what the head costs, in blocks}
    {"split": "auto", "p", "v", "L", "Vp", "C"}
        {"blocks": [of each chunk], "efficiency": the share of the time in which ranks compute if there is no bubble}
    {"schedule": "1f1b", "p", "m", "v", "times": [F, I, W of 1/p of the model], "of_chunk": [[F, I, W], ..], "message": ms}
        {"step": ms, "bubble": ms by the formula, "messages": of all ranks by the formula, "parts": of the model, "cut", "ranks": [..]}
        each with {"busy", "begin", "end", "peak", "slots": the peak by the formula, "sends", "chunks": their numbers in the model,
        "head": it has the last one}, and if "boxes" is true {"boxes": [[letter, micro-batch, chunk, begin, end], ..]}.
        Instead of "of_chunk", "of_action" has what each action takes, by rank.

null stands for a formula that there is not. What is impossible ends the program with an error.
*/
#include "schedule_play.h"
#include "../../llmc/parallel/split.h"
#include "../../llmc/run/logger.h"
#include "../../llmc/run/start.h"

static double number_of(const json_t* request, const char* name) { return json_number_value(json_object_get(request, name)); }
static int whole_of(const json_t* request, const char* name) { return (int)json_integer_value(json_object_get(request, name)); }
static const char* text_of(const json_t* request, const char* name) {
    const char* text = json_string_value(json_object_get(request, name));
    require(text != NULL, "a request has no \"%s\"", name);
    return text;
}
static Times times_of(const json_t* list) {
    Times t = { json_number_value(json_array_get(list, 0)), json_number_value(json_array_get(list, 1)),
                json_number_value(json_array_get(list, 2)) };
    return t;
}

// ---- a model, and its blocks ----
static json_t* answer_model(const json_t* request) {
    Options o = options_defaults();
    Tokenizer bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.vocab_size = 257;
    o.model = text_of(request, "model");
    o.layers = whole_of(request, "layers");
    o.heads = whole_of(request, "heads");
    o.channels = whole_of(request, "channels");
    o.vocab_size = whole_of(request, "vocab-size");
    GPT2Config c = config_from_options(&o, &bytes, whole_of(request, "seq-len"));
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:f}", "L", c.L, "C", c.C, "NH", c.NH, "Vp", c.Vp, "max_T", c.max_T,
                     "head", split_costs(c.Vp, c.C).head);
}

static json_t* answer_split(const json_t* request) {
    int p = whole_of(request, "p"), v = whole_of(request, "v"), L = whole_of(request, "L"), blocks[PLAY_CHUNKS];
    const char* split = text_of(request, "split");
    SplitCosts costs = split_costs(whole_of(request, "Vp"), whole_of(request, "C"));
    json_t* list = json_array();
    if (strcmp(split, "even") == 0) split_even(blocks, L, p, v);
    else split_blocks(blocks, split, L, p, v, costs);
    for (int g = 0; g < p * v; g++) json_array_append_new(list, json_integer(blocks[g]));
    return json_pack("{s:o, s:f}", "blocks", list, "efficiency", split_efficiency(blocks, p, v, costs));
}

// ---- a schedule ----
static Pipeline pipeline_of(const json_t* request) {
    const char* name = text_of(request, "schedule");
    int schedule = 0;
    while (schedule < SCHEDULES && strcmp(schedule_names[schedule], name) != 0) schedule++;
    Pipeline l = { (Schedule)schedule, whole_of(request, "p"), whole_of(request, "m"), whole_of(request, "v") };
    bool possible = schedule < SCHEDULES && l.p >= 1 && l.p <= PLAY_RANKS && l.m >= 1 && l.v >= 1 && l.p * l.v <= PLAY_CHUNKS;
    require(possible, "a request asks for schedule %s, p %d, m %d, v %d", name, l.p, l.m, l.v);
    return l;
}

static void play_request(Play* y, Pipeline l, const json_t* request) {
    const json_t *of_action = json_object_get(request, "of_action"), *of_chunk = json_object_get(request, "of_chunk");
    Times chunks[PLAY_CHUNKS];
    double* actions[PLAY_RANKS] = { NULL };
    for (int g = 0; g < l.p * l.v; g++) chunks[g] = times_of(json_array_get(of_chunk, (size_t)g));
    for (int r = 0; r < l.p && of_action; r++) {
        const json_t* list = json_array_get(of_action, (size_t)r);
        actions[r] = (double*)xcalloc((size_t)pipeline_actions(l, r), sizeof(double));
        for (int k = 0; k < pipeline_actions(l, r); k++) actions[r][k] = json_number_value(json_array_get(list, (size_t)k));
    }
    PlayTimes t = { chunks, of_action ? actions : NULL, number_of(request, "message") };
    play(y, l, t);
    for (int r = 0; r < l.p; r++) free(actions[r]);
}

static json_t* boxes_of(const Play* y, int rank) {
    json_t* boxes = json_array();
    for (int k = 0; k < y->counts[rank]; k++) {
        const Box* b = &y->boxes[rank][k];
        json_array_append_new(boxes, json_pack("[s#, i, i, f, f]", &"FBIW"[b->action.kind], 1, b->action.micro, b->action.chunk,
                                               b->begin, b->end));
    }
    return boxes;
}

// How many messages a rank sends in a step: outputs of F to the next chunk's rank, and of I and B to the one before.
static int play_messages(const Play* y, int rank) {
    int n = 0;
    for (int k = 0; k < y->counts[rank]; k++) {
        Action a = y->boxes[rank][k].action;
        int g = chunk_number(y->l, rank, a.chunk);
        if (a.kind == ACT_FORWARD) n += !chunk_is_last(y->l, g) && chunk_rank(y->l, g + 1) != rank;
        else if (a.kind != ACT_BACKWARD_WEIGHT) n += !chunk_is_first(y->l, g) && chunk_rank(y->l, g - 1) != rank;
    }
    return n;
}
// Of all ranks by formula: a micro-batch crosses each boundary between chunks of two ranks twice.
static double schedule_messages(Pipeline l) {
    bool turns = (int)l.schedule == SCHEDULE_ZB_V; // its chunks p-1 and p are on one rank
    int boundaries = (int)l.schedule == SCHEDULE_DUALPIPE ? l.p - 1 : l.p * l.v - 1 - turns;
    return l.p == 1 ? 0 : 2.0 * l.m * boundaries;
}

static json_t* rank_of(const Play* y, int rank, bool boxes) {
    json_t* chunks = json_array();
    bool head = false;
    for (int c = 0; c < y->l.v; c++) {
        int g = chunk_number(y->l, rank, c);
        head = head || chunk_is_last(y->l, g);
        json_array_append_new(chunks, json_integer(g));
    }
    return json_pack("{s:f, s:f, s:f, s:i, s:i, s:i, s:o, s:b, s:o}", "busy", y->busy[rank], "begin", y->boxes[rank][0].begin,
                     "end", y->boxes[rank][y->counts[rank] - 1].end, "peak", y->peak[rank], "slots", schedule_peak(y->l, rank),
                     "sends", play_messages(y, rank), "chunks", chunks, "head", head, "boxes", boxes ? boxes_of(y, rank) : json_null());
}

static json_t* answer_schedule(const json_t* request) {
    static Play y;
    Pipeline l = pipeline_of(request);
    play_request(&y, l, request);
    json_t* ranks = json_array();
    for (int r = 0; r < l.p; r++) json_array_append_new(ranks, rank_of(&y, r, json_is_true(json_object_get(request, "boxes"))));
    play_free(&y);
    return json_pack("{s:f, s:o, s:f, s:i, s:b, s:o}", "step", y.step,
                     "bubble", json_number(schedule_bubble(l, times_of(json_object_get(request, "times")))),
                     "messages", schedule_messages(l), "parts", (int)l.schedule == SCHEDULE_DUALPIPE ? l.p : l.p * l.v,
                     "cut", (int)l.schedule >= SCHEDULE_ZB_H1, "ranks", ranks);
}

int main(void) {
    char* line = NULL;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, stdin)) > 0;) {
        json_t* request = json_loadb(line, (size_t)n, 0, NULL);
        require(request != NULL, "a line is no JSON object; build/schedule writes what this program reads");
        const json_t* model = json_object_get(request, "model");
        json_t* answer = model ? answer_model(model) : json_object_get(request, "split") ? answer_split(request) : answer_schedule(request);
        require(json_dumpf(answer, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 && printf("\n") > 0 && fflush(stdout) == 0,
                "an answer cannot be written: %s", strerror(errno));
        json_decref(answer);
        json_decref(request);
    }
    free(line);
    return EXIT_SUCCESS;
}
