#define ASYNCCKPT_UPDATE_KERNEL update_avx512
#include "update_kernel_body.hpp"
