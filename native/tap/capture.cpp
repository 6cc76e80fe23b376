// Queries as attention sees them: the last few kept as they are, all of them summed up.
#include "core/parallel.hpp"
#include "tap/tap.hpp"

#include <cstring>

namespace twinkv {
namespace {

// Q of an attention node, [d, n_tokens, n_head] with any strides, into rows [n_tokens, n_head, d].
std::vector<float> query_rows(const ggml_tensor* q) {
    require(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float), "queries are not float32 rows", TWINKV_EUNSUPPORTED);
    require(q->ne[3] == 1, "several streams in one batch", TWINKV_EUNSUPPORTED);
    const size_t d = size_t(q->ne[0]), n_tokens = size_t(q->ne[1]), n_head = size_t(q->ne[2]);
    const size_t span = (n_tokens - 1) * q->nb[1] + (n_head - 1) * q->nb[2] + d * sizeof(float);
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(q, 0, span, scratch);
    std::vector<float> rows(n_tokens * n_head * d);
    for (size_t t = 0; t < n_tokens; ++t) {
        for (size_t h = 0; h < n_head; ++h) {
            std::memcpy(rows.data() + (t * n_head + h) * d, bytes + t * q->nb[1] + h * q->nb[2], d * sizeof(float));
        }
    }
    return rows;
}

void keep_last(QueryWindow& w, int64_t capacity, const std::vector<float>& rows, const std::vector<int32_t>& positions,
               size_t row) {
    if (w.positions.size() != size_t(capacity) || w.rows.size() != size_t(capacity) * row) {
        w.rows.assign(size_t(capacity) * row, 0.0f);
        w.positions.assign(size_t(capacity), -1);
        w.clear();
    }
    const int64_t n = int64_t(positions.size());
    for (int64_t t = std::max<int64_t>(0, n - capacity); t < n; ++t) {
        std::memcpy(w.rows.data() + size_t(w.next) * row, rows.data() + size_t(t) * row, row * sizeof(float));
        w.positions[size_t(w.next)] = positions[size_t(t)];
        w.next = (w.next + 1) % capacity;
        w.size = std::min(capacity, w.size + 1);
    }
}

// Adds the batch to the sums. Products are summed in float over the batch (at most a few hundred terms), then
// in double.
void add_statistics(QueryStatistics& s, const Layer& layer, const std::vector<float>& rows,
                    const std::vector<int32_t>& positions, int32_t skip) {
    const size_t n_head = size_t(layer.facts.n_head), d = size_t(layer.facts.head_dim_k);
    s.sum.resize(n_head * d);
    s.outer.resize(n_head * d * d);
    parallel_for(int64_t(n_head), 0, [&](int64_t h) {
        std::vector<float> sum(d), outer(d * d);
        for (size_t t = 0; t < positions.size(); ++t) {
            if (positions[t] < skip) {
                continue;
            }
            const float* x = rows.data() + (t * n_head + size_t(h)) * d;
            for (size_t a = 0; a < d; ++a) {
                sum[a] += x[a];
                float* out = outer.data() + a * d;
                const float xa = x[a];
                for (size_t b = 0; b < d; ++b) {
                    out[b] += xa * x[b];
                }
            }
        }
        for (size_t a = 0; a < d; ++a) {
            s.sum[size_t(h) * d + a] += sum[a];
        }
        for (size_t i = 0; i < d * d; ++i) {
            s.outer[size_t(h) * d * d + i] += outer[i];
        }
    });
    for (const int32_t p : positions) {
        s.count += p >= skip;
        s.max_pos = std::max(s.max_pos, p);
    }
}

} // namespace

void capture_queries(twinkv_tap& tap, Layer& layer, const ggml_tensor* q) {
    std::vector<float> rows = query_rows(q);
    const size_t n_tokens = size_t(q->ne[1]), row = size_t(q->ne[0] * q->ne[2]);
    std::vector<int32_t> positions = tap.positions;
    if (positions.size() != n_tokens) {
        positions.assign(n_tokens, -1); // no rotary embedding in this graph: order is all we know
    }
    if (tap.window > 0) {
        keep_last(layer.window, tap.window, rows, positions, row);
    }
    if (tap.statistics) {
        require(layer.facts.rope.n_dims > 0 && positions[0] >= 0,
                "query statistics need the model's rotary embedding, which this graph does not show",
                TWINKV_EUNSUPPORTED);
        std::vector<int32_t> per_head(n_tokens * size_t(q->ne[2]));
        for (size_t i = 0; i < per_head.size(); ++i) {
            per_head[i] = positions[i / size_t(q->ne[2])];
        }
        const auto status =
            twinkv_unrotate(&layer.facts.rope, layer.freq_factors.data(), layer.facts.hadamard, rows.data(),
                            per_head.data(), int64_t(n_tokens), int32_t(q->ne[2]), int32_t(q->ne[0]), 0);
        require(status == TWINKV_OK, twinkv_last_error(), status);
        add_statistics(layer.statistics, layer, rows, positions, tap.skip);
    }
}

} // namespace twinkv

using twinkv::guard;
using twinkv::require;

extern "C" {

twinkv_status twinkv_tap_capture(twinkv_tap* tap, int32_t window, bool statistics, int32_t skip) {
    return guard([&] {
        require(window >= 0 && window <= 65536, "the query window must hold between 0 and 65536 queries");
        tap->window = window;
        tap->statistics = statistics;
        tap->skip = skip;
        twinkv_tap_reset(tap);
    });
}

void twinkv_tap_reset(twinkv_tap* tap) {
    for (auto& [il, layer] : tap->layers) {
        layer.window = {};
        layer.statistics = {};
    }
}

void twinkv_tap_rollback(twinkv_tap* tap, int32_t pos) {
    for (auto& [il, layer] : tap->layers) {
        auto& w = layer.window;
        const int64_t capacity = int64_t(w.positions.size());
        while (w.size > 0 && w.positions[size_t((w.next + capacity - 1) % capacity)] >= pos) {
            w.next = (w.next + capacity - 1) % capacity;
            --w.size;
        }
        if (layer.statistics.max_pos >= pos) {
            layer.statistics.clear();
        }
    }
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

int64_t twinkv_tap_statistics_count(const twinkv_tap* tap, int32_t index) {
    return index >= 0 && index < twinkv_tap_n_layers(tap) ? tap->at(index).statistics.count : 0;
}

twinkv_status twinkv_tap_statistics(const twinkv_tap* tap, int32_t index, double* mean, double* covariance) {
    return guard([&] {
        const auto& layer = tap->at(index);
        const auto& s = layer.statistics;
        require(s.count > 0, "no queries were summed up for this layer");
        const size_t d = size_t(layer.facts.head_dim_k);
        for (size_t i = 0; i < s.sum.size(); ++i) {
            mean[i] = s.sum[i] / double(s.count);
        }
        for (size_t i = 0; i < s.outer.size(); ++i) {
            const size_t head = i / (d * d), a = (i / d) % d, b = i % d;
            covariance[i] = s.outer[i] / double(s.count) - mean[head * d + a] * mean[head * d + b];
        }
    });
}
}
