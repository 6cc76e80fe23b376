// AVX-VNNI in int8: laptops without AVX-512 (Alder Lake and later, Zen 5).
#include "twins/avx2.hpp"
#include "twins/rows.hpp"

#include <cpuid.h>

namespace twinkv {
namespace {

bool supported() {
    unsigned a = 0, b = 0, c = 0, d = 0; // compilers know no name for this bit yet
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt") &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

inline __m256i accumulate(__m256i sum, __m256i row, __m256i column) {
    return _mm256_dpbusd_avx_epi32(sum, row, column);
}

} // namespace
} // namespace twinkv

#include "twins/tile_i8_avx2.inl"

namespace twinkv {

extern const Kernels kernels_i8_avxvnni;
const Kernels kernels_i8_avxvnni = {
    "avxvnni",
    Filter::i8,
    16,
    4,
    128,
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
    rows::pack_i8<127, 128>,
};

} // namespace twinkv
