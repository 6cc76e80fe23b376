// Mean and covariance of queries before RoPE, summed up batch by batch: O(d^2) memory per head whatever the length.
#include "core/parallel.hpp"
#include "tap/tap.hpp"

#include <algorithm>

namespace twinkv {
namespace {

// Sums per element run over the tokens in order, so every instruction set gives the same result; wider ones only take
// more elements at once.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__)
#define TWINKV_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TWINKV_CLONES
#endif

// Adds the outer products of n rows [n, d], times sign, to an upper triangle: four rows at a time, to load and store
// a sum once for four products.
TWINKV_CLONES void add_outer(const float* rows, int64_t n, int64_t d, float sign, float* triangle) {
    for (int64_t t = 0; t < n; t += 4) {
        const float* x0 = rows + t * d;
        const float* x1 = rows + std::min(n - 1, t + 1) * d;
        const float* x2 = rows + std::min(n - 1, t + 2) * d;
        const float* x3 = rows + std::min(n - 1, t + 3) * d;
        const float w1 = t + 1 < n ? sign : 0.0f, w2 = t + 2 < n ? sign : 0.0f, w3 = t + 3 < n ? sign : 0.0f;
        float* out = triangle;
        for (int64_t a = 0; a < d; ++a) {
            const float a0 = sign * x0[a], a1 = w1 * x1[a], a2 = w2 * x2[a], a3 = w3 * x3[a];
            for (int64_t b = a; b < d; ++b) {
                out[b - a] += (a0 * x0[b] + a1 * x1[b]) + (a2 * x2[b] + a3 * x3[b]);
            }
            out += d - a;
        }
    }
}

// Rows of one head less its pivot, [n, d], of the tokens that count.
std::vector<float> centred(const std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t skip,
                           size_t n_head, size_t h, size_t d, const float* pivot) {
    std::vector<float> out;
    out.reserve(positions.size() * d);
    for (size_t t = 0; t < positions.size(); ++t) {
        const float* x = rows.data() + (t * n_head + h) * d;
        for (size_t a = 0; a < d && positions[t] >= skip; ++a) {
            out.push_back(x[a] - pivot[a]);
        }
    }
    return out;
}

void choose_pivot(QueryStatistics& s, const std::vector<float>& rows, const std::vector<int32_t>& positions,
                  int32_t skip, size_t row, int64_t counted) {
    s.pivot.assign(row, 0.0f);
    for (size_t t = 0; t < positions.size(); ++t) {
        for (size_t i = 0; i < row && positions[t] >= skip; ++i) {
            s.pivot[i] += rows[t * row + i] / float(counted);
        }
    }
}

void accumulate(Layer& layer, std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t skip,
                int n_threads, float sign) {
    QueryStatistics& s = layer.statistics;
    const size_t n_head = size_t(layer.facts.n_head), d = size_t(layer.facts.head_dim_k);
    const int64_t counted = std::count_if(positions.begin(), positions.end(), [&](int32_t p) { return p >= skip; });
    if (counted == 0) {
        return;
    }
    const int threads = positions.size() < 32 ? 1 : n_threads; // starting threads takes longer than a few tokens
    std::vector<int32_t> per_head(positions.size() * n_head);
    for (size_t i = 0; i < per_head.size(); ++i) {
        per_head[i] = positions[i / n_head];
    }
    const auto status = twinkv_unrotate(&layer.facts.rope, layer.freq_factors.data(), layer.facts.hadamard, rows.data(),
                                        int64_t(n_head * d), int64_t(d), per_head.data(), int64_t(positions.size()),
                                        int32_t(n_head), int32_t(d), threads);
    require(status == TWINKV_OK, twinkv_last_error(), status);
    if (s.pivot.empty()) {
        choose_pivot(s, rows, positions, skip, n_head * d, counted);
        s.sum.assign(n_head * d, 0.0);
        s.outer.assign(n_head * d * (d + 1) / 2, 0.0f);
    }
    parallel_for(int64_t(n_head), threads, [&](int64_t head) {
        const size_t h = size_t(head), triangle = d * (d + 1) / 2;
        const std::vector<float> x = centred(rows, positions, skip, n_head, h, d, s.pivot.data() + h * d);
        for (size_t i = 0; i < x.size(); ++i) {
            s.sum[h * d + i % d] += double(sign) * double(x[i]);
        }
        // a few tokens at a time: they and the sums stay in the first-level cache
        constexpr int64_t block = 32;
        for (int64_t t = 0; t < counted; t += block) {
            add_outer(x.data() + size_t(t) * d, std::min(block, counted - t), int64_t(d), sign,
                      s.outer.data() + h * triangle);
        }
    });
    s.count += sign > 0 ? counted : -counted;
}

} // namespace

void add_statistics(Layer& layer, std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t skip,
                    int n_threads) {
    accumulate(layer, rows, positions, skip, n_threads, 1.0f);
    for (const int32_t p : positions) {
        layer.statistics.max_pos = std::max(layer.statistics.max_pos, p);
    }
}

void subtract_statistics(Layer& layer, std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t pos,
                         int32_t skip, int n_threads) {
    QueryStatistics& s = layer.statistics;
    if (s.max_pos < pos) {
        return;
    }
    if (int64_t(positions.size()) != int64_t(s.max_pos) - pos + 1) {
        s = {};
        return;
    }
    accumulate(layer, rows, positions, skip, n_threads, -1.0f);
    s.max_pos = pos - 1;
    if (s.count == 0) {
        s = {};
    }
}

} // namespace twinkv

using twinkv::guard;
using twinkv::require;

extern "C" {

int64_t twinkv_tap_statistics_count(const twinkv_tap* tap, int32_t index) {
    return index >= 0 && index < twinkv_tap_n_layers(tap) ? tap->at(index).statistics.count : 0;
}

twinkv_status twinkv_tap_statistics(const twinkv_tap* tap, int32_t index, double* mean, double* covariance) {
    return guard([&] {
        const auto& layer = tap->at(index);
        const auto& s = layer.statistics;
        require(s.count > 0, "no queries were summed up for this layer");
        const size_t n_head = size_t(layer.facts.n_head), d = size_t(layer.facts.head_dim_k);
        const float* outer = s.outer.data();
        for (size_t h = 0; h < n_head; ++h) {
            const double* sum = s.sum.data() + h * d;
            double* c = covariance + h * d * d;
            for (size_t a = 0; a < d; ++a) {
                mean[h * d + a] = double(s.pivot[h * d + a]) + sum[a] / double(s.count);
                for (size_t b = a; b < d; ++b, ++outer) {
                    c[a * d + b] = c[b * d + a] =
                        (double(*outer) - sum[a] * sum[b] / double(s.count)) / double(s.count);
                }
            }
        }
    });
}
}
