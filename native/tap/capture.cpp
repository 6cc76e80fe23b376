// Queries as attention sees them: the last few are kept as they are, all of them summed up (statistics.cpp).
#include "tap/tap.hpp"

#include <algorithm>
#include <cstring>

namespace twinkv {
namespace {

// Q of an attention node, [d, n_tokens, n_head] with any strides: its tokens from `first` on as rows
// [n_tokens - first, n_head, d].
std::vector<float> query_rows(const ggml_tensor* q, size_t first) {
    require(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float), "queries are not float32 rows", TWINKV_EUNSUPPORTED);
    require(q->ne[3] == 1, "several streams in one batch", TWINKV_EUNSUPPORTED);
    const size_t d = size_t(q->ne[0]), n_tokens = size_t(q->ne[1]), n_head = size_t(q->ne[2]);
    const size_t span = (n_tokens - 1) * q->nb[1] + (n_head - 1) * q->nb[2] + d * sizeof(float);
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(q, 0, span, scratch);
    std::vector<float> rows((n_tokens - first) * n_head * d);
    float* out = rows.data();
    for (size_t t = first; t < n_tokens; ++t) {
        for (size_t h = 0; h < n_head; ++h, out += d) {
            std::memcpy(out, bytes + t * q->nb[1] + h * q->nb[2], d * sizeof(float));
        }
    }
    return rows;
}

void keep_last(QueryWindow& w, int64_t capacity, const float* rows, const std::vector<int32_t>& positions, size_t row) {
    if (w.positions.size() != size_t(capacity) || w.rows.size() != size_t(capacity) * row) {
        w.rows.assign(size_t(capacity) * row, 0.0f);
        w.positions.assign(size_t(capacity), -1);
        w.clear();
    }
    const int64_t n = int64_t(positions.size());
    for (int64_t t = std::max<int64_t>(0, n - capacity); t < n; ++t) {
        std::memcpy(w.rows.data() + size_t(w.next) * row, rows + size_t(t) * row, row * sizeof(float));
        w.positions[size_t(w.next)] = positions[size_t(t)];
        w.next = (w.next + 1) % capacity;
        w.size = std::min(capacity, w.size + 1);
    }
}

// The newest queries of the window that stand at positions >= pos, oldest first, and out of the window.
std::vector<float> take_back(QueryWindow& w, int32_t pos, std::vector<int32_t>& positions) {
    const int64_t capacity = int64_t(w.positions.size());
    int64_t n = 0;
    while (n < w.size && w.positions[size_t((w.next + capacity - n - 1) % capacity)] >= pos) {
        ++n;
    }
    const size_t row = n > 0 ? w.rows.size() / size_t(capacity) : 0;
    std::vector<float> rows(size_t(n) * row);
    positions.resize(size_t(n));
    for (int64_t i = 0; i < n; ++i) {
        const size_t at = size_t((w.next + capacity - n + i) % capacity);
        std::memcpy(rows.data() + size_t(i) * row, w.rows.data() + at * row, row * sizeof(float));
        positions[size_t(i)] = w.positions[at];
    }
    w.next = n > 0 ? (w.next + capacity - n) % capacity : w.next;
    w.size -= n;
    return rows;
}

} // namespace

void capture_queries(twinkv_tap& tap, Layer& layer, const ggml_tensor* q) {
    const size_t n_tokens = size_t(q->ne[1]), row = size_t(q->ne[0] * q->ne[2]);
    require(tap.positions.size() == n_tokens,
            "queries cannot be captured: this model's graph shows no token positions (no rotary embedding)",
            TWINKV_EUNSUPPORTED);
    const size_t first = tap.statistics ? 0 : n_tokens - std::min(n_tokens, size_t(tap.window));
    std::vector<float> rows = query_rows(q, first);
    const std::vector<int32_t> positions(tap.positions.begin() + std::ptrdiff_t(first), tap.positions.end());
    if (tap.window > 0) {
        keep_last(layer.window, tap.window, rows.data(), positions, row);
    }
    if (tap.statistics) {
        add_statistics(layer, rows, positions, tap.skip, tap.n_threads);
    }
}

} // namespace twinkv

using twinkv::guard;
using twinkv::require;

extern "C" {

twinkv_status twinkv_tap_capture(twinkv_tap* tap, int32_t window, bool statistics, int32_t skip, int32_t n_threads) {
    return guard([&] {
        require(window >= 0 && window <= 65536, "the query window must hold between 0 and 65536 queries");
        tap->n_threads = n_threads;
        if (window != tap->window || statistics != tap->statistics || skip != tap->skip) {
            tap->window = window;
            tap->statistics = statistics;
            tap->skip = skip;
            twinkv_tap_reset(tap);
        }
    });
}

void twinkv_tap_reset(twinkv_tap* tap) {
    for (auto& [il, layer] : tap->layers) {
        layer.window = {};
        layer.statistics = {};
    }
}

twinkv_status twinkv_tap_rollback(twinkv_tap* tap, int32_t pos) {
    return guard([&] {
        for (auto& [il, layer] : tap->layers) {
            std::vector<int32_t> positions;
            std::vector<float> rows = twinkv::take_back(layer.window, pos, positions);
            twinkv::subtract_statistics(layer, rows, positions, pos, tap->skip, tap->n_threads);
        }
    });
}

int64_t twinkv_tap_window_size(const twinkv_tap* tap, int32_t index) {
    return index >= 0 && index < twinkv_tap_n_layers(tap) ? tap->at(index).window.size : 0;
}

twinkv_status twinkv_tap_window(const twinkv_tap* tap, int32_t index, int64_t size, float* queries,
                                int32_t* positions) {
    return guard([&] {
        const auto& layer = tap->at(index);
        const auto& w = layer.window;
        require(size == w.size, "the window holds " + std::to_string(w.size) + " queries");
        const size_t row = size_t(layer.facts.n_head) * size_t(layer.facts.head_dim_k);
        const int64_t capacity = int64_t(w.positions.size());
        for (int64_t i = 0; i < w.size; ++i) {
            const size_t at = size_t((w.next - w.size + i + capacity) % capacity);
            std::memcpy(queries + size_t(i) * row, w.rows.data() + at * row, row * sizeof(float));
            positions[i] = w.positions[at];
        }
    });
}
}
