// mistakes.cpp - prints how cuDNN's backend API answers mistakes, a line each: "what was done: status". The lines must be the same
// with the emulator's stand-in (-DCUDA_EMULATOR) as with the real library: test/kernels/test_cuda_attention.py compares them.
#include "../../../llmc/device/cuda/cudnn_graph.cuh"
#include <string>
#include <vector>
typedef cudnnBackendDescriptor_t Descriptor;

static void line(const char* what, cudnnStatus_t status) { printf("%s: %s\n", what, cudnn.cudnnGetErrorString(status)); }
static Descriptor make(cudnnBackendDescriptorType_t type) {
    Descriptor d = NULL;
    require(cudnn.cudnnBackendCreateDescriptor(type, &d) == CUDNN_STATUS_SUCCESS, "a descriptor of type %d cannot be made", type);
    return d;
}
typedef cudnnBackendAttributeName_t Name;
typedef cudnnBackendAttributeType_t Type;
static cudnnStatus_t set_any(Descriptor d, Name name, Type type, int64_t n, const void* values) {
    return cudnn.cudnnBackendSetAttribute(d, name, type, n, values);
}
static cudnnStatus_t set_many(Descriptor d, Name name, std::vector<int64_t> values) {
    return set_any(d, name, CUDNN_TYPE_INT64, (int64_t)values.size(), values.data());
}
template <typename T> static cudnnStatus_t set_one(Descriptor d, Name name, T value) {
    return set_any(d, name, attribute_type(value), 1, &value);
}
static cudnnStatus_t get_one(Descriptor d, Name name, Type type, void* value) {
    int64_t count;
    return cudnn.cudnnBackendGetAttribute(d, name, type, 1, &count, value);
}
static cudnnStatus_t finalize(Descriptor d) { return cudnn.cudnnBackendFinalize(d); }
static void line(const char* what, Descriptor d) { line(what, finalize(d)); }
// A descriptor with these attributes, names and values in turn. Where a descriptor is NULL its attribute is left out.
static void set_each(Descriptor) {}
template <typename T, typename... Rest> static void set_each(Descriptor d, Name name, T value, Rest... rest) {
    if (attribute_type(value) != CUDNN_TYPE_BACKEND_DESCRIPTOR || value != T()) set_one(d, name, value);
    set_each(d, rest...);
}
template <typename... A> static Descriptor with(cudnnBackendDescriptorType_t type, A... attributes) {
    Descriptor d = make(type);
    set_each(d, attributes...);
    return d;
}

// A correct tensor, except that one attribute is left out.
typedef std::vector<int64_t> Numbers;
static Numbers packed(const Numbers& dim) {
    Numbers stride(dim.size(), 1);
    for (size_t i = dim.size() - 1; i-- > 0;) stride[i] = stride[i + 1] * dim[i + 1];
    return stride;
}
static Descriptor tensor_without(int left_out, int64_t uid, const Numbers& dim, cudnnDataType_t type = CUDNN_DATA_FLOAT,
                                 bool is_virtual = false) {
    Descriptor t = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    if (left_out != CUDNN_ATTR_TENSOR_UNIQUE_ID) set_one(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, uid);
    if (left_out != CUDNN_ATTR_TENSOR_DATA_TYPE) set_one(t, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    if (left_out != CUDNN_ATTR_TENSOR_DIMENSIONS) set_many(t, CUDNN_ATTR_TENSOR_DIMENSIONS, dim);
    if (left_out != CUDNN_ATTR_TENSOR_STRIDES) set_many(t, CUDNN_ATTR_TENSOR_STRIDES, packed(dim));
    if (left_out != CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT) set_one(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, (int64_t)16);
    if (is_virtual) set_one(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, true);
    return t;
}
static Descriptor tensor(int64_t uid, const Numbers& dim, cudnnDataType_t type = CUDNN_DATA_FLOAT, bool is_virtual = false) {
    Descriptor t = tensor_without(-1, uid, dim, type, is_virtual);
    require(finalize(t) == CUDNN_STATUS_SUCCESS, "a good tensor is refused");
    return t;
}

static void mistakes_of_attributes(void) {
    Descriptor t = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR), none = NULL;
    int64_t n = 7;
    float f = 1;
    line("a descriptor of no type", cudnn.cudnnBackendCreateDescriptor((cudnnBackendDescriptorType_t)999, &none));
    line("an attribute of nothing", set_any(NULL, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &n));
    line("an attribute without values", set_any(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, NULL));
    line("an attribute of another type", set_any(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_FLOAT, 1, &f));
    line("an attribute of another descriptor", set_one(t, CUDNN_ATTR_POINTWISE_AXIS, n));
    line("two values where one belongs", set_many(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, { 1, 2 }));
    line("no values", set_any(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 0, &n));
    line("a dimension of 0", set_many(t, CUDNN_ATTR_TENSOR_DIMENSIONS, { 1, 1, 0, 1 }));
    line("an alignment of 0", set_one(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, (int64_t)0));
    line("an alignment of 3", set_one(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, (int64_t)3));
    line("reading before finalising", get_one(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, &n));
    t = tensor(1, { 2, 3, 4, 5 });
    line("setting after finalising", set_one(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, n));
    line("finalising again", finalize(t));
    line("finalising nothing", finalize(NULL));
    line("reading another type", get_one(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_FLOAT, &f));
    line("reading another descriptor's", get_one(t, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, &n));
}
static void mistakes_of_tensors(void) {
    const cudnnBackendAttributeName_t all[5] = { CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_DATA_TYPE,
        CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT };
    for (int i = 0; i < 5; i++) {
        char what[64];
        snprintf(what, sizeof what, "a tensor without attribute %d", all[i]);
        line(what, tensor_without(all[i], 1, { 2, 3, 4, 5 }));
    }
    Descriptor t = tensor_without(CUDNN_ATTR_TENSOR_STRIDES, 1, { 2, 3, 4, 5 });
    set_many(t, CUDNN_ATTR_TENSOR_STRIDES, { 20, 5, 1 });
    line("a tensor with fewer strides than dimensions", finalize(t));
    t = tensor_without(-1, 1, { 2, 3, 4, 5 }, CUDNN_DATA_FLOAT, true);
    set_one(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
    line("a tensor that is virtual and by value", finalize(t));
    t = tensor_without(CUDNN_ATTR_TENSOR_UNIQUE_ID, 1, { 2, 3, 4, 5 });
    set_one(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, (int64_t)0);
    line("a tensor of uid 0", finalize(t));
}

static Descriptor matmul_of(Descriptor a, Descriptor b, Descriptor c) {
    Descriptor math = with(CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    finalize(math);
    return with(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b,
                CUDNN_ATTR_OPERATION_MATMUL_CDESC, c, CUDNN_ATTR_OPERATION_MATMUL_DESC, math);
}
static Descriptor pointwise_of(cudnnPointwiseMode_t mode, Descriptor x, Descriptor b, Descriptor y, int64_t axis = -1) {
    Descriptor math = with(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, mode,
                           CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_FLOAT);
    if (axis >= 0) set_one(math, CUDNN_ATTR_POINTWISE_AXIS, axis);
    finalize(math);
    return with(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, math,
                CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b,
                CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
}
static Descriptor reduction_of(Descriptor x, Descriptor y) {
    Descriptor math = with(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_REDUCE_TENSOR_ADD,
                           CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    finalize(math);
    return with(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_ATTR_OPERATION_REDUCTION_DESC, math,
                CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
}
static Descriptor reshape_of(Descriptor x, Descriptor y) {
    return with(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x,
                CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
}
static void mistakes_of_operations(void) {
    Descriptor a = tensor(1, { 2, 3, 4, 5 }), b = tensor(2, { 2, 3, 5, 6 }), c = tensor(3, { 2, 3, 4, 6 });
    Descriptor one = tensor(4, { 2, 3, 4, 1 });
    Descriptor wrong = tensor(5, { 2, 3, 7, 9 }), t = tensor(6, { 2, 3, 5, 4 }), three = tensor(7, { 3, 4, 5 });
    Descriptor number = tensor(8, { 1, 1, 1, 1 }), heads = tensor(9, { 2, 2, 5, 6 });
    Descriptor open = tensor_without(-1, 10, { 2, 3, 4, 5 });
    Descriptor operation = make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    line("a tensor that is not finalised", set_one(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, open));
    line("NULL for a tensor", set_one(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, (Descriptor)NULL));
    line("a good product", matmul_of(a, b, c));
    line("a product without A", matmul_of(NULL, b, c));
    line("a product without B", matmul_of(a, NULL, c));
    line("a product without C", matmul_of(a, b, NULL));
    line("a product of other inner sizes", matmul_of(a, wrong, c));
    line("a product of another result", matmul_of(a, b, a));
    line("a product of other heads", matmul_of(a, heads, c));
    line("a product of three dimensions", matmul_of(three, b, c));
    line("a product without its arithmetic", make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR));
    line("a product's arithmetic, not set", make(CUDNN_BACKEND_MATMUL_DESCRIPTOR));
    line("a pointwise operation's arithmetic, not set", make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR));
    line("a reduction's arithmetic, not set", make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR));
    line("a good sum", pointwise_of(CUDNN_POINTWISE_ADD, a, a, a));
    line("a good sum with a column", pointwise_of(CUDNN_POINTWISE_ADD, a, one, a));
    line("a good sum with a number", pointwise_of(CUDNN_POINTWISE_ADD, a, number, a));
    line("a sum without B", pointwise_of(CUDNN_POINTWISE_ADD, a, NULL, a));
    line("a sum without X", pointwise_of(CUDNN_POINTWISE_ADD, NULL, a, a));
    line("a sum without Y", pointwise_of(CUDNN_POINTWISE_ADD, a, a, NULL));
    line("a sum of other shapes", pointwise_of(CUDNN_POINTWISE_ADD, a, wrong, a));
    line("a sum of another result", pointwise_of(CUDNN_POINTWISE_ADD, a, a, wrong));
    line("an exponential with B", pointwise_of(CUDNN_POINTWISE_EXP, a, a, a));
    line("an exponential of another result", pointwise_of(CUDNN_POINTWISE_EXP, a, NULL, wrong));
    line("a choice without a mask", pointwise_of(CUDNN_POINTWISE_BINARY_SELECT, a, a, a));
    line("an index without an axis", pointwise_of(CUDNN_POINTWISE_GEN_INDEX, a, NULL, a));
    line("an index along axis 9", pointwise_of(CUDNN_POINTWISE_GEN_INDEX, a, NULL, a, 9));
    line("a good reduction", reduction_of(a, one));
    line("a reduction without X", reduction_of(NULL, one));
    line("a reduction without Y", reduction_of(a, NULL));
    line("a reduction to another shape", reduction_of(a, wrong));
    line("a good transposition", reshape_of(a, t));
    line("a transposition without X", reshape_of(NULL, t));
    line("a transposition without Y", reshape_of(a, NULL));
    line("a transposition to another size", reshape_of(a, wrong));
}
static Descriptor graph_of(std::vector<Descriptor> operations) {
    Descriptor g = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    for (Descriptor operation : operations) finalize(operation);
    int64_t n = (int64_t)operations.size();
    set_any(g, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, n, operations.data());
    return g;
}
static void mistakes_of_graphs(void) {
    const Numbers shape = { 2, 3, 4, 8 };
    Descriptor x = tensor(1, shape), y = tensor(2, shape), between = tensor(3, shape, CUDNN_DATA_FLOAT, true);
    Descriptor other = tensor(1, { 2, 3, 4, 16 }), result = tensor(9, { 2, 3, 4, 16 });
    auto exp = [](Descriptor from, Descriptor to) { return pointwise_of(CUDNN_POINTWISE_EXP, from, NULL, to); };
    Descriptor g = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    line("a graph without operations", finalize(g));
    line("an operation that is not finalised", set_one(g, CUDNN_ATTR_OPERATIONGRAPH_OPS, exp(x, y)));
    line("a good graph", graph_of({ exp(x, y) }));
    line("two tensors of one uid", graph_of({ exp(x, between), exp(other, result) }));
    line("a virtual tensor that nothing computes", graph_of({ exp(between, y) }));
    line("a tensor computed twice", graph_of({ exp(x, y), exp(x, y) }));
    line("a tensor computed from itself", graph_of({ pointwise_of(CUDNN_POINTWISE_ADD, x, between, between) }));
    line("operations in another order", graph_of({ exp(between, y), exp(x, between) }));
    line("heuristics without a graph", make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR));
    line("a plan without an engine", make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR));
    line("an engine without a graph", make(CUDNN_BACKEND_ENGINE_DESCRIPTOR));
    Descriptor heuristics = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    line("a graph that is not finalised", set_one(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph_of({})));
}
static void mistakes_of_packs(void) {
    int64_t uids[2] = { 1, 2 };
    char somewhere[64];
    void *addresses[2] = { somewhere, somewhere + 16 }, *nowhere = NULL;
    Descriptor p = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR), x = tensor(1, { 1, 1, 1, 8 });
    line("an empty pack", make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR));
    line("uids", set_any(p, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 2, uids));
    line("one address for two uids", set_any(p, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 1, addresses));
    line("that pack", finalize(p));
    p = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    uids[1] = 1;
    set_any(p, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 2, uids);
    set_any(p, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 2, addresses);
    line("one uid twice", finalize(p));
    p = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    line("addresses as numbers", set_any(p, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_INT64, 2, addresses));
    line("a workspace nowhere", set_any(p, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &nowhere));
    line("running without a handle", cudnn.cudnnBackendExecute(NULL, x, p));
    line("destroying nothing", cudnn.cudnnBackendDestroyDescriptor(NULL));
    line("a handle nowhere", cudnn.cudnnCreate(NULL));
}

int main(void) {
    const char* missing = cudnn_load();
    require(missing[0] == 0, "%s", missing);
    mistakes_of_attributes();
    mistakes_of_tensors();
    mistakes_of_operations();
    mistakes_of_graphs();
    mistakes_of_packs();
    return 0;
}
