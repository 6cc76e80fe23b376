// The CUDA kernels' arithmetic of indices and thresholds, shared with a host build that runs the same tile loops on the
// CPU and is tested there (tests/native/test_cuda_tile.cpp).
//
// A block of 8 warps computes 128 x 128 similarities from bf16 keys in steps of 32 dimensions; a warp has 64 x 32 of
// them, as 4 x 4 products of mma.m16n8k16.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TWINKV_HD __host__ __device__ __forceinline__
#else
#define TWINKV_HD inline
#endif

namespace twinkv {
namespace cuda {

constexpr int tile = 128;        // rows and columns of a block
constexpr int step = 32;         // dimensions in shared memory at a time
constexpr int threads = 256;     // of a block
constexpr int warp_rows = 64;    // 2 warps down
constexpr int warp_columns = 32; // 4 warps across
constexpr int m_tiles = warp_rows / 16, n_tiles = warp_columns / 8;
// Elements from one row in shared memory to the next. 80 bytes: the 8 rows x 4 words that a fragment load touches lie
// in 32 different banks, and rows stay aligned to the 16 bytes of a copy.
constexpr int stride = step + 8;
constexpr int copy_elements = 8;                              // bf16 values of a 16-byte copy
constexpr int copies = tile * step / copy_elements / threads; // of a thread, for each of the two operands

struct RowAndDim {
    int row, dim;
};

// Which values of an operand a thread copies in its c-th copy: copy_elements of them from here on.
TWINKV_HD RowAndDim copy_source(int thread, int c) {
    const int index = c * threads + thread;
    constexpr int per_row = step / copy_elements;
    return {index / per_row, index % per_row * copy_elements};
}

TWINKV_HD int shared_offset(int row, int dim) {
    return row * stride + dim;
}

TWINKV_HD int warp_row(int warp) {
    return warp / 4 * warp_rows;
}
TWINKV_HD int warp_column(int warp) {
    return warp % 4 * warp_columns;
}

// Where the pair of values lies that a lane holds in register r of a fragment of mma.m16n8k16 (PTX ISA, matrix
// fragments for .bf16). A is 16 rows x 16 dimensions, B 8 columns x 16 dimensions; k0 is 0 or 16.
TWINKV_HD int a_offset(int row0, int lane, int r, int k0) {
    return shared_offset(row0 + lane / 4 + (r % 2) * 8, k0 + lane % 4 * 2 + (r / 2) * 8);
}
TWINKV_HD int b_offset(int column0, int lane, int r, int k0) {
    return shared_offset(column0 + lane / 4, k0 + lane % 4 * 2 + r * 8);
}

// Row and column, within 16 x 8, of a lane's e-th accumulator.
TWINKV_HD int accumulator_row(int lane, int e) {
    return lane / 4 + e / 2 * 8;
}
TWINKV_HD int accumulator_column(int lane, int e) {
    return lane % 4 * 2 + e % 2;
}

// A token's share of the error bound: for keys of length 1, |approximate - similarity| <= slack_i + slack_j
// (docs/kernels.md). left: length of what rounding to bf16 loses. d: dimensions.
TWINKV_HD float slack_of(float left, int d) {
    const float u = 5.9604645e-8f; // 2^-24
    return left * 1.01f + (float(d) + 64) * u * 1.02f;
}

// What an approximate similarity says of sim > tau.
enum class Verdict { no, open, yes };
TWINKV_HD Verdict judge(float approximate, float tau, float slack) {
    return approximate > tau + slack ? Verdict::yes : approximate > tau - slack ? Verdict::open : Verdict::no;
}

// Floats as integers of the same order, for atomicMax.
TWINKV_HD int32_t ordered(int32_t bits) {
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

// Pairs of a set with itself, each once: whether block (down, across) holds any. first[i]: the first column that row i
// is compared with; it never falls from row to row.
TWINKV_HD bool holds_pairs(int down, int across, int n, const int32_t* first) {
    const int last = across * tile + tile - 1;
    return down * tile < n && across * tile < n && first[down * tile] <= last;
}

} // namespace cuda
} // namespace twinkv
