/*
plan_options.h - the options of build/plan: their table, what a device or node says of those that are not given, and which do
not go together.
*/
#ifndef DEV_PLAN_OPTIONS_H
#define DEV_PLAN_OPTIONS_H
#include "plan_axes.h"
#include "plan_models.h"
#include "plan_cost.h"
#include "plan_here.h"
#include "plan_nodes.h"
#include "../../llmc/run/start.h"

enum { FP32, BF16, FP16 };
enum { DEVICE_GPU, DEVICE_CPU };
enum { MASTER_ON, MASTER_OFF };
enum { COMPRESS_ALL = COMPRESS_METHODS }; // of --compress
enum { MOST_MICRO_BATCHES = 1 << 16, PLAYED_MICRO_BATCHES = 4096 }; // zb-h1's actions are searched for among all before
#define H100_PEAK 989e12      // what a rank reaches if nothing is said of its device
#define H100_PEAK_FP32 67e12

typedef struct {
    Options o;                      // the options that a training program also has
    long long ranks, accumulation, wrap_blocks, limit_all_gathers, tensor_parallel, pipeline_parallel, chunks, shard_group;
    long long ranks_per_node, nics, rank;
    int precision, device, master, algorithm, exact, sequence_parallel, keep_gathered, schedule;
    int sharding, reduce_dtype, offload, compress, error_feedback;
    int recommends, validates, json;
    bool compares;                  // all schedules, not only --schedule
    double efficiency, sm_share, host_link, host_bandwidth, fraction, bucket_mb, communication_ms;
    RunOf run;                      // --tokens, --price, --watts
    double params, peak_flops, mfu, compute_ms, memory_bandwidth;
    double memory, reserve;         // GB of a device; of these what a rank cannot use
    const char *gpu_name, *node_name; // "": none
    const PlanGpu* gpu;             // the same; NULL: none
    bool gpu_links;                 // its links, because no others are given
    double room;                    // bytes that a rank can use; INFINITY: not known
    bool shares_room;               // all ranks together, because they are on this machine
    const char* room_of;            // whose
    const char *link, *inter_link, *split;
    const char *mesh, *emulate;     // "": none
    const char* here;               // what was measured of this machine
    long long zero_stage;           // of --mesh
    Emulation emulation;            // the same as emulate
    const char* published;          // --validate: its table
} PlanOptions;

static void plan_defaults(PlanOptions* p) {
    p->o = options_defaults();
    p->o.recompute = RECOMPUTE_NONE; // auto would need a device's free memory
    p->ranks = 8; p->wrap_blocks = 1; p->limit_all_gathers = 2; p->ranks_per_node = 8;
    p->precision = BF16;
    p->mfu = 0.4;
    p->link = "nvlink"; p->inter_link = "infiniband";
    p->gpu_name = p->node_name = p->mesh = p->emulate = "";
    p->here = "build/here.json";
    p->reserve = 2;
    p->efficiency = 1;
    p->host_link = 31.5e9; p->host_bandwidth = 51.2e9;
    p->fraction = 0.01; p->rank = 4; p->bucket_mb = 25;
    p->published = "dev/tools/plan_published.txt";
    p->schedule = SCHEDULE_1F1B;
    p->split = "auto";
}

// ---- the table ----
static void options_of_model(OptionTable* t, PlanOptions* p) {
    option_heading(t, "Model and batch");
    option_text(t, "model", &p->o.model, "NAME",
                "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-*, or dN: N layers, 64N channels, N heads");
    option_letter(t, 'm');
    option_int(t, "layers", &p->o.layers, 0, 256, "number of layers; 0: the model's");
    option_int(t, "heads", &p->o.heads, 0, 65536, "number of heads; 0: the model's");
    option_int(t, "channels", &p->o.channels, 0, 65536, "number of channels, C; 0: the model's");
    option_int(t, "vocab-size", &p->o.vocab_size, 0, 1 << 24, "number of tokens, V; 0: 257 (bytes) for dN, 50257 for gpt2*");
    option_float(t, "params", &p->params, 0, 1e15, "number of parameters, if no shape is known; 0: --model's");
    option_choice(t, "precision", &p->precision, "fp32|bf16|fp16", "of parameters, gradients and activations");
    option_choice(t, "master", &p->master, "on|off", "off: no fp32 copy of 16-bit weights; only with --params");
    option_int(t, "seq-len", &p->o.seq_len, 1, 1 << 20, "tokens per sequence, T");
    option_letter(t, 't');
    option_int(t, "batch-size", &p->o.batch_size, 1, 1 << 20, "sequences per rank and micro-batch, B");
    option_letter(t, 'b');
    option_int(t, "accumulation", &p->accumulation, 0, MOST_MICRO_BATCHES,
               "micro-batches per step of a replica of the model; 0: 1, or in a pipeline one per rank of it");
    option_int(t, "total-batch-size", &p->o.total_batch_size, 0, 1e15,
               "tokens per step of all ranks, so that more ranks do less each; 0: --accumulation says it");
    option_choice(t, "recompute", &p->o.recompute, "none|block", "for the times; bytes are printed for both");
}
static void options_of_ranks(OptionTable* t, PlanOptions* p) {
    option_heading(t, "Ranks, and how they divide the work (bytes of the first five stages are always printed)");
    option_int(t, "ranks", &p->ranks, 1, 1 << 20, "number of ranks, N");
    option_int(t, "tensor-parallel", &p->tensor_parallel, 0, 1 << 20,
               "neighbouring ranks that share a replica of the model and a micro-batch; 0: 1, 2, 4 and 8");
    option_flag(t, "sequence-parallel", &p->sequence_parallel, "they also cut the rows of layernorms and of the residual stream");
    option_flag(t, "keep-gathered", &p->keep_gathered, "with --sequence-parallel: gathered rows are kept for the backward pass");
    option_int(t, "pipeline-parallel", &p->pipeline_parallel, 0, MAX_UNITS - 1,
               "neighbouring ranks that each have some blocks of a copy; 0: 2, 4 and 8");
    option_choice(t, "schedule", &p->schedule, SCHEDULE_WORDS, "of one pipeline; not given: all four are compared");
    option_int(t, "chunks", &p->chunks, 0, MAX_UNITS - 1, "parts of the model on each rank; 0: 2 if interleaved, else 1");
    option_text(t, "split", &p->split, "auto|N,N,...", "blocks of each part; auto: such that ranks take about equal times");
    option_text(t, "mesh", &p->mesh, "dp=N,tp=N,pp=N",
                "only this mesh of train_gpt2_3d: how many of --ranks are along each axis; '': none");
    option_int(t, "zero-stage", &p->zero_stage, 0, 1, "of --mesh: what is sharded over dp, 0 nothing, 1 optimizer state");
    option_text(t, "emulate-ms", &p->emulate, "F,B,W[,HEAD]",
                "of --mesh: actions last so many ms, as in a run with this option; '': as long as computing takes");
}
static void options_of_fsdp(OptionTable* t, PlanOptions* p) {
    option_heading(t, "The column fsdp, as train_gpt2_fsdp's options of these names");
    option_choice(t, "sharding", &p->sharding, "full|grad-op|hybrid|none",
                  "full: freed after each use; grad-op: kept until the backward pass; hybrid: full in groups; none: as DDP");
    option_int(t, "shard-group", &p->shard_group, 0, 1 << 20, "ranks that hold one replica of the model; with --sharding hybrid");
    option_int(t, "wrap-blocks", &p->wrap_blocks, 0, MAX_UNITS - 1, "blocks gathered at a time; 0: the whole model");
    option_int(t, "limit-all-gathers", &p->limit_all_gathers, 1, 256,
               "such groups that may be gathered at a time, besides the root");
    option_choice(t, "reduce-dtype", &p->reduce_dtype, "fp32|model", "the precision in which gradients are sent and added");
    option_flag(t, "cpu-offload", &p->offload, "shards are kept on the host, and AdamW runs there");
    option_float(t, "host-link", &p->host_link, 1, 1e15,
                 "bytes/s between a device and its host, with --cpu-offload; the default is PCIe 4.0 x16");
    option_float(t, "host-bandwidth", &p->host_bandwidth, 1, 1e15,
                 "bytes/s of host memory for a rank's AdamW, with --cpu-offload; the default is an eighth of a DGX A100's");
    option_heading(t, "Compressed gradients beside ddp, as train_gpt2_compress's options of these names");
    option_choice(t, "compress", &p->compress, COMPRESS_WORDS "|all",
                  "how the gradients of matrices travel; all: only a table of the methods");
    option_flag(t, "error-feedback", &p->error_feedback,
                "keep what was not sent; default: on for int4, onebit-adam and powersgd");
    option_float(t, "top-k-fraction", &p->fraction, 1e-6, 1, "share of a matrix's elements that top-k sends");
    option_int(t, "rank", &p->rank, 1, 1024, "rank of powersgd's matrices");
    option_float(t, "bucket-mb", &p->bucket_mb, 1e-6, 1e6, "MiB of gradients per bucket");
    option_float(t, "communication-ms", &p->communication_ms, 0, 1e9,
                 "ms in which ranks sum all gradients whole; all others take by their bytes. 0: from the links");
}
static void options_of_device(OptionTable* t, PlanOptions* p) {
    option_heading(t, "Device");
    option_text(t, "gpu", &p->gpu_name, PLAN_GPU_NAMES,
                "peak, memory and its bandwidth, links, nodes, --algorithm nccl, where not given; '': none");
    option_text(t, "here", &p->here, "FILE", "what sh dev/bench/here.sh has measured, for --gpu cpu-here");
    option_text(t, "node", &p->node_name, "NAME", "machine: " PLAN_NODE_NAMES "; '': none");
    option_choice(t, "device", &p->device, "gpu|cpu", "which program: NCCL or MPI, and how many logits it keeps");
    option_float(t, "memory", &p->memory, 0, 1e9, "GB of a rank's device; 0: --gpu's, or several in the tables");
    option_float(t, "reserve", &p->reserve, 0, 1e6, "GB of it that a rank cannot use: context, NCCL, fragmentation");
    option_float(t, "peak-flops", &p->peak_flops, 0, 1e18, "dense FLOP/s of a rank's device; 0: an H100's, 989e12, fp32 67e12");
    option_float(t, "mfu", &p->mfu, 1e-6, 1, "the share of --peak-flops that one rank alone reaches");
    option_float(t, "compute-ms", &p->compute_ms, 0, 1e9, "measured ms of a micro-batch on one rank; 0: from peak and MFU");
    option_float(t, "memory-bandwidth", &p->memory_bandwidth, 0, 1e15,
                 "bytes/s of a device's memory, for AdamW's 28 bytes a parameter; 0: it takes no time");
}
static void options_of_links(OptionTable* t, PlanOptions* p) {
    option_heading(t, "Links");
    option_text(t, "link", &p->link, "nvlink|nvlink3|nvlink2|pcie|infiniband|hdr|FILE",
                "inside a node; FILE: from comm_bench --json");
    option_text(t, "inter-link", &p->inter_link, "nvlink|nvlink3|nvlink2|pcie|infiniband|hdr|FILE", "between nodes");
    option_int(t, "ranks-per-node", &p->ranks_per_node, 0, 1 << 20, "ranks in each node; 0: all are in one node");
    option_int(t, "nics", &p->nics, 0, 1 << 20, "network interfaces of each node; 0: one for each rank");
    option_choice(t, "algorithm", &p->algorithm, "ring|tree|nccl", "of collectives; nccl: what NCCL takes on --gpu for each");
    option_float(t, "efficiency", &p->efficiency, 1e-3, 1, "the share of the links' bandwidth that collectives reach");
    option_float(t, "sm-share", &p->sm_share, 0, 1, "the share of a device's processors that communication takes from compute");
}
static void options_of_output(OptionTable* t, PlanOptions* p) {
    option_heading(t, "Cost of a run");
    option_float(t, "tokens", &p->run.tokens, 0, 1e18, "of the whole run, which gives hours and GPU-hours; 0: no cost");
    option_float(t, "price", &p->run.price, 0, 1e6, "of a GPU for an hour, in any currency; 0: none");
    option_float(t, "watts", &p->run.watts, 0, 1e6, "of a GPU, for kWh; 0: --gpu's at most");
    option_heading(t, "Other questions, and how answers are printed");
    option_flag(t, "recommend", &p->recommends,
                "search the best mesh for --model on --ranks of --gpu: dp, tp, pp, ZeRO, recomputation, micro-batches");
    option_flag(t, "validate", &p->validates, "compare predictions with what others have published");
    option_text(t, "published", &p->published, "FILE", "the figures for --validate");
    option_flag(t, "json", &p->json, "all tables as one JSON object; bytes and seconds");
    option_flag(t, "exact", &p->exact, "print all digits of bytes");
}
static void plan_options(OptionTable* t, PlanOptions* p) {
    plan_defaults(p);
    options_of_model(t, p);
    options_of_ranks(t, p);
    options_of_fsdp(t, p);
    options_of_device(t, p);
    options_of_links(t, p);
    options_of_output(t, p);
}

// ---- the device ----
static void take_gpu_or_node(PlanOptions* p) {
    static PlanGpu gpu; // of a node, or this machine
    const PlanNode* node = plan_node(p->node_name);
    require(p->node_name[0] == '\0' || node != NULL, "--node %s is not known; give one of " PLAN_NODE_NAMES, p->node_name);
    if (node) {
        gpu = plan_node_gpu(node);
        require(p->gpu_name[0] == '\0' || strcmp(p->gpu_name, node->gpu) == 0,
                "--node %s has %s, not --gpu %s; leave out one of the two", node->name, node->gpu, p->gpu_name);
        p->gpu = &gpu;
    } else if (strcmp(p->gpu_name, "cpu-here") == 0) {
        gpu = plan_here(p->here);
        p->gpu = &gpu;
    } else if (p->gpu_name[0] != '\0') {
        p->gpu = plan_gpu(p->gpu_name);
        require(p->gpu != NULL, "--gpu %s is not known; give one of " PLAN_GPU_NAMES, p->gpu_name);
    }
}
// What a rank can use: of --memory, of --gpu, or of an H100 if its peak is taken.
static void take_room(PlanOptions* p, OptionTable* t) {
    bool is_h100 = !p->gpu && p->device == DEVICE_GPU && p->compute_ms == 0 && !option_given(t, "peak-flops");
    double memory = p->memory > 0 ? 1e9 * p->memory : p->gpu ? p->gpu->memory : is_h100 ? plan_gpu("h100")->memory : INFINITY;
    static char given[32];
    snprintf(given, sizeof given, "%.4g GB", p->memory);
    p->room = memory - 1e9 * p->reserve;
    p->shares_room = p->memory == 0 && p->gpu && p->gpu->peak16 == 0;
    p->room_of = p->memory > 0 ? given : p->gpu ? p->gpu->name : "an h100";
    require(p->room > 0, "--reserve %g leaves nothing of %.4g GB; lower it", p->reserve, 1e-9 * memory);
}
static double rank_room(const PlanOptions* p, int N) { return p->shares_room ? p->room / N : p->room; }
// What --gpu or --node say of everything that is not given.
static void take_device(PlanOptions* p, OptionTable* t) {
    take_gpu_or_node(p);
    if (p->gpu) {
        bool is_here = p->gpu->peak16 == 0, is_measured = is_here && p->gpu->peak32 > 0;
        require(!is_here || is_measured || (p->compute_ms > 0 && option_given(t, "link")),
                "--gpu cpu-here knows only the memory, because there is no %s: measure a micro-batch and the link, and give"
                " --compute-ms and --link FILE, or let sh dev/bench/here.sh measure", p->here);
        if (is_here && !option_given(t, "device")) p->device = DEVICE_CPU;
        if (is_measured && !option_given(t, "precision")) p->precision = FP32;
        if (is_measured && !option_given(t, "mfu")) p->mfu = 1;
        if (is_measured && !option_given(t, "link")) p->link = p->here;
        p->gpu_links = !is_here && !option_given(t, "link") && !option_given(t, "inter-link");
        if (!option_given(t, "peak-flops")) p->peak_flops = p->precision == FP32 ? p->gpu->peak32 : p->gpu->peak16;
        if (!option_given(t, "memory-bandwidth")) p->memory_bandwidth = p->gpu->bandwidth;
        if (!option_given(t, "ranks-per-node")) p->ranks_per_node = p->gpu->per_node;
        if (!option_given(t, "nics")) p->nics = p->gpu->nics;
        if (!option_given(t, "algorithm") && p->gpu_links && p->gpu->nccl_inside > 0) p->algorithm = PLAN_NCCL;
        if (!option_given(t, "watts")) p->run.watts = p->gpu->watts;
    }
    take_room(p, t);
}

// ---- checks ----
static bool is_one_of(const char* name, const char* const* names, size_t n) {
    for (size_t i = 0; i < n; i++) if (strcmp(name, names[i]) == 0) return true;
    return false;
}
// Dies if an option is given that is (or, with others, that is not) one of names (n) beside --`with`.
static void forbid(const OptionTable* t, const char* const* names, size_t n, bool others, const char* with, const char* why) {
    for (int i = 0; i < t->count; i++) {
        const OptionSpec* s = &t->specs[i];
        require(!s->given || is_one_of(s->name, names, n) == others,
                "--%s cannot be used with --%s, which %s; leave one of the two out", s->name, with, why);
    }
}
#define FORBID(t, names, with, why) forbid(t, names, sizeof names / sizeof names[0], false, with, why)
#define FORBID_OTHERS(t, names, with, why) forbid(t, names, sizeof names / sizeof names[0], true, with, why)

// --params, --recommend and --validate leave out what the tables of stages need.
static void check_questions(const PlanOptions* p, OptionTable* t) {
    static const char* const of_params[] = {
        "params", "master", "precision", "ranks", "gpu", "node", "here", "memory", "reserve", "json"
    };
    static const char* const of_recommend[] = {
        "recommend", "model", "layers", "heads", "channels", "vocab-size", "ranks", "seq-len", "total-batch-size", "tokens",
        "price", "watts", "gpu", "node", "here", "reserve", "json", "exact"
    };
    static const char* const of_validate[] = { "validate", "published", "reserve", "json" };
    require(!(p->recommends && p->validates), "--recommend and --validate are two questions: give one of them");
    require(p->validates || !option_given(t, "published"), "--published is for --validate; give it as well");
    if (p->recommends) FORBID_OTHERS(t, of_recommend, "recommend", "tries all of them");
    else if (p->validates) FORBID_OTHERS(t, of_validate, "validate", "takes those of each published row");
    else if (p->params > 0) FORBID_OTHERS(t, of_params, "params", "describes a model of unknown shape");
}
static void check_model(const PlanOptions* p, OptionTable* t) {
    require(p->params == 0 || p->params >= 1, "--params must be at least 1, not %g", p->params);
    require(p->params > 0 || !option_given(t, "master"),
            "--master is for --params: our stages always keep an fp32 copy of 16-bit weights; leave it out");
    require(p->precision != FP32 || !option_given(t, "master"),
            "--master cannot be used with --precision fp32, whose weights are the master copy");
    require(p->compute_ms == 0 || !(option_given(t, "peak-flops") || option_given(t, "mfu")),
            "--compute-ms replaces --peak-flops and --mfu: give either that or these");
    require(p->o.total_batch_size == 0 || !option_given(t, "accumulation"),
            "--total-batch-size %lld decides how many micro-batches a step has; leave out --accumulation", p->o.total_batch_size);
    require(p->o.total_batch_size % p->o.seq_len == 0 || p->recommends,
            "--total-batch-size %lld is no multiple of --seq-len %lld; choose one that is", p->o.total_batch_size, p->o.seq_len);
    require(p->run.tokens > 0 || !(option_given(t, "price") || option_given(t, "watts")),
            "--%s is for the cost of a run; give its --tokens as well", option_given(t, "price") ? "price" : "watts");
}
static void check_sharding(const PlanOptions* p, OptionTable* t) {
    static const char* const of_stages[] = { "sharding", "shard-group", "wrap-blocks", "limit-all-gathers", "reduce-dtype",
                                             "cpu-offload", "compress" };
    if (p->mesh[0] != '\0') FORBID(t, of_stages, "mesh", "is train_gpt2_3d, without fsdp and compression");
    require(p->offload || !(option_given(t, "host-link") || option_given(t, "host-bandwidth")),
            "--%s is for --cpu-offload; give it as well", option_given(t, "host-link") ? "host-link" : "host-bandwidth");
    require(p->shard_group <= p->ranks, "--shard-group %lld is more than the %lld ranks; lower it, or raise --ranks",
            p->shard_group, p->ranks);
    bool all = p->compress == COMPRESS_ALL, whole = p->compress == COMPRESS_NONE;
    require(all || p->compress == COMPRESS_TOP_K || !option_given(t, "top-k-fraction"),
            "--top-k-fraction is for --compress top-k; give it as well");
    require(all || p->compress == COMPRESS_POWERSGD || !option_given(t, "rank"),
            "--rank is for --compress powersgd; give it as well");
    require(!whole || !(option_given(t, "error-feedback") || option_given(t, "bucket-mb") || option_given(t, "communication-ms")),
            "--error-feedback, --bucket-mb and --communication-ms are for --compress; give it as well");
    require(p->communication_ms == 0 || p->ranks > 1, "--communication-ms %g: one rank sends nothing; raise --ranks",
            p->communication_ms);
}
static void check_links(const PlanOptions* p, OptionTable* t) {
    require(p->ranks_per_node > 0 || !(option_given(t, "nics") || option_given(t, "inter-link")),
            "--%s is about nodes, and --ranks-per-node 0 says that there is one; give --ranks-per-node as well",
            option_given(t, "nics") ? "nics" : "inter-link");
    require(p->algorithm != PLAN_NCCL || (p->gpu && p->gpu->nccl_inside > 0),
            "--algorithm nccl depends on the device: give --gpu and one of NVIDIA's");
    require(p->algorithm != PLAN_NCCL || p->gpu_links, "--algorithm nccl takes --gpu's links: leave out --link and --inter-link");
}
static void check_pipelines(const PlanOptions* p, OptionTable* t) {
    bool mesh = p->mesh[0] != '\0', one = p->pipeline_parallel > 0 || mesh;
    require(!mesh || !(option_given(t, "tensor-parallel") || option_given(t, "pipeline-parallel")),
            "--mesh %s has tensor and pipeline parallelism; leave out --tensor-parallel and --pipeline-parallel", p->mesh);
    require(mesh || !(option_given(t, "zero-stage") || option_given(t, "emulate-ms")),
            "--zero-stage and --emulate-ms are for --mesh; give it as well");
    require(one || strcmp(p->split, "auto") == 0, "--split %s is for one number of ranks; give --pipeline-parallel as well",
            p->split);
    require(!one || p->accumulation <= PLAYED_MICRO_BATCHES,
            "--accumulation %lld: a pipeline is played with %d micro-batches at most, and its bubble is short by then; lower it",
            p->accumulation, PLAYED_MICRO_BATCHES);
    require(one || option_given(t, "schedule") || p->chunks == 0,
            "--chunks %lld is for --schedule interleaved; give it as well", p->chunks);
}
static void check_options(const PlanOptions* p, OptionTable* t) {
    check_questions(p, t);
    check_model(p, t);
    check_sharding(p, t);
    check_links(p, t);
    check_pipelines(p, t);
}

// ---- what they mean ----
// How p ranks are planned with a schedule.
static Plan plan_of_pipe(const PlanOptions* o, Plan plan, int p, int schedule) {
    bool interleaved = schedule == SCHEDULE_INTERLEAVED;
    plan.pipe.p = p;
    plan.pipe.schedule = schedule;
    plan.pipe.v = o->chunks > 0 && (interleaved || !o->compares) ? (int)o->chunks : interleaved ? 2 : 1;
    plan.pipe.rank = PLAN_MOST;
    plan.pipe.split = o->split;
    plan.accumulation = o->accumulation ? (int)o->accumulation : p;
    return plan;
}

// How the mesh is planned that --mesh asks for.
static Plan plan_of_mesh(const PlanOptions* o, Plan plan) {
    Axes axes = axes_choose(o->mesh, plan.N);
    plan = plan_of_pipe(o, plan, axes.size[MESH_PP], o->schedule);
    plan.t = axes.size[MESH_TP];
    plan.zero_stage = (int)o->zero_stage;
    return plan;
}

// GPT-3's names, as the options that say the same. Llama's blocks are in no stage.
static void take_model(Options* o) {
    static char depth[16];
    const PlanShape* shape = plan_shape(o->model);
    GPT2Config unused;
    if (shape == NULL || gpt2_named_config(o->model, &unused)) return;
    require(!shape->llama, "--model %s has grouped queries, a gated MLP and an untied head, which no stage of this course has:"
            " only --recommend plans it", o->model);
    snprintf(depth, sizeof depth, "d%d", shape->L);
    o->model = depth;
    if (o->channels == 0) o->channels = shape->C;
    if (o->heads == 0) o->heads = shape->NH;
    if (o->vocab_size == 0) o->vocab_size = shape->V;
}
static GPT2Config planned_config(Options o) {
    Tokenizer bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.vocab_size = 257;
    take_model(&o);
    return config_from_options(&o, &bytes, (int)o.seq_len);
}
// Dies, in the stages' words, if they cannot be run so. These errors come before any table.
static void plan_check(const PlanOptions* p, const Plan* plan) {
    LayerShapes shapes = { plan->B, plan->T, plan->config.C, plan->config.NH, plan->config.Vp, 1 };
    require(plan->T <= plan->config.max_T, "--seq-len %d is longer than the %d positions of the model; lower it or choose a model"
            " with more", plan->T, plan->config.max_T);
    layer_shapes_check(shapes);
    if (p->mesh[0] != '\0') {
        Plan mesh = plan_of_mesh(p, *plan);
        plan_bytes(&mesh, PLAN_3D);
        return;
    }
    plan_sharding(plan);
    plan_bytes(plan, PLAN_TP);
    if (p->pipeline_parallel == 0) return;
    Plan pipe = plan_of_pipe(p, *plan, (int)p->pipeline_parallel, p->schedule);
    plan_bytes(&pipe, PLAN_PP);
}
static Plan plan_from_options(const PlanOptions* p) {
    Plan plan;
    memset(&plan, 0, sizeof plan);
    plan.config = planned_config(p->o);
    plan.B = (int)p->o.batch_size;
    plan.T = (int)p->o.seq_len;
    plan.accumulation = p->accumulation ? (int)p->accumulation : 1;
    plan.X = p->precision == FP32 ? 4 : 2;
    plan.N = (int)p->ranks;
    plan.gpu = p->device == DEVICE_GPU;
    plan.memory_bandwidth = p->memory_bandwidth;
    plan.rooms = (int)p->limit_all_gathers;
    plan.wrap_blocks = (int)p->wrap_blocks;
    plan.t = p->tensor_parallel ? (int)p->tensor_parallel : 1;
    plan.sequence_parallel = p->sequence_parallel;
    plan.keep_gathered = p->keep_gathered;
    PlanFsdp fsdp = { p->sharding, (int)p->shard_group, p->reduce_dtype, p->offload, p->host_link, p->host_bandwidth };
    plan.fsdp = fsdp;
    plan_check(p, &plan);
    return plan;
}

// One link that is so fast that `plan` takes --communication-ms to sum all gradients, whatever the messages.
static Network network_of_milliseconds(const PlanOptions* p, const Plan* plan) {
    double bytes = (double)(gpt2_num_elements(plan->config) * plan->X) * (plan->N - 1) / plan->N;
    Link link = link_of(0, collective_passes(PLAN_ALL_REDUCE) * bytes / (1e-3 * p->communication_ms));
    Network w = { link, link, 0, 0, PLAN_RING, NULL, 1, p->sm_share };
    return w;
}
static Network network_of_options(const PlanOptions* p, const Plan* plan) {
    if (p->communication_ms > 0) return network_of_milliseconds(p, plan);
    Network w = { link_open(p->link), link_open(p->inter_link), (int)p->ranks_per_node, (int)p->nics, p->algorithm, p->gpu,
                  p->efficiency, p->sm_share };
    if (w.nics == 0) w.nics = w.ranks_per_node;
    if (p->gpu_links) {
        const LinkPreset *near = link_preset(p->gpu->nvlink ? "nvlink" : "pcie"), *far = link_preset("infiniband");
        w.inside = link_of(near->alpha, p->gpu->inside);
        w.between = link_of(far->alpha, p->gpu->nic);
    }
    return w;
}
#endif
