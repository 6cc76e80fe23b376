#include "attention/sums.hpp"

#include "attention/block.hpp"
#include "core/parallel.hpp"
#include "tap/tap.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace twinkv {

void Queries::append(const Queries& other) {
    rows.insert(rows.end(), other.rows.begin(), other.rows.end());
    positions.insert(positions.end(), other.positions.begin(), other.positions.end());
    limits.insert(limits.end(), other.limits.begin(), other.limits.end());
}

void Queries::keep_first(size_t n) {
    rows.resize(size() > 0 ? rows.size() / size() * n : 0);
    positions.resize(n);
    limits.resize(n);
}

std::vector<float> AttentionWorkspace::take(size_t size) {
    std::vector<float> buffer;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!buffers_.empty()) {
            buffer = std::move(buffers_.back());
            buffers_.pop_back();
        }
    }
    if (buffer.size() < size) {
        buffer.resize(size);
    }
    return buffer;
}

void AttentionWorkspace::put_back(std::vector<float> buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    buffers_.push_back(std::move(buffer));
}

namespace {

template <class T> int32_t row_limit(const T* row, int64_t n, T minus_infinity) {
    int64_t open = 0, shut = 0;
    for (int64_t c = 0; c < n; ++c) {
        open += row[c] == T(0);
        shut += row[c] == minus_infinity;
    }
    bool prefix = open + shut == n;
    for (int64_t c = 0; c < open; ++c) {
        prefix &= row[c] == T(0);
    }
    require(prefix, "attention to all cells of a growing prefix is needed, and this mask shows something else",
            TWINKV_EUNSUPPORTED);
    return int32_t(open);
}

} // namespace

std::vector<int32_t> mask_limits(const ggml_tensor* mask, size_t n_tokens) {
    require(mask && (mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32) && mask->ne[1] >= int64_t(n_tokens) &&
                mask->ne[2] == 1 && mask->ne[3] == 1 && ggml_is_contiguous(mask),
            "an attention mask of unknown shape or type", TWINKV_EUNSUPPORTED);
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(mask, 0, n_tokens * mask->nb[1], scratch);
    std::vector<int32_t> limits(n_tokens);
    for (size_t t = 0; t < n_tokens; ++t) {
        const uint8_t* row = bytes + t * mask->nb[1];
        if (mask->type == GGML_TYPE_F16) {
            limits[t] = row_limit(reinterpret_cast<const uint16_t*>(row), mask->ne[0], uint16_t(0xfc00));
        } else {
            limits[t] = row_limit(reinterpret_cast<const float*>(row), mask->ne[0], -INFINITY);
        }
    }
    require(n_tokens == 0 || (limits[0] > 0 && std::is_sorted(limits.begin(), limits.end())),
            "tokens of a batch are not in order", TWINKV_EUNSUPPORTED);
    return limits;
}

namespace {

constexpr size_t enough = 32; // queries that are worth a block

// The first n keys of a head, transposed in panels [n_panels, d, width], the last one padded with zeros.
void pack_keys(const Layer& layer, const uint8_t* bytes, int32_t head, int64_t n, int n_threads,
               std::vector<float>& panels) {
    const int64_t d = layer.facts.head_dim_k, width = block_shape().width, n_panels = (n + width - 1) / width;
    const size_t stride = layer.k->nb[1], piece = ggml_row_size(layer.k->type, d);
    if (int64_t(panels.size()) < n_panels * width * d) {
        panels.resize(size_t(n_panels * width * d));
    }
    constexpr int64_t chunk = 8; // panels a thread takes at once
    parallel_for((n_panels + chunk - 1) / chunk, n_threads, [&](int64_t c) {
        std::vector<float> rows(static_cast<size_t>(width * d));
        for (int64_t p = c * chunk; p < std::min(n_panels, (c + 1) * chunk); ++p) {
            const int64_t first = p * width, have = std::min(width, n - first);
            std::fill(rows.begin(), rows.end(), 0.0f);
            const auto status = twinkv_rows_to_f32(layer.k->type, bytes + size_t(first) * stride + size_t(head) * piece,
                                                   size_t(have - 1) * stride + piece, stride, have, d, 1, rows.data());
            require(status == TWINKV_OK, twinkv_last_error(), status);
            float* out = panels.data() + p * width * d;
            for (int64_t k = 0; k < d; ++k) {
                for (int64_t i = 0; i < width; ++i) {
                    out[k * width + i] = rows[size_t(i * d + k)];
                }
            }
        }
    });
}

// Rows first .. first + n - 1 of a KV head, a row being a token and a query head of the group: one block.
struct HeadQueries {
    const Layer& layer;
    const Queries& queries;
    int32_t head;

    int64_t group() const { return layer.facts.n_head / layer.facts.n_head_kv; }
    int64_t n_rows() const { return int64_t(queries.size()) * group(); }

    void attend_rows(int64_t first, int64_t n, AttentionWorkspace& work, float* received) const {
        const int64_t d = layer.facts.head_dim_k, shape = block_shape().rows, groups = (n + shape - 1) / shape;
        std::vector<int32_t> limits(static_cast<size_t>(n));
        std::vector<float> sinks(layer.sinks.empty() ? 0 : size_t(n));
        for (int64_t i = 0; i < n; ++i) {
            limits[size_t(i)] = queries.limits[size_t((first + i) / group())];
            if (!sinks.empty()) {
                sinks[size_t(i)] = layer.sinks[size_t(head * group() + (first + i) % group())];
            }
        }
        const int64_t packed = groups * shape * d;
        std::vector<float> buffer = work.take(size_t(packed + block_scratch(n, limits.back())));
        std::fill_n(buffer.begin(), packed, 0.0f);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t token = (first + i) / group(), q = head * group() + (first + i) % group();
            const float* row = queries.rows.data() + (token * layer.facts.n_head + q) * d;
            float* out = buffer.data() + i / shape * shape * d + i % shape;
            for (int64_t k = 0; k < d; ++k) {
                out[k * shape] = row[k] * layer.facts.kq_scale;
            }
        }
        Block b{};
        b.queries = buffer.data();
        b.limits = limits.data();
        b.sinks = sinks.empty() ? nullptr : sinks.data();
        b.n_rows = n;
        b.d = d;
        b.panels = work.panels.data();
        b.hidden = layer.mask.n > 0 ? layer.mask.hidden.data() + head * layer.mask.n : nullptr;
        b.n_hidden = layer.mask.n;
        b.softcap = layer.facts.softcap;
        b.scratch = buffer.data() + packed;
        b.received = received;
        attend(b);
        work.put_back(std::move(buffer));
    }
};

// Adds sign times the attention of the queries. How rows are split among threads does not change a sum.
void accumulate(Layer& layer, const Queries& queries, float sign, AttentionWorkspace& work, int n_threads) {
    const int32_t n_head_kv = layer.facts.n_head_kv;
    const int64_t n_keys = queries.limits.back(), padded = (n_keys + block_tile - 1) / block_tile * block_tile;
    std::vector<uint8_t> scratch;
    const uint8_t* keys = tensor_bytes(layer.k, 0, size_t(n_keys) * layer.k->nb[1], scratch);
    layer.attention.sums.resize(size_t(n_head_kv));
    for (int32_t head = 0; head < n_head_kv; ++head) {
        pack_keys(layer, keys, head, n_keys, n_threads, work.panels);
        const HeadQueries mine{layer, queries, head};
        const int64_t n_blocks = (mine.n_rows() + block_rows - 1) / block_rows;
        const int64_t n_parts = std::min<int64_t>(8, n_blocks);
        std::vector<float> received(size_t(n_parts * padded));
        parallel_for(n_parts, n_threads, [&](int64_t part) {
            for (int64_t i = part * n_blocks / n_parts; i < (part + 1) * n_blocks / n_parts; ++i) {
                const int64_t first = i * block_rows, n = std::min(block_rows, mine.n_rows() - first);
                mine.attend_rows(first, n, work, received.data() + part * padded);
            }
        });
        std::vector<float>& sums = layer.attention.sums[size_t(head)];
        sums.resize(std::max(sums.size(), size_t(n_keys)));
        for (int64_t c = 0; c < n_keys; ++c) {
            float s = 0;
            for (int64_t part = 0; part < n_parts; ++part) {
                s += received[size_t(part * padded + c)];
            }
            sums[size_t(c)] += sign * s;
        }
    }
}

} // namespace

void settle_attention(Layer& layer, AttentionWorkspace& work, int n_threads) {
    Queries& pending = layer.attention.pending;
    if (pending.size() > 0) {
        accumulate(layer, pending, 1.0f, work, n_threads);
        pending = {};
    }
}

void add_attention(Layer& layer, const Queries& queries, AttentionWorkspace& work, int n_threads) {
    AttentionSums& a = layer.attention;
    a.count += int64_t(queries.size());
    a.max_pos = std::max(a.max_pos, queries.positions.back());
    if (queries.size() >= enough) {
        settle_attention(layer, work, n_threads);
        accumulate(layer, queries, 1.0f, work, n_threads);
        return;
    }
    a.pending.append(queries);
    if (a.pending.size() >= enough) {
        settle_attention(layer, work, n_threads);
    }
}

void subtract_attention(Layer& layer, const Queries& known, int32_t pos, AttentionWorkspace& work, int n_threads) {
    AttentionSums& a = layer.attention;
    if (a.max_pos < pos) {
        return;
    }
    const auto before = [](const std::vector<int32_t>& positions, int32_t p) {
        return size_t(std::lower_bound(positions.begin(), positions.end(), p) - positions.begin());
    };
    const int64_t gone = int64_t(a.max_pos) - pos + 1, pending = int64_t(a.pending.size());
    const size_t left = before(a.pending.positions, pos);
    const int64_t summed_up = gone - (pending - int64_t(left)); // of those that go
    a.pending.keep_first(left);
    a.count -= gone;
    a.max_pos = pos - 1;
    if (summed_up > 0) {
        const size_t first = before(known.positions, pos);
        if (int64_t(known.size() - first) < summed_up) {
            a = {};
            return;
        }
        Queries taken;
        const size_t row = known.rows.size() / known.size(), end = first + size_t(summed_up);
        taken.rows.assign(known.rows.begin() + std::ptrdiff_t(first * row),
                          known.rows.begin() + std::ptrdiff_t(end * row));
        taken.positions.assign(known.positions.begin() + std::ptrdiff_t(first),
                               known.positions.begin() + std::ptrdiff_t(end));
        taken.limits.assign(known.limits.begin() + std::ptrdiff_t(first), known.limits.begin() + std::ptrdiff_t(end));
        accumulate(layer, taken, -1.0f, work, n_threads);
        for (auto& sums : a.sums) {
            // the cells of the tokens that go, and of no others, hold nothing now but rounding
            std::fill(sums.begin() + std::min<std::ptrdiff_t>(taken.limits[0] - 1, std::ptrdiff_t(sums.size())),
                      sums.end(), 0.0f);
        }
    }
}

void gather_attention(Layer& layer, int64_t n_keep, const int32_t* cells) {
    for (size_t head = 0; head < layer.attention.sums.size(); ++head) {
        std::vector<float>& sums = layer.attention.sums[head];
        std::vector<float> kept(static_cast<size_t>(n_keep));
        for (int64_t c = 0; c < n_keep; ++c) {
            const int32_t cell = cells[int64_t(head) * n_keep + c];
            kept[size_t(c)] = cell >= 0 && size_t(cell) < sums.size() ? sums[size_t(cell)] : 0.0f;
        }
        sums = std::move(kept);
    }
}

} // namespace twinkv
