// mma.h - in place of CUDA's, whose nvcuda::wmma would compile for the host, and compute nothing.
#error "nvcuda::wmma has no stand-in in the emulator; matrix.h has mma_m16n8k16 and ldmatrix"
