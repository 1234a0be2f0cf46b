/*
matrix.h - the tensor cores' warp-wide instructions, under the names that llmc's wrappers give them. On a GPU the wrapper is
inline PTX; here the product is computed from the fragments' documented layout, so a wrong index gives a wrong number.
A wrapper header has: #ifdef CUDA_EMULATOR  using namespace emulator::matrix;  #else  ...inline PTX...  #endif
*/
#ifndef CUDA_EMULATOR_MATRIX_H
#define CUDA_EMULATOR_MATRIX_H
namespace emulator { namespace matrix {

// mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}.{bf16,f16}.f32: d += a * b, T is __nv_bfloat16 or __half.
template <class T> EMULATED void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = here()) {
    static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "elements are bf16 or fp16");
    emulator::mma_m16n8k16(std::is_same<T, __half>::value ? Element::FP16 : Element::BF16, d, a, b, site);
}

// ldmatrix.sync.aligned.m8n8.x{count}[.trans].shared.b16: lane 8m + r gives the address of row r of matrix m (16 bytes,
// aligned to 16); lanes from 8 count on may give any address. Fragment m is this lane's two elements of matrix m.
template <int count> EMULATED void load_rows(const char* name, bool transposed, uint32_t (&fragments)[count], const void* row, Site site) {
    uint4 own = {};
    if (self->lane < 8 * count) {
        check_aligned(row, 16, site);
        for (int i = 0; i < 16; i++) ((unsigned char*)&own)[i] = ((const unsigned char*)row)[i];
    }
    load_matrices(name, count, transposed, &own, fragments, site);
}
template <int count> EMULATED void ldmatrix(uint32_t (&fragments)[count], const void* row, Site site = here()) {
    load_rows("ldmatrix", false, fragments, row, site);
}
template <int count> EMULATED void ldmatrix_trans(uint32_t (&fragments)[count], const void* row, Site site = here()) {
    load_rows("ldmatrix_trans", true, fragments, row, site);
}
}} // namespace emulator::matrix
#endif
