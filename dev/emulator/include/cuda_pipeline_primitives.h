// cuda_pipeline_primitives.h - in place of CUDA's: device_functions.h has the primitives already.
