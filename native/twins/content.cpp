// What the repair by coverage compares: keys and values side by side, one float16 vector a token. Heads and blocks of
// tokens are worked on side by side; sums over tokens go block by block in order, whatever the threads.
#include "core/parallel.hpp"
#include "core/status.hpp"
#include "twinkv.h"

#include "ggml-cpu.h"

#include <cmath>

namespace twinkv {
namespace {

constexpr int64_t block_size = 256; // tokens of one unit of work

float square(const float* x, int64_t d) {
    constexpr int64_t lanes = 8; // sums side by side: the compiler may not reorder a single one
    float sums[lanes] = {};
    const int64_t whole = d / lanes * lanes;
    for (int64_t k = 0; k < whole; k += lanes) {
        for (int64_t c = 0; c < lanes; ++c) {
            sums[c] += x[k + c] * x[k + c];
        }
    }
    for (int64_t k = whole; k < d; ++k) {
        sums[k - whole] += x[k] * x[k];
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

struct Content {
    const float *keys, *values;
    int64_t n_heads, n, d_k, d_v;
    float value_scale;
    uint16_t* vectors;
    float* weights;
    int n_threads;

    int64_t n_blocks = (n + block_size - 1) / block_size;
    std::vector<double> means = std::vector<double>(size_t(n_heads * n_blocks * d_v)); // of a block: sums, at first
    std::vector<double> squares = std::vector<double>(size_t(2 * n_heads * n_blocks)); // of keys, of values

    // f(head, block, first token, one past the last)
    template <class F> void for_blocks(F&& f) {
        parallel_for(n_heads * n_blocks, n_threads, [&](int64_t i) {
            const int64_t block = i % n_blocks, first = block * block_size;
            f(i / n_blocks, block, first, std::min(n, first + block_size));
        });
    }

    void run() {
        for_blocks([&](int64_t head, int64_t block, int64_t first, int64_t end) { sum_up(head, block, first, end); });
        for (int64_t head = 0; head < n_heads; ++head) {
            average(head);
        }
        for_blocks([&](int64_t head, int64_t block, int64_t first, int64_t end) { weigh(head, block, first, end); });
        for_blocks([&](int64_t head, int64_t, int64_t first, int64_t end) { write(head, first, end); });
    }

    void sum_up(int64_t head, int64_t block, int64_t first, int64_t end) {
        double* sums = means.data() + (head * n_blocks + block) * d_v;
        double keys_square = 0;
        for (int64_t i = first; i < end; ++i) {
            const float* value = values + (head * n + i) * d_v;
            for (int64_t k = 0; k < d_v; ++k) {
                sums[k] += double(value[k]);
            }
            keys_square += double(square(keys + (head * n + i) * d_k, d_k));
        }
        squares[size_t(2 * (head * n_blocks + block))] = keys_square;
    }

    void average(int64_t head) {
        double* mean = means.data() + head * n_blocks * d_v;
        for (int64_t k = 0; k < d_v; ++k) {
            for (int64_t block = 1; block < n_blocks; ++block) {
                mean[k] += mean[block * d_v + k];
            }
            mean[k] /= double(n);
        }
    }

    // value less the mean -> own [d_v]
    void centre(int64_t head, int64_t i, float* own) const {
        const float* value = values + (head * n + i) * d_v;
        const double* mean = means.data() + head * n_blocks * d_v;
        for (int64_t k = 0; k < d_v; ++k) {
            own[k] = value[k] - float(mean[k]);
        }
    }

    void weigh(int64_t head, int64_t block, int64_t first, int64_t end) {
        std::vector<float> own(static_cast<size_t>(d_v));
        double sum = 0;
        for (int64_t i = first; i < end; ++i) {
            centre(head, i, own.data());
            const float s = square(own.data(), d_v);
            weights[head * n + i] = std::sqrt(s);
            sum += double(s);
        }
        squares[size_t(2 * (head * n_blocks + block) + 1)] = sum;
    }

    // root mean square of the norms of keys (0) or values (1): a number above 0
    double size(int64_t head, int which) const {
        double sum = 0;
        for (int64_t block = 0; block < n_blocks; ++block) {
            sum += squares[size_t(2 * (head * n_blocks + block) + which)];
        }
        return sum > 0 ? std::sqrt(sum / double(n)) : 1.0;
    }

    void write(int64_t head, int64_t first, int64_t end) {
        const int64_t d = d_k + d_v;
        const float key_scale = float(1 / size(head, 0)), own_scale = float(value_scale / size(head, 1));
        std::vector<float> row(static_cast<size_t>(d));
        for (int64_t i = first; i < end; ++i) {
            const float* key = keys + (head * n + i) * d_k;
            for (int64_t k = 0; k < d_k; ++k) {
                row[size_t(k)] = key[k] * key_scale;
            }
            centre(head, i, row.data() + d_k);
            for (int64_t k = d_k; k < d; ++k) {
                row[size_t(k)] *= own_scale;
            }
            ggml_cpu_fp32_to_fp16(row.data(), vectors + (head * n + i) * d, d);
        }
    }
};

} // namespace
} // namespace twinkv

extern "C" twinkv_status twinkv_content(const float* keys, const float* values, int64_t n_heads, int64_t n, int64_t d_k,
                                        int64_t d_v, float value_scale, int n_threads, uint16_t* vectors,
                                        float* weights) {
    return twinkv::guard([&] {
        twinkv::require(n_heads >= 0 && n >= 0 && d_k > 0 && d_v > 0, "no keys and values to put side by side");
        twinkv::require(std::isfinite(value_scale) && value_scale >= 0, "value_scale must be finite and not negative");
        if (n_heads > 0 && n > 0) {
            twinkv::Content{keys, values, n_heads, n, d_k, d_v, value_scale, vectors, weights, n_threads}.run();
        }
    });
}
