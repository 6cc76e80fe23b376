// Twin kernels for NVIDIA GPUs (sm_80 and later): bf16 tensor cores as a filter, thresholds on the accumulators, and
// exact similarities in double for the pairs that the filter leaves open, all in one pass over the tiles.
#pragma once

#include "twins/cuda/tile.hpp"

#include "ggml.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace twinkv {
namespace cuda {
namespace {

// Tokens ready for the kernels; rows beyond n up to a whole tile are zeros.
struct Tokens {
    const float* unit;         // [n padded, d]
    const __nv_bfloat16* half; // [n padded, k]
    const float* slack;        // [n padded]; infinity - infinity never arises: see valid
    const uint8_t* valid;      // [n padded]; 0: no direction, or padding
    int n, d, k;
};

__device__ float value_at(const uint8_t* row, int type, int c) {
    switch (type) {
    case GGML_TYPE_F16: {
        __half_raw h;
        h.x = uint16_t(row[2 * c] | row[2 * c + 1] << 8);
        return __half2float(__half(h));
    }
    case GGML_TYPE_BF16:
        return __uint_as_float(uint32_t(row[2 * c] | row[2 * c + 1] << 8) << 16);
    case GGML_TYPE_Q8_0: { // half scale, 32 signed bytes
        const uint8_t* block = row + c / 32 * 34;
        __half_raw h;
        h.x = uint16_t(block[0] | block[1] << 8);
        return float(int8_t(block[2 + c % 32])) * __half2float(__half(h));
    }
    case GGML_TYPE_Q4_0: { // half scale, 16 bytes: low nibbles are values 0..15, high ones 16..31
        const uint8_t* block = row + c / 32 * 18;
        __half_raw h;
        h.x = uint16_t(block[0] | block[1] << 8);
        const int byte = block[2 + c % 16];
        return float((c % 32 < 16 ? byte & 15 : byte >> 4) - 8) * __half2float(__half(h));
    }
    default:
        return __uint_as_float(uint32_t(row[4 * c]) | uint32_t(row[4 * c + 1]) << 8 | uint32_t(row[4 * c + 2]) << 16 |
                               uint32_t(row[4 * c + 3]) << 24);
    }
}

bool readable_on_device(int type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0 ||
           type == GGML_TYPE_Q4_0;
}

// One warp a token. The norm is summed in the stated order by one lane; products of floats are exact in double, so
// fused multiply-add or not, the bits are those of every other backend.
__global__ void pack(const uint8_t* keys, size_t row_stride, int type, const int32_t* token, int n, int padded, int d,
                     int k, float* unit, __nv_bfloat16* half, float* slack, uint8_t* valid) {
    const int i = int((blockIdx.x * blockDim.x + threadIdx.x) / 32), lane = int(threadIdx.x % 32);
    if (i >= padded) {
        return;
    }
    double norm = 0;
    const uint8_t* row = i < n ? keys + size_t(token[i]) * row_stride : nullptr;
    if (lane == 0 && row) {
        for (int c = 0; c < d; ++c) {
            const double x = value_at(row, type, c);
            norm += x * x;
        }
        norm = sqrt(norm);
    }
    norm = __shfl_sync(0xffffffffu, norm, 0);
    const bool has_direction = norm > 0 && norm < 1e300; // squares of floats stay far below
    float left = 0;
    for (int c = lane; c < k; c += 32) {
        const float x = has_direction && c < d ? float(double(value_at(row, type, c)) / norm) : 0.0f;
        const __nv_bfloat16 rounded = __float2bfloat16_rn(x);
        if (c < d) {
            unit[size_t(i) * d + c] = x;
        }
        half[size_t(i) * k + c] = rounded;
        const float lost = x - __bfloat162float(rounded);
        left += lost * lost;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        left += __shfl_xor_sync(0xffffffffu, left, offset);
    }
    if (lane == 0) {
        slack[i] = slack_of(sqrtf(left) * 1.001f + 1e-6f, d);
        valid[i] = has_direction;
    }
}

__device__ float exact_similarity(const Tokens& a, int i, const Tokens& b, int j) {
    const float *x = a.unit + size_t(i) * a.d, *y = b.unit + size_t(j) * b.d;
    double sum = 0;
    for (int c = 0; c < a.d; ++c) {
        sum += double(x[c]) * double(y[c]);
    }
    return float(sum);
}

__device__ void copy_async(void* shared, const void* global) {
    const auto to = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global));
}

__device__ void multiply(float* sums, const uint32_t* a, const uint32_t* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// f(row, column, approximate similarity) for the pairs that a thread has of the block's tile.
template <class F> __device__ void for_each_pair(const Tokens& a, int row0, const Tokens& b, int column0, F&& f) {
    __shared__ __align__(16) __nv_bfloat16 rows[2][tile * stride], columns[2][tile * stride];
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    float sums[m_tiles][n_tiles][4] = {};
    const auto fetch = [&](int buffer, int k0) {
        for (int c = 0; c < copies; ++c) {
            const RowAndDim from = copy_source(int(threadIdx.x), c);
            const int to = shared_offset(from.row, from.dim);
            copy_async(&rows[buffer][to], a.half + size_t(row0 + from.row) * a.k + k0 + from.dim);
            copy_async(&columns[buffer][to], b.half + size_t(column0 + from.row) * b.k + k0 + from.dim);
        }
        asm volatile("cp.async.commit_group;");
    };
    fetch(0, 0);
    for (int k0 = 0, buffer = 0; k0 < a.k; k0 += step, buffer ^= 1) {
        if (k0 + step < a.k) {
            fetch(buffer ^ 1, k0 + step);
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        __syncthreads();
        for (int k = 0; k < step; k += 16) {
            uint32_t fa[m_tiles][4], fb[n_tiles][2];
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) {
                for (int r = 0; r < 4; ++r) {
                    const int at = a_offset(warp_row(warp) + m * 16, lane, r, k);
                    fa[m][r] = *reinterpret_cast<const uint32_t*>(&rows[buffer][at]);
                }
            }
#pragma unroll
            for (int c = 0; c < n_tiles; ++c) {
                for (int r = 0; r < 2; ++r) {
                    const int at = b_offset(warp_column(warp) + c * 8, lane, r, k);
                    fb[c][r] = *reinterpret_cast<const uint32_t*>(&columns[buffer][at]);
                }
            }
#pragma unroll
            for (int m = 0; m < m_tiles; ++m) {
                for (int c = 0; c < n_tiles; ++c) {
                    multiply(sums[m][c], fa[m], fb[c]);
                }
            }
        }
        __syncthreads(); // the next fetch writes into the buffer just read
    }
    // a copy that may be indexed at run time, so that the accumulators themselves stay in registers
    float found[m_tiles * n_tiles * 4];
#pragma unroll
    for (int q = 0; q < m_tiles * n_tiles * 4; ++q) {
        found[q] = sums[q / (4 * n_tiles)][q / 4 % n_tiles][q % 4];
    }
    for (int q = 0; q < m_tiles * n_tiles * 4; ++q) {
        const int m = q / (4 * n_tiles), c = q / 4 % n_tiles, e = q % 4;
        const int row = row0 + warp_row(warp) + m * 16 + accumulator_row(lane, e);
        const int column = column0 + warp_column(warp) + c * 8 + accumulator_column(lane, e);
        f(row, column, found[q]);
    }
}

__global__ void __launch_bounds__(threads) count_pairs(Tokens t, const int32_t* first, float tau, int32_t* counts) {
    if (!holds_pairs(int(blockIdx.y), int(blockIdx.x), t.n, first)) {
        return;
    }
    __shared__ int32_t by_row[tile], by_column[tile];
    for (int c = int(threadIdx.x); c < tile; c += threads) {
        by_row[c] = by_column[c] = 0;
    }
    __syncthreads();
    const int row0 = int(blockIdx.y) * tile, column0 = int(blockIdx.x) * tile;
    for_each_pair(t, row0, t, column0, [&](int i, int j, float approximate) {
        if (i >= t.n || j >= t.n || j < first[i] || !t.valid[i] || !t.valid[j]) {
            return;
        }
        const Verdict verdict = judge(approximate, tau, t.slack[i] + t.slack[j]);
        if (verdict == Verdict::yes || (verdict == Verdict::open && exact_similarity(t, i, t, j) > tau)) {
            atomicAdd(&by_row[i - row0], 1);
            atomicAdd(&by_column[j - column0], 1);
        }
    });
    __syncthreads();
    for (int c = int(threadIdx.x); c < tile; c += threads) {
        if (by_row[c] != 0) {
            atomicAdd(&counts[row0 + c], by_row[c]);
        }
        if (by_column[c] != 0) {
            atomicAdd(&counts[column0 + c], by_column[c]);
        }
    }
}

struct Bands { // columns that a row is not compared with: [begin, end)
    const int32_t *begin, *end;
};

// Pass 0 raises floor[i] to what the best of row i is at least; pass 1 raises best[i] to the exact similarity of every
// pair that may be above the floor. Both as ordered() integers.
__global__ void __launch_bounds__(threads)
    best_pairs(Tokens a, Tokens b, Bands bands, int pass, int32_t* floor, int32_t* best) {
    const int row0 = int(blockIdx.y) * tile, column0 = int(blockIdx.x) * tile;
    for_each_pair(a, row0, b, column0, [&](int i, int j, float approximate) {
        if (i >= a.n || j >= b.n || (j >= bands.begin[i] && j < bands.end[i]) || !a.valid[i] || !b.valid[j]) {
            return;
        }
        const float slack = a.slack[i] + b.slack[j];
        if (pass == 0) {
            const int32_t low = ordered(__float_as_int(approximate - slack));
            if (low > floor[i]) {
                atomicMax(&floor[i], low);
            }
        } else if (ordered(__float_as_int(approximate + slack)) >= floor[i]) {
            atomicMax(&best[i], ordered(__float_as_int(exact_similarity(a, i, b, j))));
        }
    });
}

} // namespace
} // namespace cuda
} // namespace twinkv
