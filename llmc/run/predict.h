/*
predict.h - --predict N: evaluates the formulas of a run on N ranks and prints the result as a line of JSON. No rank is
started, and no device, data, tokenizer or MPI is touched, so N may be any number. This is how build/plan
(dev/plan) asks the programs.

    ./train_gpt2_zero --predict 64 --model gpt2-xl --zero-stage 3 --batch-size 4
    {"parameters":1557611200,"accumulation":1,"axes":{"tp":1,"cp":1,"pp":1,"dp":64},
     "ranks":[{"rank":0,"bytes":{...},"sent":...}]}

"ranks" lists one rank of each pipeline stage, because all ranks of a stage keep and send the same. With Muon rank 0
keeps most, and "more" says what others send. Bytes of the layers' workspace are only those of wte's fp32 sums, because
the rest depends on libraries and threads. --predict - reads many questions: each line of standard input has the options
of one question, --predict N among them. Options that a run would refuse end the program with the same message.
*/
#ifndef LLMC_RUN_PREDICT_H
#define LLMC_RUN_PREDICT_H
#include "ranks_run.h"

// Sets the fields of a model that the formulas read.
typedef void ConfigureModel(void* model, Run* run);
typedef struct { const char* ranks; int device; double gpu_memory; } PredictOptions;
enum { PREDICT_OWN, PREDICT_CPU, PREDICT_GPU }; // of --predict-device
#define PREDICT_GPU_MEMORY 80 // GB: an A100's or an H100's
#ifdef __CUDACC__
enum { PREDICT_OWN_IS_GPU = 1 };
#else
enum { PREDICT_OWN_IS_GPU = 0 };
#endif
typedef struct {
    Run *run, *clean;          // clean: as before its options were read, owned
    RanksRun* clean_ranks;     // the same of run->ranks, owned
    void *model, *clean_model; // the same for the model of the program
    size_t size;               // bytes of the model
    ConfigureModel* configure;
    PredictModel* predict;
    PredictOptions o;
    CommContext world;         // of ranks that nobody joins
    CommBackend backend;
} Predictor;

// As mpi_device_bytes and nccl_device_bytes, which need the libraries: MPI on host memory adds up pieces,
// NCCL numbers the ranks.
static inline size_t predict_mpi_bytes(const CommOptions* o, int N) {
    (void)o;
    return N > 1 ? 4 << 20 : 0;
}
static inline size_t predict_nccl_bytes(const CommOptions* o, int N) {
    (void)o;
    return (size_t)N * sizeof(int);
}

// Becomes N ranks of that device's program, of which this is the first.
static inline void predict_ranks(Predictor* p) {
    Run* run = p->run;
    char* end;
    long N = strtol(p->o.ranks, &end, 10);
    require(*end == '\0' && N >= 1 && N <= 1 << 20, "--predict wants a number of ranks from 1 to 1048576, not '%s'",
            p->o.ranks);
    bool gpu = p->o.device == PREDICT_GPU || (p->o.device == PREDICT_OWN && PREDICT_OWN_IS_GPU);
    classifier_elements = CLASSIFIER_ELEMENTS_CPU;
    if (gpu) classifier_elements = classifier_elements_cuda(1e9 * p->o.gpu_memory, run->o.deterministic);
    p->backend.device_bytes = gpu ? predict_nccl_bytes : predict_mpi_bytes;
    p->world.backend = N > 1 ? &p->backend : NULL; // one rank needs no backend
    run->ranks->all.comm.world = &p->world;
    run->ranks->all.comm.size = (int)N;
}

// Sets run as run_start does.
static inline void predict_start(Predictor* p, int argc, char** argv) {
    Run* run = p->run;
    memcpy(run, p->clean, sizeof *run);
    memcpy(run->ranks, p->clean_ranks, sizeof *run->ranks);
    memcpy(p->model, p->clean_model, p->size);
    p->o.ranks = "";
    p->o.device = PREDICT_OWN;
    p->o.gpu_memory = PREDICT_GPU_MEMORY;
    options_parse(&run->table, argc, argv);
    predict_ranks(p);
    run->tokenizer.vocab_size = run->o.vocab_size ? 0 : 257; // bytes
    run->config = config_for_run(&run->o, &run->table, &run->tokenizer, NULL);
    LayerShapes shapes = layer_shapes((int)run->o.batch_size, (int)run->o.seq_len, run->config.C, run->config.NH,
                                      run->config.Vp, 1);
    layer_shapes_check(shapes);
}

// A rank's bytes by kind, those that are not 0.
static inline void predict_print_rank(const Run* run) {
    const RanksRun* r = run->ranks;
    int BT = (int)(run->o.batch_size * run->o.seq_len / r->along[AXIS_CP]),
        Vp = run->config.Vp / (int)r->along[AXIS_TP];
    size_t bytes[MEMORY_KINDS];
    memcpy(bytes, run->predicted, sizeof bytes);
    bytes[MEMORY_WORKSPACE] = classifier_sums(BT, run->config.C, Vp) * sizeof(float);
    printf("{\"rank\":%d,\"bytes\":{", r->all.comm.rank);
    for (int k = 0, n = 0; k < MEMORY_KINDS; k++)
        if (bytes[k] > 0) printf("%s\"%s\":%zu", n++ ? "," : "", memory_kind_names[k], bytes[k]);
    printf("},\"sent\":%.17g", r->sent);
    const double* sent = r->sharing.sent;
    if (sent) printf(",\"sent_along\":{\"tp\":%.17g,\"pp\":%.17g,\"dp\":%.17g}", sent[0], sent[1], sent[2]);
    printf("}");
}

// Answers one question: a rank of each stage.
static inline void predict_answer(Predictor* p, int argc, char** argv) {
    Run* run = p->run;
    RanksRun* r = run->ranks;
    for (int stage = 0; stage == 0 || stage < r->along[AXIS_PP]; stage++) {
        predict_start(p, argc, argv);
        run_choose_batch(run, ranks_readers(run, stage)); // as ranks_start does
        p->configure(p->model, run);
        p->predict(p->model, run);
        ranks_predict_snapshot(run);
        long long tp = r->along[AXIS_TP], pp = r->along[AXIS_PP], cp = r->along[AXIS_CP];
        if (stage == 0)
            printf("{\"parameters\":%zu,\"accumulation\":%d,\"axes\":{\"tp\":%lld,\"cp\":%lld,\"pp\":%lld,\"dp\":%lld},"
                   "\"ranks\":[",
                   gpt2_num_parameters(run->config), run->accumulation, tp, cp, pp, r->all.comm.size / (tp * cp * pp));
        else printf(",");
        predict_print_rank(run);
    }
    printf("]");
    if (r->sharing.predict) {
        json_t* object = r->sharing.predict(r->sharing.self);
        char* more = json_dumps(object, JSON_COMPACT);
        printf(",\"more\":%s", more);
        free(more);
        json_decref(object);
    }
    printf("}\n");
    fflush(stdout);
}

// Answers a line's question: its words are options.
static inline void predict_answer_line(Predictor* p, char* line) {
    enum { MOST_WORDS = 128 };
    char *words[MOST_WORDS] = { NULL }, *rest = NULL;
    int n = 1;
    for (char* w = strtok_r(line, " \t\n", &rest); w != NULL; w = strtok_r(NULL, " \t\n", &rest)) {
        require(n < MOST_WORDS, "a line for --predict - has more than %d words", MOST_WORDS);
        words[n++] = w;
    }
    if (n > 1) predict_answer(p, n, words);
}

static inline bool predict_is_asked(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return false;
        if (strcmp(argv[i], "--predict") == 0 || strncmp(argv[i], "--predict=", 10) == 0) return true;
    }
    return false;
}
// Adds its options to the table. If --predict is given, answers, and the program ends. model: of `size` bytes.
static inline void run_predict(Run* run, int argc, char** argv, ConfigureModel* configure, PredictModel* predict,
                               void* model, size_t size) {
    static Predictor p; // the table points to its options
    p.o.ranks = "";
    p.o.gpu_memory = PREDICT_GPU_MEMORY;
    options_group(&run->table, "ranks");
    option_text(&run->table, "predict", &p.o.ranks, "N|-",
                "print the memory and traffic that the formulas predict for N ranks, as JSON, and exit without "
                "starting them; -: read many questions, each a line of options");
    option_choice(&run->table, "predict-device", &p.o.device, "own|cpu|gpu",
                  "memory to predict: of this program, or of its build for the CPU or the GPU");
    option_float(&run->table, "predict-gpu-memory", &p.o.gpu_memory, 0, 1e6,
                 "GB of memory on the GPU; with more memory, more logits exist at a time");
    options_group(&run->table, NULL);
    if (!predict_is_asked(argc, argv)) return;
    p.run = run;
    p.model = model;
    p.size = size;
    p.configure = configure;
    p.predict = predict;
    p.clean = (Run*)memcpy(xcalloc(1, sizeof *run), run, sizeof *run);
    p.clean_ranks = (RanksRun*)memcpy(xcalloc(1, sizeof *run->ranks), run->ranks, sizeof *run->ranks);
    p.clean_model = memcpy(xcalloc(1, size), model, size);
    options_parse(&run->table, argc, argv);
    if (strcmp(p.o.ranks, "-") != 0) predict_answer(&p, argc, argv);
    else {
        char* line = NULL;
        size_t room = 0;
        while (getline(&line, &room, stdin) >= 0) predict_answer_line(&p, line);
        free(line);
    }
    free(p.clean);
    free(p.clean_ranks);
    free(p.clean_model);
    exit(EXIT_SUCCESS);
}
#endif
