// NEON (arm64) in float32: 4 x 16 similarities in registers.
#include "twins/portable.hpp"
#include "twins/rows.hpp"

#include <arm_neon.h>

namespace twinkv {
namespace {

bool always() { // every arm64 processor has it
    return true;
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const float* rows = static_cast<const float*>(a.rows) + group * tile_size * a.k;
    const float* columns = static_cast<const float*>(b.panels) + panel * tile_size * b.k;
    for (int64_t c = 0; c < tile_size; c += 16) {
        for (int64_t r = 0; r < tile_size; r += 4) {
            float32x4_t sums[4][4];
            for (auto& row : sums) {
                row[0] = row[1] = row[2] = row[3] = vdupq_n_f32(0);
            }
            for (int64_t k = 0; k < a.k; ++k) {
                const float* lane = columns + k * tile_size + c;
                const float32x4_t x[4] = {vld1q_f32(lane), vld1q_f32(lane + 4), vld1q_f32(lane + 8),
                                          vld1q_f32(lane + 12)};
                for (int i = 0; i < 4; ++i) {
                    const float value = rows[(r + i) * a.k + k];
                    for (int v = 0; v < 4; ++v) {
                        sums[i][v] = vfmaq_n_f32(sums[i][v], x[v], value);
                    }
                }
            }
            for (int i = 0; i < 4; ++i) {
                for (int v = 0; v < 4; ++v) {
                    vst1q_f32(out + (r + i) * tile_size + c + 4 * v, sums[i][v]);
                }
            }
        }
    }
}

const uint32_t weights[4] = {1, 2, 4, 8};

bool above(const float* tile, const float* column, float delta, const float* row_threshold, uint32_t* out) {
    const uint32x4_t weight = vld1q_u32(weights);
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        const float32x4_t threshold = vdupq_n_f32(row_threshold[r]);
        uint32_t bits = 0;
        for (int c = 0; c < 32; c += 4) {
            const float32x4_t x =
                vaddq_f32(vld1q_f32(tile + r * tile_size + c), vaddq_f32(vld1q_f32(column + c), vdupq_n_f32(delta)));
            bits |= vaddvq_u32(vandq_u32(vcgtq_f32(x, threshold), weight)) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

bool above_either(const float* tile, const float* column, const float* row, float delta, const float* row_threshold,
                  const float* column_threshold, uint32_t* out) {
    const uint32x4_t weight = vld1q_u32(weights);
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        const float32x4_t threshold = vdupq_n_f32(row_threshold[r]), shift = vdupq_n_f32(row[r]);
        uint32_t bits = 0;
        for (int c = 0; c < 32; c += 4) {
            const float32x4_t x =
                vaddq_f32(vld1q_f32(tile + r * tile_size + c), vaddq_f32(vld1q_f32(column + c), vdupq_n_f32(delta)));
            const uint32x4_t by_column = vcgtq_f32(vaddq_f32(x, shift), vld1q_f32(column_threshold + c));
            bits |= vaddvq_u32(vandq_u32(vorrq_u32(vcgtq_f32(x, threshold), by_column), weight)) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

float dot(const float* a, const float* b, int64_t ld) {
    float32x4_t s[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int64_t k = 0; k < ld; k += 16) {
        for (int c = 0; c < 4; ++c) {
            s[c] = vfmaq_f32(s[c], vld1q_f32(a + k + 4 * c), vld1q_f32(b + k + 4 * c));
        }
    }
    return vaddvq_f32(vaddq_f32(vaddq_f32(s[0], s[1]), vaddq_f32(s[2], s[3])));
}

void dots(const float* keys, int64_t ld, const int32_t* i, const int32_t* j, int64_t n, float* out) {
    for (int64_t p = 0; p < n; ++p) {
        prefetch_pair(keys, ld, i, j, p, n);
        out[p] = dot(keys + i[p] * ld, keys + j[p] * ld, ld);
    }
}

} // namespace

extern const Kernels kernels_f32_neon;
const Kernels kernels_f32_neon = {
    "neon",
    Filter::f32,
    1,
    1,
    0,
    always,
    nullptr,
    nullptr,
    tile,
    above,
    above_either,
    rows::maxima,
    portable::count,
    dots,
    portable::dot<double>,
    rows::normalize,
    rows::pack_f32,
};

} // namespace twinkv
