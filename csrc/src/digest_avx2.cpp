#define XXH_VECTOR XXH_AVX2
#define ASYNCCKPT_DIGEST_KERNEL digest_avx2
#include "digest_kernel_body.hpp"
