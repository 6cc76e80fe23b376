// AVX2 in int8: twice the products per instruction of float32. Rows are 7 bits wide: two products of a 7-bit
// and an 8-bit integer, which vpmaddubsw adds in 16 bits, then never saturate (2 * 127 * 127 < 32768).
#include "twins/avx2.hpp"
#include "twins/rows.hpp"

namespace twinkv {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
}

inline __m256i accumulate(__m256i sum, __m256i row, __m256i column) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(row, column), _mm256_set1_epi16(1)));
}

} // namespace
} // namespace twinkv

#include "twins/tile_i8_avx2.inl"

namespace twinkv {

extern const Kernels kernels_i8_avx2;
const Kernels kernels_i8_avx2 = {
    "avx2int8",
    Filter::i8,
    16,
    4,
    64,
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
    rows::pack_i8<63, 64>,
};

} // namespace twinkv
