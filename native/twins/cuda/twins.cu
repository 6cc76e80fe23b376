// Twin counts and best twins on NVIDIA GPUs: memory, launches and the C interface (the kernels: kernels.cuh). Keys may
// lie in host or in device memory; a cache tensor on the device is read where it is.
#include "core/status.hpp"
#include "twins/cuda/kernels.cuh"
#include "twins/head.hpp"

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
