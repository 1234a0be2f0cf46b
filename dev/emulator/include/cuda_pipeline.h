// cuda_pipeline.h - in place of CUDA's: device_functions.h has the primitives already.
