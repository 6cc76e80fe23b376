// The functions around the tile in AVX-512 (F, BW, DQ, VL). Included only by files compiled for it (see
// kernels.hpp).
#pragma once

#include "twins/kernels.hpp"

#include <immintrin.h>

namespace twinkv {
namespace {
namespace avx512 {

// Two stores from mask registers instead of joining them first: the port that joins is the one that compares.
inline void store(__mmask16 low, __mmask16 high, uint32_t* out) {
    auto* bytes = reinterpret_cast<unsigned char*>(out);
    __builtin_memcpy(bytes, &low, 2);
    __builtin_memcpy(bytes + 2, &high, 2);
}

inline bool above(const float* tile, const float* column, float delta, const float* row_threshold, uint32_t* out) {
    const __m512 low = _mm512_add_ps(_mm512_loadu_ps(column), _mm512_set1_ps(delta));
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(column + 16), _mm512_set1_ps(delta));
#pragma GCC unroll 8
    for (int64_t r = 0; r < tile_size; ++r) {
        const __m512 threshold = _mm512_set1_ps(row_threshold[r]);
        const __m512 x = _mm512_add_ps(low, _mm512_loadu_ps(tile + r * tile_size));
        const __m512 y = _mm512_add_ps(high, _mm512_loadu_ps(tile + r * tile_size + 16));
        store(_mm512_cmp_ps_mask(x, threshold, _CMP_GT_OQ), _mm512_cmp_ps_mask(y, threshold, _CMP_GT_OQ), out + r);
    }
    const __m512i bits = _mm512_or_si512(_mm512_loadu_si512(out), _mm512_loadu_si512(out + 16));
    return _mm512_test_epi32_mask(bits, bits) != 0;
}

inline bool above_either(const float* tile, const float* column, const float* row, float delta,
                         const float* row_threshold, const float* column_threshold, uint32_t* out) {
    const __m512 low = _mm512_add_ps(_mm512_loadu_ps(column), _mm512_set1_ps(delta));
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(column + 16), _mm512_set1_ps(delta));
    const __m512 low_threshold = _mm512_loadu_ps(column_threshold);
    const __m512 high_threshold = _mm512_loadu_ps(column_threshold + 16);
#pragma GCC unroll 4
    for (int64_t r = 0; r < tile_size; ++r) {
        const __m512 threshold = _mm512_set1_ps(row_threshold[r]), shift = _mm512_set1_ps(row[r]);
        const __m512 x = _mm512_add_ps(low, _mm512_loadu_ps(tile + r * tile_size));
        const __m512 y = _mm512_add_ps(high, _mm512_loadu_ps(tile + r * tile_size + 16));
        // where neither holds, in this form a mask is born from a mask: no mask arithmetic
        const __mmask16 not_x = _mm512_cmp_ps_mask(x, threshold, _CMP_NGT_UQ);
        const __mmask16 not_y = _mm512_cmp_ps_mask(y, threshold, _CMP_NGT_UQ);
        store(_mm512_mask_cmp_ps_mask(not_x, _mm512_add_ps(x, shift), low_threshold, _CMP_NGT_UQ),
              _mm512_mask_cmp_ps_mask(not_y, _mm512_add_ps(y, shift), high_threshold, _CMP_NGT_UQ), out + r);
    }
    const __m512i ones = _mm512_set1_epi32(-1);
    const __m512i a = _mm512_xor_si512(_mm512_loadu_si512(out), ones);
    const __m512i b = _mm512_xor_si512(_mm512_loadu_si512(out + 16), ones);
    _mm512_storeu_si512(out, a);
    _mm512_storeu_si512(out + 16, b);
    const __m512i bits = _mm512_or_si512(a, b);
    return _mm512_test_epi32_mask(bits, bits) != 0;
}

inline void count(const uint32_t* masks, int32_t* row_count, int32_t* column_count) {
    for (int64_t r = 0; r < tile_size; ++r) {
        row_count[r] += _mm_popcnt_u32(masks[r]);
    }
    const __m512i one = _mm512_set1_epi32(1);
    __m512i low = _mm512_loadu_si512(column_count), high = _mm512_loadu_si512(column_count + 16);
    for (int64_t r = 0; r < tile_size; ++r) {
        low = _mm512_mask_add_epi32(low, __mmask16(masks[r]), low, one);
        high = _mm512_mask_add_epi32(high, __mmask16(masks[r] >> 16), high, one);
    }
    _mm512_storeu_si512(column_count, low);
    _mm512_storeu_si512(column_count + 16, high);
}

inline float dot(const float* a, const float* b, int64_t ld) {
    __m512 s0 = _mm512_setzero_ps(), s1 = s0;
    int64_t k = 0;
    for (; k + 32 <= ld; k += 32) {
        s0 = _mm512_fmadd_ps(_mm512_loadu_ps(a + k), _mm512_loadu_ps(b + k), s0);
        s1 = _mm512_fmadd_ps(_mm512_loadu_ps(a + k + 16), _mm512_loadu_ps(b + k + 16), s1);
    }
    if (k < ld) {
        s0 = _mm512_fmadd_ps(_mm512_loadu_ps(a + k), _mm512_loadu_ps(b + k), s0);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(s0, s1));
}

inline void dots(const float* keys, int64_t ld, const int32_t* i, const int32_t* j, int64_t n, float* out) {
    for (int64_t p = 0; p < n; ++p) {
        prefetch_pair(keys, ld, i, j, p, n);
        out[p] = dot(keys + i[p] * ld, keys + j[p] * ld, ld);
    }
}

inline double dot_double(const float* a, const float* b, int64_t ld) {
    __m512d s0 = _mm512_setzero_pd(), s1 = s0;
    for (int64_t k = 0; k < ld; k += 16) {
        s0 = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + k)), _mm512_cvtps_pd(_mm256_loadu_ps(b + k)), s0);
        s1 = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_loadu_ps(a + k + 8)), _mm512_cvtps_pd(_mm256_loadu_ps(b + k + 8)),
                             s1);
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(s0, s1));
}

} // namespace avx512
} // namespace
} // namespace twinkv
