/*
cublaslt.cpp - a stand-in for the part of cuBLASLt that llmc/device/cuda/matmul.cuh uses: descriptors, layouts, the heuristic's
candidates and cublasLtMatmul with its epilogues, as cublasLt.h describes them. It should refuse what the library refuses or
forbids, so that tests find wrong calls; where the description is silent it accepts only what is known to work elsewhere.

    D = epilogue(alpha op(A) op(B) + beta C)        op(A) (m,k), op(B) (k,n), C and D (m,n), all column-major

Sums are computed in double precision and D is rounded once; the candidate with a workspace also rounds two partial sums to fp32
there. (The documentation does not say how the library's algorithms round inside a sum, but it says that they differ.)

Algorithms are numbered: 0 takes anything, 1 splits the sum, 2 needs everything aligned to 16 bytes. Two settings are sums
of 1 << number: CUDA_EMULATOR_CUBLASLT_FAILS, those that the heuristic offers and that fail when they are run, with an error
of the runtime left behind; CUDA_EMULATOR_CUBLASLT_INVALID, those whose result has a state that says not to use it. With
CUDA_EMULATOR_CUBLASLT_COUNTS=FILE, cublasLtDestroy appends a line to FILE that says what was called. A product that is the
same as the one before it, whatever its algorithm, is a repetition: only timing makes those. A shape is untried if none of its
products was repeated.
*/
#include "runtime.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <set>
#include <vector>

namespace {
struct Layout { cudaDataType type; uint64_t rows, cols; int64_t ld; int32_t order, batch; };
struct Operation {
    int32_t compute, scale, pointer_mode, trans_a, trans_b, trans_c;
    uint32_t epilogue;
    void *bias, *aux;
    int64_t aux_ld;
    int32_t bias_type, aux_type; // -1: D's
    int32_t processors; // for which an algorithm is chosen; 0: all
};
struct Preference { uint64_t workspace; uint32_t alignment_a, alignment_b, alignment_c, alignment_d, reductions; };
// What the heuristic returns, valid only for this problem.
struct Algorithm { uint64_t m, n, k; uint32_t epilogue, transposed; uint32_t number, alignment; uint64_t workspace; };
struct Problem { Operation o; Layout a, b, c, d; uint64_t m, n, k; };

struct Refusal { cublasStatus_t status; char why[256]; };
const Refusal accepted = {CUBLAS_STATUS_SUCCESS, ""};
__attribute__((format(printf, 2, 3))) Refusal refuse(cublasStatus_t status, const char* format, ...) {
    FORMATTED(why, sizeof Refusal::why, format);
    Refusal r = {status, ""};
    memcpy(r.why, why, sizeof why);
    return r;
}
cublasStatus_t answer(const char* call, const Refusal& r) { // says why
    if (r.status) emulator::explain(call, "%s", r.why);
    return r.status;
}
#define INVALID(...) return refuse(CUBLAS_STATUS_INVALID_VALUE, __VA_ARGS__)
#define UNSUPPORTED(...) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, __VA_ARGS__)
#define PASS(call) do { Refusal r_ = call; if (r_.status) return r_; } while (0)

// --- descriptors: CUDA's opaque structures hold ours ---
template <class Ours, class Theirs> Ours* ours(Theirs* p) {
    static_assert(sizeof(Ours) <= sizeof(Theirs), "it must fit into the library's own structure");
    return reinterpret_cast<Ours*>(p);
}
template <class Ours, class Theirs> const Ours* ours(const Theirs* p) { return ours<Ours>(const_cast<Theirs*>(p)); }
template <class Ours, class Theirs> cublasStatus_t create(Theirs** result, const Ours& initial) {
    *result = new Theirs();
    *ours<Ours>(*result) = initial;
    return CUBLAS_STATUS_SUCCESS;
}
struct Field { int attribute; size_t offset, size; };
#define FIELD(attribute, type, member) {attribute, offsetof(type, member), sizeof(type::member)}
const std::vector<Field> layout_fields = {
    FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type), FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows), FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    FIELD(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld), FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch),
};
const std::vector<Field> operation_fields = {
    FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Operation, compute), FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Operation, scale),
    FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, Operation, pointer_mode), FIELD(CUBLASLT_MATMUL_DESC_TRANSA, Operation, trans_a),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSB, Operation, trans_b), FIELD(CUBLASLT_MATMUL_DESC_TRANSC, Operation, trans_c),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, Operation, epilogue), FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Operation, bias),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Operation, bias_type),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, Operation, aux),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, Operation, aux_ld),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, Operation, aux_type),
    FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Operation, processors),
};
const std::vector<Field> preference_fields = {
    FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace),
    FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reductions),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, alignment_a),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, alignment_b),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, alignment_c),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, alignment_d),
};
Refusal set_field(const std::vector<Field>& fields, void* object, int attribute, const void* value, size_t size) {
    for (const Field& f : fields) {
        if (f.attribute != attribute) continue;
        if (!object || !value || size != f.size) INVALID("attribute %d has %zu bytes, not %zu", attribute, f.size, size);
        memcpy((char*)object + f.offset, value, size);
        return accepted;
    }
    UNSUPPORTED("attribute %d is not known to the emulator", attribute);
}

// --- what is refused ---
size_t size_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }
bool is_float(cudaDataType type) { return type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF; }
bool has(const Problem& p, uint32_t part) { return (p.o.epilogue & part) == part; }
bool has_bias_vector(const Problem& p) {
    return has(p, CUBLASLT_EPILOGUE_BIAS) || has(p, CUBLASLT_EPILOGUE_BGRADA) || has(p, CUBLASLT_EPILOGUE_BGRADB)
        || p.o.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
}
bool has_aux(const Problem& p) { return (p.o.epilogue & 128) != 0; }
uint64_t bias_length(const Problem& p) { return has(p, CUBLASLT_EPILOGUE_BGRADB) ? p.n : p.m; }

Refusal check_layout(const char* name, const Layout& l, uint64_t rows, uint64_t cols) {
    if (!is_float(l.type)) UNSUPPORTED("%s is of type %d; the emulator has fp32, bf16 and fp16", name, l.type);
    if (l.order != CUBLASLT_ORDER_COL || l.batch != 1) UNSUPPORTED("%s: only single column-major matrices are supported", name);
    if (!l.rows || !l.cols) INVALID("%s is empty", name);
    if (l.rows != rows || l.cols != cols)
        INVALID("%s is (%zu,%zu), where the others make it (%zu,%zu)", name, l.rows, l.cols, rows, cols);
    if (l.ld < (int64_t)l.rows) INVALID("%s: the leading dimension %ld is less than its %zu rows", name, (long)l.ld, l.rows);
    return accepted;
}
Refusal check_epilogue(const Problem& p) {
    const Operation& o = p.o;
    bool transposed_b_only = o.trans_a == CUBLAS_OP_N && o.trans_b == CUBLAS_OP_T;
    switch (o.epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT: case CUBLASLT_EPILOGUE_BIAS: case CUBLASLT_EPILOGUE_GELU:
        case CUBLASLT_EPILOGUE_GELU_BIAS: case CUBLASLT_EPILOGUE_GELU_AUX: case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        case CUBLASLT_EPILOGUE_DGELU: case CUBLASLT_EPILOGUE_DGELU_BGRAD: break;
        case CUBLASLT_EPILOGUE_BGRADA: case CUBLASLT_EPILOGUE_BGRADB: // known to work only for weight gradients
            if (!transposed_b_only) UNSUPPORTED("a bias gradient of an input needs A as it is and B transposed");
            break;
        default: UNSUPPORTED("epilogue %u is not known to the emulator", o.epilogue);
    }
    int own = (int)p.d.type;
    if (has_bias_vector(p) && !o.bias) INVALID("epilogue %u without a bias pointer", o.epilogue);
    if (has_bias_vector(p) && o.bias_type != -1 && o.bias_type != own) UNSUPPORTED("the bias is not of the type of D");
    if (!has_aux(p)) return accepted;
    if (!o.aux) INVALID("epilogue %u without an auxiliary pointer", o.epilogue);
    if (o.aux_ld % 8 || o.aux_ld < (int64_t)p.m)
        INVALID("the auxiliary leading dimension, %ld, must divide by 8 and be no less than the %zu rows", (long)o.aux_ld, p.m);
    if (o.aux_type != -1 && o.aux_type != own) UNSUPPORTED("the auxiliary matrix is not of the type of D");
    return accepted;
}
Refusal check_problem(const Problem& p) {
    const Operation& o = p.o;
    if (o.compute != CUBLAS_COMPUTE_32F || o.scale != CUDA_R_32F) UNSUPPORTED("the emulator computes and scales in fp32 only");
    if (o.pointer_mode != CUBLASLT_POINTER_MODE_HOST) UNSUPPORTED("alpha and beta are the host's in the emulator");
    if (o.trans_c != CUBLAS_OP_N) UNSUPPORTED("C cannot be transposed");
    if (o.processors < 0 || o.processors > 4) INVALID("an algorithm for %d of 4 multiprocessors", o.processors);
    for (int trans : {o.trans_a, o.trans_b}) if (trans != CUBLAS_OP_N && trans != CUBLAS_OP_T) UNSUPPORTED("op %d", trans);
    PASS(check_layout("A", p.a, o.trans_a ? p.k : p.m, o.trans_a ? p.m : p.k));
    PASS(check_layout("B", p.b, o.trans_b ? p.n : p.k, o.trans_b ? p.k : p.n));
    PASS(check_layout("C", p.c, p.m, p.n));
    PASS(check_layout("D", p.d, p.m, p.n));
    if (p.a.type != p.b.type || p.c.type != p.d.type) UNSUPPORTED("A and B, and C and D, must be of one type");
    if (p.d.type != p.a.type && p.d.type != CUDA_R_32F) UNSUPPORTED("D must be of the type of A, or fp32");
    return check_epilogue(p);
}
Refusal read_problem(Problem* p, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    if (!o || !a || !b || !c || !d) INVALID("a descriptor is NULL");
    *p = {*ours<Operation>(o), *ours<Layout>(a), *ours<Layout>(b), *ours<Layout>(c), *ours<Layout>(d), 0, 0, 0};
    p->m = p->d.rows;
    p->n = p->d.cols;
    p->k = p->o.trans_a ? p->a.rows : p->a.cols;
    return check_problem(*p);
}
uint64_t bytes_of(const Layout& l) { return ((l.cols - 1) * (uint64_t)l.ld + l.rows) * size_of(l.type); }
Refusal check_memory(const char* name, const void* p, uint64_t bytes, uint64_t alignment) {
    if ((uintptr_t)p % alignment) INVALID("%s, %p, is not aligned to %zu bytes", name, p, alignment);
    if (!emulator::on_device(p, bytes)) INVALID("%s: %zu bytes at %p are not in one allocation of device memory", name, bytes, p);
    return accepted;
}
Refusal check_apart(const char* name, const void* p, uint64_t bytes, const void* d, uint64_t bytes_d) {
    if ((const char*)p < (const char*)d + bytes_d && (const char*)d < (const char*)p + bytes) INVALID("%s and D overlap", name);
    return accepted;
}
struct Operands { const void *a, *b, *c; void *d, *workspace; uint64_t workspace_bytes; float alpha, beta; };
Refusal check_operands(const Problem& p, const Algorithm& g, const Operands& x) {
    uint32_t transposed = (uint32_t)(p.o.trans_a * 2 + p.o.trans_b);
    if (g.m != p.m || g.n != p.n || g.k != p.k || g.epilogue != p.o.epilogue || g.transposed != transposed)
        INVALID("the algorithm is for (%zu,%zu,%zu), epilogue %u; the product is (%zu,%zu,%zu), epilogue %u", g.m, g.n, g.k,
                g.epilogue, p.m, p.n, p.k, p.o.epilogue);
    PASS(check_memory("A", x.a, bytes_of(p.a), g.alignment));
    PASS(check_memory("B", x.b, bytes_of(p.b), g.alignment));
    PASS(check_memory("D", x.d, bytes_of(p.d), g.alignment));
    if (x.beta != 0) PASS(check_memory("C", x.c, bytes_of(p.c), g.alignment));
    if (x.beta != 0 && x.c == x.d && p.c.ld != p.d.ld) INVALID("C is D, but their leading dimensions differ");
    PASS(check_apart("A", x.a, bytes_of(p.a), x.d, bytes_of(p.d)));
    PASS(check_apart("B", x.b, bytes_of(p.b), x.d, bytes_of(p.d)));
    if (has_bias_vector(p)) PASS(check_memory("the bias", p.o.bias, bias_length(p) * size_of(p.d.type), size_of(p.d.type)));
    if (has_aux(p)) {
        Layout aux = {p.d.type, p.m, p.n, p.o.aux_ld, CUBLASLT_ORDER_COL, 1};
        PASS(check_memory("the auxiliary matrix", p.o.aux, bytes_of(aux), 16));
        PASS(check_apart("the auxiliary matrix", p.o.aux, bytes_of(aux), x.d, bytes_of(p.d)));
    }
    if (x.workspace_bytes < g.workspace)
        INVALID("a workspace of %zu bytes, where the algorithm needs %zu", x.workspace_bytes, g.workspace);
    return g.workspace ? check_memory("the workspace", x.workspace, x.workspace_bytes, 16) : accepted;
}

// --- the product ---
float get(const void* p, cudaDataType type, uint64_t i) {
    if (type == CUDA_R_32F) return ((const float*)p)[i];
    if (type == CUDA_R_16BF) return __bfloat162float(((const __nv_bfloat16*)p)[i]);
    return __half2float(((const __half*)p)[i]);
}
void put(void* p, cudaDataType type, uint64_t i, double x) {
    if (type == CUDA_R_32F) ((float*)p)[i] = (float)x;
    else if (type == CUDA_R_16BF) ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn((float)x);
    else ((__half*)p)[i] = __float2half_rn((float)x);
}
// op(X) with its rows (or, by_column, its columns) one after the other, in double precision.
std::vector<double> unpack(const void* x, const Layout& l, bool transposed, bool by_column) {
    uint64_t rows = transposed ? l.cols : l.rows, cols = transposed ? l.rows : l.cols;
    std::vector<double> out(rows * cols);
    for (uint64_t j = 0; j < l.cols; j++)
        for (uint64_t i = 0; i < l.rows; i++) {
            uint64_t row = transposed ? j : i, col = transposed ? i : j;
            out[by_column ? col * rows + row : row * cols + col] = get(x, l.type, j * (uint64_t)l.ld + i);
        }
    return out;
}
// sums (m) = a (m,k), by columns, times one column of b; k from `begin` to `end`
void multiply_column(double* sums, const double* a, const double* column, uint64_t m, uint64_t begin, uint64_t end) {
    memset(sums, 0, m * sizeof *sums);
    for (uint64_t k = begin; k < end; k++)
        for (uint64_t i = 0; i < m; i++) sums[i] += a[k * m + i] * column[k];
}
double gelu(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
double gelu_derivative(double x) {
    double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}
double epilogue_of(const Problem& p, double x, uint64_t i, uint64_t j) {
    uint64_t aux = j * (uint64_t)p.o.aux_ld + i;
    if (has(p, CUBLASLT_EPILOGUE_BIAS)) x += get(p.o.bias, p.d.type, i);
    if (has(p, CUBLASLT_EPILOGUE_GELU_AUX)) put(p.o.aux, p.d.type, aux, x);
    if (has(p, CUBLASLT_EPILOGUE_GELU)) x = gelu(x);
    if (has(p, CUBLASLT_EPILOGUE_DGELU)) x *= gelu_derivative(get(p.o.aux, p.d.type, aux));
    return x;
}
void sum_over_k(const Problem& p, const std::vector<double>& x, uint64_t length) { // x (length,k) by rows
    for (uint64_t i = 0; i < length; i++) {
        double sum = 0;
        for (uint64_t k = 0; k < p.k; k++) sum += x[i * p.k + k];
        put(p.o.bias, p.d.type, i, sum);
    }
}
// Returns whether one of the operands is nothing but zeros.
bool multiply(const Problem& p, const Algorithm& g, const Operands& x) {
    std::vector<double> a = unpack(x.a, p.a, p.o.trans_a, true), b = unpack(x.b, p.b, p.o.trans_b, true), sums(p.m), bias(p.m);
    auto is_zero = [](const std::vector<double>& v) { return std::all_of(v.begin(), v.end(), [](double y) { return y == 0; }); };
    float* partial = (float*)x.workspace; // (m,n), of the algorithm that splits the sum
    if (g.workspace) memset(x.workspace, 0xff, g.workspace);
    for (uint64_t j = 0; j < p.n; j++) {
        uint64_t half = g.number == 1 ? p.k / 2 : 0;
        if (half) {
            multiply_column(sums.data(), a.data(), &b[j * p.k], p.m, 0, half);
            for (uint64_t i = 0; i < p.m; i++) partial[j * p.m + i] = (float)sums[i];
        }
        multiply_column(sums.data(), a.data(), &b[j * p.k], p.m, half, p.k);
        for (uint64_t i = 0; i < p.m; i++) {
            double sum = half ? partial[j * p.m + i] + (float)sums[i] : sums[i];
            double y = x.alpha * sum + (x.beta != 0 ? x.beta * (double)get(x.c, p.c.type, j * (uint64_t)p.c.ld + i) : 0);
            y = epilogue_of(p, y, i, j);
            bias[i] += y;
            put(x.d, p.d.type, j * (uint64_t)p.d.ld + i, y);
        }
    }
    if (p.o.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) for (uint64_t i = 0; i < p.m; i++) put(p.o.bias, p.d.type, i, bias[i]);
    if (p.o.epilogue == CUBLASLT_EPILOGUE_BGRADA) sum_over_k(p, unpack(x.a, p.a, p.o.trans_a, false), p.m);
    if (p.o.epilogue == CUBLASLT_EPILOGUE_BGRADB) sum_over_k(p, b, p.n);
    return is_zero(a) || is_zero(b);
}

// --- candidates: one that takes anything, one that splits the sum, one that needs everything aligned to 16 bytes ---
uint32_t alignment_promised(const Problem& p, const Preference& f) {
    uint32_t bits = f.alignment_a | f.alignment_b | f.alignment_c | f.alignment_d | 256;
    for (const Layout* l : {&p.a, &p.b, &p.c, &p.d}) bits |= (uint32_t)((uint64_t)l->ld * size_of(l->type));
    return bits & -bits;
}
std::vector<Algorithm> candidates(const Problem& p, const Preference& f) {
    uint32_t element = (uint32_t)size_of(p.a.type), transposed = (uint32_t)(p.o.trans_a * 2 + p.o.trans_b);
    Algorithm plain = {p.m, p.n, p.k, p.o.epilogue, transposed, 0, element, 0}, split = plain, aligned = plain;
    split.number = 1;
    split.workspace = p.m * p.n * sizeof(float);
    aligned.number = 2;
    aligned.alignment = 16;
    std::vector<Algorithm> list;
    if (alignment_promised(p, f) >= 16) list.push_back(aligned);
    list.push_back(plain);
    if (split.workspace <= f.workspace && f.reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) list.push_back(split);
    return list;
}
bool is_in(const char* setting, uint32_t number) { return emulator::setting(setting, 0) >> number & 1; }

// --- counts ---
// for_fewer: after the first collective, for a part of the multiprocessors. Of the repetitions: of_zeros, one operand was;
// profiled, while a profiler records; late, after the first collective.
struct Counts { uint64_t products, gelus, bias_gradients, for_fewer, failures, repetitions, of_zeros, profiled, late; };
Counts counts;
using Shape = std::array<uint64_t, 7>; // m, n, k, transposed A and B, the type of D, multiprocessors
std::set<Shape> shapes, tried;
Problem last_problem;
Operands last_operands;
std::mutex counts_lock;
bool count(const Problem& p, const Operands& x, bool fails) { // returns whether it repeats the one before
    bool late = emulator::has_met_others, profiled = emulator::is_profiled();
    std::lock_guard<std::mutex> lock(counts_lock);
    const Operands& y = last_operands;
    const Problem& q = last_problem;
    bool repeats = x.a == y.a && x.b == y.b && x.d == y.d && p.m == q.m && p.n == q.n && p.k == q.k &&
        p.o.processors == q.o.processors;
    Shape shape = {p.m, p.n, p.k, (uint64_t)p.o.trans_a, (uint64_t)p.o.trans_b, (uint64_t)p.d.type, (uint64_t)p.o.processors};
    shapes.insert(shape);
    if (repeats) tried.insert(shape);
    counts.products++;
    counts.gelus += has(p, CUBLASLT_EPILOGUE_GELU) || has(p, CUBLASLT_EPILOGUE_DGELU);
    counts.bias_gradients += p.o.epilogue == CUBLASLT_EPILOGUE_BGRADA || p.o.epilogue == CUBLASLT_EPILOGUE_BGRADB;
    counts.failures += fails;
    counts.for_fewer += late && p.o.processors > 0;
    counts.repetitions += repeats;
    counts.profiled += repeats && profiled;
    counts.late += repeats && late;
    last_problem = p;
    last_operands = x;
    return repeats;
}
void count_zeros(void) {
    std::lock_guard<std::mutex> lock(counts_lock);
    counts.of_zeros++;
}
void write_counts(void) {
    emulator::append_to("CUDA_EMULATOR_CUBLASLT_COUNTS", "products %zu, with GELU %zu, untried shapes %zu, with a bias gradient %zu, "
                        "for fewer processors %zu, failed %zu, repeated %zu, of zeros %zu, profiled %zu, after a collective %zu\n",
                        counts.products, counts.gelus, shapes.size() - tried.size(), counts.bias_gradients, counts.for_fewer, counts.failures,
                        counts.repetitions, counts.of_zeros, counts.profiled, counts.late);
}
std::set<cublasLtHandle_t> handles;
std::mutex handles_lock;
bool is_handle(cublasLtHandle_t handle) {
    std::lock_guard<std::mutex> lock(handles_lock);
    return handles.count(handle) != 0;
}
} // namespace

extern "C" {
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
#define NAME(s) case CUBLAS_STATUS_##s: return "CUBLAS_STATUS_" #s;
    switch (status) {
        NAME(SUCCESS) NAME(NOT_INITIALIZED) NAME(INVALID_VALUE) NAME(NOT_SUPPORTED) NAME(EXECUTION_FAILED)
        default: return "an error";
    }
}
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    int device;
    if (cudaGetDevice(&device)) return answer(__func__, refuse(CUBLAS_STATUS_NOT_INITIALIZED, "there is no device"));
    std::lock_guard<std::mutex> lock(handles_lock);
    *handle = (cublasLtHandle_t)new char;
    handles.insert(*handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    std::lock_guard<std::mutex> lock(handles_lock);
    if (!handles.erase(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    delete (char*)handle;
    write_counts();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    return create(layout, Layout{type, rows, cols, ld, CUBLASLT_ORDER_COL, 1});
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute, cudaDataType_t scale) {
    return create(operation, Operation{compute, scale, CUBLASLT_POINTER_MODE_HOST, CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N,
                                       CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, 0, -1, -1, 0});
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return create(preference, Preference{0, 256, 256, 256, 256, CUBLASLT_REDUCTION_SCHEME_MASK});
}
#define SETS_AND_DESTROYS(descriptor, attributes, fields) \
    cublasStatus_t descriptor##SetAttribute(descriptor##_t object, attributes name, const void* value, size_t size) { \
        return answer(__func__, set_field(fields, object, name, value, size)); \
    } \
    cublasStatus_t descriptor##Destroy(descriptor##_t object) { delete object; return CUBLAS_STATUS_SUCCESS; }
SETS_AND_DESTROYS(cublasLtMatrixLayout, cublasLtMatrixLayoutAttribute_t, layout_fields)
SETS_AND_DESTROYS(cublasLtMatmulDesc, cublasLtMatmulDescAttributes_t, operation_fields)
SETS_AND_DESTROYS(cublasLtMatmulPreference, cublasLtMatmulPreferenceAttributes_t, preference_fields)

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned) {
    if (!is_handle(handle)) return answer(__func__, refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle of cublasLtCreate"));
    if (requested <= 0 || !preference || !results || !returned)
        return answer(__func__, refuse(CUBLAS_STATUS_INVALID_VALUE, "no preference, or no place for results"));
    Problem p;
    *returned = 0;
    Refusal r = read_problem(&p, operation, a, b, c, d);
    if (r.status == CUBLAS_STATUS_NOT_SUPPORTED) return r.status; // asking is not a mistake
    if (r.status) return answer(__func__, r);
    for (const Algorithm& g : candidates(p, *ours<Preference>(preference))) {
        if (*returned == requested) break;
        cublasLtMatmulHeuristicResult_t* result = &results[(*returned)++];
        *result = cublasLtMatmulHeuristicResult_t{};
        result->state = CUBLAS_STATUS_SUCCESS;
        if (is_in("CUDA_EMULATOR_CUBLASLT_INVALID", g.number)) result->state = CUBLAS_STATUS_NOT_SUPPORTED;
        if (result->state) continue; // the other fields are not valid
        *ours<Algorithm>(&result->algo) = g;
        result->workspaceSize = g.workspace;
        result->wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algorithm,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    if (!is_handle(handle)) return answer(__func__, refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle of cublasLtCreate"));
    if (!alpha || !beta) return answer(__func__, refuse(CUBLAS_STATUS_INVALID_VALUE, "alpha or beta is NULL"));
    Problem p;
    Refusal r = read_problem(&p, operation, a, b, c, d);
    if (r.status) return answer(__func__, r);
    Algorithm g = algorithm ? *ours<Algorithm>(algorithm) : candidates(p, Preference{0, 1, 1, 1, 1, 0})[0];
    Operands x = {A, B, C, D, workspace, workspace_bytes, *(const float*)alpha, *(const float*)beta};
    r = check_operands(p, g, x);
    if (r.status) return answer(__func__, r);
    bool fails = is_in("CUDA_EMULATOR_CUBLASLT_FAILS", g.number);
    bool repeats = count(p, x, fails);
    if (fails) {
        emulator::remember(cudaErrorLaunchOutOfResources);
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    cudaError_t error = emulator::enqueue(stream, "cublasLtMatmul", [=] { if (multiply(p, g, x) && repeats) count_zeros(); });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
}
