/*
schedule_order - tells tools in Python what a pipeline of train_gpt2_pp does: the order of a rank's actions, the formulas
(llmc/parallel/pipeline.h), and the split of blocks (split.h). It reads a JSON object a line, and answers each with a line:

    {"model": "gpt2"}
        {"L", "C", "Vp", "head": what the head costs, in blocks}
    {"split": "auto", "p", "v", "L", "Vp", "C"}
        {"blocks": [of each chunk], "efficiency": the share of the time in which ranks compute if there is no bubble}
    {"schedule": its number in pipeline.h, "p", "m", "v", "times": [F, I, W of all chunks of a rank]}
        {"orders": [of each rank [[letter, micro-batch, chunk], ..]], "slots": [of each rank], "bubble": in the unit of the times}

What is impossible ends the program with an error.
*/
#define main train_main
#include "../../train_gpt2_pp.cu" // for its pipeline_run_ahead and gpt2_init_schedule
#undef main
#include "../../llmc/parallel/split.h"
#include "../../llmc/run/logger.h"
#include "../../llmc/run/run.h"

static json_t* answer_model(json_t* request) {
    Options o = options_defaults();
    Tokenizer bytes = { .vocab_size = 257 };
    if (json_unpack(request, "{s:s}", "model", &o.model) != 0) return NULL;
    GPT2Config c = config_from_options(&o, &bytes, 1);
    return json_pack("{s:i, s:i, s:i, s:f}", "L", c.L, "C", c.C, "Vp", c.Vp, "head", split_costs(c.Vp, c.C).head);
}

static json_t* answer_split(json_t* request) {
    const char* split;
    int p, v, L, Vp, C;
    if (json_unpack(request, "{s:s, s:i, s:i, s:i, s:i, s:i}", "split", &split, "p", &p, "v", &v, "L", &L,
                    "Vp", &Vp, "C", &C) != 0) return NULL;
    SplitCosts costs = split_costs(Vp, C);
    int* blocks = (int*)xcalloc((size_t)(p * v), sizeof(int));
    json_t* list = json_array();
    if (strcmp(split, "even") == 0) split_even(blocks, L, p, v);
    else split_blocks(blocks, split, L, p, v, costs);
    for (int g = 0; g < p * v; g++) json_array_append_new(list, json_integer(blocks[g]));
    json_t* answer = json_pack("{s:o, s:f}", "blocks", list, "efficiency", split_efficiency(blocks, p, v, costs));
    free(blocks);
    return answer;
}

static json_t* answer_schedule(json_t* request) {
    int schedule, p, m, v;
    double F, I, W;
    if (json_unpack(request, "{s:i, s:i, s:i, s:i, s:[F, F, F]}", "schedule", &schedule, "p", &p, "m", &m, "v", &v,
                    "times", &F, &I, &W) != 0) return NULL;
    Pipeline pipe = { (Schedule)schedule, p, m, v, 0, 0 };
    json_t *orders = json_array(), *slots = json_array();
    for (int r = 0; r < p; r++) {
        static GPT2 g; // only its schedule is used
        json_t* order = json_array();
        g.pipeline = pipe;
        pipeline_run_ahead(&g.pipeline, r);
        gpt2_init_schedule(&g);
        for (int k = 0; k < g.num_actions; k++) {
            Action a = g.actions[k];
            json_array_append_new(order, json_pack("[s#, i, i]", &"FBIW"[a.kind], 1, a.micro, a.chunk));
        }
        free(g.actions);
        json_array_append_new(orders, order);
        json_array_append_new(slots, json_integer(pipeline_slots(g.pipeline)));
    }
    return json_pack("{s:o, s:o, s:f}", "orders", orders, "slots", slots, "bubble", pipeline_bubble(pipe, F, I, W));
}

int main(void) {
    for (json_t* request; (request = json_loadf(stdin, JSON_DISABLE_EOF_CHECK, NULL)) || !feof(stdin); json_decref(request)) {
        json_t* answer = answer_model(request);
        if (answer == NULL) answer = answer_split(request);
        if (answer == NULL) answer = answer_schedule(request);
        require(answer != NULL, "a line is no request; dev/tools/schedule_play.py writes what this program reads");
        bool written = json_dumpf(answer, stdout, JSON_COMPACT | JSON_REAL_PRECISION(17)) == 0 && printf("\n") > 0;
        require(written && fflush(stdout) == 0, "an answer cannot be written: %s", strerror(errno));
        json_decref(answer);
    }
    return EXIT_SUCCESS;
}
