/*
cuda/matmul.cuh - linear layers: matrix products from cuBLASLt, with bias and GELU.

cuBLASLt is column-major: it sees a row-major (rows, cols) tensor as a column-major (cols, rows) matrix of the same
bytes. So every product is written down transposed, out^T = w inp^T for out = inp w^T, and no byte has to move.

A product may end with an epilogue of cuBLASLt: bias, GELU, its derivative, or the sum of a bias's gradient. Or the
product is made alone and a kernel of bias_gelu.cuh does the rest. Which of the two is faster, and by which of
cuBLASLt's algorithms, is found by trying: layers_prepare runs and times all of them for the products of a training
step, on scratch memory. It does so before ranks exchange anything, because NCCL's kernels hold multiprocessors while
they run, which would slow down some products by chance. The choice may differ from run to run, and then the last bits
differ. So with --deterministic, and for shapes that only sampling sees, cuBLASLt's first suggestion is taken untimed.

Both GELUs are the tanh form: cuBLASLt applies it to a sum that is not yet rounded to floatX, ours to the stored number.
In fp32 ours is always taken, because NVIDIA does not say how exact the other one is. In 16 bits the rounding that
follows is larger than its error.

Global state: the handle, two events, the table of plans below, and whether new plans are tried. cuBLASLt's scratch is
the layers' workspace.
*/
#ifndef LLMC_CUDA_MATMUL_CUH
#define LLMC_CUDA_MATMUL_CUH
#include "../weight_chunks.h"
#include "bias_gelu.cuh"
#include "common.cuh"
#include "stats.cuh"
#include <algorithm>
#include <cublasLt.h>

constexpr size_t MATMUL_WORKSPACE = 32 << 20; // what NVIDIA recommends for Hopper
constexpr int MATMUL_CANDIDATES = 32;         // algorithms asked for
constexpr int MATMUL_TRIALS = 3;              // runs of each that are timed; the shortest counts
constexpr int MATMUL_BEST = 3;                // this many of the fastest are timed again,
                                              // each for about MATMUL_LONG milliseconds
#ifdef CUDA_EMULATOR
constexpr float MATMUL_LONG = 0.1f;           // the time of an emulated product means nothing
#else
constexpr float MATMUL_LONG = 20;
#endif
constexpr int MATMUL_PLANS = 128;
// Multiprocessors that NCCL's kernel takes on Hopper where NVSwitch adds (NVLS)
constexpr int SUM_PROCESSORS = 16;

// D (m,n) = op(A) op(B), column-major: A (m,k), or (k,m) where a_transposed; B (k,n), or (n,k) where b_transposed.
// All ints, so that two shapes can be compared as memory.
// d_fp32: D is not floatX. newton_schulz: A, B and D are floatNS, and every rank must get equal bits. processors: for
// how many multiprocessors an algorithm is chosen; 0: all. This and alignment are found out by matmul_plan.
typedef struct {
    int a_transposed, b_transposed, m, n, k, epilogue, d_fp32, newton_schulz, alignment, processors;
} ProductShape;
typedef struct {
    const char* layer;    // for messages
    ProductShape shape;
    void* d;              // D = op(A) op(B) + beta D
    const floatX *a, *b;
    floatX* bias;         // EPILOGUE_BIAS, GELU_AUX_BIAS: read; BGRADB: written. NULL: none
    floatX* aux;          // GELU_AUX_BIAS: D before the GELU, written; DGELU: the same, read. NULL: none
    float beta;           // 0: D is overwritten, 1: added to
} Product;

// ---- plans: everything that cuBLASLt wants to know about one shape, and the algorithms that it offers ----
typedef struct {
    ProductShape shape;
    uint64_t last_use;    // 0: empty
    bool timed;           // all its candidates were tried: it stays
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    int candidates;       // 0: cuBLASLt cannot do this
    cublasLtMatmulHeuristicResult_t candidate[MATMUL_CANDIDATES]; // the one that it expects to be fastest comes first
    int chosen;           // which of them; -1: none, the product is made alone and a kernel follows
} MatmulPlan;
static struct {
    cublasLtHandle_t handle;
    cudaEvent_t start, stop;
    bool tries;           // each new product is tried in every way when it is first made
    int all_processors;   // the GPU's
    int processors;       // for products from here on; 0: all (layers_overlap_sum)
    uint64_t uses;
    MatmulPlan plans[MATMUL_PLANS];
} cuda_matmul;

static inline void cublas_check(cublasStatus_t status, const char* what) {
    invariant(status == CUBLAS_STATUS_SUCCESS, "%s: cuBLASLt reports %s", what, cublasLtGetStatusString(status));
}

template <typename T> static inline void plan_set(MatmulPlan* plan, cublasLtMatmulDescAttributes_t attribute, T value) {
    cublas_check(cublasLtMatmulDescSetAttribute(plan->operation, attribute, &value, sizeof value),
                 "describing a product");
}
static inline void plan_set_pointers(MatmulPlan* plan, Product p) {
    if (p.bias != NULL) plan_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.aux != NULL) plan_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
}

static inline void plan_describe(MatmulPlan* plan, Product p) {
    ProductShape s = p.shape;
    DType dtype = s.newton_schulz ? FLOATNS_DTYPE : FLOATX_DTYPE;
    const cudaDataType_t type = dtype == DTYPE_F32 ? CUDA_R_32F : dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    cublas_check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), p.layer);
    plan_set(plan, CUBLASLT_MATMUL_DESC_TRANSA, s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set(plan, CUBLASLT_MATMUL_DESC_TRANSB, s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, (cublasLtEpilogue_t)s.epilogue);
    if (p.aux != NULL) plan_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)s.m);
    if (s.processors > 0) plan_set(plan, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, (int32_t)s.processors);
    plan_set_pointers(plan, p); // their alignment decides which algorithms there are
    int a_rows = s.a_transposed ? s.k : s.m, b_rows = s.b_transposed ? s.n : s.k;
    cublas_check(cublasLtMatrixLayoutCreate(&plan->a, type, a_rows, s.a_transposed ? s.m : s.k, a_rows), p.layer);
    cublas_check(cublasLtMatrixLayoutCreate(&plan->b, type, b_rows, s.b_transposed ? s.k : s.n, b_rows), p.layer);
    cublas_check(cublasLtMatrixLayoutCreate(&plan->d, s.d_fp32 ? CUDA_R_32F : type, s.m, s.n, s.m), p.layer);
}

template <typename T> static inline void preference_set(cublasLtMatmulPreference_t preference,
                                                        cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                 "choosing an algorithm");
}

// Algorithms that need no more than our workspace and alignment, and that add up partial sums in fp32, in a fixed order
static inline void preference_set_all(cublasLtMatmulPreference_t preference, int alignment) {
    preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)MATMUL_WORKSPACE);
    preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    for (auto matrix : { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES })
        preference_set(preference, matrix, (uint32_t)alignment);
}
// Moves the results that cuBLASLt stands by to the front, in their order, and returns their number.
static inline int results_valid(cublasLtMatmulHeuristicResult_t* results, int n) {
    int valid = 0;
    for (int i = 0; i < n; i++) if (results[i].state == CUBLAS_STATUS_SUCCESS) results[valid++] = results[i];
    return valid;
}
static inline void plan_ask(MatmulPlan* plan, Product p) {
    cublasLtMatmulPreference_t preference;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference), p.layer);
    preference_set_all(preference, p.shape.alignment);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cuda_matmul.handle, plan->operation, plan->a, plan->b,
                                                           plan->d, plan->d, preference, MATMUL_CANDIDATES,
                                                           plan->candidate, &plan->candidates);
    cublasLtMatmulPreferenceDestroy(preference);
    plan->candidates = status == CUBLAS_STATUS_SUCCESS ? results_valid(plan->candidate, plan->candidates) : 0;
    invariant(plan->candidates > 0 || p.shape.epilogue != CUBLASLT_EPILOGUE_DEFAULT,
              "%s: cuBLASLt has no algorithm for a product of (%d,%d) and (%d,%d) (%s)", p.layer, p.shape.m, p.shape.k,
              p.shape.k, p.shape.n, cublasLtGetStatusString(status));
}

#ifndef GELU_EPILOGUES // test/unit/layers.cu also allows them in fp32, where its tests print their error
#define GELU_EPILOGUES (FLOATX_DTYPE != DTYPE_F32)
#endif
// An epilogue may take vectors 16 bytes at a time, which no preference can express;
// aux needs a leading dimension that 8 divides.
static inline bool epilogue_is_possible(Product p) {
    if (p.shape.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    return p.shape.alignment >= 16 && (p.aux == NULL || (GELU_EPILOGUES && p.shape.m % 8 == 0)); // only GELU uses aux
}

static inline void plan_clear(MatmulPlan* plan) {
    if (plan->operation != NULL) {
        cublasLtMatrixLayoutDestroy(plan->a);
        cublasLtMatrixLayoutDestroy(plan->b);
        cublasLtMatrixLayoutDestroy(plan->d);
        cublasLtMatmulDescDestroy(plan->operation);
    }
    memset(plan, 0, sizeof *plan);
}

// Returns the largest power of two, up to 16, that divides every address of a product. A thread and TMA need no more;
// and with a higher bound the algorithm would depend on where a program keeps its parameters.
static inline int product_alignment(Product p) {
    uintptr_t bits = (uintptr_t)p.a | (uintptr_t)p.b | (uintptr_t)p.d | (uintptr_t)p.bias | (uintptr_t)p.aux | 16;
    return (int)(bits & -bits);
}

// Returns the plan of a product; if there is none yet it takes the place of the least recently used one.
static inline MatmulPlan* matmul_plan(Product p) {
    MatmulPlan *oldest = NULL, *found = NULL;
    p.shape.alignment = product_alignment(p);
    p.shape.processors = p.shape.newton_schulz ? 0 : cuda_matmul.processors;
    for (MatmulPlan* plan = cuda_matmul.plans; plan < cuda_matmul.plans + MATMUL_PLANS && found == NULL; plan++) {
        if (plan->last_use > 0 && memcmp(&plan->shape, &p.shape, sizeof p.shape) == 0) found = plan;
        if (!plan->timed && (oldest == NULL || plan->last_use < oldest->last_use)) oldest = plan;
    }
    if (found == NULL) {
        invariant(oldest != NULL, "%s: more than %d shapes of matrix products in a training step", p.layer,
                  MATMUL_PLANS);
        found = oldest;
        plan_clear(found);
        found->shape = p.shape;
        if (epilogue_is_possible(p)) {
            plan_describe(found, p);
            plan_ask(found, p);
        }
        found->chosen = found->candidates > 0 ? 0 : -1;
    }
    found->last_use = ++cuda_matmul.uses;
    return found;
}

// ---- doing a product ----
// The same without its epilogue. A GELU's input, which cuBLASLt would leave in aux, is then the product itself.
static inline Product product_alone(Product p) {
    if (p.shape.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) p.d = p.aux;
    p.shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    p.bias = p.aux = NULL;
    return p;
}

static inline cublasStatus_t product_launch(Product p, MatmulPlan* plan, int candidate) {
    const float alpha = 1;
    plan_set_pointers(plan, p);
    cublasStatus_t status = cublasLtMatmul(cuda_matmul.handle, plan->operation, &alpha, p.a, plan->a, p.b, plan->b,
                                           &p.beta, p.d, plan->d, p.d, plan->d, &plan->candidate[candidate].algo,
                                           cuda_layers.workspace, MATMUL_WORKSPACE, compute_stream);
    if (status == CUBLAS_STATUS_SUCCESS) check_launch(p.layer);
    else cudaGetLastError(); // of a kernel that could not be launched, say: the next check must not take it for its own
    return status;
}

// Does the work of an epilogue by a kernel. m is the length of a row of D.
static inline void product_finish(Product p) {
    ProductShape s = p.shape;
    floatX* d = (floatX*)p.d; // no epilogue follows sums in fp32
    if (s.epilogue == CUBLASLT_EPILOGUE_BIAS) bias_gelu_forward(NULL, d, p.bias, s.n, s.m);
    if (s.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) bias_gelu_forward(d, p.aux, p.bias, s.n, s.m);
    if (s.epilogue == CUBLASLT_EPILOGUE_DGELU) gelu_backward(d, p.aux, s.n, s.m);
    if (s.epilogue == CUBLASLT_EPILOGUE_BGRADB) bias_backward(p.bias, p.b, s.k, s.n, GRAD_SET);
}

// Computes p by its own plan, or by the plan without an epilogue and a kernel.
// Returns cuBLASLt's status: the caller decides what it means.
static inline cublasStatus_t product_by(Product p, MatmulPlan* plan, int candidate) {
    if (plan->shape.epilogue == p.shape.epilogue) return product_launch(p, plan, candidate);
    cublasStatus_t status = product_launch(product_alone(p), plan, candidate);
    if (status == CUBLAS_STATUS_SUCCESS) product_finish(p);
    return status;
}

// Returns the mean time of `runs` runs of a product, in milliseconds; INFINITY if cuBLASLt refuses it.
static inline float product_time(Product p, MatmulPlan* plan, int candidate, int runs) {
    float time;
    cuda_check(cudaEventRecord(cuda_matmul.start, compute_stream), p.layer);
    for (int i = 0; i < runs; i++)
        if (product_by(p, plan, candidate) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    cuda_check(cudaEventRecord(cuda_matmul.stop, compute_stream), p.layer);
    cuda_check(cudaEventSynchronize(cuda_matmul.stop), p.layer);
    cuda_check(cudaEventElapsedTime(&time, cuda_matmul.start, cuda_matmul.stop), p.layer);
    return time / (float)runs;
}
// Returns the shortest of some single runs, after one to warm up.
static inline float product_time_once(Product p, MatmulPlan* plan, int candidate) {
    float shortest = INFINITY;
    for (int trial = -1; trial < MATMUL_TRIALS; trial++) {
        float time = product_time(p, plan, candidate, 1);
        if (trial >= 0) shortest = fminf(shortest, time);
    }
    return shortest;
}

// Tries every algorithm of a plan once, then the MATMUL_BEST fastest for longer, chooses the fastest of these and
// returns its time. The second round is needed because a GPU that has just begun to work runs at a higher clock than in
// the middle of training, and because single runs differ by more than good algorithms do.
static inline float plan_time(MatmulPlan* plan, Product p) {
    float once[MATMUL_CANDIDATES], best = INFINITY;
    for (int i = 0; i < plan->candidates; i++) once[i] = product_time_once(p, plan, i);
    for (int k = 0; k < MATMUL_BEST && k < plan->candidates; k++) {
        int i = (int)(std::min_element(once, once + plan->candidates) - once);
        if (once[i] == INFINITY) break; // the others are refused
        float time = product_time(p, plan, i, (int)fminf(1000, fmaxf(1, MATMUL_LONG / once[i])));
        once[i] = INFINITY; // so that the next one is found
        if (time < best) plan->chosen = i;
        best = fminf(best, time);
    }
    plan->timed = true;
    return best;
}

// Chooses the fastest way of a product: an algorithm of its plan; or -1, and an algorithm of the plan without epilogue.
static inline void plan_choose(MatmulPlan* plan, Product p) {
    float time = plan_time(plan, p);
    if (p.shape.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return;
    if (plan_time(matmul_plan(product_alone(p)), p) < time) plan->chosen = -1;
}

static inline void product(Product p) {
    if (p.shape.n == 0) return; // D, row-major, has no rows
    MatmulPlan* plan = matmul_plan(p);
    bool may_repeat = p.beta == 0;            // the output is not also an input
    bool may_differ = !p.shape.newton_schulz; // from the choice of another rank
    if (may_repeat && may_differ && cuda_matmul.tries && !plan->timed) plan_choose(plan, p);
    if (plan->chosen < 0) plan = matmul_plan(product_alone(p));
    cublas_check(product_by(p, plan, plan->chosen), p.layer);
}

// A sum over ranks that overlaps with products holds multiprocessors: an algorithm with one block for each of the GPU's
// would have to wait for those, and take twice as long. With --deterministic nothing changes, because bits must not
// depend on whether a sum is under way.
void layers_overlap_sum(bool overlaps) {
    int left = cuda_matmul.all_processors > SUM_PROCESSORS ? cuda_matmul.all_processors - SUM_PROCESSORS : 1;
    cuda_matmul.processors = overlaps && !cuda_layers.deterministic ? left : 0;
}

// A second call does nothing.
static inline void matmul_init(void) {
    if (cuda_matmul.handle != NULL) return;
    int device;
    cuda_check(cudaGetDevice(&device), "starting cuBLASLt");
    cuda_check(cudaDeviceGetAttribute(&cuda_matmul.all_processors, cudaDevAttrMultiProcessorCount, device),
               "starting cuBLASLt");
    cublas_check(cublasLtCreate(&cuda_matmul.handle), "starting cuBLASLt");
    cuda_check(cudaEventCreate(&cuda_matmul.start), "creating an event");
    cuda_check(cudaEventCreate(&cuda_matmul.stop), "creating an event");
}
static inline void matmul_free(void) {
    for (int i = 0; i < MATMUL_PLANS; i++) plan_clear(&cuda_matmul.plans[i]);
    cudaEventDestroy(cuda_matmul.start);
    cudaEventDestroy(cuda_matmul.stop);
    cublasLtDestroy(cuda_matmul.handle);
    memset(&cuda_matmul, 0, sizeof cuda_matmul);
}

// ---- the layers, row-major in layers.h and transposed here ----
// out^T (OC,N) = w (OC,C) inp^T (C,N) + bias along OC
void matmul_forward(floatX* out, const floatX* inp, const floatX* w, const floatX* bias, int N, int C, int OC) {
    int epilogue = bias != NULL ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    product({ "matmul_forward", { 1, 0, OC, N, C, epilogue, 0, 0, 0, 0 }, out, w, inp, (floatX*)bias, NULL, 0 });
}
// pre^T = w inp^T + bias, out = gelu(pre)
void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp, const floatX* w, const floatX* bias, int N, int C,
                         int OC) {
    ProductShape shape = { 1, 0, OC, N, C, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0, 0, 0, 0 };
    product({ "matmul_gelu_forward", shape, out, w, inp, (floatX*)bias, pre, 0 });
}
// forward: out = inp w^T, so dinp^T (C,N) = w^T (C,OC) dout^T (OC,N)
void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* w, int N, int C, int OC) {
    ProductShape shape = { 0, 0, C, N, OC, CUBLASLT_EPILOGUE_DEFAULT, 0, 0, 0, 0 };
    product({ "matmul_backward_input", shape, dinp, w, dout, NULL, NULL, 0 });
}
// forward: out = gelu(pre) w^T, so dpre^T = w^T dout^T * gelu'(pre)^T
void matmul_gelu_backward_input(floatX* dinp, const floatX* dout, const floatX* w, const floatX* pre, int N, int C,
                                int OC) {
    ProductShape shape = { 0, 0, C, N, OC, CUBLASLT_EPILOGUE_DGELU, 0, 0, 0, 0 };
    product({ "matmul_gelu_backward_input", shape, dinp, w, dout, NULL, (floatX*)pre, 0 });
}
// forward: out = inp w^T + bias, so dw^T (C,OC) = inp^T (C,N) dout (N,OC), dbias = the sums of dout over N. The
// epilogue can only overwrite a bias's gradient. With GRAD_ADD it writes to scratch, rounded to floatX, and a small
// kernel adds that: our kernel would read all of dout again. Nothing says that the epilogue adds up in a fixed order:
// with --deterministic our kernel does.
void matmul_backward_weight(floatX* dw, floatX* dbias, const floatX* dout, const floatX* inp, int N, int C, int OC,
                            GradMode mode) {
    if (N == 0) { weight_without_rows(dw, (size_t)OC * (size_t)C * sizeof *dw, dbias, OC, mode); return; }
    bool in_epilogue = dbias != NULL && !cuda_layers.deterministic;
    ProductShape shape = {
        0, 1, C, OC, N, in_epilogue ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_DEFAULT, 0, 0, 0, 0
    };
    floatX* sums = mode == GRAD_ADD ? cuda_layers.bias_sums : dbias;
    product({ "matmul_backward_weight", shape, dw, inp, dout, in_epilogue ? sums : NULL, NULL,
              mode == GRAD_ADD ? 1.0f : 0.0f });
    if (in_epilogue && mode == GRAD_ADD) add_in_place(dbias, sums, (size_t)OC);
    if (dbias != NULL && !in_epilogue) bias_backward(dbias, dout, N, OC, mode);
}
void matmul_backward_weight_fp32(float* dw, const floatX* dout, const floatX* inp, int N, int C, int OC,
                                 GradMode mode) {
    if (N == 0) { weight_without_rows(dw, (size_t)OC * (size_t)C * sizeof *dw, NULL, OC, mode); return; }
    ProductShape shape = { 0, 1, C, OC, N, CUBLASLT_EPILOGUE_DEFAULT, NEEDS_MASTER, 0, 0, 0 };
    product({ "matmul_backward_weight", shape, dw, inp, dout, NULL, NULL, mode == GRAD_ADD ? 1.0f : 0.0f });
}
void matmul_backward_weight_chunk(floatX* dw, const floatX* dout, const floatX* inp, int row, int n, int N, int C,
                                  int OC, GradMode mode) {
    weight_add_chunk(cuda_layers.weight_sums, dw, dout, inp, row, n, N, C, OC, mode);
}

// ---- before training: every product of a step is tried ----
// Operands as large as the largest, in elements of floatX. Nobody reads the results.
typedef struct {
    floatX *wide;     // (N,4C) or the classifier's logits
    floatX *a, *b;    // (N,4C)
    floatX *w, *bias; // (4C,C) or (Vp,C); (4C)
    float* sums;      // (Vp,C), or nothing if the classifier works in one chunk
    void* workspace;
} MatmulScratch;

// Places the arrays one after another from `memory` on; NULL: only computes the bytes, which it returns.
static inline size_t scratch_place(MatmulScratch* m, char* memory, LayerShapes s) {
    size_t N = (size_t)layer_rows(s), C = (size_t)s.C, rows = (size_t)classifier_rows((int)N, s.Vp), Vp = (size_t)s.Vp;
    const size_t elements[] = { size_max(N * 4 * C, rows * Vp), N * 4 * C, N * 4 * C, size_max(4 * C, Vp) * C, 4 * C };
    floatX** const arrays[] = { &m->wide, &m->a, &m->b, &m->w, &m->bias };
    size_t bytes = 0;
    for (int i = 0; i < 5; i++) {
        if (memory != NULL) *arrays[i] = (floatX*)(memory + bytes);
        bytes += round_up(elements[i] * sizeof(floatX), 256);
    }
    if (memory != NULL) m->sums = (float*)(memory + bytes);
    bytes += round_up(classifier_sums((int)N, s.C, s.Vp) * sizeof(float), 256);
    if (memory != NULL) m->workspace = memory + bytes;
    return bytes + size_max(MATMUL_WORKSPACE, bias_workspace_bytes(s));
}

struct RandomNumbers { // x: uniform in [-1, 1), the same from run to run
    floatX* x; float size; uint32_t seed;
    template <int W> __device__ void at(size_t i) const {
        Floats<W> numbers;
        #pragma unroll
        for (int k = 0; k < W; k++) {
            uint32_t h = (uint32_t)(i + k) * 2654435761u + seed;
            h = (h ^ (h >> 15)) * 2246822519u;
            h = (h ^ (h >> 13)) * 3266489917u;
            numbers.x[k] = size * ((float)(h >> 8) / 8388608.0f - 1);
        }
        store(x + i, numbers);
    }
};
// Fills all operands before a product, because earlier products leave larger and larger numbers in them. Zeros will not
// do: they need less power, so the GPU runs faster than it will in training, and another algorithm may win.
static inline void scratch_fill(MatmulScratch m) {
    size_t n = (size_t)((floatX*)m.sums - m.wide);
    for_pieces(n, true, RandomNumbers { m.wide, 1, 1 }, "layers_prepare");
}

// Makes every product of a step once, by the layers themselves: a block's four, then the classifier's. Of ranks that
// share the model, one adds the biases of the second and the fourth; a product with a bias is also tried without it.
// They also compute gradients of weights while a sum is under way, or without one.
static inline void make_every_product(MatmulScratch m, LayerShapes s) {
    int N = layer_rows(s), C = s.C, D = C / s.parts, at_a_time = classifier_rows(N, s.Vp);
    const int inputs[] = { C, D, C, 4 * D }, outputs[] = { 3 * D, C, 4 * D, C };
    for (int i = 0; i < 4; i++) {
        int in = inputs[i], out = outputs[i];
        scratch_fill(m);
        if (i == 2) matmul_gelu_forward(m.wide, m.b, m.a, m.w, m.bias, N, in, out);
        else matmul_forward(m.wide, m.a, m.w, m.bias, N, in, out);
        scratch_fill(m);
        if (i == 3) matmul_gelu_backward_input(m.a, m.wide, m.w, m.b, N, in, out);
        else matmul_backward_input(m.a, m.wide, m.w, N, in, out);
        for (bool beside : { false, true }) {
            if (beside && s.parts == 1) continue;
            scratch_fill(m);
            layers_overlap_sum(beside);
            matmul_backward_weight(m.w, m.bias, m.wide, m.a, N, in, out, GRAD_SET);
            layers_overlap_sum(false);
        }
    }
    for (int rows : { at_a_time, N % at_a_time }) {
        if (rows == 0) continue; // there are no rows left over
        scratch_fill(m);
        matmul_forward(m.wide, m.a, m.w, NULL, rows, C, s.Vp);
        scratch_fill(m);
        if (classifier_sums(N, C, s.Vp) > 0) matmul_backward_weight_fp32(m.sums, m.wide, m.a, rows, C, s.Vp, GRAD_SET);
        else matmul_backward_weight(m.w, NULL, m.wide, m.a, rows, C, s.Vp, GRAD_SET);
        scratch_fill(m);
        matmul_backward_input(m.a, m.wide, m.w, rows, C, s.Vp);
    }
}

// Tries every product of a training step, in memory that it frees again, less than the model will need. If there is not
// enough memory, the model will not fit either, and its own error says more.
static inline void matmul_prepare(LayerShapes s) {
    MatmulScratch m = {};
    void* memory;
    size_t bytes = scratch_place(&m, NULL, s);
    if (cuda_layers.deterministic) return; // what is chosen by time may be another algorithm in the next run
    cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // clears it
        return;
    }
    cuda_check(error, "layers_prepare");
    cuda_check(cudaProfilerStop(), "layers_prepare"); // until layers_init: a profile is of training
    scratch_place(&m, (char*)memory, s);
    cuda_layers.workspace = m.workspace;
    cuda_matmul.tries = true;
    make_every_product(m, s);
    cuda_matmul.tries = false;
    cuda_layers.workspace = NULL;
    cuda_check(cudaStreamSynchronize(compute_stream), "layers_prepare");
    cuda_check(cudaFree(memory), "layers_prepare");
}
#endif
