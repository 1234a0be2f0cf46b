/*
cudnn.cpp - a stand-in for the part of cuDNN that llmc/device/cuda/cudnn_graph.cuh uses: descriptors of the backend API, and an
interpreter of graphs of matrix products, pointwise operations, reductions and transpositions on the tensors' own dimensions,
strides and types. It should refuse what cuDNN refuses, with the same status; test/kernels/cudnn_plans/mistakes.cpp asks both. It also
refuses mistakes for which cuDNN computes something else, or crashes: tensors without uid or type, descriptors that are not
finalised or of another kind, results of other shapes than the operands', virtual tensors that nothing computes, addresses for
tensors that are not in the graph.

Operations run one after the other, in fp32 (products in double), each result rounded to its tensor's type. A product into
fp32 memory that the graph reads later is added up there in pieces, whose order follows the seed: the last bits differ from
run to run. From 9.6 on cuDNN sets that memory to 0 itself, when it comes to the product: until then it is full of NaN here,
so that what reads it too early gets NaN. A plan's workspace is overwritten.
*/
#include "runtime.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cudnn.h>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

struct cudnnContext { cudaStream_t stream; };

namespace {
typedef std::array<int64_t, 4> Index; // batch, head, row, column
struct Tensor {
    int64_t uid, alignment;
    cudnnDataType_t type;
    Index dim, stride;
    bool is_virtual, by_value;
    int64_t elements() const { return dim[0] * dim[1] * dim[2] * dim[3]; }
    int64_t extent() const { // elements from the first to the last
        int64_t n = 1;
        for (int i = 0; i < 4; i++) n += (dim[i] - 1) * stride[i];
        return n;
    }
};
struct Operation {
    cudnnBackendDescriptorType_t kind;
    int mode;                   // cudnnPointwiseMode_t or cudnnReduceTensorOp_t
    int64_t axis;
    std::vector<Tensor> inputs; // x or a, b, mask, as many as there are
    Tensor result;
    bool accumulates;
};
struct Graph {
    std::vector<Operation> operations; // each after those that it reads from
    std::map<int64_t, Tensor> tensors;
};

// ---- errors ----
thread_local char last_error[512];
__attribute__((format(printf, 2, 3))) cudnnStatus_t refuse(cudnnStatus_t status, const char* format, ...) {
    FORMATTED(why, 500, format);
    snprintf(last_error, sizeof last_error, "Reason: %s", why);
    return status;
}
#define REFUSE_UNLESS(cond, status, ...) do { if (!(cond)) return refuse(CUDNN_STATUS_##status, __VA_ARGS__); } while (0)
#define PASS(call) do { cudnnStatus_t s_ = call; if (s_ != CUDNN_STATUS_SUCCESS) return s_; } while (0)

// ---- descriptors ----
struct Value { int64_t count; std::vector<char> bytes; };
struct Descriptor {
    cudnnBackendDescriptorType_t kind;
    bool finalized;
    std::map<int, Value> values;
    Tensor tensor;                      // what finalising made of them, by kind
    Operation operation;
    std::shared_ptr<const Graph> graph; // of a graph, and of whatever was made from it
};
std::set<Descriptor*> alive;

size_t size_of(cudnnBackendAttributeType_t type) {
    switch (type) {
        case CUDNN_TYPE_BOOLEAN: return sizeof(bool);
        case CUDNN_TYPE_INT64: return sizeof(int64_t);
        case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_BACKEND_DESCRIPTOR: return sizeof(void*);
        default: return sizeof(int); // the enumerations
    }
}
bool is_operation(int kind) {
    return kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR || kind == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR
        || kind == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR || kind == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR;
}
bool has(const Descriptor* d, int name) { return d->values.count(name) > 0; }
// The values of an attribute; none if it was not set.
template <typename T> std::vector<T> all(const Descriptor* d, int name) {
    auto found = d->values.find(name);
    if (found == d->values.end()) return {};
    std::vector<T> v((size_t)found->second.count);
    memcpy((void*)v.data(), found->second.bytes.data(), v.size() * sizeof(T));
    return v;
}
template <typename T> T one(const Descriptor* d, int name, T otherwise = T()) {
    if (has(d, name)) memcpy((void*)&otherwise, d->values.at(name).bytes.data(), sizeof otherwise);
    return otherwise;
}
void set_number(Descriptor* d, int name, int64_t value) {
    d->values[name] = { 1, std::vector<char>((const char*)&value, (const char*)(&value + 1)) };
}
Descriptor* child(const Descriptor* d, int name) { return one<Descriptor*>(d, name); }

// ---- finalising: each function checks the attributes and keeps the result ----
cudnnStatus_t finalize_tensor(Descriptor* d) {
    std::vector<int64_t> dim = all<int64_t>(d, CUDNN_ATTR_TENSOR_DIMENSIONS);
    std::vector<int64_t> stride = all<int64_t>(d, CUDNN_ATTR_TENSOR_STRIDES);
    Tensor& t = d->tensor;
    t = { one<int64_t>(d, CUDNN_ATTR_TENSOR_UNIQUE_ID), one<int64_t>(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT),
          (cudnnDataType_t)one<int>(d, CUDNN_ATTR_TENSOR_DATA_TYPE, -1), {}, {}, one<bool>(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL),
          one<bool>(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE) };
    REFUSE_UNLESS(has(d, CUDNN_ATTR_TENSOR_UNIQUE_ID), BAD_PARAM, "a tensor without uid");
    REFUSE_UNLESS(t.alignment > 0 && (t.alignment & (t.alignment - 1)) == 0, BAD_PARAM, "tensor %ld is aligned to %ld bytes",
                  (long)t.uid, (long)t.alignment);
    REFUSE_UNLESS(!dim.empty() && dim.size() == stride.size(), BAD_PARAM, "tensor %ld has %zu dimensions and %zu strides",
                  (long)t.uid, dim.size(), stride.size());
    REFUSE_UNLESS(!(t.is_virtual && t.by_value), BAD_PARAM, "tensor %ld is virtual and by value", (long)t.uid);
    REFUSE_UNLESS(t.type == CUDNN_DATA_FLOAT || t.type == CUDNN_DATA_HALF || t.type == CUDNN_DATA_BFLOAT16
                      || (t.is_virtual && (t.type == CUDNN_DATA_INT32 || t.type == CUDNN_DATA_BOOLEAN)),
                  NOT_SUPPORTED_DATA_TYPE, "tensor %ld is of type %d", (long)t.uid, (int)t.type);
    REFUSE_UNLESS(!t.by_value || t.type == CUDNN_DATA_FLOAT, NOT_SUPPORTED_DATA_TYPE, "the number %ld is not fp32", (long)t.uid);
    if (dim.size() != 4) return CUDNN_STATUS_SUCCESS; // operations refuse it
    for (int i = 0; i < 4; i++) {
        REFUSE_UNLESS(dim[(size_t)i] > 0 && stride[(size_t)i] > 0, BAD_PARAM, "tensor %ld has a dimension or stride of 0",
                      (long)t.uid);
        t.dim[(size_t)i] = dim[(size_t)i];
        t.stride[(size_t)i] = stride[(size_t)i];
    }
    return CUDNN_STATUS_SUCCESS;
}
bool broadcasts(const Tensor& from, const Tensor& to) {
    for (size_t i = 0; i < 4; i++) if (from.dim[i] != to.dim[i] && from.dim[i] != 1) return false;
    return true;
}
#define OPERAND(name) child(d, CUDNN_ATTR_OPERATION_##name)
cudnnStatus_t finalize_matmul(Descriptor* d) {
    Descriptor *a = OPERAND(MATMUL_ADESC), *b = OPERAND(MATMUL_BDESC), *c = OPERAND(MATMUL_CDESC);
    Descriptor* math = OPERAND(MATMUL_DESC);
    REFUSE_UNLESS(math, BAD_PARAM, "a matmul without its arithmetic");
    REFUSE_UNLESS(a && b && c, NOT_SUPPORTED, "a matmul without A, B or C");
    for (Descriptor* t : { a, b, c }) REFUSE_UNLESS(t->tensor.dim[0] > 0, NOT_SUPPORTED, "a matmul takes four dimensions");
    Index p = a->tensor.dim, q = b->tensor.dim, r = c->tensor.dim;
    REFUSE_UNLESS(p[3] == q[2] && r[2] == p[2] && r[3] == q[3], BAD_PARAM, "matmul of (%ld,%ld) (%ld,%ld) to (%ld,%ld)",
                  (long)p[2], (long)p[3], (long)q[2], (long)q[3], (long)r[2], (long)r[3]);
    REFUSE_UNLESS(p[0] == q[0] && p[1] == q[1] && p[0] == r[0] && p[1] == r[1], BAD_PARAM,
                  "matmul of different batches or heads");
    d->operation = { d->kind, 0, 0, { a->tensor, b->tensor }, c->tensor, false };
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_pointwise(Descriptor* d) {
    Descriptor *x = OPERAND(POINTWISE_XDESC), *b = OPERAND(POINTWISE_BDESC), *mask = OPERAND(POINTWISE_TDESC);
    Descriptor *y = OPERAND(POINTWISE_YDESC), *math = OPERAND(POINTWISE_PW_DESCRIPTOR);
    REFUSE_UNLESS(math && x && y, BAD_PARAM, "a pointwise operation without X, Y or what to do");
    int mode = one<int>(math, CUDNN_ATTR_POINTWISE_MODE, -1);
    int64_t axis = one<int64_t>(math, CUDNN_ATTR_POINTWISE_AXIS, -1);
    bool select = mode == CUDNN_POINTWISE_BINARY_SELECT;
    bool binary = mode == CUDNN_POINTWISE_ADD || mode == CUDNN_POINTWISE_SUB || mode == CUDNN_POINTWISE_MUL
        || mode == CUDNN_POINTWISE_DIV || mode == CUDNN_POINTWISE_CMP_GE;
    bool unary = mode == CUDNN_POINTWISE_EXP || mode == CUDNN_POINTWISE_LOG || mode == CUDNN_POINTWISE_IDENTITY
        || mode == CUDNN_POINTWISE_GEN_INDEX;
    REFUSE_UNLESS(binary || select || unary, NOT_SUPPORTED, "pointwise mode %d is not known to the emulator", mode);
    REFUSE_UNLESS(!!b == (binary || select) && !!mask == select, BAD_PARAM, "pointwise mode %d with %s B, %s mask", mode,
                  b ? "a" : "no", mask ? "a" : "no");
    REFUSE_UNLESS(mode != CUDNN_POINTWISE_GEN_INDEX || (axis >= 0 && axis < 4), BAD_PARAM, "an index along axis %ld", (long)axis);
    d->operation = { d->kind, mode, axis, { x->tensor }, y->tensor, false };
    for (Descriptor* more : { b, mask }) if (more) d->operation.inputs.push_back(more->tensor);
    for (const Tensor& t : d->operation.inputs)
        REFUSE_UNLESS(t.dim[0] > 0 && broadcasts(t, y->tensor), BAD_PARAM, "tensor %ld does not broadcast to the result",
                      (long)t.uid);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_reduction(Descriptor* d) {
    Descriptor *math = OPERAND(REDUCTION_DESC), *x = OPERAND(REDUCTION_XDESC), *y = OPERAND(REDUCTION_YDESC);
    REFUSE_UNLESS(math && x && y, BAD_PARAM, "a reduction without X, Y or what to do");
    int op = one<int>(math, CUDNN_ATTR_REDUCTION_OPERATOR, -1);
    REFUSE_UNLESS(op == CUDNN_REDUCE_TENSOR_ADD || op == CUDNN_REDUCE_TENSOR_MAX, NOT_SUPPORTED,
                  "reduction %d is not known to the emulator", op);
    Index p = x->tensor.dim, q = y->tensor.dim;
    REFUSE_UNLESS(p[0] == q[0] && p[1] == q[1] && p[2] == q[2] && q[3] == 1, BAD_PARAM,
                  "a reduction to another shape than (.., rows, 1)");
    d->operation = { d->kind, op, 0, { x->tensor }, y->tensor, false };
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_reshape(Descriptor* d) {
    Descriptor *x = OPERAND(RESHAPE_XDESC), *y = OPERAND(RESHAPE_YDESC);
    REFUSE_UNLESS(x && y, BAD_PARAM, "a reshape without X or Y");
    REFUSE_UNLESS(x->tensor.elements() == y->tensor.elements() && x->tensor.extent() == y->tensor.extent(), BAD_PARAM,
                  "a reshape from %ld elements to %ld", (long)x->tensor.elements(), (long)y->tensor.elements());
    d->operation = { d->kind, 0, 0, { x->tensor }, y->tensor, false };
    return CUDNN_STATUS_SUCCESS;
}
bool same_tensor(const Tensor& a, const Tensor& b) {
    return a.type == b.type && a.dim == b.dim && a.stride == b.stride && a.is_virtual == b.is_virtual && a.by_value == b.by_value;
}
// Orders operations so that each reads only what has been computed.
cudnnStatus_t sort_operations(Graph& g, std::vector<Operation> operations) {
    std::set<int64_t> computed, results;
    for (const Operation& o : operations)
        REFUSE_UNLESS(results.insert(o.result.uid).second, BAD_PARAM, "tensor %ld is computed twice", (long)o.result.uid);
    while (!operations.empty()) {
        auto ready = std::find_if(operations.begin(), operations.end(), [&](const Operation& o) {
            return std::all_of(o.inputs.begin(), o.inputs.end(), [&](const Tensor& t) {
                return computed.count(t.uid) > 0 || (!t.is_virtual && results.count(t.uid) == 0);
            });
        });
        REFUSE_UNLESS(ready != operations.end(), BAD_PARAM, "an operation reads a virtual tensor that nothing computes");
        computed.insert(ready->result.uid);
        g.operations.push_back(*ready);
        operations.erase(ready);
    }
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_graph(Descriptor* d) {
    std::vector<Descriptor*> list = all<Descriptor*>(d, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    REFUSE_UNLESS(!list.empty(), BAD_PARAM, "a graph without operations");
    auto g = std::make_shared<Graph>();
    std::vector<Operation> operations;
    for (Descriptor* operation : list) {
        Operation o = operation->operation;
        operations.push_back(o);
        o.inputs.push_back(o.result);
        for (const Tensor& t : o.inputs) {
            auto known = g->tensors.insert({ t.uid, t }).first;
            REFUSE_UNLESS(same_tensor(known->second, t), BAD_PARAM, "two tensors have the uid %ld", (long)t.uid);
        }
    }
    PASS(sort_operations(*g, operations));
    std::set<int64_t> read;
    for (const Operation& o : g->operations) for (const Tensor& t : o.inputs) if (!t.is_virtual) read.insert(t.uid);
    for (Operation& o : g->operations)
        o.accumulates = o.kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR && read.count(o.result.uid) > 0;
    d->graph = g;
    return CUDNN_STATUS_SUCCESS;
}
// Returns why cuDNN has no engine for a graph; "" if it has one. Only the two reasons that llmc could meet.
const char* why_unsupported(const Graph& g) {
    for (auto& [uid, t] : g.tensors) {
        bool half = t.type == CUDNN_DATA_HALF || t.type == CUDNN_DATA_BFLOAT16;
        if (!t.is_virtual && half && (t.stride[3] == 1 ? t.dim[3] : t.dim[2]) % 8 != 0)
            return "Embedding dim per head is not a multiple of 8";
    }
    for (const Operation& o : g.operations) {
        bool mixed = o.kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR && o.inputs[0].type != o.inputs[1].type;
        if (mixed && !o.inputs[1].is_virtual) return "A and B need to have the same datatype in the matmul";
    }
    return "";
}
// Bytes of workspace that a graph's plan needs: more for backward than for forward, as with cuDNN.
int64_t workspace_bytes(const Graph& g) { return 256 * (int64_t)g.operations.size(); }
cudnnStatus_t finalize_plan(Descriptor* d) {
    Descriptor* configuration = child(d, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    REFUSE_UNLESS(configuration, BAD_PARAM_NOT_FINALIZED, "a plan without an engine's configuration");
    REFUSE_UNLESS(has(d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE), BAD_PARAM, "a plan without a handle");
    d->graph = configuration->graph;
    set_number(d, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, workspace_bytes(*d->graph));
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_pack(Descriptor* d) {
    std::vector<int64_t> uids = all<int64_t>(d, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    size_t addresses = all<void*>(d, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).size();
    REFUSE_UNLESS(uids.size() == addresses, BAD_PARAM, "%zu addresses for %zu uids", addresses, uids.size());
    std::set<int64_t> different(uids.begin(), uids.end());
    REFUSE_UNLESS(different.size() == uids.size(), BAD_PARAM_DUPLICATED_ENTRIES, "a uid is there twice");
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_heuristics(Descriptor* d) {
    REFUSE_UNLESS(has(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH), BAD_PARAM, "heuristics without a graph");
    REFUSE_UNLESS(has(d, CUDNN_ATTR_ENGINEHEUR_MODE), BAD_PARAM, "heuristics without a mode");
    d->graph = child(d, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)->graph;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t finalize_engine(Descriptor*) {
    return refuse(CUDNN_STATUS_BAD_PARAM_NULL_POINTER, "to the emulator, engines come from heuristics");
}
cudnnStatus_t finalize_configuration(Descriptor*) {
    return refuse(CUDNN_STATUS_BAD_PARAM, "to the emulator, configurations come from heuristics");
}
cudnnStatus_t finalize_mode(Descriptor*) { return CUDNN_STATUS_SUCCESS; } // it has no meaning without the operation

// ---- kinds of descriptors: how they are finalised, and what may be set, which is so many values of a type ----
struct Attribute { int name; cudnnBackendAttributeType_t type; int64_t most; int of_kind; };
struct Kind { cudnnStatus_t (*finalize)(Descriptor*); std::vector<Attribute> attributes; };
const int NO_DESCRIPTOR = -1, ANY_OPERATION = -2; // instead of the kind that descriptors must have
#define KIND(name, finalize, ...) { CUDNN_BACKEND_##name##_DESCRIPTOR, { finalize, { __VA_ARGS__ } } }
#define CHILDREN(name, kind, most) { CUDNN_ATTR_##name, CUDNN_TYPE_BACKEND_DESCRIPTOR, most, kind }
#define CHILD(name, kind) CHILDREN(name, CUDNN_BACKEND_##kind##_DESCRIPTOR, 1)
#define OF(name, kind) CHILD(OPERATION_##name, kind)
#define VALUES(name, type, most) { CUDNN_ATTR_##name, CUDNN_TYPE_##type, most, NO_DESCRIPTOR }
#define VALUE(name, type) VALUES(name, type, 1)
const std::map<int, Kind> kinds = {
    KIND(TENSOR, finalize_tensor, VALUE(TENSOR_UNIQUE_ID, INT64), VALUE(TENSOR_DATA_TYPE, DATA_TYPE),
         VALUES(TENSOR_DIMENSIONS, INT64, 8), VALUES(TENSOR_STRIDES, INT64, 8), VALUE(TENSOR_BYTE_ALIGNMENT, INT64),
         VALUE(TENSOR_IS_VIRTUAL, BOOLEAN), VALUE(TENSOR_IS_BY_VALUE, BOOLEAN)),
    KIND(MATMUL, finalize_mode, VALUE(MATMUL_COMP_TYPE, DATA_TYPE)),
    KIND(POINTWISE, finalize_mode, VALUE(POINTWISE_MODE, POINTWISE_MODE), VALUE(POINTWISE_MATH_PREC, DATA_TYPE),
         VALUE(POINTWISE_AXIS, INT64)),
    KIND(REDUCTION, finalize_mode, VALUE(REDUCTION_OPERATOR, REDUCTION_OPERATOR_TYPE),
         VALUE(REDUCTION_COMP_TYPE, DATA_TYPE)),
    KIND(OPERATION_MATMUL, finalize_matmul, OF(MATMUL_ADESC, TENSOR), OF(MATMUL_BDESC, TENSOR),
         OF(MATMUL_CDESC, TENSOR), OF(MATMUL_DESC, MATMUL)),
    KIND(OPERATION_POINTWISE, finalize_pointwise, OF(POINTWISE_XDESC, TENSOR), OF(POINTWISE_BDESC, TENSOR),
         OF(POINTWISE_TDESC, TENSOR), OF(POINTWISE_YDESC, TENSOR), OF(POINTWISE_PW_DESCRIPTOR, POINTWISE)),
    KIND(OPERATION_REDUCTION, finalize_reduction, OF(REDUCTION_XDESC, TENSOR), OF(REDUCTION_YDESC, TENSOR),
         OF(REDUCTION_DESC, REDUCTION)),
    KIND(OPERATION_RESHAPE, finalize_reshape, OF(RESHAPE_XDESC, TENSOR), OF(RESHAPE_YDESC, TENSOR)),
    KIND(OPERATIONGRAPH, finalize_graph, CHILDREN(OPERATIONGRAPH_OPS, ANY_OPERATION, 1000),
         VALUE(OPERATIONGRAPH_HANDLE, HANDLE)),
    KIND(ENGINEHEUR, finalize_heuristics, CHILD(ENGINEHEUR_OPERATION_GRAPH, OPERATIONGRAPH),
         VALUE(ENGINEHEUR_MODE, HEUR_MODE), CHILDREN(ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, 100)),
    KIND(ENGINE, finalize_engine, VALUE(ENGINE_GLOBAL_INDEX, INT64)),
    KIND(ENGINECFG, finalize_configuration, CHILD(ENGINECFG_ENGINE, ENGINE)),
    KIND(EXECUTION_PLAN, finalize_plan, VALUE(EXECUTION_PLAN_HANDLE, HANDLE),
         CHILD(EXECUTION_PLAN_ENGINE_CONFIG, ENGINECFG), VALUE(EXECUTION_PLAN_WORKSPACE_SIZE, INT64)),
    KIND(VARIANT_PACK, finalize_pack, VALUES(VARIANT_PACK_UNIQUE_IDS, INT64, 1000),
         VALUES(VARIANT_PACK_DATA_POINTERS, VOID_PTR, 1000), VALUE(VARIANT_PACK_WORKSPACE, VOID_PTR)),
};
const Attribute* find_attribute(const Descriptor* d, int name) {
    for (const Attribute& a : kinds.at(d->kind).attributes) if (a.name == name) return &a;
    return nullptr;
}

// ---- running a graph ----
float load(cudnnDataType_t type, const void* p, int64_t i) {
    switch (type) {
        case CUDNN_DATA_BFLOAT16: return __bfloat162float(((const __nv_bfloat16*)p)[i]);
        case CUDNN_DATA_HALF: return __half2float(((const __half*)p)[i]);
        default: return ((const float*)p)[i];
    }
}
void store(cudnnDataType_t type, void* p, int64_t i, float x) {
    switch (type) {
        case CUDNN_DATA_BFLOAT16: ((__nv_bfloat16*)p)[i] = __float2bfloat16_rn(x); break;
        case CUDNN_DATA_HALF: ((__half*)p)[i] = __float2half_rn(x); break;
        default: ((float*)p)[i] = x;
    }
}
float rounded(cudnnDataType_t type, float x) { // x as a tensor of this type stores it; indices and truth values are small numbers
    float stored;
    store(type, &stored, 0, x);
    return load(type, &stored, 0);
}
typedef std::vector<float> Dense; // a tensor's elements in the order of their indices
struct Run {
    std::shared_ptr<const Graph> graph;
    std::map<int64_t, void*> addresses;     // of tensors in device memory
    std::map<int64_t, float> numbers;       // by value
    std::map<int64_t, Dense> virtuals;      // (extent), laid out by their strides
    std::mt19937_64 random;
    void* workspace;

    // Calls visit(offset) for each element of `shape`, with the offset in t, whose dimensions of 1 stay where they are.
    template <typename Visit> static void each(const Tensor& t, const Index& shape, Visit visit) {
        Index step;
        for (size_t i = 0; i < 4; i++) step[i] = t.dim[i] == 1 ? 0 : t.stride[i];
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t h = 0; h < shape[1]; h++)
                for (int64_t r = 0; r < shape[2]; r++)
                    for (int64_t c = 0; c < shape[3]; c++) visit(b * step[0] + h * step[1] + r * step[2] + c * step[3]);
    }
    float element(const Tensor& t, int64_t offset) {
        if (t.by_value) return numbers.at(t.uid);
        return t.is_virtual ? virtuals.at(t.uid)[(size_t)offset] : load(t.type, addresses.at(t.uid), offset);
    }
    Dense read(const Tensor& t, const Index& shape) {
        Dense x;
        each(t, shape, [&](int64_t offset) { x.push_back(element(t, offset)); });
        return x;
    }
    void put(const Tensor& t, int64_t offset, float x) {
        if (t.is_virtual) virtuals[t.uid][(size_t)offset] = rounded(t.type, x);
        else store(t.type, addresses.at(t.uid), offset, x);
    }
    void write(const Tensor& t, const Dense& x) {
        size_t i = 0;
        each(t, t.dim, [&](int64_t offset) { put(t, offset, x[i++]); });
    }

    void matmul(const Operation& o) {
        const Tensor &ta = o.inputs[0], &tb = o.inputs[1];
        Dense a = read(ta, ta.dim), b = read(tb, tb.dim), c((size_t)o.result.elements());
        const size_t batch = (size_t)(ta.dim[0] * ta.dim[1]), M = (size_t)ta.dim[2], K = (size_t)ta.dim[3], N = (size_t)tb.dim[3];
        const size_t piece = o.accumulates ? 16 : K;
        std::vector<size_t> begins;
        for (size_t k = 0; k < K; k += piece) begins.push_back(k);
        std::shuffle(begins.begin(), begins.end(), random);
        std::vector<double> row(N);
        for (size_t begin : begins)
            for (size_t m = 0; m < batch * M; m++) {
                std::fill(row.begin(), row.end(), 0.0);
                for (size_t k = begin; k < K && k < begin + piece; k++)
                    for (size_t n = 0; n < N; n++) row[n] += (double)a[m * K + k] * (double)b[(m / M * K + k) * N + n];
                for (size_t n = 0; n < N; n++) c[m * N + n] += (float)row[n];
            }
        write(o.result, c);
    }
    void pointwise(const Operation& o) {
        Dense x = read(o.inputs[0], o.result.dim), b, mask;
        if (o.inputs.size() > 1) b = read(o.inputs[1], o.result.dim);
        if (o.inputs.size() > 2) mask = read(o.inputs[2], o.result.dim);
        const Index& dim = o.result.dim;
        int64_t inner = 1; // elements in a row before the index grows
        for (int64_t axis = o.axis + 1; axis < 4; axis++) inner *= dim[(size_t)axis];
        for (size_t i = 0; i < x.size(); i++) switch (o.mode) {
            case CUDNN_POINTWISE_ADD: x[i] += b[i]; break;
            case CUDNN_POINTWISE_SUB: x[i] -= b[i]; break;
            case CUDNN_POINTWISE_MUL: x[i] *= b[i]; break;
            case CUDNN_POINTWISE_DIV: x[i] /= b[i]; break;
            case CUDNN_POINTWISE_EXP: x[i] = expf(x[i]); break;
            case CUDNN_POINTWISE_LOG: x[i] = logf(x[i]); break;
            case CUDNN_POINTWISE_CMP_GE: x[i] = x[i] >= b[i]; break;
            case CUDNN_POINTWISE_GEN_INDEX: x[i] = (float)((int64_t)i / inner % dim[(size_t)o.axis]); break;
            case CUDNN_POINTWISE_BINARY_SELECT: x[i] = mask[i] != 0 ? x[i] : b[i]; break;
            default: break; // IDENTITY
        }
        write(o.result, x);
    }
    void reduction(const Operation& o) {
        Dense x = read(o.inputs[0], o.inputs[0].dim), y((size_t)o.result.elements());
        const size_t cols = (size_t)o.inputs[0].dim[3];
        for (size_t r = 0; r < y.size(); r++) {
            y[r] = x[r * cols];
            for (size_t c = 1; c < cols; c++) {
                float next = x[r * cols + c];
                y[r] = o.mode == CUDNN_REDUCE_TENSOR_ADD ? y[r] + next : fmaxf(y[r], next);
            }
        }
        write(o.result, y);
    }
    // The same memory under other dimensions and strides.
    void reshape(const Operation& o) {
        each(o.result, o.result.dim, [&](int64_t offset) { put(o.result, offset, element(o.inputs[0], offset)); });
    }
    void run(void) {
        memset(workspace, 0xff, (size_t)workspace_bytes(*graph));
        for (const Operation& o : graph->operations)
            if (o.accumulates) each(o.result, o.result.dim, [&](int64_t offset) { put(o.result, offset, NAN); });
        for (const Operation& o : graph->operations) {
            if (o.result.is_virtual) virtuals[o.result.uid].assign((size_t)o.result.extent(), NAN);
            switch ((int)o.kind) {
                case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR: matmul(o); break;
                case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR: pointwise(o); break;
                case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR: reduction(o); break;
                default: reshape(o);
            }
        }
        virtuals.clear();
    }
};
// Finds every tensor of the graph that is not virtual in the pack, and checks that its address can be used.
cudnnStatus_t bind(Run& run, const Descriptor* pack) {
    std::vector<int64_t> uids = all<int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    std::vector<void*> addresses = all<void*>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (int64_t uid : uids) {
        auto t = run.graph->tensors.find(uid);
        bool in_memory = t != run.graph->tensors.end() && !t->second.is_virtual;
        REFUSE_UNLESS(in_memory, BAD_PARAM, "uid %ld is not a tensor in memory", (long)uid);
    }
    for (auto& [uid, t] : run.graph->tensors) {
        if (t.is_virtual) continue;
        auto found = std::find(uids.begin(), uids.end(), uid);
        void* p = found == uids.end() ? nullptr : addresses[(size_t)(found - uids.begin())];
        REFUSE_UNLESS(p, BAD_PARAM_NULL_POINTER, "tensor %ld has no address", (long)uid);
        REFUSE_UNLESS((uintptr_t)p % (uintptr_t)t.alignment == 0, BAD_PARAM_MISALIGNED_POINTER,
                      "tensor %ld is not aligned to %ld bytes", (long)uid, (long)t.alignment);
        size_t bytes = (size_t)t.extent() * (t.type == CUDNN_DATA_FLOAT ? 4 : 2);
        REFUSE_UNLESS(t.by_value || emulator::on_device(p, bytes), EXECUTION_FAILED,
                      "tensor %ld, %zu bytes, is not in device memory", (long)uid, bytes);
        if (t.by_value) run.numbers[uid] = *(const float*)p;
        else run.addresses[uid] = p;
    }
    run.workspace = one<void*>(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    int64_t bytes = workspace_bytes(*run.graph);
    REFUSE_UNLESS(emulator::on_device(run.workspace, (size_t)bytes), BAD_PARAM,
                  "the plan's workspace, %ld bytes, is not in device memory", (long)bytes);
    return CUDNN_STATUS_SUCCESS;
}
} // namespace

// ---- the API ----
extern "C" {
size_t cudnnGetVersion(void) { return emulator::setting("CUDA_EMULATOR_CUDNN", CUDNN_VERSION); }
const char* cudnnGetErrorString(cudnnStatus_t status) {
#define NAME(s) case CUDNN_STATUS_##s: return "CUDNN_STATUS_" #s;
    switch ((int)status) {
        NAME(SUCCESS) NAME(NOT_INITIALIZED) NAME(BAD_PARAM) NAME(BAD_PARAM_NULL_POINTER) NAME(BAD_PARAM_MISALIGNED_POINTER)
        NAME(BAD_PARAM_NOT_FINALIZED) NAME(BAD_PARAM_DUPLICATED_ENTRIES) NAME(BAD_PARAM_ATTRIBUTE_TYPE)
        NAME(BAD_PARAM_DESCRIPTOR_TYPE)
        NAME(NOT_SUPPORTED) NAME(NOT_SUPPORTED_DATA_TYPE) NAME(INTERNAL_ERROR_HOST_ALLOCATION_FAILED) NAME(EXECUTION_FAILED)
        default: return "an unknown status";
    }
}
void cudnnGetLastErrorString(char* message, size_t size) {
    snprintf(message, size, "%s", last_error);
    last_error[0] = 0;
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    int device;
    REFUSE_UNLESS(handle, BAD_PARAM, "there is no place for the handle");
    REFUSE_UNLESS(cudaGetDevice(&device) == cudaSuccess, NOT_INITIALIZED, "there is no device");
    *handle = new cudnnContext{ nullptr };
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
    delete handle;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    REFUSE_UNLESS(handle, BAD_PARAM, "there is no handle");
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t* descriptor) {
    REFUSE_UNLESS(kinds.count(kind), INTERNAL_ERROR_HOST_ALLOCATION_FAILED,
                  "descriptors of kind %d are not known to the emulator", (int)kind);
    Descriptor* d = new Descriptor{ kind, false, {}, {}, {}, {} };
    alive.insert(d);
    *descriptor = d;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    REFUSE_UNLESS(descriptor, BAD_PARAM_NULL_POINTER, "there is no descriptor");
    REFUSE_UNLESS(alive.erase((Descriptor*)descriptor), BAD_PARAM, "this descriptor was destroyed before");
    delete (Descriptor*)descriptor;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    Descriptor* d = (Descriptor*)descriptor;
    REFUSE_UNLESS(d, BAD_PARAM_NULL_POINTER, "there is no descriptor");
    REFUSE_UNLESS(alive.count(d), BAD_PARAM, "the descriptor was destroyed");
    REFUSE_UNLESS(!d->finalized, BAD_PARAM, "attribute %d is set after finalising", (int)name);
    const Attribute* a = find_attribute(d, name);
    REFUSE_UNLESS(a, BAD_PARAM, "a descriptor of kind %d has no attribute %d", (int)d->kind, (int)name);
    bool pack = d->kind == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR; // for which cuDNN returns another status
    REFUSE_UNLESS(type == a->type || !pack, NOT_SUPPORTED, "attribute %d is of another type", (int)name);
    REFUSE_UNLESS(type == a->type, BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d is of another type", (int)name);
    REFUSE_UNLESS(values && count > 0 && count <= a->most, BAD_PARAM, "attribute %d with %ld values", (int)name, (long)count);
    for (int64_t i = 0; a->of_kind != NO_DESCRIPTOR && i < count; i++) {
        Descriptor* c = ((Descriptor* const*)values)[i];
        REFUSE_UNLESS(alive.count(c), BAD_PARAM, "attribute %d: no descriptor, or one that was destroyed", (int)name);
        REFUSE_UNLESS(a->of_kind == ANY_OPERATION ? is_operation(c->kind) : (int)c->kind == a->of_kind, BAD_PARAM_DESCRIPTOR_TYPE,
                      "attribute %d is not a descriptor of kind %d", (int)name, (int)c->kind);
        REFUSE_UNLESS(c->finalized, BAD_PARAM_NOT_FINALIZED, "attribute %d is not finalised", (int)name);
    }
    d->values[name] = { count, std::vector<char>((const char*)values, (const char*)values + (size_t)count * size_of(type)) };
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    Descriptor* d = (Descriptor*)descriptor;
    REFUSE_UNLESS(d, BAD_PARAM_NULL_POINTER, "there is no descriptor");
    REFUSE_UNLESS(alive.count(d) && !d->finalized, BAD_PARAM, "the descriptor was finalised or destroyed");
    PASS(kinds.at(d->kind).finalize(d));
    d->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t most, int64_t* count, void* values) {
    Descriptor* d = (Descriptor*)descriptor;
    REFUSE_UNLESS(d, BAD_PARAM_NULL_POINTER, "there is no descriptor");
    REFUSE_UNLESS(alive.count(d) && d->finalized, NOT_INITIALIZED, "the descriptor is not finalised");
    const Attribute* a = find_attribute(d, name);
    REFUSE_UNLESS(a, BAD_PARAM, "a descriptor of kind %d has no attribute %d", (int)d->kind, (int)name);
    REFUSE_UNLESS(type == a->type, BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d is of another type", (int)name);
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE) { // into the caller's descriptor
        const char* why = why_unsupported(*d->graph);
        *count = why[0] ? 0 : 1;
        if (why[0]) refuse(CUDNN_STATUS_NOT_SUPPORTED, "%s", why);
        if (*count == 0 || most == 0) return CUDNN_STATUS_SUCCESS;
        Descriptor* result = *(Descriptor**)values;
        REFUSE_UNLESS(alive.count(result) && (int)result->kind == a->of_kind, BAD_PARAM_DESCRIPTOR_TYPE,
                      "the result is of another kind");
        result->graph = d->graph;
        result->finalized = true;
        if (name == CUDNN_ATTR_ENGINECFG_ENGINE) set_number(result, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, 0);
        return CUDNN_STATUS_SUCCESS;
    }
    REFUSE_UNLESS(has(d, name), BAD_PARAM, "attribute %d was not set", (int)name);
    const Value& value = d->values[name];
    *count = value.count;
    memcpy(values, value.bytes.data(), (size_t)std::min(most, value.count) * size_of(type));
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
    Descriptor *p = (Descriptor*)plan, *v = (Descriptor*)pack;
    static uint64_t runs;
    REFUSE_UNLESS(handle, BAD_PARAM, "there is no handle");
    REFUSE_UNLESS(alive.count(p) && p->finalized && p->kind == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, BAD_PARAM,
                  "there is no plan");
    REFUSE_UNLESS(alive.count(v) && v->finalized && v->kind == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, BAD_PARAM,
                  "there is no variant pack");
    auto run = std::make_shared<Run>();
    run->graph = p->graph;
    run->random.seed(emulator::setting("CUDA_EMULATOR_SEED", 1) * 1000003 + runs++);
    PASS(bind(*run, v));
    cudaError_t error = emulator::enqueue(handle->stream, "a cuDNN graph", [run] { run->run(); });
    REFUSE_UNLESS(error == cudaSuccess, EXECUTION_FAILED, "%s", cudaGetErrorString(error));
    return CUDNN_STATUS_SUCCESS;
}
}
