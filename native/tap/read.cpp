// Cells of a layer's cache as float32, from host or device memory, transposed V or not.
#include "core/parallel.hpp"
#include "tap/tap.hpp"

namespace twinkv {
namespace {

void read_rows(const ggml_tensor* cache, int64_t first, int64_t n, int n_threads, float* dst) {
    const size_t row = cache->nb[1];
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(cache, size_t(first) * row, size_t(n) * row, scratch);
    const auto status = twinkv_rows_to_f32(cache->type, bytes, size_t(n) * row, row, n, cache->ne[0], n_threads, dst);
    require(status == TWINKV_OK, twinkv_last_error(), status);
}

// V without flash attention: element (cell c, value j) lies at j * n_cells + c. Only unquantized types are
// stored so.
void read_columns(const ggml_tensor* cache, int64_t first, int64_t n, int n_threads, float* dst) {
    const int64_t n_values = cache->ne[0], n_cells = cache->ne[1];
    const size_t element = ggml_type_size(cache->type);
    require(ggml_blck_size(cache->type) == 1, "a transposed V cache of a quantized type", TWINKV_EUNSUPPORTED);
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(cache, 0, ggml_nbytes(cache), scratch);
    parallel_for(n_values, n_threads, [&](int64_t j) {
        std::vector<float> column(static_cast<size_t>(n));
        const uint8_t* src = bytes + size_t(j * n_cells + first) * element;
        const auto status =
            twinkv_rows_to_f32(cache->type, src, size_t(n) * element, size_t(n) * element, 1, n, 1, column.data());
        require(status == TWINKV_OK, twinkv_last_error(), status);
        for (int64_t c = 0; c < n; ++c) {
            dst[c * n_values + j] = column[size_t(c)];
        }
    });
}

void read(const ggml_tensor* cache, bool transposed, int64_t first, int64_t n, int n_threads, float* dst) {
    require(first >= 0 && n >= 0 && first + n <= cache->ne[1], "cells past the end of the cache");
    if (n == 0) {
        return;
    }
    transposed ? read_columns(cache, first, n, n_threads, dst) : read_rows(cache, first, n, n_threads, dst);
}

} // namespace
} // namespace twinkv

extern "C" {

twinkv_status twinkv_tap_read_k(const twinkv_tap* tap, int32_t index, int64_t first, int64_t n, int n_threads,
                                float* dst) {
    return twinkv::guard([&] { twinkv::read(tap->at(index).k, false, first, n, n_threads, dst); });
}

twinkv_status twinkv_tap_read_v(const twinkv_tap* tap, int32_t index, int64_t first, int64_t n, int n_threads,
                                float* dst) {
    return twinkv::guard([&] {
        const auto& layer = tap->at(index);
        twinkv::require(layer.v != nullptr, "the layer's V cache was not seen in the graph", TWINKV_EUNSUPPORTED);
        twinkv::read(layer.v, layer.facts.v_transposed, first, n, n_threads, dst);
    });
}
}
