/*
matmul_backward.cu - the gradients of a linear layer in several kernels. Forward is out (N,OC) = inp (N,C) w (OC,C)^T, so

    dinp (N,C)  = dout (N,OC) w (OC,C)            sums over OC
    dw (OC,C)  += dout (N,OC)^T inp (N,C)         sums over N

This is twice forward's arithmetic on the same arrays, but neighbours in memory are no longer neighbours in the sum: all
operands but the first dout lie "by columns" (matmul_common.cuh). This helps the simplest kernel, in which neighbouring
threads now read neighbours. Every better kernel has to transpose, which is nearly free where the hardware can do it:
ldmatrix.trans, and two bits of wgmma's instruction. This file skips forward's steps in between. bias_backward.cu is the
bias's gradient.
*/
#include "matmul_common.cuh"
#include "matmul_hopper.cuh"
#include "matmul_tensor_cores.cuh"

struct Problem {
    int N, C, OC;
    double flops; // multiplications and additions, of both products
    Both<floatX> dinp, dw, dout, inp, w;

    Problem(Shape s) : N(s.rows), C(s.depth), OC(s.cols), flops(4.0 * N * C * OC) {
        start_cpu(layer_shapes(1, N, C, 1, 1, 1));
        library_start();
        dout = random_both((size_t)N * OC, 0, 0.1f); inp = random_both((size_t)N * C); w = random_both((size_t)OC * C, 0, 0.1f);
        dinp = unset_both((size_t)N * C);
        dw = random_both((size_t)OC * C); // what is added to
        cpu::matmul_backward_input(dinp.cpu, dout.cpu, w.cpu, N, C, OC);
        cpu::matmul_backward_weight(dw.cpu, NULL, dout.cpu, inp.cpu, N, C, OC, GRAD_ADD);
        // like a step's first micro-batch: algorithms are tried here, because a sum that adds cannot be computed twice
        matmul_backward_weight(dw.gpu, NULL, dout.gpu, inp.gpu, N, C, OC, GRAD_SET);
    }
    void expect_right() { // a sum in one thread's order is off by about the root of its length, in roundings
        expect_near("dinp", dinp, 32 + 2 * sqrt(OC));
        expect_near("dw", dw, 32 + 2 * sqrt(N));
    }
};
static MatmulOutput output_dinp(Problem& p) { return { p.dinp.gpu, NULL, GRAD_SET, p.N, p.C }; }
static MatmulOutput output_dw(Problem& p) { return { p.dw.gpu, NULL, GRAD_ADD, p.OC, p.C }; }

#define DINP(p) output_dinp(p), (p).dout.gpu, (p).w.gpu, (p).OC
#define DW(p) output_dw(p), (p).dout.gpu, (p).inp.gpu, (p).N

// ---- 1: what one would write first ----
// One result per thread. Neighbouring threads compute neighbouring columns, so in one step of k a warp reads 32
// neighbours of w or inp, and one number of dout for all lanes. But every use of a number still loads it from the
// cache.
VARIANT(matmul_backward_1_naive, "one result per thread") {
    is_offered = launch_results<ThreadPerRow, BY_ROWS, BY_COLUMNS>(DINP(p), threads) &&
                 launch_results<ThreadPerRow, BY_COLUMNS, BY_COLUMNS>(DW(p), threads);
}

// ---- 2: tiles in shared memory, 4 x 4 results per thread ----
// As in forward, by the same kernel (matmul_common.cuh), which transposes a tile that lies by columns as it writes it.
VARIANT(matmul_backward_2_tiles, "tiles in shared memory, 4 x 4 results per thread") {
    is_offered = launch_tiles<BY_ROWS, BY_COLUMNS>(DINP(p), threads) &&
                 launch_tiles<BY_COLUMNS, BY_COLUMNS>(DW(p), threads);
}

// ---- 3: tensor cores ----
// Forward's kernel. A tile lies in shared memory as it does in memory, and ldmatrix transposes a tile by columns on its
// way into registers. (Both products meet the same conditions: if the first is refused, neither runs.)
VARIANT(matmul_backward_3_tensor_cores, "tensor cores, ldmatrix transposes operands by columns") {
    is_offered = mma_launch<BY_ROWS, BY_COLUMNS>(DINP(p), threads) &&
                 mma_launch<BY_COLUMNS, BY_COLUMNS>(DW(p), threads);
}

// ---- 4: Hopper ----
// A bit of wgmma's instruction selects operands by columns.
VARIANT(matmul_backward_4_hopper, "Hopper's own: tiles by TMA, products by wgmma", OWN_BLOCKS) {
    is_offered = wg_launch<BY_ROWS, BY_COLUMNS>(DINP(p)) && wg_launch<BY_COLUMNS, BY_COLUMNS>(DW(p));
}

// ---- 5: the library ----
VARIANT(matmul_backward_5_library, "cuBLASLt, as llmc/ calls it", OWN_BLOCKS) {
    matmul_backward_input(p.dinp.gpu, p.dout.gpu, p.w.gpu, p.N, p.C, p.OC);
    matmul_backward_weight(p.dw.gpu, NULL, p.dout.gpu, p.inp.gpu, p.N, p.C, p.OC, GRAD_ADD);
}

OPERATION("rows are tokens, cols outputs, depth inputs", { 8192, 3072, 768 }, { 136, 200, 40 })
