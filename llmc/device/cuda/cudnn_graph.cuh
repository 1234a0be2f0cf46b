/*
cuda/cudnn_graph.cuh - graphs of operations for cuDNN, through its C backend API. Included by attention_cudnn.cuh.

A graph is described operation by operation, as one writes a formula; cuDNN then looks for an engine that computes all
of it in one kernel, compiles that, and hands back a plan. Tensors between operations are "virtual": they exist in the
formula, not in memory. In the API everything is a descriptor: create it, set its attributes, finalise it.

cuDNN may refuse a graph: it does not support the shapes, the GPU is too old, a library is missing. So nothing here
dies: the graph remembers in `why` what was refused first, and later calls do nothing.

libcudnn.so is loaded when it is first needed, so that programs start on a machine that lacks it.
API: https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html
*/
#ifndef LLMC_CUDA_CUDNN_GRAPH_CUH
#define LLMC_CUDA_CUDNN_GRAPH_CUH
#include "../../base/common.h"
#include <cudnn.h>
#include <dlfcn.h>
#include <type_traits>
static_assert(CUDNN_VERSION >= 90800, "llmc needs the headers of cuDNN 9.8 or newer; USE_CUDNN=0 builds without cuDNN");

// ---- the library ----
// Every function of cuDNN that is called. X is applied to each name.
#define CUDNN_FUNCTIONS(X) \
    X(cudnnGetVersion) X(cudnnGetErrorString) X(cudnnGetLastErrorString) \
    X(cudnnCreate) X(cudnnDestroy) X(cudnnSetStream) \
    X(cudnnBackendCreateDescriptor) X(cudnnBackendDestroyDescriptor) X(cudnnBackendFinalize) \
    X(cudnnBackendSetAttribute) X(cudnnBackendGetAttribute) X(cudnnBackendExecute)
typedef struct {
#define X(name) decltype(&::name) name;
    CUDNN_FUNCTIONS(X)
#undef X
} CudnnFunctions;
static CudnnFunctions cudnn; // NULL until cudnn_load has found them
// The minimum version to load. Before 9.10 it does not take -Inf for a masked score; and NVIDIA's own front end refuses
// attention in 16 bits by 9.10.0 and 9.10.1, forward and backward, because of bugs (sdpa_support_surface.h there).
constexpr size_t CUDNN_LEAST = 91002;

// "": cudnn's functions can be called. Else why they cannot, and what to do.
static inline const char* cudnn_load(void) {
    static char why[256];
    if (cudnn.cudnnGetVersion != NULL) return "";
    CudnnFunctions found;
#ifdef CUDA_EMULATOR // its stand-in for cuDNN is a part of the program
#define X(name) found.name = ::name;
#else
    snprintf(why, sizeof why, "libcudnn.so.%d", CUDNN_MAJOR);
    void* library = dlopen(why, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(why, sizeof why, "libcudnn.so.%d was not found; get it with sh dev/setup.sh,"
                 " or name its folder in LD_LIBRARY_PATH", CUDNN_MAJOR);
        return why;
    }
#define X(name) \
    if ((found.name = (decltype(found.name))dlsym(library, #name)) == NULL) { \
        snprintf(why, sizeof why, "libcudnn.so.%d has no %s; install a newer cuDNN", CUDNN_MAJOR, #name); \
        return why; \
    }
#endif
    CUDNN_FUNCTIONS(X)
#undef X
    size_t v = found.cudnnGetVersion(), least = CUDNN_LEAST;
    if (v < least) {
        snprintf(why, sizeof why,
                 "libcudnn.so.%d is cuDNN %zu.%zu.%zu, but the minimum is %zu.%zu.%zu, because attention in earlier "
                 "ones has bugs; install a newer one",
                 CUDNN_MAJOR, v / 10000, v / 100 % 100, v % 100, least / 10000, least / 100 % 100, least % 100);
        return why;
    }
    cudnn = found;
    return "";
}

// ---- graphs ----
constexpr int CUDNN_MAX_DESCRIPTORS = 192, CUDNN_MAX_OPERATIONS = 32;
typedef struct {
    cudnnHandle_t handle;                                           // the GPU that will run it, borrowed;
                                                                    // NULL: for a plan only
    cudnnBackendDescriptor_t device;                                // without a handle: the device that the plan is
                                                                    // for, borrowed
    cudnnBackendDescriptor_t descriptors[CUDNN_MAX_DESCRIPTORS];    // every one that was made, owned
    cudnnBackendDescriptor_t operations[CUDNN_MAX_OPERATIONS];
    int num_descriptors, num_operations;
    int64_t virtual_tensors;
    const char* step;                                               // what is being described, for messages
    cudnnBackendDescriptor_t plan;                                  // the result: what graph_run runs
    int64_t engine, workspace_bytes;
    char why[384];                                                  // "": all is well so far
} CudnnGraph;

// dim and stride are in elements: batch, head, row, column.
typedef struct {
    int64_t dim[4], stride[4];
    cudnnDataType_t type;
    cudnnBackendDescriptor_t descriptor;
} CudnnTensor;

// What cuDNN says about its last failure, without the path that led to it: ", reason", or "".
static inline void cudnn_reason(char* text, size_t size) {
    char said[2048] = "";
    cudnn.cudnnGetLastErrorString(said, sizeof said);
    const char* reason = strstr(said, "Reason: ");
    reason = reason ? reason + strlen("Reason: ") : said;
    snprintf(text, size, "%s%.*s", reason[0] ? ", " : "", (int)strcspn(reason, "\n"), reason);
}
static inline bool graph_ok(CudnnGraph* g, cudnnStatus_t status) {
    if (g->why[0] != 0 || status == CUDNN_STATUS_SUCCESS) return g->why[0] == 0;
    char reason[256];
    cudnn_reason(reason, sizeof reason);
    snprintf(g->why, sizeof g->why, "%s: %s%s", g->step, cudnn.cudnnGetErrorString(status), reason);
    return false;
}
static inline cudnnBackendDescriptor_t graph_create(CudnnGraph* g, cudnnBackendDescriptorType_t type) {
    cudnnBackendDescriptor_t d = NULL;
    invariant(g->num_descriptors < CUDNN_MAX_DESCRIPTORS, "a cuDNN graph has more than %d descriptors",
              CUDNN_MAX_DESCRIPTORS);
    if (g->why[0] == 0 && graph_ok(g, cudnn.cudnnBackendCreateDescriptor(type, &d)))
        g->descriptors[g->num_descriptors++] = d;
    return d;
}
static inline void graph_finalize(CudnnGraph* g, cudnnBackendDescriptor_t d) {
    if (g->why[0] == 0) graph_ok(g, cudnn.cudnnBackendFinalize(d));
}
static inline void graph_free(CudnnGraph* g) {
    for (int i = g->num_descriptors - 1; i >= 0; i--) cudnn.cudnnBackendDestroyDescriptor(g->descriptors[i]);
    memset(g, 0, sizeof *g);
}

// An attribute's type follows from the value that it is set to.
static constexpr cudnnBackendAttributeType_t attribute_type(int64_t) { return CUDNN_TYPE_INT64; }
static constexpr cudnnBackendAttributeType_t attribute_type(bool) { return CUDNN_TYPE_BOOLEAN; }
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnHandle_t) { return CUDNN_TYPE_HANDLE; }
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnDataType_t) { return CUDNN_TYPE_DATA_TYPE; }
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnPointwiseMode_t) { return CUDNN_TYPE_POINTWISE_MODE; }
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnReduceTensorOp_t) {
    return CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
}
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnBackendHeurMode_t) { return CUDNN_TYPE_HEUR_MODE; }
static constexpr cudnnBackendAttributeType_t attribute_type(cudnnBackendDescriptor_t) {
    return CUDNN_TYPE_BACKEND_DESCRIPTOR;
}
static inline void graph_set_array(CudnnGraph* g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                   cudnnBackendAttributeType_t type, int64_t n, const void* values) {
    if (g->why[0] == 0) graph_ok(g, cudnn.cudnnBackendSetAttribute(d, name, type, n, values));
}
// Attributes are names and values in turn. A descriptor or handle that is NULL is left out.
static inline void graph_set(CudnnGraph*, cudnnBackendDescriptor_t) {}
template <typename T, typename... Rest>
static inline void graph_set(CudnnGraph* g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, T value,
                             Rest... rest) {
    bool left_out = false;
    if constexpr (std::is_pointer_v<T>) left_out = value == NULL;
    if (!left_out) graph_set_array(g, d, name, attribute_type(value), 1, &value);
    graph_set(g, d, rest...);
}
// A descriptor with these attributes, finalised.
template <typename... A>
static inline cudnnBackendDescriptor_t graph_make(CudnnGraph* g, cudnnBackendDescriptorType_t type, A... attributes) {
    cudnnBackendDescriptor_t d = graph_create(g, type);
    graph_set(g, d, attributes...);
    graph_finalize(g, d);
    return d;
}
// Reads up to n values, and returns how many there are. Those that are descriptors must have been created.
static inline int64_t graph_get(CudnnGraph* g, cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                cudnnBackendAttributeType_t type, int64_t n, void* values) {
    int64_t count = 0;
    if (g->why[0] == 0) graph_ok(g, cudnn.cudnnBackendGetAttribute(d, name, type, n, &count, values));
    return g->why[0] == 0 ? count : 0;
}

// ---- tensors ----
// Its element of index (b,h,r,c) lies at the sum of index times stride. more: attributes that not all tensors have.
template <typename... A>
static inline CudnnTensor tensor_make(CudnnGraph* g, int64_t uid, cudnnDataType_t type, const int64_t dim[4],
                                      const int64_t stride[4], int64_t alignment, A... more) {
    CudnnTensor t = { {}, {}, type, graph_create(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR) };
    memcpy(t.dim, dim, sizeof t.dim);
    memcpy(t.stride, stride, sizeof t.stride);
    graph_set(g, t.descriptor, CUDNN_ATTR_TENSOR_UNIQUE_ID, uid, CUDNN_ATTR_TENSOR_DATA_TYPE, type,
              CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment, more...);
    graph_set_array(g, t.descriptor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, t.dim);
    graph_set_array(g, t.descriptor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, t.stride);
    graph_finalize(g, t.descriptor);
    return t;
}
// In memory, at the address that graph_run is given for this uid; it begins on 16 bytes.
static inline CudnnTensor tensor_in_memory(CudnnGraph* g, int64_t uid, cudnnDataType_t type, const int64_t dim[4],
                                           const int64_t stride[4]) {
    g->step = "a tensor";
    return tensor_make(g, uid, type, dim, stride, 16);
}
// One fp32 number, read from the host when the graph runs.
static inline CudnnTensor tensor_number(CudnnGraph* g, int64_t uid) {
    const int64_t one[4] = { 1, 1, 1, 1 };
    g->step = "a number";
    return tensor_make(g, uid, CUDNN_DATA_FLOAT, one, one, sizeof(float), CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
}
// A result that only other operations of the graph see. Its uid is larger than those that callers choose.
static inline CudnnTensor tensor_virtual(CudnnGraph* g, cudnnDataType_t type, const int64_t dim[4],
                                         const int64_t stride[4]) {
    return tensor_make(g, 1000 + g->virtual_tensors++, type, dim, stride, 16, CUDNN_ATTR_TENSOR_IS_VIRTUAL, true);
}
// The same, packed.
static inline CudnnTensor tensor_between(CudnnGraph* g, cudnnDataType_t type, int64_t B, int64_t NH, int64_t rows,
                                         int64_t cols) {
    const int64_t dim[4] = { B, NH, rows, cols }, stride[4] = { NH * rows * cols, rows * cols, cols, 1 };
    return tensor_virtual(g, type, dim, stride);
}
static inline CudnnTensor tensor_like(CudnnGraph* g, cudnnDataType_t type, CudnnTensor x) {
    return tensor_between(g, type, x.dim[0], x.dim[1], x.dim[2], x.dim[3]);
}

// ---- operations: each returns its result, virtual unless `result` says where it goes; arithmetic is fp32 ----
template <typename... A>
static inline void graph_operation(CudnnGraph* g, cudnnBackendDescriptorType_t type, A... attributes) {
    invariant(g->num_operations < CUDNN_MAX_OPERATIONS, "a cuDNN graph has more than %d operations",
              CUDNN_MAX_OPERATIONS);
    g->operations[g->num_operations++] = graph_make(g, type, attributes...);
}
// a b, (rows,inner) (inner,cols)
static inline CudnnTensor graph_matmul(CudnnGraph* g, CudnnTensor a, CudnnTensor b, const CudnnTensor* result = NULL) {
    g->step = "matmul";
    CudnnTensor y = result ? *result : tensor_between(g, CUDNN_DATA_FLOAT, a.dim[0], a.dim[1], a.dim[2], b.dim[3]);
    cudnnBackendDescriptor_t math = graph_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_ATTR_MATMUL_COMP_TYPE,
                                               CUDNN_DATA_FLOAT);
    graph_operation(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.descriptor,
                    CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.descriptor, CUDNN_ATTR_OPERATION_MATMUL_CDESC, y.descriptor,
                    CUDNN_ATTR_OPERATION_MATMUL_DESC, math);
    return y;
}
// What is done, in which arithmetic, to x, or to x and b, or where mask is true; more: attributes of what is done.
template <typename... A>
static inline CudnnTensor graph_pointwise(CudnnGraph* g, cudnnPointwiseMode_t mode, cudnnDataType_t arithmetic,
                                          CudnnTensor x, CudnnTensor b, CudnnTensor mask, CudnnTensor y, A... more) {
    cudnnBackendDescriptor_t math = graph_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_ATTR_POINTWISE_MODE, mode,
                                               CUDNN_ATTR_POINTWISE_MATH_PREC, arithmetic, more...);
    graph_operation(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, math,
                    CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x.descriptor, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                    b.descriptor, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask.descriptor,
                    CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y.descriptor);
    return y;
}
static const CudnnTensor no_tensor = {};
// exp(x), log(x), x
static inline CudnnTensor graph_map(CudnnGraph* g, cudnnPointwiseMode_t mode, CudnnTensor x,
                                    const CudnnTensor* result = NULL) {
    g->step = "a function of each element";
    CudnnTensor y = result ? *result : tensor_like(g, CUDNN_DATA_FLOAT, x);
    return graph_pointwise(g, mode, CUDNN_DATA_FLOAT, x, no_tensor, no_tensor, y);
}
// x op b, element by element; where b has one column or one number, it is the same for all of x
static inline CudnnTensor graph_combine(CudnnGraph* g, CudnnTensor x, cudnnPointwiseMode_t op, CudnnTensor b,
                                        const CudnnTensor* result = NULL) {
    g->step = "an operation on two tensors";
    CudnnTensor y = result ? *result : tensor_like(g, CUDNN_DATA_FLOAT, x);
    return graph_pointwise(g, op, CUDNN_DATA_FLOAT, x, b, no_tensor, y);
}
// Each element of a tensor of x's shape is its own index along `axis`: 2 is the row, 3 the column.
static inline CudnnTensor graph_index(CudnnGraph* g, CudnnTensor x, int64_t axis) {
    g->step = "an index";
    CudnnTensor y = tensor_like(g, CUDNN_DATA_INT32, x);
    return graph_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, x, no_tensor, no_tensor, y,
                           CUDNN_ATTR_POINTWISE_AXIS, axis);
}
// x where the row's index is at least the column's, b elsewhere: query t sees keys 0..t
static inline CudnnTensor graph_causal(CudnnGraph* g, CudnnTensor x, CudnnTensor b) {
    CudnnTensor row = graph_index(g, x, 2), col = graph_index(g, x, 3);
    g->step = "the causal mask";
    CudnnTensor seen = tensor_like(g, CUDNN_DATA_BOOLEAN, x), y = tensor_like(g, CUDNN_DATA_FLOAT, x);
    graph_pointwise(g, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, row, col, no_tensor, seen);
    return graph_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, x, b, seen, y);
}
// Returns the sum or the largest of each row, (rows,1)
static inline CudnnTensor graph_reduce(CudnnGraph* g, cudnnReduceTensorOp_t op, CudnnTensor x) {
    g->step = "a reduction";
    CudnnTensor y = tensor_between(g, CUDNN_DATA_FLOAT, x.dim[0], x.dim[1], x.dim[2], 1);
    cudnnBackendDescriptor_t math = graph_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_ATTR_REDUCTION_OPERATOR, op,
                                               CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    graph_operation(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.descriptor,
                    CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y.descriptor, CUDNN_ATTR_OPERATION_REDUCTION_DESC, math);
    return y;
}
// x with rows and columns exchanged, in the type that the product which reads it multiplies
static inline CudnnTensor graph_transpose(CudnnGraph* g, CudnnTensor x, cudnnDataType_t type) {
    const int64_t dim[4] = { x.dim[0], x.dim[1], x.dim[3], x.dim[2] };
    const int64_t stride[4] = { x.stride[0], x.stride[1], x.stride[3], x.stride[2] };
    g->step = "a transposition";
    CudnnTensor y = tensor_virtual(g, type, dim, stride);
    graph_operation(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.descriptor,
                    CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y.descriptor);
    return y;
}

// ---- plans ----
// Makes the plan from one of the configurations that the heuristics propose; returns false if that fails, and `why`
// says why.
static inline bool plan_from(CudnnGraph* g, cudnnBackendDescriptor_t configuration) {
    cudnnBackendDescriptor_t engine = graph_create(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    graph_get(g, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    graph_get(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &g->engine);
    cudnnBackendDescriptor_t plan = graph_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
                                               CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, g->device,
                                               CUDNN_ATTR_EXECUTION_PLAN_HANDLE, g->device ? NULL : g->handle,
                                               CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                                               configuration); // the kernel is compiled here
    graph_get(g, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &g->workspace_bytes);
    g->plan = plan;
    return g->why[0] == 0;
}
// Makes a plan by the first engine of cuDNN's heuristics that takes the operations.
// Returns false if none does: `why` has the first's.
static inline bool graph_plan(CudnnGraph* g) {
    constexpr int MOST = 16;
    cudnnBackendDescriptor_t graph = graph_create(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR), found[MOST];
    g->step = "the graph";
    graph_set(g, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, g->handle);
    graph_set_array(g, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->num_operations,
                    g->operations);
    graph_finalize(g, graph);
    g->step = "the choice of an engine";
    cudnnBackendDescriptor_t heuristics = graph_make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
        CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A,
        CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, g->device);
    for (int i = 0; i < MOST; i++) found[i] = graph_create(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t n = graph_get(g, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, MOST, found);
    if (g->why[0] != 0) return false;

    char first[sizeof g->why], reason[256];
    cudnn_reason(reason, sizeof reason);
    snprintf(first, sizeof first, "no engine takes this graph%s", reason);
    g->step = "the plan";
    for (int64_t i = 0; i < n && i < MOST; i++) {
        if (plan_from(g, found[i])) return true;
        if (i == 0) memcpy(first, g->why, sizeof first);
        g->why[0] = 0;
    }
    memcpy(g->why, first, sizeof first);
    return false;
}

// Where a tensor of the graph is: an address on the device, or of a number on the host.
typedef struct { int64_t uid; const void* address; } CudnnArgument;
// Runs the plan on the handle's stream. workspace (workspace_bytes) on the device. If it fails, dies naming the layer.
static inline void graph_run(CudnnGraph* g, const CudnnArgument* arguments, int n, void* workspace, const char* layer) {
    constexpr int MOST = 24;
    int64_t uids[MOST];
    void* addresses[MOST];
    invariant(n <= MOST, "%s: more than %d arguments", layer, MOST);
    for (int i = 0; i < n; i++) {
        uids[i] = arguments[i].uid;
        addresses[i] = (void*)arguments[i].address;
    }
    cudnnBackendDescriptor_t pack = NULL;
    g->step = layer;
    graph_ok(g, cudnn.cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack));
    graph_set_array(g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids);
    graph_set_array(g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, addresses);
    graph_set_array(g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    graph_finalize(g, pack);
    if (g->why[0] == 0) graph_ok(g, cudnn.cudnnBackendExecute(g->handle, g->plan, pack));
    invariant(g->why[0] == 0, "cuDNN, %s", g->why);
    cudnn.cudnnBackendDestroyDescriptor(pack);
}
#endif
