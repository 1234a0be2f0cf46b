/*
schedule_order - says for build/schedule what llmc/ has of pipelines, so that orders, formulas and the split of blocks are those
of train_gpt2_pp. It reads a JSON object a line, and answers each with a line:

    {"model": {"model": "gpt2", "layers": 0, "heads": 0, "channels": 0, "vocab-size": 0, "seq-len": 1024}}
        {"L", "C", "NH", "Vp", "max_T", "head": what the head costs, in blocks}
    {"split": "auto", "p", "v", "L", "Vp", "C"}
        {"blocks": [of each chunk]}
    {"schedule": number in Schedule, "p", "m", "v", "times": [F, B, W of 1/p of the model]}
        {"bubble": ms by the formula, "peaks": [of each rank by the formula], "orders": [[[letter, micro-batch, chunk], ..], ..]}

What is impossible ends the program with an error.
*/
#include "../../llmc/parallel/pipeline.h"
#include "../../llmc/parallel/split.h"
#include "../../llmc/run/logger.h"
#include "../../llmc/run/start.h"

enum { MOST_CHUNKS = 1024 };

static int whole_of(const json_t* request, const char* name) { return (int)json_integer_value(json_object_get(request, name)); }
static const char* text_of(const json_t* request, const char* name) {
    const char* text = json_string_value(json_object_get(request, name));
    require(text != NULL, "a request has no \"%s\"", name);
    return text;
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
    int p = whole_of(request, "p"), v = whole_of(request, "v"), L = whole_of(request, "L"), blocks[MOST_CHUNKS];
    const char* split = text_of(request, "split");
    json_t* list = json_array();
    if (strcmp(split, "even") == 0) split_even(blocks, L, p, v);
    else split_blocks(blocks, split, L, p, v, split_costs(whole_of(request, "Vp"), whole_of(request, "C")));
    for (int g = 0; g < p * v; g++) json_array_append_new(list, json_integer(blocks[g]));
    return json_pack("{s:o}", "blocks", list);
}

// ---- a schedule ----
static json_t* order_of(Pipeline l, int rank) {
    json_t* order = json_array();
    for (int k = 0; k < pipeline_actions(l, rank); k++) {
        Action a = pipeline_action(l, rank, k);
        json_array_append_new(order, json_pack("[s#, i, i]", &"FDBW"[a.kind], 1, a.micro, a.chunk));
    }
    return order;
}

static json_t* answer_schedule(const json_t* request) {
    Pipeline l = { (Schedule)whole_of(request, "schedule"), whole_of(request, "p"), whole_of(request, "m"),
                   whole_of(request, "v") };
    double F, B, W;
    pipeline_check(l);
    require(json_unpack((json_t*)request, "{s:[F, F, F]}", "times", &F, &B, &W) == 0, "a request has no \"times\"");
    json_t *peaks = json_array(), *orders = json_array();
    for (int r = 0; r < l.p; r++) {
        json_array_append_new(peaks, json_integer(pipeline_slots(l, r)));
        json_array_append_new(orders, order_of(l, r));
    }
    return json_pack("{s:f, s:o, s:o}", "bubble", pipeline_bubble(l, F, B, W), "peaks", peaks, "orders", orders);
}

int main(void) {
    char* line = NULL;
    size_t room = 0;
    for (ssize_t n; (n = getline(&line, &room, stdin)) > 0;) {
        json_t* request = json_loadb(line, (size_t)n, 0, NULL);
        require(request != NULL, "a line is no JSON object; build/schedule writes what this program reads");
        const json_t* model = json_object_get(request, "model");
        json_t* answer = model ? answer_model(model) : json_object_get(request, "split") ? answer_split(request)
                                                                                         : answer_schedule(request);
        require(json_dumpf(answer, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 && printf("\n") > 0 && fflush(stdout) == 0,
                "an answer cannot be written: %s", strerror(errno));
        json_decref(answer);
        json_decref(request);
    }
    free(line);
    return EXIT_SUCCESS;
}
