#define XXH_VECTOR XXH_AVX512
#define ASYNCCKPT_DIGEST_KERNEL digest_avx512
#include "digest_kernel_body.hpp"
