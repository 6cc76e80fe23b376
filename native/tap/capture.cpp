// Queries as attention sees them: the last few are kept as they are, all of them summed up
// (statistics.cpp), and so is what they attend to (attention/).
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

void keep_last(QueryWindow& w, int64_t capacity, const Queries& queries, size_t row) {
    if (w.capacity() != capacity || w.rows.size() != size_t(capacity) * row) {
        w = {};
        w.rows.resize(size_t(capacity) * row);
        w.positions.assign(size_t(capacity), -1);
        w.limits.assign(size_t(capacity), 0);
    }
    const int64_t n = int64_t(queries.size());
    for (int64_t t = std::max<int64_t>(0, n - capacity); t < n; ++t) {
        std::memcpy(w.rows.data() + size_t(w.next) * row, queries.rows.data() + size_t(t) * row, row * sizeof(float));
        w.positions[size_t(w.next)] = queries.positions[size_t(t)];
        w.limits[size_t(w.next)] = queries.limits[size_t(t)];
        w.next = (w.next + 1) % capacity;
        w.size = std::min(capacity, w.size + 1);
    }
}

// The queries of the window from the i-th on, oldest first.
Queries held(const QueryWindow& w, int64_t first) {
    Queries out;
    const size_t row = w.capacity() > 0 ? w.rows.size() / size_t(w.capacity()) : 0;
    for (int64_t i = first; i < w.size; ++i) {
        const float* from = w.rows.data() + w.slot(i) * row;
        out.rows.insert(out.rows.end(), from, from + row);
        out.positions.push_back(w.positions[w.slot(i)]);
        out.limits.push_back(w.limits[w.slot(i)]);
    }
    return out;
}

// Un-rotates the queries: the last use of them.
void use_queries(twinkv_tap& tap, Layer& layer) {
    Queries& queries = tap.queries;
    if (tap.window > 0) {
        keep_last(layer.window, tap.window, queries, size_t(layer.facts.n_head) * size_t(layer.facts.head_dim_k));
    }
    if (tap.statistics) {
        add_statistics(layer, queries.rows, queries.positions, tap.skip, tap.n_threads);
    }
}

void roll_back(twinkv_tap& tap, Layer& layer, int32_t pos) {
    QueryWindow& w = layer.window;
    int64_t left = w.size;
    while (left > 0 && w.positions[w.slot(left - 1)] >= pos) {
        --left;
    }
    Queries taken = held(w, left);
    subtract_attention(layer, taken, pos, tap.work, tap.n_threads);
    subtract_statistics(layer, taken.rows, taken.positions, pos, tap.skip, tap.n_threads);
    if (left < w.size) {
        w.next = int64_t(w.slot(left));
        w.size = left;
    }
}

} // namespace

void capture_queries(twinkv_tap& tap, Layer& layer, const ggml_tensor* q) {
    const size_t n_tokens = size_t(q->ne[1]);
    require(tap.positions.size() == n_tokens,
            "queries cannot be captured: this model's graph shows no token positions (no rotary embedding)",
            TWINKV_EUNSUPPORTED);
    const bool all = tap.statistics || tap.attention;
    const size_t first = all ? 0 : n_tokens - std::min(n_tokens, size_t(tap.window));
    tap.queries.rows = query_rows(q, first);
    tap.queries.positions.assign(tap.positions.begin() + std::ptrdiff_t(first), tap.positions.end());
    tap.queries.limits.assign(tap.queries.size(), 0);
    if (!tap.attention) {
        use_queries(tap, layer);
    }
}

void capture_attention(twinkv_tap& tap, Layer& layer, const ggml_tensor* mask) {
    tap.queries.limits = mask_limits(mask, tap.queries.size());
    add_attention(layer, tap.queries, tap.work, tap.n_threads);
    use_queries(tap, layer);
}

} // namespace twinkv

using twinkv::guard;
using twinkv::require;

extern "C" {

twinkv_status twinkv_tap_capture(twinkv_tap* tap, const twinkv_capture* what) {
    return guard([&] {
        require(what->window >= 0 && what->window <= 65536, "the query window must hold between 0 and 65536 queries");
        tap->n_threads = what->n_threads;
        if (what->window != tap->window || what->statistics != tap->statistics || what->attention != tap->attention ||
            what->skip != tap->skip) {
            tap->window = what->window;
            tap->statistics = what->statistics;
            tap->attention = what->attention;
            tap->skip = what->skip;
            twinkv_tap_reset(tap);
        }
    });
}

void twinkv_tap_reset(twinkv_tap* tap) {
    for (auto& [il, layer] : tap->layers) {
        layer.window = {};
        layer.statistics = {};
        layer.attention = {};
    }
}

twinkv_status twinkv_tap_rollback(twinkv_tap* tap, int32_t pos) {
    return guard([&] {
        for (auto& [il, layer] : tap->layers) {
            twinkv::roll_back(*tap, layer, pos);
        }
    });
}

twinkv_status twinkv_tap_settle(twinkv_tap* tap) {
    return guard([&] {
        for (auto& [il, layer] : tap->layers) {
            twinkv::settle_attention(layer, tap->work, tap->n_threads);
        }
    });
}

twinkv_status twinkv_tap_gather(twinkv_tap* tap, int32_t index, int64_t n_keep, const int32_t* cells) {
    return guard([&] { twinkv::gather_attention(tap->at(index), n_keep, cells); });
}

int64_t twinkv_tap_attention_count(const twinkv_tap* tap, int32_t index) {
    return index >= 0 && index < twinkv_tap_n_layers(tap) ? tap->at(index).attention.count : 0;
}

twinkv_status twinkv_tap_attention(twinkv_tap* tap, int32_t index, int64_t n, float* sums) {
    return guard([&] {
        auto& layer = tap->at(index);
        twinkv::settle_attention(layer, tap->work, tap->n_threads);
        std::fill_n(sums, layer.facts.n_head_kv * n, 0.0f);
        for (const auto& head : layer.attention.sums) {
            std::copy_n(head.begin(), std::min(n, int64_t(head.size())), sums);
            sums += n;
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
        const twinkv::Queries all = twinkv::held(w, 0);
        std::copy(all.rows.begin(), all.rows.end(), queries);
        std::copy(all.positions.begin(), all.positions.end(), positions);
    });
}
}
