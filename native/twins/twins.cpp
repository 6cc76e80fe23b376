// placeholder replaced by the kernel room
#include "core/status.hpp"
extern "C" {
twinkv_status twinkv_twin_counts(const float*, int64_t, int64_t, float, int64_t, int, int32_t*) {
    return twinkv::set_error(TWINKV_EUNSUPPORTED, "not built");
}
twinkv_status twinkv_best_twin(const float*, const uint8_t*, int64_t, int64_t, int64_t, int, float*) {
    return twinkv::set_error(TWINKV_EUNSUPPORTED, "not built");
}
}
