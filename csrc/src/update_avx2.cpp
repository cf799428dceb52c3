#define ASYNCCKPT_UPDATE_KERNEL update_avx2
#include "update_kernel_body.hpp"
