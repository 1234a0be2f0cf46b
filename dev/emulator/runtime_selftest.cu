/*
runtime_selftest.cu - shows which mistakes the stand-ins for the CUDA runtime and cuBLASLt find. As in selftest.cu, each mistake
comes with a correct twin. If a message must name a line, that line ends in "BUG" and the name of the mistake.

  runtime_selftest good     the twins, and every error code; all must match CUDA, for every seed
  runtime_selftest NAME     one mistake: status 1 and a message, or a wrong number
*/
#include <atomic>
#include <thread>
#include "selftest.h"
#include "runtime.h" // emulator::enqueue_when, by which NCCL's stand-in asks for work
#ifdef WITH_CUBLASLT
#include <cublasLt.h>
#endif
extern "C" unsigned long long emulator_calls(const char* name);

constexpr int N = 1000;
static cudaStream_t one, other; // both are non-blocking: they wait for other streams only through events
static float *x, *y;            // (N) on the device
static float *in, *out;         // (N) pinned

__global__ void fill(float* x, float value) { if (threadIdx.x < N) x[threadIdx.x] = value; }
__global__ void add_one(float* y, const float* x) { if (threadIdx.x < N) y[threadIdx.x] = x[threadIdx.x] + 1; }
struct Hidden { float* p; };
__global__ void fill_hidden(Hidden x) { x.p[threadIdx.x] = 1; } // BUG freed_in_structure

static void expect_error(const char* what, cudaError_t is, cudaError_t should) {
    if (is == should && cudaGetLastError() == is && cudaGetLastError() == cudaSuccess) return;
    printf("selftest: %s: %s, and %s was expected\n", what, cudaGetErrorName(is), cudaGetErrorName(should));
    exit(1);
}
static void ok(cudaError_t error) { expect("a call", error, cudaSuccess); }
struct Event { // destroyed at the end of its block
    cudaEvent_t event;
    Event() { ok(cudaEventCreate(&event)); }
    ~Event() { ok(cudaEventDestroy(event)); }
    operator cudaEvent_t() const { return event; }
};
static float first_of(const float* device, cudaStream_t stream) {
    ok(cudaMemcpyAsync(out, device, sizeof *out, cudaMemcpyDeviceToHost, stream));
    ok(cudaStreamSynchronize(stream));
    return *out;
}

// --- streams and events: the mistake produces a wrong number, for some seeds or for all ---
template <bool bug> static void missing_wait() { // `other` reads what `one` writes
    Event written;
    ok(cudaMemset(x, 0, N * sizeof *x));
    ok(cudaDeviceSynchronize());
    fill<<<1, N, 0, one>>>(x, 6);
    ok(cudaEventRecord(written, one));
    if (!bug) ok(cudaStreamWaitEvent(other, written));
    add_one<<<1, N, 0, other>>>(y, x);
    expect("what another stream wrote", first_of(y, other), 7);
}
template <bool bug> static void event_too_early() { // the event was recorded before the write
    Event written;
    if (bug) ok(cudaEventRecord(written, one));
    fill<<<1, N, 0, one>>>(x, 8);
    if (!bug) ok(cudaEventRecord(written, one));
    ok(cudaStreamWaitEvent(other, written));
    add_one<<<1, N, 0, other>>>(y, x);
    expect("what came before the event", first_of(y, other), 9);
}
template <bool bug> static void overwritten() { // `one` overwrites memory that `other` may still read; some seeds show it
    Event written, read;
    fill<<<1, N, 0, one>>>(x, 1);
    ok(cudaEventRecord(written, one));
    ok(cudaStreamWaitEvent(other, written));
    add_one<<<1, N, 0, other>>>(y, x);
    ok(cudaEventRecord(read, other));
    if (!bug) ok(cudaStreamWaitEvent(one, read));
    fill<<<1, N, 0, one>>>(x, 2);
    ok(cudaDeviceSynchronize());
    expect("what was read before it was overwritten", first_of(y, other), 2);
}
template <bool bug> static void legacy_stream() { // a copy on the NULL stream does not wait for non-blocking streams
    cudaStream_t blocking;
    ok(cudaStreamCreate(&blocking));
    ok(cudaMemset(x, 0, N * sizeof *x));
    ok(cudaDeviceSynchronize());
    fill<<<1, N, 0, bug ? one : blocking>>>(x, 3);
    ok(cudaMemcpy(out, x, sizeof *out, cudaMemcpyDeviceToHost));
    expect("a copy by the default stream", *out, 3);
    fill<<<1, N>>>(x, 4);
    expect("a kernel of the default stream", first_of(x, bug ? one : blocking), 4);
    ok(cudaStreamDestroy(blocking));
}

// --- copies ---
template <bool bug> static void reused_early() { // pinned memory is read when the copy runs
    *in = 5;
    ok(cudaMemcpyAsync(x, in, sizeof *in, cudaMemcpyHostToDevice, one));
    if (!bug) ok(cudaStreamSynchronize(one));
    *in = 6;
    expect("a copy of pinned memory that is used again", first_of(x, one), 5);
}
template <bool bug> static void read_early() {
    fill<<<1, N, 0, one>>>(x, 5);
    ok(cudaMemcpyAsync(out, x, sizeof *out, cudaMemcpyDeviceToHost, one));
    if (!bug) ok(cudaStreamSynchronize(one));
    expect("what a copy brings to pinned memory", *out, 5);
}
template <bool bug> static void not_written() {
    float* fresh;
    ok(cudaMalloc((void**)&fresh, sizeof *fresh));
    if (!bug) ok(cudaMemset(fresh, 0, sizeof *fresh));
    ok(cudaDeviceSynchronize());
    expect("new memory", first_of(fresh, one), 0);
    ok(cudaFree(fresh));
}
static void check_ordinary_memory() { // is copied before the call returns
    std::vector<float> ordinary(N, 5);
    ok(cudaMemcpyAsync(x, ordinary.data(), N * sizeof *x, cudaMemcpyHostToDevice, one));
    ordinary[0] = 6;
    expect("a copy of ordinary memory", first_of(x, one), 5);
    fill<<<1, N, 0, one>>>(x, 7);
    ok(cudaMemcpyAsync(ordinary.data(), x, N * sizeof *x, cudaMemcpyDeviceToHost, one));
    expect("a copy to ordinary memory", ordinary[N - 1], 7);
}
static void check_rows() { // four of two elements: from ordinary memory, on the device, to pinned memory
    const size_t size = sizeof *x;
    std::vector<float> ordinary(N, -1);
    for (int i = 0; i < 8; i++) ordinary[i / 2 * 5 + i % 2] = (float)i;
    ok(cudaMemset(x, 0, N * size));
    ok(cudaDeviceSynchronize());
    ok(cudaMemcpy2DAsync(x, 3 * size, ordinary.data(), 5 * size, 2 * size, 4, cudaMemcpyHostToDevice, one));
    ordinary[0] = -1; // the call has already copied it
    ok(cudaMemcpy2DAsync(y, 2 * size, x, 3 * size, 2 * size, 4, cudaMemcpyDeviceToDevice, one));
    out[2] = 9;
    ok(cudaMemcpy2DAsync(out, 3 * size, y, 2 * size, 2 * size, 4, cudaMemcpyDeviceToHost, one));
    ok(cudaStreamSynchronize(one));
    for (int i = 0; i < 8; i++) expect("a copy of rows", out[i / 2 * 3 + i % 2], i);
    expect("between two rows", out[2], 9);
    expect("and on the device", first_of(x + 2, one), 0);
    const cudaMemcpyKind same = cudaMemcpyDeviceToDevice;
    ok(cudaMemcpy2DAsync(x + 3, 5 * size, y, 2 * size, 8, N / 5, same, one)); // up to the end
    expect_error("a row past the end", cudaMemcpy2DAsync(x + 4, 5 * size, y, 2 * size, 8, N / 5, same, one), cudaErrorInvalidValue);
    expect_error("or from there", cudaMemcpy2DAsync(y, 2 * size, x, 5 * size, 8, N / 5 + 1, same, one), cudaErrorInvalidValue);
    expect_error("onto themselves", cudaMemcpy2DAsync(x, 8, x + 14, 8, 8, 8, same, one), cudaErrorInvalidValue);
    expect_error("rows within each other", cudaMemcpy2DAsync(x, 4, y, 8, 8, 2, same, one), cudaErrorInvalidPitchValue);
    expect_error("rows the wrong way", cudaMemcpy2DAsync(x, 8, y, 8, 8, 2, cudaMemcpyHostToDevice, one), cudaErrorInvalidValue);
    expect_error("no rows", cudaMemcpy2DAsync(x, 8, y, 8, 8, 0, same, one), cudaSuccess);
}

// --- graphs: the work captured on a stream runs in that order, each time the graph is launched and only then ---
struct Graph { // destroyed at the end of its block
    cudaGraphExec_t executable;
    ~Graph() { ok(cudaGraphExecDestroy(executable)); }
    operator cudaGraphExec_t() const { return executable; }
};
static void begin(void) { ok(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal)); }
static cudaGraphExec_t end(void) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ok(cudaStreamEndCapture(one, &graph));
    ok(cudaGraphInstantiate(&executable, graph, 0));
    ok(cudaGraphDestroy(graph));
    return executable;
}
static void set_all(float* x, float value) {
    fill<<<1, N, 0, one>>>(x, value);
    ok(cudaStreamSynchronize(one));
}
template <bool bug> static void not_launched() { // a capture runs nothing
    set_all(x, 1);
    begin();
    fill<<<1, N, 0, one>>>(x, 2);
    Graph graph = { end() };
    if (!bug) ok(cudaGraphLaunch(graph, one));
    expect("what was captured", first_of(x, one), 2);
}
template <bool bug> static void old_argument() { // a kernel keeps the arguments that it was captured with
    float value = bug ? 3 : 4;
    begin();
    fill<<<1, N, 0, one>>>(x, value);
    value = 4;
    Graph graph = { end() };
    ok(cudaGraphLaunch(graph, one));
    expect("an argument that changed since", first_of(x, one), value);
}
template <bool bug> static void graph_not_waited_for() { // a launch is work on a stream
    Event written;
    set_all(x, 1);
    begin();
    fill<<<1, N, 0, one>>>(x, 6);
    Graph graph = { end() };
    ok(cudaGraphLaunch(graph, one));
    ok(cudaEventRecord(written, one));
    if (!bug) ok(cudaStreamWaitEvent(other, written));
    expect("what a graph wrote on another stream", first_of(x, other), 6);
}
static void check_graphs() {
    set_all(y, 1);
    *out = 1;
    begin(); // y[0] = in, x = y + 1, y[1] = x[0], out = y[1], x[0] = 0, out = out + 1
    ok(cudaMemcpyAsync(y, in, sizeof *y, cudaMemcpyHostToDevice, one));
    add_one<<<1, N, 0, one>>>(x, y);
    ok(cudaMemcpyAsync(y + 1, x, sizeof *y, cudaMemcpyDeviceToDevice, one));
    ok(cudaMemcpyAsync(out, y + 1, sizeof *out, cudaMemcpyDeviceToHost, one));
    ok(cudaMemsetAsync(x, 0, sizeof *x, one));
    ok(cudaLaunchHostFunc(one, [](void* p) { ++*(float*)p; }, out));
    Graph graph = { end() };
    ok(cudaStreamSynchronize(one));
    expect("memory that a capture names", *out, 1);
    for (int i = 0; i < 3; i++) {
        *in = (float)(5 + i);
        ok(cudaGraphLaunch(graph, one));
        ok(cudaStreamSynchronize(one));
        expect("a launch's number", *out, 7 + i);
        expect("its kernel", first_of(x + 2, one), 2);
        expect("its memset", first_of(x, one), 0);
    }

    set_all(x, 0); // two launches of a graph never overlap, on any streams
    begin();
    add_one<<<1, N, 0, one>>>(y, x);
    add_one<<<1, N, 0, one>>>(x, y);
    Graph twice = { end() };
    for (int i = 0; i < 20; i++) ok(cudaGraphLaunch(twice, i % 2 ? other : one));
    ok(cudaDeviceSynchronize());
    expect("launches on two streams", first_of(x, one), 40);
}

// A call that invalidates a capture fails, and so do all later ones. There is no graph, and the stream works as before.
static void expect_spoilt(const char* what, cudaError_t should, std::function<cudaError_t()> call) {
    cudaGraph_t graph;
    set_all(x, 1);
    begin();
    fill<<<1, N, 0, one>>>(x, 2);
    expect_error(what, call(), should);
    fill<<<1, N, 0, one>>>(x, 3);
    expect_error("a launch in a spoilt capture", cudaPeekAtLastError(), cudaErrorStreamCaptureInvalidated);
    expect_error("the end of it", cudaStreamEndCapture(one, &graph), cudaErrorStreamCaptureInvalidated);
    expect("the graph of it", graph == nullptr, 1);
    expect("what it left", first_of(x, one), 1);
}
static void check_captures() {
    const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
    float ordinary;
    void *p, *pinned, *unused;
    Event event;
    begin();
    cudaGraphExec_t empty = end();
    ok(cudaMalloc(&p, 8));
    ok(cudaMallocHost(&pinned, 8));
    ok(cudaEventRecord(event, one));
    expect_spoilt("waiting for the stream", unsupported, [] { return cudaStreamSynchronize(one); });
    expect_spoilt("asking it", unsupported, [] { return cudaStreamQuery(one); });
    expect_spoilt("waiting for all", unsupported, [] { return cudaDeviceSynchronize(); });
    expect_spoilt("waiting for an event", unsupported, [&] { return cudaEventSynchronize(event); });
    expect_spoilt("asking it", unsupported, [&] { return cudaEventQuery(event); });
    expect_spoilt("an event", unsupported, [&] { return cudaEventRecord(event, one); });
    expect_spoilt("waiting there for an event", cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(one, event); });
    expect_spoilt("allocating", unsupported, [&] { return cudaMalloc(&unused, 8); });
    expect_spoilt("allocating pinned memory", unsupported, [&] { return cudaMallocHost(&unused, 8); });
    expect_spoilt("freeing", unsupported, [=] { return cudaFree(p); });
    expect_spoilt("freeing pinned memory", unsupported, [=] { return cudaFreeHost(pinned); });
    expect_spoilt("a copy that blocks", unsupported, [] { return cudaMemcpy(x, y, 4, cudaMemcpyDeviceToDevice); });
    expect_spoilt("a copy of ordinary memory", unsupported,
                  [&] { return cudaMemcpyAsync(x, &ordinary, 4, cudaMemcpyHostToDevice, one); });
    expect_spoilt("a copy to ordinary memory elsewhere", unsupported,
                  [&] { return cudaMemcpyAsync(&ordinary, x, 4, cudaMemcpyDeviceToHost, other); });
    expect_spoilt("a collective", unsupported,
                  [] { return emulator::enqueue_when(one, "a collective", [] { return true; }, [] {}); });
    expect_spoilt("a graph in it", unsupported, [=] { return cudaGraphLaunch(empty, one); });
    expect_spoilt("destroying the stream", unsupported, [] { return cudaStreamDestroy(one); });
    expect_spoilt("another thread that waits for all", unsupported, [] {
        cudaError_t error;
        std::thread([&] { error = cudaDeviceSynchronize(); }).join();
        return error ? cudaDeviceSynchronize() : error; // once more here, because cudaGetLastError is per thread
    });

    cudaGraph_t graph; // these calls are allowed during a capture
    begin();
    expect_error("beginning again", cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal), cudaErrorIllegalState);
    fill<<<1, N, 0, other>>>(y, 5);
    ordinary = 6;
    ok(cudaMemcpyAsync(y + 1, &ordinary, sizeof ordinary, cudaMemcpyHostToDevice, other));
    std::thread([] {
        void* own;
        cudaGraph_t none;
        ok(cudaMalloc(&own, 8));
        ok(cudaFree(own));
        expect("another stream meanwhile", first_of(y + 1, other), 6);
        expect_error("its end in another thread", cudaStreamEndCapture(one, &none), cudaErrorStreamCaptureWrongThread);
    }).join();
    fill<<<1, N, 0, one>>>(x, 7);
    ok(cudaStreamEndCapture(one, &graph));
    ok(cudaGraphDestroy(graph));

    cudaGraphExec_t executable;
    expect_error("no capture's end", cudaStreamEndCapture(one, &graph), cudaErrorIllegalState);
    expect_error("the stream NULL", cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal), unsupported);
    expect_error("a destroyed graph", cudaGraphInstantiate(&executable, graph, 0), cudaErrorInvalidValue);
    expect_error("destroying it again", cudaGraphDestroy(graph), cudaErrorInvalidValue);
    ok(cudaGraphExecDestroy(empty));
    expect_error("a launch of what was destroyed", cudaGraphLaunch(empty, one), cudaErrorInvalidValue);
    ok(cudaFree(p));
    ok(cudaFreeHost(pinned));
}

// --- memory: the mistake ends the program with the line of the host code, of the launch, or of the kernel ---
template <bool bug> static void host_reads() {
    ok(cudaMemset(x, 0, N * sizeof *x));
    float* p = bug ? x : out;
    if (!bug) ok(cudaMemcpy(out, x, N * sizeof *x, cudaMemcpyDeviceToHost));
    expect("a number", p[3], 0); // BUG host_reads
}
template <bool bug> static void host_copies() {
    volatile size_t bytes = 2000;
    memcpy(bug ? x : in, out, bytes); // BUG host_copies
    bytes = 0; // so that memcpy is not called last, which leaves no frame of this function
}
template <bool bug> static void host_pointer() {
    std::vector<float> ordinary(N);
    add_one<<<1, N, 0, one>>>(y, bug ? ordinary.data() : x); // BUG host_pointer
    ok(cudaStreamSynchronize(one));
}
template <bool bug> static void freed() {
    float* p;
    ok(cudaMalloc((void**)&p, N * sizeof *p));
    if (bug) ok(cudaFree(p));
    fill<<<1, N, 0, one>>>(p, 1); // BUG freed
    if (!bug) ok(cudaFree(p));
}
template <bool bug> static void freed_in_structure() {
    float* p;
    ok(cudaMalloc((void**)&p, N * sizeof *p));
    if (bug) ok(cudaFree(p));
    fill_hidden<<<1, N, 0, one>>>(Hidden{p});
    ok(cudaStreamSynchronize(one));
    if (!bug) ok(cudaFree(p));
}
template <bool bug> static void call_from_callback() {
    ok(cudaLaunchHostFunc(one, [](void*) { if (bug) cudaDeviceSynchronize(); }, nullptr));
    ok(cudaStreamSynchronize(one));
}

// --- error codes ---
static void check_errors() {
    cudaStream_t stream;
    cudaEvent_t event, untimed;
    float ms;
    const size_t bytes = N * sizeof *x;
    const cudaMemcpyKind up = cudaMemcpyHostToDevice, down = cudaMemcpyDeviceToHost;
    expect_error("past the end", cudaMemcpyAsync(x, in, bytes + 1, up, one), cudaErrorInvalidValue);
    expect_error("past the end, from inside", cudaMemcpyAsync(in, x + 1, bytes, down, one), cudaErrorInvalidValue);
    expect_error("the wrong way", cudaMemcpyAsync(x, in, bytes, down, one), cudaErrorInvalidValue);
    expect_error("onto itself", cudaMemcpyAsync(x, x + 1, 8, cudaMemcpyDeviceToDevice, one), cudaErrorInvalidValue);
    expect_error("of nothing", cudaMemcpyAsync(x, in, 0, up, one), cudaSuccess);
    expect_error("the host's memory", cudaMemset(&ms, 0, sizeof ms), cudaErrorInvalidValue);
    expect_error("too much", cudaMemsetAsync(x, 0, bytes + 1, one), cudaErrorInvalidValue);
    expect_error("freeing a part", cudaFree(x + 1), cudaErrorInvalidValue);
    expect_error("freeing the other kind", cudaFreeHost(x), cudaErrorInvalidValue);
    expect_error("freeing nothing", cudaFree(nullptr), cudaSuccess);

    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    fill<<<1, N, 0, stream>>>(x, 11);
    ok(cudaStreamDestroy(stream));
    expect_error("a destroyed stream", cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
    fill<<<1, N, 0, stream>>>(x, 12);
    expect_error("a launch there", cudaPeekAtLastError(), cudaErrorInvalidResourceHandle);
    ok(cudaDeviceSynchronize());
    expect("what it had been asked", first_of(x, one), 11);

    ok(cudaEventCreate(&event));
    ok(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    expect_error("an event that was never recorded", cudaEventSynchronize(event), cudaSuccess);
    expect_error("its time", cudaEventElapsedTime(&ms, event, event), cudaErrorInvalidResourceHandle);
    ok(cudaEventRecord(untimed, one));
    ok(cudaEventRecord(event, one));
    expect_error("a time that is not kept", cudaEventElapsedTime(&ms, event, untimed), cudaErrorInvalidResourceHandle);
    expect_error("a time to come", cudaEventElapsedTime(&ms, event, event), cudaErrorNotReady);
    ok(cudaEventSynchronize(event));
    unsigned long long calls = emulator_calls("cudaEventElapsedTime");
    ok(cudaEventElapsedTime(&ms, event, event));
    expect("calls that are counted", (double)(emulator_calls("cudaEventElapsedTime") - calls), 1);
    expect("calls of what does not exist", (double)emulator_calls("cudaNothing"), 0);
    for (int i = 0; i < 5; i++) fill<<<1, N, 0, one>>>(x, (float)i);
    ok(cudaEventRecord(event, one));
    expect_error("a query", cudaEventQuery(event), cudaErrorNotReady);
    int asked = 0;
    while (cudaEventQuery(event) == cudaErrorNotReady && asked < 100) asked++;
    cudaGetLastError();
    expect("a caller that keeps asking gets there", asked > 1 && asked < 100, 1);
    ok(cudaEventDestroy(event));
    ok(cudaEventDestroy(untimed));
    expect_error("a destroyed event", cudaEventRecord(event, one), cudaErrorInvalidResourceHandle);

    void* p;
    size_t available, total;
    ok(cudaMemGetInfo(&available, &total));
    expect_error("all there is, and a byte", cudaMalloc(&p, available + 1), cudaErrorMemoryAllocation);
    expect("the result of that", p == nullptr, 1);
    cudaDeviceProp properties;
    ok(cudaGetDeviceProperties(&properties, 0));
    expect("the memory of the device", (double)properties.totalGlobalMem, (double)total);
    expect_error("the second of one device", cudaSetDevice(1), cudaErrorInvalidDevice);
}
// A host function may wait for another thread that uses CUDA.
static void check_threads() {
    static std::atomic<bool> may_go;
    Event before;
    fill<<<1, N, 0, one>>>(x, 21);
    ok(cudaEventRecord(before, one));
    std::thread helper([&before] {
        ok(cudaEventSynchronize(before));
        fill<<<1, N, 0, other>>>(y, 22);
        ok(cudaStreamSynchronize(other));
        may_go = true;
    });
    ok(cudaLaunchHostFunc(one, [](void*) { while (!may_go) std::this_thread::yield(); }, nullptr));
    add_one<<<1, N, 0, one>>>(x, y);
    expect("what another thread's kernel left", first_of(x, one), 23);
    helper.join();
}

#ifdef WITH_CUBLASLT
// --- cuBLASLt: D (m,n) = A^T B, and refusals ---
struct Call {
    int m = 8, n = 3, k = 5, a_rows = 5, lda = 5, ldb = 5, ldd = 8, aux_ld = 8, alignment = 4;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    cublasOperation_t trans_a = CUBLAS_OP_T;
    float *a = x, *b = x + 100, *d = y, *bias = x + 200, *aux = y + 200;
    size_t workspace = 0;
    cublasStatus_t operator()() const {
        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t o;
        cublasLtMatrixLayout_t la, lb, ld;
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulHeuristicResult_t found[8];
        int count = 0;
        int64_t aux_ld64 = aux_ld;
        float alpha = 2, beta = 0;
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&o, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatmulDescSetAttribute(o, CUBLASLT_MATMUL_DESC_TRANSA, &trans_a, sizeof trans_a);
        cublasLtMatmulDescSetAttribute(o, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        cublasLtMatmulDescSetAttribute(o, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
        cublasLtMatmulDescSetAttribute(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux, sizeof aux);
        cublasLtMatmulDescSetAttribute(o, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld64, sizeof aux_ld64);
        cublasLtMatrixLayoutCreate(&la, CUDA_R_32F, a_rows, m, lda);
        cublasLtMatrixLayoutCreate(&lb, CUDA_R_32F, k, n, ldb);
        cublasLtMatrixLayoutCreate(&ld, CUDA_R_32F, m, n, ldd);
        cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
        for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
        cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, o, la, lb, ld, ld, preference, 8, found, &count);
        // the last candidate needs a workspace, if one is allowed, and the first the best alignment
        const cublasLtMatmulAlgo_t* algorithm = &found[workspace ? count - 1 : 0].algo;
        if (count) status = cublasLtMatmul(handle, o, &alpha, a, la, b, lb, &beta, d, ld, d, ld, algorithm, nullptr, 0, one);
        cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t l : {la, lb, ld}) cublasLtMatrixLayoutDestroy(l);
        cublasLtMatmulDescDestroy(o);
        cublasLtDestroy(handle);
        return status;
    }
};
static void expect_refused(const char* what, cublasStatus_t should, std::function<void(Call&)> change) {
    Call call;
    change(call);
    expect(what, call(), should);
}
static void check_cublaslt() {
    for (int i = 0; i < N; i++) in[i] = (float)(i % 7 - 3);
    ok(cudaMemcpyAsync(x, in, N * sizeof *x, cudaMemcpyHostToDevice, one));
    Call biased;
    biased.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    expect("a product", biased(), CUBLAS_STATUS_SUCCESS);
    ok(cudaMemcpyAsync(out, y, N * sizeof *y, cudaMemcpyDeviceToHost, one));
    ok(cudaStreamSynchronize(one));
    for (int j = 0; j < 3; j++)
        for (int i = 0; i < 8; i++) {
            double sum = 0;
            for (int k = 0; k < 5; k++) sum += 2.0 * in[i * 5 + k] * in[100 + j * 5 + k];
            sum += in[200 + i];
            expect("what GELU was taken of", out[200 + j * 8 + i], sum);
            double gelu = 0.5 * sum * (1 + tanh(0.7978845608028654 * (sum + 0.044715 * sum * sum * sum)));
            expect("its GELU", out[j * 8 + i], (float)gelu);
        }
    set_all(y, 0);
    begin();
    expect("a product in a capture", Call()(), CUBLAS_STATUS_SUCCESS);
    Graph graph = { end() };
    expect("what it has done", first_of(y, one), 0);
    ok(cudaGraphLaunch(graph, one));
    expect("what a launch of it does", first_of(y, one), 10); // 2 (-3 -2 -1 0 1) (-1 0 1 2 3)
    const cublasStatus_t invalid = CUBLAS_STATUS_INVALID_VALUE, unsupported = CUBLAS_STATUS_NOT_SUPPORTED;
    expect_refused("a leading dimension below the rows", invalid, [](Call& c) { c.lda = 4; });
    expect_refused("D's, too", invalid, [](Call& c) { c.ldd = 7; });
    expect_refused("matrices that do not fit", invalid, [](Call& c) { c.a_rows = 6; c.lda = 6; });
    expect_refused("a transposition forgotten", invalid, [](Call& c) { c.trans_a = CUBLAS_OP_N; });
    expect_refused("memory of the host", invalid, [](Call& c) { c.a = in; });
    expect_refused("memory that ends too early", invalid, [](Call& c) { c.b = x + N - 14; });
    expect_refused("D upon B", invalid, [](Call& c) { c.d = c.b + 1; });
    expect_refused("an address less aligned than was said", invalid,
                   [](Call& c) { c.alignment = 256; c.lda = c.ldb = c.ldd = 64; c.b = x + 501; });
    expect_refused("no workspace where one was promised", invalid, [](Call& c) { c.workspace = 1 << 20; });
    expect_refused("a bias that is not there", invalid, [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_BIAS; c.bias = nullptr; });
    expect_refused("an auxiliary leading dimension that 8 does not divide", invalid,
                   [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS; c.aux_ld = 9; });
    expect_refused("an auxiliary matrix on 4 bytes", invalid,
                   [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS; c.aux = y + 201; });
    expect_refused("a bias gradient of A transposed", unsupported, [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_BGRADA; });
    expect_refused("an epilogue that is not emulated", unsupported, [](Call& c) { c.epilogue = CUBLASLT_EPILOGUE_RELU; });
}
#endif

static void check_all() {
    check_ordinary_memory();
    check_rows();
    check_errors();
    check_threads();
    check_graphs();
    check_captures();
#ifdef WITH_CUBLASLT
    check_cublaslt();
#endif
}
int main(int argc, char** argv) {
    ok(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (float** p : {&x, &y}) ok(cudaMalloc((void**)p, N * sizeof **p));
    for (float** p : {&in, &out}) ok(cudaMallocHost((void**)p, N * sizeof **p));
#define MISTAKE(name) {#name, name<false>, name<true>}
    int status = run_selftest(argc, argv, {
        MISTAKE(missing_wait), MISTAKE(event_too_early), MISTAKE(overwritten), MISTAKE(legacy_stream),
        MISTAKE(reused_early), MISTAKE(read_early), MISTAKE(not_written), MISTAKE(not_launched), MISTAKE(old_argument),
        MISTAKE(graph_not_waited_for), MISTAKE(host_reads), MISTAKE(host_copies), MISTAKE(host_pointer), MISTAKE(freed),
        MISTAKE(freed_in_structure), MISTAKE(call_from_callback)}, check_all);
    for (float* p : {x, y}) ok(cudaFree(p));
    for (float* p : {in, out}) ok(cudaFreeHost(p));
    return status;
}
