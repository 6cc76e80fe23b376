// Twin kernels for NVIDIA GPUs (sm_80 and later): bf16 tensor cores as a filter, thresholds on the accumulators in
// registers, and exact similarities in double for the pairs that the filter leaves open, all in one pass over the
// tiles. Keys may lie in host or in device memory; a cache tensor on the device is read where it is.
#include "core/status.hpp"
#include "twins/cuda/tile.hpp"
#include "twins/head.hpp"

#include "ggml.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace twinkv {
namespace cuda {
namespace {

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        throw Error(error == cudaErrorMemoryAllocation ? TWINKV_ENOMEM : TWINKV_EINTERNAL,
                    std::string(what) + ": " + cudaGetErrorString(error));
    }
}

template <class T> class Array {
  public:
    explicit Array(size_t size) { check(cudaMalloc(&data_, std::max<size_t>(1, size) * sizeof(T)), "device memory"); }
    Array(const T* host, size_t size) : Array(size) {
        check(cudaMemcpy(data_, host, size * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
    }
    ~Array() { cudaFree(data_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    T* get() { return data_; }
    void zero(size_t size) { check(cudaMemset(data_, 0, size * sizeof(T)), "device memory"); }
    void read(T* host, size_t size) const {
        check(cudaMemcpy(host, data_, size * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    }

  private:
    T* data_ = nullptr;
};

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

// Keys of one head in device memory; copied there first when they are in the host's.
class DeviceRows {
  public:
    DeviceRows(const twinkv_keys& keys, int64_t head) : type_(keys.type), stride_(keys.row_stride) {
        const auto* rows = static_cast<const uint8_t*>(keys.data) + size_t(head) * keys.head_stride;
        cudaPointerAttributes where{};
        const bool known = cudaPointerGetAttributes(&where, keys.data) == cudaSuccess;
        cudaGetLastError(); // an unknown pointer is the host's, not an error
        if (known && (where.type == cudaMemoryTypeDevice || where.type == cudaMemoryTypeManaged)) {
            require(readable_on_device(keys.type), "keys of this type cannot be read on the device",
                    TWINKV_EUNSUPPORTED);
            data_ = rows;
            return;
        }
        // rows as float32: whatever ggml can read
        std::vector<float> plain(size_t(keys.n * keys.d));
        const size_t row_bytes = ggml_row_size(ggml_type(keys.type), keys.d);
        const twinkv_status status =
            twinkv_rows_to_f32(keys.type, rows, keys.n > 0 ? size_t(keys.n - 1) * keys.row_stride + row_bytes : 0,
                               keys.row_stride, keys.n, keys.d, 0, plain.data());
        require(status == TWINKV_OK, twinkv_last_error(), status);
        type_ = GGML_TYPE_F32;
        stride_ = size_t(keys.d) * 4;
        check(cudaMalloc(&copy_, std::max<size_t>(1, plain.size() * 4)), "device memory");
        check(cudaMemcpy(copy_, plain.data(), plain.size() * 4, cudaMemcpyHostToDevice), "copy to the device");
        data_ = static_cast<const uint8_t*>(copy_);
    }
    ~DeviceRows() { cudaFree(copy_); }
    DeviceRows(const DeviceRows&) = delete;
    DeviceRows& operator=(const DeviceRows&) = delete;

    const uint8_t* data() const { return data_; }
    size_t stride() const { return stride_; }
    int type() const { return type_; }

  private:
    int type_;
    size_t stride_;
    const uint8_t* data_ = nullptr;
    void* copy_ = nullptr;
};

int padded(int64_t n) {
    return int((n + tile - 1) / tile * tile);
}

class PackedTokens {
  public:
    PackedTokens(const DeviceRows& rows, const std::vector<int32_t>& token, int64_t d)
        : n_(int(token.size())), d_(int(d)), k_(int((d + step - 1) / step * step)), unit_(size_t(padded(n_)) * d_),
          half_(size_t(padded(n_)) * k_), slack_(padded(n_)), valid_(padded(n_)) {
        const Array<int32_t> index(token.data(), token.size());
        constexpr int block = 128;
        const int blocks = (padded(n_) * 32 + block - 1) / block;
        if (blocks > 0) {
            pack<<<blocks, block>>>(rows.data(), rows.stride(), rows.type(), const_cast<Array<int32_t>&>(index).get(),
                                    n_, padded(n_), d_, k_, unit_.get(), half_.get(), slack_.get(), valid_.get());
            check(cudaGetLastError(), "packing keys");
        }
        check(cudaDeviceSynchronize(), "packing keys"); // index goes
    }

    Tokens view() { return {unit_.get(), half_.get(), slack_.get(), valid_.get(), n_, d_, k_}; }

  private:
    int n_, d_, k_;
    Array<float> unit_;
    Array<__nv_bfloat16> half_;
    Array<float> slack_;
    Array<uint8_t> valid_;
};

std::vector<int64_t> positions_of(const twinkv_keys& keys, int64_t head) {
    std::vector<int64_t> out(size_t(keys.n), 0);
    for (int64_t i = 0; i < keys.n; ++i) {
        out[size_t(i)] = keys.positions ? keys.positions[head * keys.position_stride + i] : i;
        require(i == 0 || out[size_t(i)] > out[size_t(i - 1)], "positions must ascend");
    }
    return out;
}

std::vector<int32_t> tokens_of(int64_t n, const uint8_t* among) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < n; ++i) {
        if (!among || among[i]) {
            out.push_back(int32_t(i));
        }
    }
    return out;
}

dim3 grid_of(const Tokens& rows, const Tokens& columns) {
    return dim3(unsigned(padded(columns.n) / tile), unsigned(padded(rows.n) / tile));
}

void twin_counts(const twinkv_keys& keys, int64_t head, float tau, int64_t window, int32_t* counts) {
    const auto position = positions_of(keys, head);
    const DeviceRows rows(keys, head);
    PackedTokens packed(rows, tokens_of(keys.n, nullptr), keys.d);
    std::vector<int32_t> first(size_t(keys.n), 0);
    for (size_t i = 0, j = 0; i < first.size(); ++i) {
        while (j < first.size() && position[j] <= position[i] + window) {
            ++j;
        }
        first[i] = int32_t(j);
    }
    Array<int32_t> device_first(first.data(), first.size()), device_counts(first.size());
    device_counts.zero(first.size());
    const Tokens t = packed.view();
    count_pairs<<<grid_of(t, t), threads>>>(t, device_first.get(), tau, device_counts.get());
    check(cudaGetLastError(), "counting twins");
    device_counts.read(counts, first.size());
}

void best_twin(const twinkv_keys& keys, int64_t head, const uint8_t* retained, int64_t window, float* best) {
    const auto position = positions_of(keys, head);
    const auto columns = tokens_of(keys.n, retained);
    std::fill_n(best, keys.n, -1.0f);
    if (columns.empty()) {
        return;
    }
    std::vector<int32_t> begin, end;
    for (int64_t p : position) {
        const auto before = [&](int32_t j, int64_t q) { return position[size_t(j)] < q; };
        begin.push_back(
            int32_t(std::lower_bound(columns.begin(), columns.end(), p - window, before) - columns.begin()));
        end.push_back(
            int32_t(std::lower_bound(columns.begin(), columns.end(), p + window + 1, before) - columns.begin()));
    }
    const DeviceRows rows(keys, head);
    PackedTokens all(rows, tokens_of(keys.n, nullptr), keys.d), kept(rows, columns, keys.d);
    Array<int32_t> device_begin(begin.data(), begin.size()), device_end(end.data(), end.size());
    int32_t none;
    const float minus_one = -1.0f;
    std::memcpy(&none, &minus_one, 4);
    const std::vector<int32_t> nothing(begin.size(), ordered(none));
    Array<int32_t> floor(nothing.data(), nothing.size()), found(nothing.data(), nothing.size());
    const Tokens a = all.view(), b = kept.view();
    for (int pass = 0; pass < 2; ++pass) {
        best_pairs<<<grid_of(a, b), threads>>>(a, b, Bands{device_begin.get(), device_end.get()}, pass, floor.get(),
                                               found.get());
        check(cudaGetLastError(), "best twins");
    }
    std::vector<int32_t> bits(begin.size());
    found.read(bits.data(), bits.size());
    for (size_t i = 0; i < bits.size(); ++i) {
        const int32_t plain = ordered(bits[i]);
        std::memcpy(best + i, &plain, 4);
    }
}

} // namespace
} // namespace cuda
} // namespace twinkv

extern "C" {

const char* twinkv_cuda_unavailable(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        cudaGetLastError();
        return "there is no CUDA device";
    }
    cudaDeviceProp device{};
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major < 8) {
        cudaGetLastError();
        return "the CUDA device has no bf16 tensor cores (compute capability 8.0 is needed)";
    }
    return nullptr;
}

twinkv_status twinkv_cuda_twin_counts(const twinkv_keys* keys, float tau, int64_t local_window, int32_t* counts) {
    return twinkv::guard([&] {
        twinkv::check_call(keys, local_window);
        twinkv::check_tau(tau);
        for (int64_t h = 0; h < keys->n_heads && keys->n > 0; ++h) {
            twinkv::cuda::twin_counts(*keys, h, tau, local_window, counts + h * keys->n);
        }
    });
}

twinkv_status twinkv_cuda_best_twin(const twinkv_keys* keys, const uint8_t* retained, int64_t local_window,
                                    float* best) {
    return twinkv::guard([&] {
        twinkv::check_call(keys, local_window);
        for (int64_t h = 0; h < keys->n_heads && keys->n > 0; ++h) {
            twinkv::cuda::best_twin(*keys, h, retained + h * keys->n, local_window, best + h * keys->n);
        }
    });
}
}
