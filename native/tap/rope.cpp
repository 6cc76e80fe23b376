// Taking RoPE back, exactly as ggml applied it: same float arithmetic for the angles, the transposed rotation
// for the pairs. On quantized caches llama.cpp multiplies by a normalized Hadamard matrix after RoPE; that
// goes first.
#include "core/parallel.hpp"
#include "core/status.hpp"
#include "twinkv.h"

#include "ggml.h"

#include <cmath>
#include <vector>

namespace twinkv {
namespace {

// The normalized Hadamard matrix is its own inverse: the fast transform, n a power of two.
void hadamard_in_place(float* x, int n) {
    for (int half = 1; half < n; half *= 2) {
        for (int i = 0; i < n; i += 2 * half) {
            for (int j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
        }
    }
    const float scale = 1.0f / std::sqrt(float(n));
    for (int i = 0; i < n; ++i) {
        x[i] *= scale;
    }
}

// YaRN's mix of interpolated and extrapolated angles.
float ramp(float low, float high, int pair) {
    const float y = (float(pair) - low) / std::max(0.001f, high - low);
    return 1.0f - std::min(1.0f, std::max(0.0f, y));
}

struct Angles {
    const twinkv_rope& rope;
    const float* freq_factors;
    float corr_dims[2] = {0.0f, 0.0f};
    float scale = 1.0f; // angle of the next pair over the angle of this one

    Angles(const twinkv_rope& r, const float* ff) : rope(r), freq_factors(ff) {
        ggml_rope_yarn_corr_dims(r.n_dims, r.n_ctx_orig, r.freq_base, r.beta_fast, r.beta_slow, corr_dims);
        scale = std::pow(r.freq_base, -2.0f / float(r.n_dims));
    }

    // What ggml multiplies the rotated pairs by.
    float magnitude() const {
        return rope.ext_factor != 0.0f ? rope.attn_factor * (1.0f + 0.1f * std::log(1.0f / rope.freq_scale))
                                       : rope.attn_factor;
    }

    // cos and sin of every pair at a position.
    void at(int32_t pos, float* cosines, float* sines) const {
        float theta = float(pos);
        for (int pair = 0; pair < rope.n_dims / 2; ++pair) {
            const float extrapolated = freq_factors ? theta / freq_factors[pair] : theta;
            float angle = rope.freq_scale * extrapolated;
            if (rope.ext_factor != 0.0f) {
                const float mix = ramp(corr_dims[0], corr_dims[1], pair) * rope.ext_factor;
                angle = angle * (1.0f - mix) + extrapolated * mix;
            }
            cosines[pair] = std::cos(angle);
            sines[pair] = std::sin(angle);
            theta *= scale;
        }
    }
};

void check_rope(const twinkv_rope& rope, const float* freq_factors) {
    require(rope.n_dims >= 0 && rope.n_dims % 2 == 0, "an odd number of rotary dimensions");
    require(rope.mode == GGML_ROPE_TYPE_NORMAL || rope.mode == GGML_ROPE_TYPE_NEOX,
            "this rotary mode (" + std::to_string(rope.mode) + ") is unknown here", TWINKV_EUNSUPPORTED);
    require(!rope.has_freq_factors || freq_factors, "the layer's frequency factors are missing");
}

void unrotate(const twinkv_rope& rope, const float* freq_factors, int32_t hadamard, float* rows, int64_t token_stride,
              int64_t head_stride, const int32_t* positions, int64_t n, int32_t n_head, int32_t head_dim,
              int n_threads) {
    require(n >= 0 && n_head > 0 && head_dim > 0, "no rows to rotate back");
    require((n <= 1 || token_stride >= head_dim) && (n_head == 1 || head_stride >= head_dim),
            "rows to rotate back overlap");
    check_rope(rope, freq_factors);
    require(rope.n_dims <= head_dim, "rotary dimensions exceed the head");
    require(hadamard == 0 || (hadamard > 0 && (hadamard & (hadamard - 1)) == 0 && head_dim % hadamard == 0),
            "a Hadamard block that does not divide the head");
    const int pairs = rope.n_dims / 2;
    const bool half_split = rope.mode == GGML_ROPE_TYPE_NEOX;
    const Angles angles(rope, rope.has_freq_factors ? freq_factors : nullptr);
    const float divisor = pairs > 0 ? angles.magnitude() : 1.0f;
    parallel_for(n, n_threads, [&](int64_t r) {
        std::vector<float> cosines(static_cast<size_t>(pairs)), sines(static_cast<size_t>(pairs));
        int32_t known = -1;
        for (int32_t h = 0; h < n_head; ++h) {
            float* x = rows + r * token_stride + h * head_stride;
            for (int32_t i = 0; hadamard && i < head_dim; i += hadamard) {
                hadamard_in_place(x + i, hadamard);
            }
            const int32_t pos = positions[r * n_head + h];
            if (pos != known) {
                angles.at(pos, cosines.data(), sines.data());
                known = pos;
            }
            for (int p = 0; p < pairs; ++p) {
                float& a = x[half_split ? p : 2 * p];
                float& b = x[half_split ? p + pairs : 2 * p + 1];
                const float ra = (a * cosines[size_t(p)] + b * sines[size_t(p)]) / divisor;
                b = (b * cosines[size_t(p)] - a * sines[size_t(p)]) / divisor;
                a = ra;
            }
        }
    });
}

void mean_rotation(const twinkv_rope& rope, const float* freq_factors, int32_t first, int64_t n, double* cosines,
                   double* sines) {
    check_rope(rope, freq_factors);
    require(first >= 0 && n > 0 && n <= INT32_MAX - first, "no positions to average over");
    const size_t pairs = size_t(rope.n_dims / 2);
    const Angles angles(rope, rope.has_freq_factors ? freq_factors : nullptr);
    std::vector<float> c(pairs), s(pairs);
    std::fill_n(cosines, pairs, 0.0);
    std::fill_n(sines, pairs, 0.0);
    for (int64_t i = 0; i < n; ++i) {
        angles.at(int32_t(first + i), c.data(), s.data());
        for (size_t p = 0; p < pairs; ++p) {
            cosines[p] += c[p];
            sines[p] += s[p];
        }
    }
    for (size_t p = 0; p < pairs; ++p) {
        cosines[p] *= double(angles.magnitude()) / double(n);
        sines[p] *= double(angles.magnitude()) / double(n);
    }
}

} // namespace
} // namespace twinkv

extern "C" {

twinkv_status twinkv_unrotate(const twinkv_rope* rope, const float* freq_factors, int32_t hadamard, float* rows,
                              int64_t token_stride, int64_t head_stride, const int32_t* positions, int64_t n,
                              int32_t n_head, int32_t head_dim, int n_threads) {
    return twinkv::guard([&] {
        twinkv::unrotate(*rope, freq_factors, hadamard, rows, token_stride, head_stride, positions, n, n_head, head_dim,
                         n_threads);
    });
}

twinkv_status twinkv_mean_rotation(const twinkv_rope* rope, const float* freq_factors, int32_t first, int64_t n,
                                   double* cosines, double* sines) {
    return twinkv::guard([&] { twinkv::mean_rotation(*rope, freq_factors, first, n, cosines, sines); });
}
}
