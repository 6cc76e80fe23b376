// Rows of a KV cache as float32, through ggml's own type traits: whatever llama.cpp can cache, this can read.
#include "core/parallel.hpp"
#include "core/status.hpp"

#include "ggml.h"

#include <cstring>

namespace twinkv {
namespace {

bool known_type(int type) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_type_size(ggml_type(type)) > 0;
}

void rows_to_f32(int type_id, const void* src, size_t src_bytes, size_t row_stride, int64_t n_rows, int64_t n_values,
                 int n_threads, float* dst) {
    require(twinkv_rows_supported(type_id),
            "rows of ggml type " + std::to_string(type_id) + " cannot be read as float32", TWINKV_EUNSUPPORTED);
    require(n_rows >= 0 && n_values >= 0, "negative number of rows or values");
    const auto type = ggml_type(type_id);
    require(n_values % ggml_blck_size(type) == 0, "a row of " + std::to_string(n_values) +
                                                      " values is no whole number of " + ggml_type_name(type) +
                                                      " blocks");
    if (n_rows == 0 || n_values == 0) {
        return;
    }
    const size_t row_bytes = ggml_row_size(type, n_values);
    require(row_stride >= row_bytes && src_bytes >= row_bytes &&
                size_t(n_rows - 1) <= (src_bytes - row_bytes) / row_stride,
            "rows reach past the end of their buffer");
    const auto* bytes = static_cast<const uint8_t*>(src);
    const auto to_float = type == GGML_TYPE_F32 ? nullptr : ggml_get_type_traits(type)->to_float;
    constexpr int64_t chunk = 256; // rows a thread takes at once: enough work to hide the hand-out
    parallel_for((n_rows + chunk - 1) / chunk, n_threads, [&](int64_t c) {
        const int64_t end = std::min(n_rows, (c + 1) * chunk);
        for (int64_t r = c * chunk; r < end; ++r) {
            const uint8_t* row = bytes + size_t(r) * row_stride;
            if (to_float) {
                to_float(row, dst + r * n_values, n_values);
            } else {
                std::memcpy(dst + r * n_values, row, row_bytes);
            }
        }
    });
}

} // namespace
} // namespace twinkv

extern "C" {

bool twinkv_rows_supported(int ggml_type_id) {
    return twinkv::known_type(ggml_type_id) &&
           (ggml_type_id == GGML_TYPE_F32 || ggml_get_type_traits(ggml_type(ggml_type_id))->to_float != nullptr);
}

twinkv_status twinkv_rows_to_f32(int ggml_type_id, const void* src, size_t src_bytes, size_t row_stride, int64_t n_rows,
                                 int64_t n_values, int n_threads, float* dst) {
    return twinkv::guard(
        [&] { twinkv::rows_to_f32(ggml_type_id, src, src_bytes, row_stride, n_rows, n_values, n_threads, dst); });
}
}
