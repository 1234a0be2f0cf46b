/*
plan - predicts what a model will need on a number of ranks, before anything is run.

    build/plan --model gpt2-xl --ranks 8 --seq-len 1024 --batch-size 4
    build/plan --params 7.5e9 --ranks 64
    build/plan --model gpt2 --link measured.json --compute-ms 120
    build/plan --model d32 --ranks 64 --tensor-parallel 8 --sequence-parallel
    build/plan --model gpt2 --ranks 8 --pipeline-parallel 4 --accumulation 16
    build/plan --model gpt2 --ranks 8 --pipeline-parallel 4 --accumulation 16 --schedule 1f1b --split 4,4,4,0
    build/plan --recommend --model gpt3-13b --gpu h100 --ranks 64 --tokens 300e9
    build/plan --validate
    build/plan --compress all --model gpt2 --ranks 4 --precision fp32 --compute-ms 10 --communication-ms 8

The first prints bytes per rank by kind in every stage of the course, which devices it fits on and the largest dN that fits,
and seconds per step on 1 to 4096 ranks; tensor parallelism is there for 1, 2, 4 and 8 ranks that share a replica of the model,
or, as in the fourth, for the number that is asked for. So are pipelines of 2, 4 and 8 ranks. Asked for a number, as in the
fifth, plan compares the schedules; asked for one of these, as in the sixth, it shows each rank, and seconds on more ranks. The
second is given only a number of parameters: it prints the bytes kept for them, and the table of the ZeRO paper. The third uses
measured links and compute (comm_bench --json, a run on one rank). Two know any mesh and more models, by coarser formulas:
one searches the best mesh and says why, the other compares with published figures. The last compares all ways to compress
gradients. GB are 1e9 bytes.

    plan_options.h                   options, and what a device (plan_gpus.h, plan_nodes.h, plan_here.h) says of those not given
    plan_stage.h                     bytes, by the stages' own formulas
    plan.h, _pipeline.h, _axes.h     seconds of a step; plan_nccl.h: of a collective
    plan_compress.h, plan_methods.h  gradients that travel compressed; plan_cost.h: what a run costs
    plan_ways.h, plan_times.h        what tables compare, and its seconds; plan_print.h, plan_params.h, plan_json.h print them
    plan_mesh.h, plan_models.h       any mesh of any model; plan_search.h, plan_recommend.h choose one; plan_validate.h compares
*/
#include "plan_json.h"
#include "plan_methods.h"
#include "plan_recommend.h"

static void print_model(const Compared* c, const TimeTables* times, const PlanOptions* o, const Network* network) {
    const Plan* plan = &c->plan;
    GPT2Config m = plan->config;
    printf("model      %d layers, %d heads, %d channels, vocabulary %d, context %d: %zu parameters\n",
           m.L, m.NH, m.C, m.V, m.max_T, gpt2_num_parameters(m));
    printf("step       %d x %d tokens in %d micro-batch%s per rank; %s, on a %s\n", plan->B, plan->T, plan->accumulation,
           plan->accumulation == 1 ? "" : "es", precision_name(o->precision), plan->gpu ? "GPU" : "CPU");
    print_sharding(plan);
    print_mesh_memory(&c->mesh, o);
    if (c->stages.n > 0) print_model_memory(&c->stages, o->exact);
    print_compressed_memory(&c->compressed, o);
    if (c->tensor.n > 0) print_tensor_parallel_memory(&c->tensor, o);
    print_pipeline_memory(&c->pipelines, o);
    printf("not counted: the rest of the layers' workspace, some MB, and what a device needs for itself\n");
    print_what_fits(c, o);
    print_times(times, c, o, network);
}
static void answer_model(const PlanOptions* o) {
    static TimeTables times;
    Compared c = compared_from_options(o);
    Network network = network_of_options(o, &c.plan);
    UnitSeconds seconds = plan_unit_seconds(&c.plan, micro_batch_seconds(o, &c.plan));
    if (o->compress == COMPRESS_ALL) {
        if (o->json) json_print(json_methods(o, &c.plan, &network, seconds));
        else answer_methods(o, &c.plan, &network, seconds);
        return;
    }
    tables_of(&times, o, &c, &network, seconds);
    if (o->json) json_model(&c, &times, o);
    else print_model(&c, &times, o, &network);
}
static void answer_params(const PlanOptions* o) {
    if (o->json) json_params(o);
    else print_params(o);
}
static void answer_validate(const PlanOptions* o) {
    if (o->json) json_validate(o->published, 1e9 * o->reserve);
    else validate_print(o->published, 1e9 * o->reserve);
}

// A published shape, or that of a dN, with the numbers that are given in place of its own.
static PlanShape shape_from_options(const PlanOptions* p, OptionTable* t) {
    const PlanShape* known = plan_shape(p->o.model);
    const Options* o = &p->o;
    bool changed = o->layers || o->heads || o->channels || o->vocab_size;
    PlanShape s = { o->model, 0, 0, 0, 0, 0, 257, (int)o->seq_len, false };
    GPT2Config c;
    memset(&c, 0, sizeof c);
    if (known) s = *known;
    else if (gpt2_named_config(o->model, &c)) { s.L = c.L; s.NH = c.NH; s.C = c.C; }
    else {
        char names[1024] = "";
        for (int i = 0; i < PLAN_SHAPES; i++) snprintf(names + strlen(names), sizeof names - strlen(names), ", %s",
                                                       plan_shapes[i].name);
        die("--recommend knows no --model %s: dN%s", o->model, names);
    }
    require(!s.llama || !changed, "--model %s: --layers, --heads, --channels and --vocab-size are for models with GPT-2's blocks",
            s.name);
    if (o->layers) s.L = (int)o->layers;
    if (o->heads) s.NH = (int)o->heads;
    if (o->channels) s.C = (int)o->channels;
    if (o->vocab_size) s.V = (int)o->vocab_size;
    require(s.C % s.NH == 0, "%d channels do not divide over %d heads", s.C, s.NH);
    if (!s.llama) { s.NKV = s.NH; s.F = 4 * s.C; }
    if (option_given(t, "seq-len") && !exact_is_named(&s)) s.T = (int)o->seq_len;
    return s;
}
static void answer_recommend(const PlanOptions* p, OptionTable* t) {
    require(p->gpu != NULL, "--recommend needs a --gpu whose peak is known: " PLAN_GPU_NAMES);
    PlanShape shape = shape_from_options(p, t);
    PlanGpu gpu = p->gpu->peak16 > 0 ? *p->gpu : plan_here_shared(p->gpu, (int)p->ranks);
    double T = option_given(t, "seq-len") ? (double)p->o.seq_len : shape.T;
    double tokens = p->o.total_batch_size > 0 ? (double)p->o.total_batch_size : fmax(524288, (double)p->ranks * T);
    require(T <= shape.T, "--seq-len %.0f is longer than the %d positions of %s", T, shape.T, shape.name);
    require(fmod(tokens, T) == 0, "--total-batch-size %.0f is no multiple of --seq-len %.0f", tokens, T);
    SearchFor f = { &shape, &gpu, (int)p->ranks, (int)(tokens / T), (int)T, 1e9 * p->reserve };
    Search s = search(&f);
    if (p->json) recommend_print_json(&s, &f);
    else recommend_print(&s, &f, p->run, p->exact);
    search_free(&s);
}

int main(int argc, char** argv) {
    static PlanOptions p;
    OptionTable table = options_table("plan", "predict bytes per rank and seconds per step of a model on many ranks, by formula");
    plan_options(&table, &p);
    options_parse(&table, argc, argv);
    p.emulation = emulation_parse(p.emulate);
    if (!option_given(&table, "error-feedback")) p.error_feedback = PLAN_USUAL;
    p.compares = p.pipeline_parallel > 0 && !option_given(&table, "schedule") && strcmp(p.split, "auto") == 0;
    take_device(&p, &table);
    check_options(&p, &table);
    if (p.validates) answer_validate(&p);
    else if (p.recommends) answer_recommend(&p, &table);
    else if (p.params > 0) answer_params(&p);
    else answer_model(&p);
    return EXIT_SUCCESS;
}
