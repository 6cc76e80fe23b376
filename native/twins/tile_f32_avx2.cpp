// AVX2 + FMA in float32: 4 x 16 similarities in registers.
#include "twins/avx2.hpp"
#include "twins/rows.hpp"

namespace twinkv {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const float* rows = static_cast<const float*>(a.rows) + group * tile_size * a.k;
    const float* columns = static_cast<const float*>(b.panels) + panel * tile_size * b.k;
    for (int64_t c = 0; c < tile_size; c += 16) {
        for (int64_t r = 0; r < tile_size; r += 4) {
            const float* row = rows + r * a.k;
            __m256 sums[4][2] = {};
            for (int64_t k = 0; k < a.k; ++k) {
                const __m256 x = _mm256_loadu_ps(columns + k * tile_size + c);
                const __m256 y = _mm256_loadu_ps(columns + k * tile_size + c + 8);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const __m256 value = _mm256_broadcast_ss(row + i * a.k + k);
                    sums[i][0] = _mm256_fmadd_ps(value, x, sums[i][0]);
                    sums[i][1] = _mm256_fmadd_ps(value, y, sums[i][1]);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                _mm256_storeu_ps(out + (r + i) * tile_size + c, sums[i][0]);
                _mm256_storeu_ps(out + (r + i) * tile_size + c + 8, sums[i][1]);
            }
        }
    }
}

} // namespace

extern const Kernels kernels_f32_avx2;
const Kernels kernels_f32_avx2 = {
    "avx2",
    Filter::f32,
    1,
    1,
    0,
    supported,
    nullptr,
    nullptr,
    tile,
    avx2::above,
    avx2::above_either,
    rows::maxima,
    avx2::count,
    avx2::dots,
    avx2::dot_double,
    rows::normalize,
    rows::pack_f32,
};

} // namespace twinkv
