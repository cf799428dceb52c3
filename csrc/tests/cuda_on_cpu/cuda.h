// What the CUDA library uses of the driver's header; see cuda_runtime.h beside it.
#pragma once

typedef enum cudaError_enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef struct CUctx_st* CUcontext;
