// test_cuda_attention.cu - attention through cuDNN's graphs against the CPU's layer, and which attention is chosen when. On a GPU
// with the real cuDNN, or under the emulator with its interpreter of graphs; built with -DUSE_CUDNN=1. test_cuda_kernels.cu tests
// our own kernels.
#include "../../llmc/device/cuda/common.cuh"
[[maybe_unused]] static int memsets; // that attention has asked for
#define cudaMemsetAsync(...) (memsets++, cudaMemsetAsync(__VA_ARGS__))
#include "../../llmc/device/cuda/attention_choice.cuh"
#define CUDA_OWN_MAIN
#include "cuda_both.h"

static void start(int B, int T, int NH, int HS, AttentionChoice choice, bool deterministic) {
    LayerShapes s = layer_shapes(B, T, NH * HS, NH, 1, 1);
    if (choice != cuda_layers.attention || deterministic != cuda_layers.deterministic) attention_free(); // else plans stay valid
    start_both(s, 0);
    cuda_layers.attention = choice;
    cuda_layers.deterministic = deterministic;
    size_t bytes = attention_workspace_bytes(s); // which asks what computes it
    cuda_layers.workspace = device_bytes(bytes);
    cuda_check(cudaMemset(cuda_layers.workspace, 0xff, bytes), "filling the workspace");
}

// ---- which attention computes ----
// The kernels' results differ in the last bits, which shows which one computed: heads of 64 channels in 16 bits use tensor cores,
// but not if their arrays do not begin at a multiple of 16 bytes.
static void expect_own(int HS, size_t offset, void (*attention)(AttentionCall), const char* kernels) {
    const int B = 1, T = 40, NH = 2, C = NH * HS;
    size_t n = (size_t)B * T * C;
    start(B, T, NH, HS, ATTENTION_OWN, true);
    Both<floatX> qkv = random_both(3 * n, 0, 1, offset), out = unset_both(n), dout = random_both(n), dqkv = unset_both(3 * n);
    Both<float> stats = unset_both<float>((size_t)B * NH * T);
    attention({ out.gpu, stats.gpu, qkv.gpu, NULL, NULL, B, T, C, NH, HS });
    attention({ dqkv.gpu, stats.gpu, qkv.gpu, dout.gpu, out.gpu, B, T, C, NH, HS });
    std::vector<floatX> out_wanted = result_of(out), dqkv_wanted = result_of(dqkv);
    begin_again(out);
    begin_again(dqkv);
    attention_forward(out.gpu, stats.gpu, qkv.gpu, B, T, C, NH);
    attention_backward(dqkv.gpu, dout.gpu, qkv.gpu, out.gpu, stats.gpu, B, T, C, NH);
    expect_bits(kernels, result_of(out), out_wanted);
    expect_bits(kernels, result_of(dqkv), dqkv_wanted);
}
TEST(who_computes_our_own) {
    expect_own(48, 0, attention_fp32_arithmetic, "48 channels, in fp32 arithmetic");
    expect_own(64, 1, attention_fp32_arithmetic, "an array that is not aligned, in fp32 arithmetic");
#if ATTENTION_ON_TENSOR_CORES
    expect_own(64, 0, attention_tensor_cores, "64 channels, on tensor cores");
#else
    expect_own(64, 0, attention_fp32_arithmetic, "fp32, in fp32 arithmetic");
#endif
}
// `test_cuda_attention choose auto|cudnn|own HS T` prints which attention computes T tokens and heads of HS channels, or dies.
static int print_choice(const char* choice, int HS, int T) {
    bool own = strcmp(choice, "own") == 0, cudnn = strcmp(choice, "cudnn") == 0;
    start(1, T, 2, HS, own ? ATTENTION_OWN : cudnn ? ATTENTION_CUDNN : ATTENTION_AUTO, false);
    printf("%s\n", attention_description());
    free_all();
    attention_free();
    return 0;
}

#if ATTENTION_BY_CUDNN
// Forward and backward of B sequences of T tokens, with the attention that start() has chosen.
static void check_attention(int B, int T, int NH, int HS, bool equal_bits) {
    int C = NH * HS;
    size_t n = (size_t)B * T * C;
    // probabilities and their gradients are rounded to floatX before they are multiplied
    double stats_slack = 4 * (8 + sqrt(HS) + sqrt(T)), out_slack = stats_slack + 1.5 * ROUNDING / F32_ROUNDING;
    Both<floatX> qkv = random_both(3 * n), out = unset_both(n), dout = random_both(n), dqkv = unset_both(3 * n);
    Both<float> stats = unset_both<float>((size_t)B * NH * T);
    BOTH(attention_forward, out, stats, qkv, B, T, C, NH);
    expect_near("attention's out", out, out_slack);
    expect_near("attention's stats", stats, stats_slack);
    Both<floatX> o = as_input(out);
    Both<float> s = as_input(stats);
    cpu::attention_backward(dqkv.cpu, dout.cpu, qkv.cpu, o.cpu, s.cpu, B, T, C, NH);
    auto backward = [&] { attention_backward(dqkv.gpu, dout.gpu, qkv.gpu, o.gpu, s.gpu, B, T, C, NH); };
    if (equal_bits) run_twice("attention_backward", backward, dqkv);
    else backward();
    expect_near("attention's dqkv", dqkv, 2 * out_slack);
}
static void check_cudnn(int B, int T, int NH, int HS) {
    for (bool deterministic : { false, true }) {
        start(B, T, NH, HS, ATTENTION_CUDNN, deterministic);
        expect(strncmp(attention_description(), "cuDNN ", 6) == 0, "%s computes attention", attention_description());
        check_attention(B, T, NH, HS, deterministic);
    }
}
TEST(cudnn_follows_the_cpu_over_shapes) {
    check_cudnn(2, 64, 3, 64);
    check_cudnn(2, 65, 2, 32);
    if (quick) return;
    check_cudnn(1, 33, 1, 128);
    check_cudnn(3, 17, 2, 8);
    check_cudnn(1, 130, 2, 80);
#ifndef CUDA_EMULATOR
    check_cudnn(2, 1024, 12, 64);
    check_cudnn(1, 2047, 2, 128);
#endif
}
TEST(cudnn_leaves_other_shapes_and_unaligned_arrays_to_our_own_kernels) {
    start(1, 8, 2, 12, ATTENTION_AUTO, false);
    check_attention(1, 8, 2, 12, true);
    start(2, 40, 2, 16, ATTENTION_CUDNN, true);
    check_attention(1, 40, 2, 16, true);
    check_attention(2, 7, 2, 16, true);
    for (int array = 0; array < 7; array++) {
        start(1, 9, 2, 16, ATTENTION_CUDNN, true);
        unaligned_array = array;
        check_attention(1, 9, 2, 16, true);
        unaligned_array = -1;
    }
}
// Without --deterministic cuDNN adds to sums, which it must set to 0 itself: start() fills them with NaN, and a second
// backward finds what the first has left.
TEST(cudnn_sets_its_sums_to_zero_itself) {
    memsets = 0;
    for (int T : { 32, 65, 128 }) {
        start(1, T, 2, 16, ATTENTION_CUDNN, false);
        check_attention(1, T, 2, 16, false);
        check_attention(1, T, 2, 16, false);
    }
    expect(memsets == 0, "%d memsets in 6 steps", memsets);
}
#endif

int main(int argc, char** argv) {
    if (argc == 5 && strcmp(argv[1], "choose") == 0) return print_choice(argv[2], atoi(argv[3]), atoi(argv[4]));
#if ATTENTION_BY_CUDNN
    if (cudnn_load()[0] != 0) {
        printf("1..0 # SKIP %s\n", cudnn_load());
        return 0;
    }
#endif
    int failed = run_tests(argc, argv);
    attention_free();
    return failed;
}
