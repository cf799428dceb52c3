// The header picks the vector code that every processor of this architecture has (SSE2, NEON) or plain C.
#define ASYNCCKPT_DIGEST_KERNEL digest_portable
#include "digest_kernel_body.hpp"
