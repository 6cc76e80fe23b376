// AVX-512 VNNI in int8: 8 x 32 similarities in registers.
#include "twins/avx512.hpp"
#include "twins/rows.hpp"

namespace twinkv {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("popcnt");
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const auto* rows = static_cast<const uint8_t*>(a.rows) + group * tile_size * a.k;
    const auto* columns = static_cast<const int8_t*>(b.panels) + panel * tile_size * b.k;
    const __m512i start_x = _mm512_loadu_si512(b.panel_start + panel * tile_size);
    const __m512i start_y = _mm512_loadu_si512(b.panel_start + panel * tile_size + 16);
    const __m512 scale_x = _mm512_loadu_ps(b.panel_scale + panel * tile_size);
    const __m512 scale_y = _mm512_loadu_ps(b.panel_scale + panel * tile_size + 16);
    for (int64_t r = 0; r < tile_size; r += 8) {
        const uint8_t* row = rows + r * a.k;
        __m512i sums[8][2];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            sums[i][0] = start_x;
            sums[i][1] = start_y;
        }
        for (int64_t k = 0; k < a.k; k += 4) {
            const __m512i x = _mm512_loadu_si512(columns + k * tile_size);
            const __m512i y = _mm512_loadu_si512(columns + k * tile_size + 64);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                int32_t four;
                __builtin_memcpy(&four, row + i * a.k + k, 4);
                const __m512i value = _mm512_set1_epi32(four);
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], value, x);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], value, y);
            }
        }
        const float* row_scale = a.row_scale + group * tile_size + r;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const __m512 scale = _mm512_set1_ps(row_scale[i]);
            float* to = out + (r + i) * tile_size;
            _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i][0]), _mm512_mul_ps(scale, scale_x)));
            _mm512_storeu_ps(to + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i][1]), _mm512_mul_ps(scale, scale_y)));
        }
    }
}

} // namespace

extern const Kernels kernels_i8_avx512vnni;
const Kernels kernels_i8_avx512vnni = {
    "avx512vnni",
    Filter::i8,
    16,
    4,
    128,
    supported,
    nullptr,
    nullptr,
    tile,
    avx512::above,
    avx512::above_either,
    rows::maxima,
    avx512::count,
    avx512::dots,
    avx512::dot_double,
    rows::normalize,
    rows::pack_i8<127, 128>,
};

} // namespace twinkv
