/*
plan - predicts what a model will need on a number of ranks, before anything is run.

    build/plan --model gpt2-xl --ranks 8 --seq-len 1024 --batch-size 4
    build/plan --params 7.5e9 --ranks 64
    build/plan --model gpt2 --link measured.json --compute-ms 120
    build/plan --model d32 --ranks 64 --tensor-parallel 8 --sequence-parallel

The first prints bytes per rank by kind in every stage of the course, which devices it fits on and the largest dN that fits,
and seconds per step on 1 to 4096 ranks; tensor parallelism is there for 1, 2, 4 and 8 ranks that share a copy of the model,
or, as in the fourth, for the number that is asked for. The second is given only a number of parameters: it prints the bytes
kept for them, and the table of the ZeRO paper. The third uses measured links and compute (comm_bench --json, a run on one
rank). The formulas of bytes are the stages' own (plan_stage.h), plan.h has the others. GB are 1e9 bytes.
*/
#include "plan.h"
#include "../../llmc/run/start.h"
#include "../../llmc/run/logger.h"

enum { FP32, BF16, FP16 };
enum { DEVICE_GPU, DEVICE_CPU };
enum { MASTER_ON, MASTER_OFF };
typedef struct {
    Options o;                      // the options that a training program also has
    long long ranks, accumulation, wrap_blocks, limit_all_gathers, tensor_parallel, ranks_per_node, nics;
    int precision, device, master, algorithm, exact, sequence_parallel, keep_gathered;
    double params, peak_flops, mfu, compute_ms;
    const char *link, *inter_link;
} PlanOptions;

static const double device_sizes[] = { 24e9, 40e9, 80e9, 141e9 };
#define DEVICE_SIZES (int)(sizeof device_sizes / sizeof device_sizes[0])

static void plan_options(OptionTable* t, PlanOptions* p) {
    p->o = options_defaults();
    p->o.recompute = RECOMPUTE_NONE; // auto would need a device's free memory
    p->ranks = 8; p->accumulation = 1; p->wrap_blocks = 1; p->limit_all_gathers = 2; p->ranks_per_node = 8;
    p->precision = BF16;
    p->mfu = 0.4;
    p->link = "nvlink"; p->inter_link = "infiniband";
    option_text(t, "model", &p->o.model, "NAME",
                "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, 64N channels, N heads");
    option_letter(t, 'm');
    option_int(t, "layers", &p->o.layers, 0, 256, "number of layers; 0: the model's");
    option_int(t, "heads", &p->o.heads, 0, 65536, "number of heads; 0: the model's");
    option_int(t, "channels", &p->o.channels, 0, 65536, "number of channels, C; 0: the model's");
    option_int(t, "vocab-size", &p->o.vocab_size, 0, 1 << 24, "number of tokens, V; 0: 257 (bytes) for dN, 50257 for gpt2*");
    option_int(t, "seq-len", &p->o.seq_len, 1, 1 << 20, "tokens per sequence, T");
    option_letter(t, 't');
    option_int(t, "batch-size", &p->o.batch_size, 1, 1 << 20, "sequences per rank and micro-batch, B");
    option_letter(t, 'b');
    option_int(t, "accumulation", &p->accumulation, 1, 1 << 16, "micro-batches per rank and step");
    option_choice(t, "recompute", &p->o.recompute, "none|block", "for the times; bytes are printed for both");
    option_float(t, "params", &p->params, 0, 1e15, "number of parameters, if the model's shape is not known; 0: --model's");
    option_choice(t, "master", &p->master, "on|off", "off: no fp32 copy of 16-bit weights; only with --params");
    option_choice(t, "precision", &p->precision, "fp32|bf16|fp16", "of parameters, gradients and activations");
    option_int(t, "ranks", &p->ranks, 1, 1 << 20, "number of ranks, N");
    option_choice(t, "device", &p->device, "gpu|cpu", "which program: NCCL or MPI, and how many logits it keeps");
    option_int(t, "wrap-blocks", &p->wrap_blocks, 0, MAX_UNITS - 1,
               "number of consecutive blocks that fsdp gathers at a time; 0: the whole model at once");
    option_int(t, "limit-all-gathers", &p->limit_all_gathers, 1, 256,
               "how many such groups, besides the root, fsdp may keep gathered at a time");
    option_int(t, "tensor-parallel", &p->tensor_parallel, 0, 1 << 20,
               "neighbouring ranks that share one copy of the model and a micro-batch; 0: as many as 1, 2, 4 and 8");
    option_flag(t, "sequence-parallel", &p->sequence_parallel,
                "they also share the rows of layernorms and of the residual stream");
    option_flag(t, "keep-gathered", &p->keep_gathered,
                "with --sequence-parallel: gathered rows are kept for the backward pass");
    option_text(t, "link", &p->link, "nvlink|nvlink3|nvlink2|pcie|infiniband|hdr|FILE",
                "link between ranks of a node; FILE: from comm_bench --json");
    option_text(t, "inter-link", &p->inter_link, "nvlink|nvlink3|nvlink2|pcie|infiniband|hdr|FILE", "between nodes");
    option_int(t, "ranks-per-node", &p->ranks_per_node, 0, 1 << 20, "ranks in each node; 0: all are in one node");
    option_int(t, "nics", &p->nics, 0, 1 << 20, "network interfaces of each node; 0: one for each rank");
    option_choice(t, "algorithm", &p->algorithm, "ring|tree", "of collectives; it decides how many hops follow one another");
    option_float(t, "peak-flops", &p->peak_flops, 0, 1e18, "dense FLOP/s of a rank's device; 0: an H100's, 989e12, fp32 67e12");
    option_float(t, "mfu", &p->mfu, 1e-6, 1, "the share of --peak-flops that one rank alone reaches");
    option_float(t, "compute-ms", &p->compute_ms, 0, 1e9,
                 "measured time of a micro-batch on one rank; 0: computed from --peak-flops and --mfu");
    option_flag(t, "exact", &p->exact, "print all digits of bytes");
}

// ---- checks ----
static void check_options(const PlanOptions* p, OptionTable* t) {
    static const char* const of_models[] = {
        "model", "layers", "heads", "channels", "vocab-size", "seq-len", "batch-size", "accumulation", "recompute", "device",
        "wrap-blocks", "limit-all-gathers", "tensor-parallel", "sequence-parallel", "keep-gathered", "link", "inter-link",
        "ranks-per-node", "nics", "algorithm", "peak-flops", "mfu", "compute-ms", "exact"
    };
    for (size_t i = 0; p->params > 0 && i < sizeof of_models / sizeof of_models[0]; i++) {
        require(!option_given(t, of_models[i]), "--%s cannot be used with --params, which describes a model of unknown shape",
                of_models[i]);
    }
    require(p->params == 0 || p->params >= 1, "--params must be at least 1, not %g", p->params);
    require(p->params > 0 || !option_given(t, "master"),
            "--master is for --params: our stages always keep an fp32 copy of 16-bit weights");
    require(p->precision != FP32 || !option_given(t, "master"),
            "--master cannot be used with --precision fp32, whose weights are the master copy");
    require(p->compute_ms == 0 || !(option_given(t, "peak-flops") || option_given(t, "mfu")),
            "--compute-ms replaces --peak-flops and --mfu: give either that or these");
}

static Plan plan_from_options(const PlanOptions* p) {
    Tokenizer bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.vocab_size = 257;
    Plan plan;
    memset(&plan, 0, sizeof plan);
    plan.config = config_from_options(&p->o, &bytes, (int)p->o.seq_len);
    plan.B = (int)p->o.batch_size;
    plan.T = (int)p->o.seq_len;
    plan.accumulation = (int)p->accumulation;
    plan.X = p->precision == FP32 ? 4 : 2;
    plan.N = (int)p->ranks;
    plan.gpu = p->device == DEVICE_GPU;
    plan.rooms = (int)p->limit_all_gathers;
    plan.wrap_blocks = (int)p->wrap_blocks;
    plan.t = p->tensor_parallel ? (int)p->tensor_parallel : 1;
    plan.sequence_parallel = p->sequence_parallel;
    plan.keep_gathered = p->keep_gathered;
    require(plan.T <= plan.config.max_T, "--seq-len %d is longer than the %d positions of the model; lower it or choose a model"
            " with more", plan.T, plan.config.max_T);
    LayerShapes shapes = { plan.B, plan.T, plan.config.C, plan.config.NH, plan.config.Vp, 1 };
    layer_shapes_check(shapes);
    plan_bytes(&plan, PLAN_TP); // whose errors come before any table
    return plan;
}

// ---- tables ----
// What a table compares: stages, or numbers of ranks that share a copy of the model.
typedef struct { PlanStage stage; Plan plan; char name[24]; } Way;
typedef struct { int n; Way ways[PLAN_STAGES + 1]; } Ways;

static void ways_add(Ways* w, PlanStage stage, const Plan* plan) {
    Way* way = &w->ways[w->n++];
    way->stage = stage;
    way->plan = *plan;
    if (stage == PLAN_TP) snprintf(way->name, sizeof way->name, "tp %d", plan->t);
    else snprintf(way->name, sizeof way->name, "%s", plan_stage_names[stage]);
}
static Ways ways_of_stages(const Plan* plan) {
    Ways w;
    w.n = 0;
    for (int s = 0; s < PLAN_STAGES; s++) ways_add(&w, (PlanStage)s, plan);
    return w;
}
// asked: 0 for 1, 2, 4 and 8, as far as ranks and model divide
static Ways ways_of_tensor_parallel(Plan plan, int asked) {
    Ways w;
    w.n = 0;
    for (plan.t = asked ? asked : 1; plan.t <= (asked ? asked : 8); plan.t *= 2) {
        if (plan_divides(&plan)) ways_add(&w, PLAN_TP, &plan);
    }
    return w;
}
static Plan recomputing(Plan plan, int recompute) {
    plan.recompute = recompute;
    return plan;
}
static size_t way_total(const Way* w, int recompute) {
    Plan plan = recomputing(w->plan, recompute);
    return plan_memory_total(&plan, w->stage);
}
static PlanBytes way_bytes(const Way* w, int recompute) {
    Plan plan = recomputing(w->plan, recompute);
    return plan_bytes(&plan, w->stage);
}

static void print_ways(const char* title, const Ways* w) {
    printf("\n%-24s", title);
    for (int i = 0; i < w->n; i++) printf(" %16s", w->ways[i].name);
    printf("\n");
}
static void print_bytes(double bytes, bool exact) {
    char text[32];
    if (exact) printf(" %16.0f", bytes);
    else printf(" %16s", format_bytes(text, sizeof text, bytes));
}
static void print_device_sizes(const char* title) {
    printf("\n%-24s", title);
    for (int d = 0; d < DEVICE_SIZES; d++) printf(" %13.0f GB", device_sizes[d] * 1e-9);
    printf("\n");
}
static const char* precision_name(int precision) { return precision == FP32 ? "fp32" : precision == BF16 ? "bf16" : "fp16"; }

static void print_total(const char* name, const Ways* w, int recompute, bool exact) {
    printf("%-24s", name);
    for (int i = 0; i < w->n; i++) print_bytes((double)way_total(&w->ways[i], recompute), exact);
    printf("\n");
}
static void print_model_memory(const Ways* w, bool exact) { // with and without recomputation
    PlanBytes kept[PLAN_STAGES + 1];
    char title[64];
    snprintf(title, sizeof title, "bytes per rank of %d", w->ways[0].plan.N);
    print_ways(title, w);
    for (int i = 0; i < w->n; i++) kept[i] = way_bytes(&w->ways[i], RECOMPUTE_NONE);
    for (int k = 0; k <= MEMORY_WORKSPACE; k++) {
        if (k == MEMORY_WORKSPACE && kept[0].memory[k] == 0) continue;
        printf("  %-22s", memory_kind_names[k]);
        for (int i = 0; i < w->n; i++) print_bytes((double)kept[i].memory[k], exact);
        printf("\n");
        if (k != MEMORY_ACTIVATIONS) continue;
        printf("    %-20s", "or recomputed");
        for (int i = 0; i < w->n; i++) print_bytes((double)way_bytes(&w->ways[i], RECOMPUTE_BLOCK).memory[k], exact);
        printf("\n");
    }
    print_total("  total", w, RECOMPUTE_NONE, exact);
    print_total("    or recomputed", w, RECOMPUTE_BLOCK, exact);
    printf("  %-22s", "sent per step");
    for (int i = 0; i < w->n; i++) {
        const Plan* plan = &w->ways[i].plan;
        print_bytes(floor(plan_sent(plan, w->ways[i].stage) / plan->N), exact);
    }
    printf("\n");
}

static void print_fits(const Ways* w) {
    for (int i = 0; i < w->n; i++) {
        if (w->ways[i].stage == PLAN_TP && w->ways[i].plan.t == 1) continue; // as ddp
        printf("  %-22s", w->ways[i].name);
        for (int d = 0; d < DEVICE_SIZES; d++) {
            bool fits = (double)way_total(&w->ways[i], RECOMPUTE_NONE) <= device_sizes[d];
            bool recomputed = (double)way_total(&w->ways[i], RECOMPUTE_BLOCK) <= device_sizes[d];
            printf(" %16s", fits ? "yes" : recomputed ? "recomputed" : "no");
        }
        printf("\n");
    }
}
static void print_largest(const Ways* w) {
    for (int i = 0; i < w->n; i++) {
        if (w->ways[i].stage == PLAN_TP && w->ways[i].plan.t == 1) continue;
        printf("  %-22s", w->ways[i].name);
        for (int d = 0; d < DEVICE_SIZES; d++) {
            char text[48] = "none";
            GPT2Config c = w->ways[i].plan.config;
            Plan with = recomputing(w->ways[i].plan, RECOMPUTE_BLOCK);
            c.L = c.NH = plan_largest_depth(with, w->ways[i].stage, device_sizes[d]);
            c.C = 64 * c.L;
            if (c.L > 0) snprintf(text, sizeof text, "d%d, %.3g B", c.L, 1e-9 * (double)gpt2_num_parameters(c));
            printf(" %16s", text);
        }
        printf("\n");
    }
}

static void print_tensor_parallel_memory(const Ways* tp, const PlanOptions* p) {
    const Plan* plan = &tp->ways[0].plan;
    if (tp->n == 1 && p->tensor_parallel == 0) {
        if (plan->N > 1) printf("\ntensor parallelism: none of 2, 4 and 8 divides %d ranks, %d heads and %d tokens\n",
                                plan->N, plan->config.NH, plan->config.Vp);
        return;
    }
    printf("\ntp t: t ranks share a copy of the model, and %d x %d tokens per micro-batch%s", plan->B, plan->T,
           !plan->sequence_parallel ? "" : plan->keep_gathered ? "; they cut its rows, and keep what they gather"
                                                               : "; they cut its rows");
    print_model_memory(tp, p->exact);
}

static void print_times_title(const char* name, const char* rows) {
    printf("%-8s %5s %12s %14s %12s %12s %14s %11s\n", name, rows, "compute ms", "communication", "exposed", "step",
           "tokens/s", "efficiency");
}
static void print_time(const Plan* plan, PlanStage stage, const Network* network, UnitSeconds s, int row) {
    StepTime t = plan_step(plan, stage, network, s);
    printf("%14d %12.2f %14.2f %12.2f %12.2f %14.0f %10.1f%%\n", row, 1e3 * t.compute, 1e3 * t.communication, 1e3 * t.exposed,
           1e3 * t.seconds, t.tokens_per_s, 100 * t.efficiency);
}
static void print_tensor_parallel_times(const Ways* tp, const PlanOptions* p, const Network* network, UnitSeconds s) {
    Plan plan = tp->ways[0].plan;
    char title[32];
    if (p->tensor_parallel) {
        snprintf(title, sizeof title, "tp %d", plan.t);
        print_times_title(title, "ranks");
        for (plan.N = plan.t; plan.N <= 4096; plan.N *= 2) print_time(&plan, PLAN_TP, network, s, plan.N);
    } else if (tp->n > 1) {
        snprintf(title, sizeof title, "tp of %d", plan.N);
        print_times_title(title, "t");
        for (int i = 0; i < tp->n; i++) print_time(&tp->ways[i].plan, PLAN_TP, network, s, tp->ways[i].plan.t);
    }
}
static void print_times(Plan plan, const Ways* tp, const PlanOptions* p, const Network* network) {
    double peak = p->peak_flops > 0 ? p->peak_flops : p->precision == FP32 ? 67e12 : 989e12;
    double seconds = 1e-3 * p->compute_ms;
    if (p->compute_ms == 0) seconds = plan_flops_done(&plan) * plan.B * plan.T / (peak * p->mfu);
    printf("\ntimes of a step: %.4g GFLOP per token, ", 1e-9 * gpt2_flops_per_token(plan.config, plan.T));
    if (p->compute_ms > 0) printf("a micro-batch takes %.4g ms", p->compute_ms);
    else printf("%.4g TFLOP/s x %.3g", 1e-12 * peak, p->mfu);
    printf("%s\n%s over %s", plan.recompute == RECOMPUTE_BLOCK ? ", blocks recomputed" : "",
           p->algorithm == PLAN_RING ? "rings" : "trees", link_description(p->link));
    if (network->ranks_per_node) printf("; nodes of %d ranks and %d interfaces: %s", network->ranks_per_node, network->nics,
                                        link_description(p->inter_link));
    printf("\n");
    UnitSeconds s = plan_unit_seconds(&plan, seconds);
    for (int stage = 0; stage < PLAN_STAGES; stage++) {
        print_times_title(plan_stage_names[stage], "ranks");
        for (plan.N = 1; plan.N <= 4096; plan.N *= 2) print_time(&plan, (PlanStage)stage, network, s, plan.N);
    }
    print_tensor_parallel_times(tp, p, network, s);
}

static void plan_model(const PlanOptions* p) {
    Plan plan = plan_from_options(p);
    Ways stages, tp;
    Network network = { link_open(p->link), link_open(p->inter_link), (int)p->ranks_per_node, (int)p->nics, p->algorithm };
    if (network.nics == 0) network.nics = network.ranks_per_node;
    GPT2Config c = plan.config;
    printf("model      %d layers, %d heads, %d channels, vocabulary %d, context %d: %zu parameters\n",
           c.L, c.NH, c.C, c.V, c.max_T, gpt2_num_parameters(c));
    printf("step       %d x %d tokens in %d micro-batch%s per rank; %s, on a %s\n", plan.B, plan.T, plan.accumulation,
           plan.accumulation == 1 ? "" : "es", precision_name(p->precision), plan.gpu ? "GPU" : "CPU");
    plan.recompute = p->o.recompute;
    stages = ways_of_stages(&plan);
    tp = ways_of_tensor_parallel(plan, (int)p->tensor_parallel);
    print_model_memory(&stages, p->exact);
    print_tensor_parallel_memory(&tp, p);
    printf("not counted: the rest of the layers' workspace, some MB, and what a device needs for itself\n");
    print_device_sizes("fits");
    print_fits(&stages);
    print_fits(&tp);
    print_device_sizes("largest dN, recomputed");
    print_largest(&stages);
    print_largest(&tp);
    print_times(plan, &tp, p, &network);
}

// ---- only a number of parameters is known ----
static double params_bytes(const PlanOptions* p, StateBytes one, PlanStage stage, double N) {
    return p->params * state_bytes_sum(state_bytes_sharded(one, stage, N));
}

static void print_stages(const char* title) {
    printf("\n%-24s", title);
    for (int s = 0; s < PLAN_STAGES; s++) printf(" %16s", plan_stage_names[s]);
    printf("\n");
}
static void print_params_table(const PlanOptions* p, StateBytes one) {
    static const int paper[] = { 1, 4, 16, 64, 1024 };
    print_stages("GB per rank");
    for (size_t i = 0; i < sizeof paper / sizeof paper[0]; i++) {
        printf("  %-22d", paper[i]);
        for (int s = 0; s < PLAN_STAGES; s++) {
            double gb = 1e-9 * params_bytes(p, one, (PlanStage)s, paper[i]);
            printf(gb < 100 ? " %16.2f" : " %16.1f", gb);
        }
        printf("\n");
    }
}

static void plan_params(const PlanOptions* p) {
    StateBytes one = state_bytes(p->precision == FP32 ? 4 : 2, p->precision != FP32 && p->master == MASTER_ON);
    const char* const names[] = { "parameters", "gradients", "optimizer state", "total" };
    char title[64];
    printf("%.4g parameters in %s: %g + %g + %g bytes each, without activations and buffers\n", p->params,
           precision_name(p->precision), one.parameters, one.gradients, one.optimizer);
    snprintf(title, sizeof title, "bytes per rank of %lld", p->ranks);
    print_stages(title);
    for (int k = 0; k < 4; k++) {
        printf("  %-22s", names[k]);
        for (int s = 0; s < PLAN_STAGES; s++) {
            StateBytes b = state_bytes_sharded(one, (PlanStage)s, (double)p->ranks);
            const double bytes[] = { b.parameters, b.gradients, b.optimizer, state_bytes_sum(b) };
            print_bytes(p->params * bytes[k], false);
        }
        printf("\n");
    }
    print_params_table(p, one);
    print_device_sizes("fits, largest");
    for (int s = 0; s < PLAN_STAGES; s++) {
        printf("  %-22s", plan_stage_names[s]);
        for (int d = 0; d < DEVICE_SIZES; d++) {
            double bytes = params_bytes(p, one, (PlanStage)s, (double)p->ranks);
            printf("    %-3s %7.3g B", bytes <= device_sizes[d] ? "yes" : "no", 1e-9 * p->params * device_sizes[d] / bytes);
        }
        printf("\n");
    }
}

int main(int argc, char** argv) {
    static PlanOptions p;
    OptionTable table = options_table("plan", "predict bytes per rank and seconds per step of a model on many ranks, by formula");
    plan_options(&table, &p);
    options_parse(&table, argc, argv);
    check_options(&p, &table);
    if (p.params > 0) plan_params(&p);
    else plan_model(&p);
    return EXIT_SUCCESS;
}
