// AVX-512 BF16: 8 x 32 similarities in registers.
#include "twins/avx512.hpp"
#include "twins/rows.hpp"

namespace twinkv {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("popcnt");
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const auto* rows = static_cast<const uint16_t*>(a.rows) + group * tile_size * a.k;
    const auto* columns = static_cast<const uint16_t*>(b.panels) + panel * tile_size * b.k;
    for (int64_t r = 0; r < tile_size; r += 8) {
        const uint16_t* row = rows + r * a.k;
        __m512 sums[8][2];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < a.k; k += 2) {
            const auto x = (__m512bh)_mm512_loadu_si512(columns + k * tile_size);
            const auto y = (__m512bh)_mm512_loadu_si512(columns + k * tile_size + 32);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                int32_t two;
                __builtin_memcpy(&two, row + i * a.k + k, 4);
                const auto value = (__m512bh)_mm512_set1_epi32(two);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], value, x);
                sums[i][1] = _mm512_dpbf16_ps(sums[i][1], value, y);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            _mm512_storeu_ps(out + (r + i) * tile_size, sums[i][0]);
            _mm512_storeu_ps(out + (r + i) * tile_size + 16, sums[i][1]);
        }
    }
}

} // namespace

extern const Kernels kernels_bf16_avx512;
const Kernels kernels_bf16_avx512 = {
    "avx512bf16",
    Filter::bf16,
    2,
    2,
    0,
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
    rows::pack_bf16,
};

} // namespace twinkv
