// layers.cu - the layers as a shared library, build/layers.so: every function of the *_api.h by its plain name,
// for test/kernels/check_layers.py. It is C on the CPU, and CUDA on a GPU or under the emulator. Functions that the tests need in
// addition follow the layers: inline ones, single kernels, and facts about matrix products.
#include "../../llmc/base/precision.h"
#ifdef __CUDACC__
#include <cuda_runtime.h>
static int memsets; // that were asked for
#define cudaMemsetAsync(...) (memsets++, cudaMemsetAsync(__VA_ARGS__))
#define GELU_EPILOGUES 1 // in fp32, too, where programs do without until a GPU has shown how exact they are
extern "C" {
#endif
static double products_flops;
#define COUNT_PRODUCT(M, N, K) (products_flops += 2.0 * (M) * (N) * (K)) // of newton_schulz, as the library is asked for them
#include "../../llmc/device/compress_api.h" // declared as C, they are C++ functions with plain names
#include "../../llmc/device/device_api.h"
#include "../../llmc/device/experts_api.h"
#include "../../llmc/device/muon_api.h"
#ifdef __CUDACC__
}
#endif
#include "../../llmc/device/compress.h"
#include "../../llmc/device/experts.h"
#include "../../llmc/device/muon.h"
#ifdef __CUDACC__
extern "C" {
#endif

// ---- inline functions ----
int elements_are(void) { return (int)FLOATX_DTYPE; }
void host_adamw(AdamW a, floatX* params, float* master, float* m, float* v, const void* grads, DType type, float grad_scale,
                size_t n, size_t no_decay, double* square) {
    host_adamw_update(a, params, master, m, v, grads, type, grad_scale, n, no_decay, square);
}
double host_squares(const void* x, DType type, size_t n) { return host_sum_squares(x, type, n); }
size_t work_of_newton_schulz(int rows, int cols) { return newton_schulz_work(rows, cols); }
double flops_of_newton_schulz(int rows, int cols) { return newton_schulz_flops(rows, cols); }
double flops_so_far(void) { return products_flops; }
void logits_at_a_time(int elements) { classifier_elements = elements; }

#ifndef __CUDACC__
// ---- the CPU ----
void* array_alloc(size_t bytes) { return malloc(bytes ? bytes : 1); }
void array_free(void* p) { free(p); }
void array_copy(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
void begin(LayerShapes s, AttentionChoice attention, int deterministic, int what) {
    (void)attention; (void)deterministic; (void)what;
    layers_free();
    layers_init(s);
}
void set_threads(int n) { omp_set_num_threads(n); }
void convert_numbers(void* dst, DType to, const void* src, DType from, size_t n) { convert_dtype(dst, to, src, from, n); }
size_t too_large(const float* x, size_t n, DType to, size_t* first) { return count_too_large(x, n, to, first); }
#define EACH(f) _Pragma("omp simd") for (size_t i = 0; i < n; i++) y[i] = f(x[i]);
void exp_each(float* y, const float* x, size_t n) { EACH(exp_f32) }
void gelu_each(float* y, const float* x, size_t n) { EACH(gelu_f32) }
void gelu_derivative_each(float* y, const float* x, size_t n) { EACH(gelu_derivative_f32) }
#else
// ---- a GPU ----
void* array_alloc(size_t bytes) {
    void* p = NULL;
    cuda_check(cudaMalloc(&p, bytes ? bytes : 1), "the test's memory");
    return p;
}
void array_free(void* p) { cuda_check(cudaFree(p), "the test's memory"); }
void array_copy(void* dst, const void* src, size_t bytes) {
    cuda_check(cudaDeviceSynchronize(), "the kernels before a copy");
    if (bytes > 0) cuda_check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "a copy");
    cuda_check(cudaDeviceSynchronize(), "a copy"); // one from pageable memory may still be in flight
}
// Prepares layers of these shapes as layers_init does, but with less memory: the workspace is only as large as the layers under test
// ask for, and is filled with NaN.
enum { KERNELS, PRODUCTS, ATTENTION, COMPRESSION, EXPERTS };
void begin(LayerShapes s, AttentionChoice attention, int deterministic, int what) {
    static void* owned[3];
    for (int i = 0; i < 3; i++) if (owned[i]) array_free(owned[i]);
    bool same_attention = attention == cuda_layers.attention && deterministic == cuda_layers.deterministic;
    if (what != ATTENTION || !same_attention) attention_free(); // else plans stay valid
    if (cuda_matmul.handle != NULL) matmul_free();
    memset(&cuda_layers, 0, sizeof cuda_layers);
    cuda_layers.shapes = s;
    cuda_layers.shared_bytes = 99 << 10;
    cuda_layers.attention = attention;
    cuda_layers.deterministic = deterministic;
    size_t kernels = std::max({ encoder_workspace_bytes(s), layernorm_workspace_bytes(s), bias_workspace_bytes(s),
                                attention_own_workspace_bytes(s), STATS_BLOCKS * sizeof(double) });
    size_t bytes = what == PRODUCTS ? size_max(MATMUL_WORKSPACE, bias_workspace_bytes(s))
                   : what == ATTENTION ? attention_workspace_bytes(s) : what == COMPRESSION ? COMPRESS_WORKSPACE
                   : what == EXPERTS ? EXPERTS_WORKSPACE : kernels;
    size_t sums = NEEDS_MASTER ? (size_t)s.Vp * (size_t)s.C * sizeof(float) : 0, sizes[3] = { bytes, bias_sums_bytes(s), sums };
    for (int i = 0; i < 3; i++) {
        owned[i] = array_alloc(sizes[i]);
        cuda_check(cudaMemset(owned[i], 0xff, sizes[i] ? sizes[i] : 1), "filling the workspace");
    }
    cuda_layers.workspace = owned[0];
    cuda_layers.bias_sums = (floatX*)owned[1];
    cuda_layers.weight_sums = NEEDS_MASTER ? (float*)owned[2] : NULL;
    cuda_check(cudaDeviceSynchronize(), "filling the workspace");
    if (what == PRODUCTS) matmul_init();
}
void shared_memory_is(int bytes) { cuda_layers.shared_bytes = bytes; }
int shared_memory_most(void) {
    int most;
    cuda_check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "a block's shared memory");
    return most;
}
int emulated(void) {
#ifdef CUDA_EMULATOR
    return true;
#else
    return false;
#endif
}
int limits_of_layernorm(int which) { // elements of a row: eight rows in shared memory, one, two in a block's threads
    const int limits[] = { LAYERNORM_SHARED / 8 / (int)sizeof(floatX), LAYERNORM_SHARED / (int)sizeof(floatX),
                           (int)LAYERNORM_THREADS / 2 * VEC };
    return limits[which];
}

// ---- kernels around a product ----
void bias_gelu_alone(floatX* act, floatX* out, const floatX* bias, int N, int OC) { bias_gelu_forward(act, out, bias, N, OC); }
void gelu_backward_alone(floatX* dinp, const floatX* pre, int N, int C) { gelu_backward(dinp, pre, N, C); }
void bias_backward_alone(floatX* dbias, const floatX* dout, int N, int OC, GradMode mode) {
    bias_backward(dbias, dout, N, OC, mode);
}

// ---- attention ----
int memsets_so_far(void) { return memsets; }
const char* attention_is(void) { return attention_description(); }
const char* cudnn_lacks(void) { // "": it can be opened
#if ATTENTION_BY_CUDNN
    return cudnn_load();
#else
    return "it is not for fp32";
#endif
}
int on_tensor_cores(int HS) { return attention_own_is_on_tensor_cores(HS); }
// dout NULL: forward
void attention_by(bool tensor_cores, floatX* result, float* stats, const floatX* qkv, const floatX* dout, const floatX* out, int B,
                  int T, int C, int NH) {
    AttentionCall call = { result, stats, qkv, dout, out, B, T, C, NH, C / NH };
#if ATTENTION_ON_TENSOR_CORES
    if (tensor_cores) { attention_tensor_cores(call); return; }
#endif
    require(!tensor_cores, "fp32 is not for tensor cores");
    attention_fp32_arithmetic(call);
}

// ---- matrix products: the number of plans, and the algorithm of each product ----
enum { IN_USE, TIMED, OF_BIASES, FOR_FEWER_PROCESSORS, REFUSED, WITH_A_FAILED_CANDIDATE, FEWEST_CANDIDATES,
       MOST_CANDIDATES };
int plans(int which) {
    int count = 0, fewest = INT_MAX, most = 0;
    for (const MatmulPlan& p : cuda_matmul.plans) {
        ProductShape s = p.shape;
        bool used = p.last_use > 0;
        if (p.timed) fewest = std::min(fewest, p.candidates), most = std::max(most, p.candidates);
        if (which == IN_USE) count += used;
        if (which == TIMED) count += p.timed;
        if (which == OF_BIASES) count += used && s.epilogue == CUBLASLT_EPILOGUE_BGRADB;
        if (which == FOR_FEWER_PROCESSORS) count += used && s.processors > 0;
        if (which == REFUSED) count += used && p.candidates == 0 && s.alignment >= 16 && s.m % 8 == 0; // a kernel does the epilogue
        if (which == WITH_A_FAILED_CANDIDATE) count += p.timed && p.chosen == 0; // the emulator's first
    }
    return which == FEWEST_CANDIDATES ? fewest : which == MOST_CANDIDATES ? most : count;
}
// Even ways use epilogues, odd ones a kernel after the product, and each pair uses another algorithm. Returns the number of ways.
int products_go(int way) {
    int most = 1;
    for (MatmulPlan& plan : cuda_matmul.plans) {
        bool has_epilogue = plan.shape.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
        if (plan.last_use == 0) continue;
        plan.chosen = plan.candidates == 0 || (has_epilogue && way % 2 == 1) ? -1 : way / 2 % plan.candidates;
        most = std::max(most, plan.candidates);
    }
    return 2 * most;
}
int plans_at_most(void) { return MATMUL_PLANS; }
void products_are_tried(bool tries) { cuda_matmul.tries = tries; }
// Tries every product of a step. Returns true if this leaves no temporary setting behind.
bool prepare_products(LayerShapes s) {
    void* workspace = cuda_layers.workspace;
    cuda_layers.workspace = NULL;
    matmul_prepare(s);
    bool clean = cuda_layers.workspace == NULL && !cuda_matmul.tries;
    cuda_layers.workspace = workspace;
    return clean;
}
int processors_for_products(bool all) { return all ? cuda_matmul.all_processors : cuda_matmul.processors; }
int processors_of_a_sum(void) { return SUM_PROCESSORS; }
}
#endif
