// The C interface of this folder: checks, and which threads work on what.
#include "core/parallel.hpp"
#include "core/status.hpp"
#include "twins/device.hpp"
#include "twins/twins.hpp"

#include <cmath>

namespace twinkv {
namespace {

// f(head, threads for it). Many heads run side by side; a few are shared by all threads, one after the other,
// so that scratch stays O(n d) per thread.
template <class F> void for_each_head(int64_t n_heads, int n_threads, F&& f) {
    const ScratchScope scratch;
    n_threads = resolve_threads(n_threads);
    if (n_threads > 1 && n_heads >= 2 * int64_t(n_threads)) {
        parallel_for(n_heads, n_threads, [&](int64_t h) { f(h, 1); });
    } else {
        for (int64_t h = 0; h < n_heads; ++h) {
            f(h, n_threads);
        }
    }
}

void best_of_heads(const twinkv_keys& keys, const uint8_t* retained, int64_t local_window, int n_threads, float* best) {
    for_each_head(keys.n_heads, n_threads, [&](int64_t h, int threads) {
        const auto head = load_head(keys, h, local_window, threads);
        best_twin({head, threads}, retained + h * keys.n, INFINITY, INFINITY, best + h * keys.n);
    });
}

} // namespace
} // namespace twinkv

extern "C" {

twinkv_status twinkv_twin_counts(const twinkv_keys* keys, float tau, int64_t local_window, int n_threads,
                                 int32_t* counts) {
    return twinkv::guard([&] {
        twinkv::check_call(keys, local_window);
        twinkv::check_tau(tau);
        twinkv::for_each_head(keys->n_heads, n_threads, [&](int64_t h, int threads) {
            const auto head = twinkv::load_head(*keys, h, local_window, threads);
            twinkv::twin_counts({head, threads}, tau, counts + h * keys->n);
        });
    });
}

twinkv_status twinkv_best_twin(const twinkv_keys* keys, const uint8_t* retained, int64_t local_window, int n_threads,
                               float* best) {
    return twinkv::guard([&] {
        twinkv::check_call(keys, local_window);
        twinkv::best_of_heads(*keys, retained, local_window, n_threads, best);
    });
}

twinkv_status twinkv_invalid_keys(const twinkv_keys* keys, int n_threads, uint8_t* invalid) {
    return twinkv::guard([&] {
        twinkv::check_call(keys, 0);
        twinkv::for_each_head(keys->n_heads, n_threads, [&](int64_t h, int threads) {
            const auto head = twinkv::load_head(*keys, h, 0, threads);
            std::transform(head.valid.begin(), head.valid.end(), invalid + h * keys->n,
                           [](uint8_t valid) { return uint8_t(!valid); });
        });
    });
}

twinkv_status twinkv_repair(const twinkv_keys* keys, const twinkv_repair_params* params, int n_threads,
                            const float* best, const float* priority, const float* weight, uint8_t* retained,
                            twinkv_repair_stats* stats) {
    return twinkv::guard([&] {
        twinkv::require(params != nullptr, "params are missing");
        twinkv::check_call(keys, params->local_window);
        const bool coverage = params->mode == TWINKV_REPAIR_COVERAGE;
        if (coverage) {
            twinkv::require(params->share >= 0 && params->share <= 1, "share must lie in [0, 1]");
            twinkv::require(params->margin >= 0 && params->margin <= 2, "margin must lie in [0, 2]");
            twinkv::require(!weight || std::all_of(weight, weight + keys->n_heads * keys->n,
                                                   [](float w) { return w >= 0 && std::isfinite(w); }),
                            "weights must be finite and not negative");
        } else {
            twinkv::check_tau(params->tau);
        }
        twinkv::require(params->n_sink >= 0 && params->n_recent >= 0, "n_sink and n_recent must not be negative");
        twinkv::require(coverage || params->mode == TWINKV_REPAIR_PAPER || params->mode == TWINKV_REPAIR_CONSISTENT,
                        "no such repair mode");
        // all heads are loaded and judged before the first result is written: a failure changes nothing
        std::vector<uint8_t> result(retained, retained + keys->n_heads * keys->n);
        const auto of = [&](int64_t h, const float* values) { return values ? values + h * keys->n : nullptr; };
        if (!coverage) {
            twinkv::for_each_head(keys->n_heads, n_threads, [&](int64_t h, int threads) {
                const auto head = twinkv::load_head(*keys, h, params->local_window, threads);
                stats[h] = twinkv::repair({head, threads}, *params, of(h, best), result.data() + h * keys->n);
            });
        } else {
            // the swaps of a head follow one another, on one thread: what all threads can share comes first
            std::vector<float> found;
            if (!best) {
                found.resize(result.size());
                twinkv::best_of_heads(*keys, retained, params->local_window, n_threads, found.data());
                best = found.data();
            }
            const twinkv::ScratchScope scratch;
            twinkv::parallel_for(keys->n_heads, n_threads, [&](int64_t h) {
                const auto head = twinkv::load_head(*keys, h, params->local_window, 1);
                stats[h] = twinkv::cover({head, 1}, *params, of(h, best), of(h, priority), of(h, weight),
                                         result.data() + h * keys->n);
            });
        }
        std::copy(result.begin(), result.end(), retained);
    });
}

twinkv_status twinkv_device_twin_counts(const char* device, const twinkv_keys* keys, float tau, int64_t local_window,
                                        int n_threads, int32_t* counts) {
    return twinkv::guard([&] {
        twinkv::require(device != nullptr, "device is missing");
        twinkv::check_call(keys, local_window);
        twinkv::check_tau(tau);
        const int threads = twinkv::resolve_threads(n_threads);
        twinkv::Device on(device, threads);
        for (int64_t h = 0; h < keys->n_heads; ++h) {
            const auto head = twinkv::load_head(*keys, h, local_window, threads);
            twinkv::device_twin_counts(on, {head, threads}, tau, counts + h * keys->n);
        }
    });
}

twinkv_status twinkv_device_best_twin(const char* device, const twinkv_keys* keys, const uint8_t* retained,
                                      int64_t local_window, int n_threads, float* best) {
    return twinkv::guard([&] {
        twinkv::require(device != nullptr, "device is missing");
        twinkv::check_call(keys, local_window);
        const int threads = twinkv::resolve_threads(n_threads);
        twinkv::Device on(device, threads);
        for (int64_t h = 0; h < keys->n_heads; ++h) {
            const auto head = twinkv::load_head(*keys, h, local_window, threads);
            twinkv::device_best_twin(on, {head, threads}, retained + h * keys->n, best + h * keys->n);
        }
    });
}

const char* twinkv_device_name(int index, bool* is_gpu) {
    if (index < 0 || size_t(index) >= ggml_backend_dev_count()) {
        return nullptr;
    }
    const ggml_backend_dev_t device = ggml_backend_dev_get(size_t(index));
    if (is_gpu) {
        const auto type = ggml_backend_dev_type(device);
        *is_gpu = type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
    }
    return ggml_backend_dev_name(device);
}
}
