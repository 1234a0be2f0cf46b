// driver.c - a libcuda.so.1 for machines without a GPU, so that cuDNN can build plans there. cuDNN looks these functions up and
// calls some of them while it compiles; none of them has to do anything. Without a device nothing can be run.
//     gcc -shared -fPIC -o libcuda.so.1 -Wl,-soname,libcuda.so.1 driver.c, and its folder in LD_LIBRARY_PATH
#define SUCCEEDS(name) int name(void); int name(void) { return 0; }
// Handles of what is loaded are never used, but must not be NULL.
static int something;
#define GIVES_SOMETHING(name) int name(void** result); int name(void** result) { *result = &something; return 0; }

GIVES_SOMETHING(cuModuleLoadData) GIVES_SOMETHING(cuModuleLoadDataEx) GIVES_SOMETHING(cuModuleLoadFatBinary)
GIVES_SOMETHING(cuModuleGetFunction) GIVES_SOMETHING(cuLibraryLoadData) GIVES_SOMETHING(cuLibraryLoadFromFile)
GIVES_SOMETHING(cuLibraryGetKernel)

SUCCEEDS(cuCtxGetCurrent) SUCCEEDS(cuCtxGetDevice) SUCCEEDS(cuCtxGetLimit) SUCCEEDS(cuCtxPopCurrent) SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuDeviceGet) SUCCEEDS(cuDeviceGetAttribute) SUCCEEDS(cuDeviceGetCount) SUCCEEDS(cuDevicePrimaryCtxRelease)
SUCCEEDS(cuDevicePrimaryCtxReset) SUCCEEDS(cuDevicePrimaryCtxRetain) SUCCEEDS(cuFuncGetAttribute) SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuKernelGetAttribute) SUCCEEDS(cuKernelSetAttribute) SUCCEEDS(cuLaunchCooperativeKernel) SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLaunchKernelEx) SUCCEEDS(cuLibraryUnload) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuModuleGetGlobal_v2)
SUCCEEDS(cuLinkAddData) SUCCEEDS(cuLinkAddData_v2) SUCCEEDS(cuLinkAddFile_v2) SUCCEEDS(cuLinkComplete) SUCCEEDS(cuLinkCreate)
SUCCEEDS(cuLinkCreate_v2) SUCCEEDS(cuLinkDestroy) SUCCEEDS(cuMemcpyDtoH_v2) SUCCEEDS(cuStreamGetCtx) SUCCEEDS(cuStreamSynchronize)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor) SUCCEEDS(cuOccupancyMaxPotentialClusterSize) SUCCEEDS(cuTensorMapEncodeTiled)

int cuInit(unsigned flags);
int cuInit(unsigned flags) { (void)flags; return 100; } // CUDA_ERROR_NO_DEVICE
int cuGetExportTable(void);
int cuGetExportTable(void) { return 500; }              // CUDA_ERROR_NOT_FOUND: NVRTC asks, and continues without it
int cuDriverGetVersion(int* version);
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuGetErrorName(int error, const char** text);
int cuGetErrorName(int error, const char** text) { (void)error; *text = "an error without a GPU"; return 0; }
int cuGetErrorString(int error, const char** text);
int cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
