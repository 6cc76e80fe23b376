#include "twins/head.hpp"

#include "core/parallel.hpp"
#include "core/status.hpp"

#include "twins/kernels.hpp"

#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace twinkv {
namespace {

constexpr int64_t rows_per_task = 256;

// Normalizes src into dst as the definition says; false (and zeros) when the key has no direction.
bool normalize_in_order(const float* src, int64_t d, float* dst) {
    double square = 0;
    for (int64_t k = 0; k < d; ++k) {
        square += double(src[k]) * double(src[k]);
    }
    const double norm = std::sqrt(square);
    if (!(norm > 0) || !std::isfinite(norm)) {
        std::memset(dst, 0, size_t(d) * sizeof(float));
        return false;
    }
    for (int64_t k = 0; k < d; ++k) {
        dst[k] = float(double(src[k]) / norm);
    }
    return true;
}

void f16_to_float(const void* src, float* dst, int64_t n) {
    static const bool ready = (ggml_cpu_init(), true); // the tables it looks the last few values up in
    (void)ready;
    ggml_cpu_fp16_to_fp32(static_cast<const ggml_fp16_t*>(src), dst, n);
}

void load_positions(const twinkv_keys& keys, int64_t head, Head& out) {
    out.pos.resize(size_t(out.n));
    for (int64_t i = 0; i < out.n; ++i) {
        out.pos[size_t(i)] = keys.positions ? keys.positions[head * keys.position_stride + i] : int32_t(i);
        if (i > 0 && out.pos[size_t(i)] <= out.pos[size_t(i - 1)]) {
            throw Error(TWINKV_EINVAL, "positions must ascend: token " + std::to_string(i) + " of head " +
                                           std::to_string(head) + " does not stand after the one before it");
        }
    }
}

} // namespace

void check_keys(const twinkv_keys& keys) {
    require(twinkv_rows_supported(keys.type),
            "keys of ggml type " + std::to_string(keys.type) + " cannot be read as float32", TWINKV_EUNSUPPORTED);
    require(keys.n_heads >= 0 && keys.n >= 0 && keys.d >= 1, "keys must be [n_heads, n, d] with d >= 1");
    require(keys.n < std::numeric_limits<int32_t>::max() && keys.d <= 1 << 20,
            "more tokens or dimensions than can be counted");
    require(keys.d % ggml_blck_size(ggml_type(keys.type)) == 0, "a key of " + std::to_string(keys.d) +
                                                                    " values is no whole number of " +
                                                                    ggml_type_name(ggml_type(keys.type)) + " blocks");
    require(keys.data != nullptr || keys.n == 0 || keys.n_heads == 0, "keys are missing");
}

void check_call(const twinkv_keys* keys, int64_t local_window) {
    require(keys != nullptr, "keys are missing");
    check_keys(*keys);
    require(local_window >= 0, "local_window must not be negative");
}

void check_tau(float tau) {
    require(std::isfinite(tau) && tau > -1 && tau <= 1, "tau must lie in (-1, 1]");
}

Head load_head(const twinkv_keys& keys, int64_t head, int64_t window, int n_threads) {
    Head out;
    out.n = keys.n;
    out.d = keys.d;
    out.ld = (keys.d + 15) / 16 * 16;
    out.window = window;
    load_positions(keys, head, out);
    out.khat = AlignedArray<float>(size_t(out.n * out.ld));
    out.valid.resize(size_t(out.n));
    const auto type = ggml_type(keys.type);
    const auto to_float = type == GGML_TYPE_F32   ? nullptr
                          : type == GGML_TYPE_F16 ? f16_to_float // ggml's own for the others are fast
                                                  : ggml_get_type_traits(type)->to_float;
    const Kernels& kernels = active_kernels();
    const auto* base = static_cast<const uint8_t*>(keys.data) + size_t(head) * keys.head_stride;
    parallel_for((out.n + rows_per_task - 1) / rows_per_task, n_threads, [&](int64_t task) {
        std::vector<float> plain(size_t(out.d)); // one key as float32
        const int64_t end = std::min(out.n, (task + 1) * rows_per_task);
        for (int64_t i = task * rows_per_task; i < end; ++i) {
            const uint8_t* src = base + size_t(i) * keys.row_stride;
            if (to_float) {
                to_float(src, plain.data(), out.d);
            } else {
                std::memcpy(plain.data(), src, size_t(out.d) * sizeof(float)); // src may be misaligned
            }
            float* dst = out.khat.data() + i * out.ld;
            out.valid[size_t(i)] =
                kernels.normalize(plain.data(), out.d, dst) || normalize_in_order(plain.data(), out.d, dst);
            std::memset(dst + out.d, 0, size_t(out.ld - out.d) * sizeof(float));
        }
    });
    return out;
}

} // namespace twinkv
