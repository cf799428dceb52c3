#define ASYNCCKPT_UPDATE_KERNEL update_portable
#include "update_kernel_body.hpp"
