// In place of twins.cu where the library is built without CUDA.
#include "core/status.hpp"

extern "C" {

const char* twinkv_cuda_unavailable(void) {
    return "the library was built without CUDA";
}

twinkv_status twinkv_cuda_twin_counts(const twinkv_keys*, float, int64_t, int32_t*) {
    return twinkv::set_error(TWINKV_EUNSUPPORTED, twinkv_cuda_unavailable());
}

twinkv_status twinkv_cuda_best_twin(const twinkv_keys*, const uint8_t*, int64_t, float*) {
    return twinkv::set_error(TWINKV_EUNSUPPORTED, twinkv_cuda_unavailable());
}
}
