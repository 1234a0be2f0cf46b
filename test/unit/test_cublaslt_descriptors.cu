// test_cublaslt_descriptors.cu - the real cuBLASLt accepts our descriptors of matrix products: of every layer, with every epilogue.
// That needs no GPU. (Finding algorithms for them needs a driver: without one cublasLtCreate fails.)
#include "../../llmc/device/device.h"
#include "../../llmc/device/cuda/common.cuh"
#include "../../llmc/device/cuda/matmul.cuh"

static int failures, tests;
static void result(const char* name, bool good) {
    failures += !good;
    printf("%s %d - %s, " FLOATX_NAME "\n", good ? "ok" : "not ok", ++tests, name);
}

// get is one of the library's functions that read an attribute.
template <typename D, typename N, typename T>
static bool is_set(cublasStatus_t (*get)(D, N, void*, size_t, size_t*), D descriptor, N attribute, T want) {
    T value;
    size_t written = 0;
    return get(descriptor, attribute, &value, sizeof value, &written) == CUBLAS_STATUS_SUCCESS && written == sizeof value && value == want;
}
static bool is_matrix(cublasLtMatrixLayout_t m, uint64_t rows, uint64_t cols) { // column-major, without gaps
    auto is = [m](auto attribute, auto want) { return is_set(cublasLtMatrixLayoutGetAttribute, m, attribute, want); };
    return is(CUBLASLT_MATRIX_LAYOUT_ROWS, rows) && is(CUBLASLT_MATRIX_LAYOUT_COLS, cols)
        && is(CUBLASLT_MATRIX_LAYOUT_LD, (int64_t)rows) && is(CUBLASLT_MATRIX_LAYOUT_ORDER, (int32_t)CUBLASLT_ORDER_COL);
}

// A product as a layer makes it; A, B and D as the library must see them. Dies if the library refuses an attribute.
typedef struct { uint64_t rows, cols; } Matrix;
static void check(const char* layer, ProductShape shape, bool bias, bool aux, Matrix a, Matrix b, Matrix d) {
    static floatX memory[8];
    Product p = { layer, shape, memory, memory, memory, bias ? memory + 1 : NULL, aux ? memory + 2 : NULL, 0 };
    MatmulPlan plan;
    memset(&plan, 0, sizeof plan);
    plan_describe(&plan, p);
    auto is = [&](auto attribute, auto want) { return is_set(cublasLtMatmulDescGetAttribute, plan.operation, attribute, want); };
    bool good = is(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)shape.epilogue)
        && is(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, (int32_t)CUBLAS_COMPUTE_32F) && is(CUBLASLT_MATMUL_DESC_SCALE_TYPE, (int32_t)CUDA_R_32F)
        && is(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (void*)p.bias) && is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void*)p.aux)
        && is(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)(aux ? d.rows : 0))
        && is(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, (int32_t)shape.processors)
        && is_matrix(plan.a, a.rows, a.cols) && is_matrix(plan.b, b.rows, b.cols) && is_matrix(plan.d, d.rows, d.cols);
    result(layer, good);
    plan_clear(&plan);
}

int main(void) {
    const int N = 8, C = 16, OC = 24;
    const Matrix out = { OC, N }, inp = { C, N }, w = { C, OC }; // row-major (N,OC), (N,C), (OC,C)
    check("out = inp w^T", { 1, 0, OC, N, C, CUBLASLT_EPILOGUE_DEFAULT, 0, 0, 0, 0 }, false, false, w, inp, out);
    check("out = inp w^T + bias", { 1, 0, OC, N, C, CUBLASLT_EPILOGUE_BIAS, 0, 0, 0, 0 }, true, false, w, inp, out);
    check("out = gelu(inp w^T + bias)", { 1, 0, OC, N, C, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0, 0, 0, 0 }, true, true, w, inp, out);
    check("dinp = dout w", { 0, 0, C, N, OC, CUBLASLT_EPILOGUE_DEFAULT, 0, 0, 0, 0 }, false, false, w, out, inp);
    check("dinp = dout w * gelu'", { 0, 0, C, N, OC, CUBLASLT_EPILOGUE_DGELU, 0, 0, 0, 0 }, false, true, w, out, inp);
    check("dw = dout^T inp, in fp32", { 0, 1, C, OC, N, CUBLASLT_EPILOGUE_DEFAULT, 1, 0, 0, 0 }, false, false, inp, out, w);
    check("dw = dout^T inp, dbias", { 0, 1, C, OC, N, CUBLASLT_EPILOGUE_BGRADB, 0, 0, 0, 0 }, true, false, inp, out, w);
    check("the same beside a sum", { 0, 1, C, OC, N, CUBLASLT_EPILOGUE_BGRADB, 0, 0, 0, 116 }, true, false, inp, out, w);
    cublasLtMatmulPreference_t preference;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference), "a preference");
    preference_set_all(preference, 16);
    result("what we ask of an algorithm", true);
    printf("1..%d\n", tests);
    return failures > 0;
}
