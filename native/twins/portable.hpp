// The functions of a Kernels table in plain C++: the reference for all others, and what a new instruction set
// can start from. Compiled once in every file that includes it (see kernels.hpp), hence the unnamed
// namespace.
#pragma once

#include "twins/kernels.hpp"

namespace twinkv {
namespace {
namespace portable {

inline bool above(const float* tile, const float* column, float delta, const float* row_threshold, uint32_t* out) {
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        uint32_t bits = 0;
        for (int64_t c = 0; c < tile_size; ++c) {
            bits |= uint32_t(tile[r * tile_size + c] + (column[c] + delta) > row_threshold[r]) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

inline bool above_either(const float* tile, const float* column, const float* row, float delta,
                         const float* row_threshold, const float* column_threshold, uint32_t* out) {
    uint32_t any = 0;
    for (int64_t r = 0; r < tile_size; ++r) {
        uint32_t bits = 0;
        for (int64_t c = 0; c < tile_size; ++c) {
            const float x = tile[r * tile_size + c] + (column[c] + delta);
            bits |= uint32_t(int(x > row_threshold[r]) | int(x + row[r] > column_threshold[c])) << c;
        }
        out[r] = bits;
        any |= bits;
    }
    return any != 0;
}

inline void count(const uint32_t* masks, int32_t* row_count, int32_t* column_count) {
    for (int64_t r = 0; r < tile_size; ++r) {
        for (int64_t c = 0; c < tile_size && masks[r] != 0; ++c) {
            const int32_t bit = int32_t(masks[r] >> c & 1);
            row_count[r] += bit;
            column_count[c] += bit;
        }
    }
}

template <class Sum> Sum dot(const float* a, const float* b, int64_t ld) {
    Sum sums[16] = {};
    for (int64_t k = 0; k < ld; k += 16) {
        for (int64_t c = 0; c < 16; ++c) {
            sums[c] += Sum(a[k + c]) * Sum(b[k + c]);
        }
    }
    Sum total = 0;
    for (int64_t c = 0; c < 16; ++c) {
        total += sums[c];
    }
    return total;
}

inline void dots(const float* keys, int64_t ld, const int32_t* i, const int32_t* j, int64_t n, float* out) {
    for (int64_t p = 0; p < n; ++p) {
        prefetch_pair(keys, ld, i, j, p, n);
        out[p] = dot<float>(keys + i[p] * ld, keys + j[p] * ld, ld);
    }
}

} // namespace portable
} // namespace
} // namespace twinkv
