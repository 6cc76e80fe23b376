// The functions around the tile in AVX2 + FMA. Included only by files compiled for it (see kernels.hpp).
#pragma once

#include "twins/kernels.hpp"

#include <immintrin.h>

namespace twinkv {
namespace {
namespace avx2 {

inline __m256 shifted(const float* column, float delta) {
    return _mm256_add_ps(_mm256_loadu_ps(column), _mm256_set1_ps(delta));
}

inline bool above(const float* tile, const float* column, float delta, const float* row_threshold, uint32_t* out) {
    const __m256 moved[4] = {shifted(column, delta), shifted(column + 8, delta), shifted(column + 16, delta),
                             shifted(column + 24, delta)};
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        const __m256 threshold = _mm256_broadcast_ss(row_threshold + r);
        uint32_t bits = 0;
        for (int c = 0; c < 32; c += 8) {
            const __m256 x = _mm256_add_ps(_mm256_loadu_ps(tile + r * tile_size + c), moved[c / 8]);
            bits |= uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ))) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

inline bool above_either(const float* tile, const float* column, const float* row, float delta,
                         const float* row_threshold, const float* column_threshold, uint32_t* out) {
    const __m256 moved[4] = {shifted(column, delta), shifted(column + 8, delta), shifted(column + 16, delta),
                             shifted(column + 24, delta)};
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        const __m256 threshold = _mm256_broadcast_ss(row_threshold + r), shift = _mm256_broadcast_ss(row + r);
        uint32_t bits = 0;
        for (int c = 0; c < 32; c += 8) {
            const __m256 x = _mm256_add_ps(_mm256_loadu_ps(tile + r * tile_size + c), moved[c / 8]);
            const __m256 by_row = _mm256_cmp_ps(x, threshold, _CMP_GT_OQ);
            const __m256 by_column =
                _mm256_cmp_ps(_mm256_add_ps(x, shift), _mm256_loadu_ps(column_threshold + c), _CMP_GT_OQ);
            bits |= uint32_t(_mm256_movemask_ps(_mm256_or_ps(by_row, by_column))) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

inline void count(const uint32_t* masks, int32_t* row_count, int32_t* column_count) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int64_t r = 0; r < tile_size; ++r) {
        if (masks[r] == 0) {
            continue;
        }
        row_count[r] += __builtin_popcount(masks[r]);
        for (int c = 0; c < 32; c += 8) {
            const __m256i lanes = _mm256_and_si256(_mm256_set1_epi32(int(masks[r] >> c)), bit);
            auto* to = reinterpret_cast<__m256i*>(column_count + c);
            // the comparison gives -1 where the bit is set
            _mm256_storeu_si256(to, _mm256_sub_epi32(_mm256_loadu_si256(to), _mm256_cmpeq_epi32(lanes, bit)));
        }
    }
}

inline float dot(const float* a, const float* b, int64_t ld) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    for (int64_t k = 0; k < ld; k += 16) {
        s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + k), _mm256_loadu_ps(b + k), s0);
        s1 = _mm256_fmadd_ps(_mm256_loadu_ps(a + k + 8), _mm256_loadu_ps(b + k + 8), s1);
    }
    s0 = _mm256_add_ps(s0, s1);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(s0), _mm256_extractf128_ps(s0, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline void dots(const float* keys, int64_t ld, const int32_t* i, const int32_t* j, int64_t n, float* out) {
    for (int64_t p = 0; p < n; ++p) {
        prefetch_pair(keys, ld, i, j, p, n);
        out[p] = dot(keys + i[p] * ld, keys + j[p] * ld, ld);
    }
}

inline double dot_double(const float* a, const float* b, int64_t ld) {
    __m256d s[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    for (int64_t k = 0; k < ld; k += 16) {
        for (int c = 0; c < 4; ++c) {
            s[c] = _mm256_fmadd_pd(_mm256_cvtps_pd(_mm_loadu_ps(a + k + 4 * c)),
                                   _mm256_cvtps_pd(_mm_loadu_ps(b + k + 4 * c)), s[c]);
        }
    }
    const __m256d t = _mm256_add_pd(_mm256_add_pd(s[0], s[1]), _mm256_add_pd(s[2], s[3]));
    const __m128d u = _mm_add_pd(_mm256_castpd256_pd128(t), _mm256_extractf128_pd(t, 1));
    return _mm_cvtsd_f64(_mm_add_sd(u, _mm_unpackhi_pd(u, u)));
}

} // namespace avx2
} // namespace
} // namespace twinkv
