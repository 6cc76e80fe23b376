#include "python/bind.hpp"

namespace {

using Keys = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Positions = std::optional<Array<const int32_t, nb::ndim<2>>>;

twinkv_keys keys_of(const Keys& keys, const Positions& positions) {
    const bool f16 = keys.dtype() == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    if (!f16 && keys.dtype() != nb::dtype<float>()) {
        throw nb::type_error("keys must be float32 or float16");
    }
    if (keys.size() > 0 && keys.shape(2) > 1 && keys.stride(2) != 1) { // strides of an empty array say nothing
        throw nb::value_error("the values of a key must be contiguous");
    }
    const int64_t item = f16 ? 2 : 4;
    const int64_t strides[] = {keys.stride(0) * item, keys.stride(1) * item};
    if (strides[0] < 0 || strides[1] < 0) {
        throw nb::value_error("keys must not run backwards");
    }
    if (positions &&
        (positions->shape(1) != keys.shape(1) || (positions->shape(0) != 1 && positions->shape(0) != keys.shape(0)))) {
        throw nb::value_error("positions must be [1 or n_heads, n]");
    }
    return {keys.data(),
            f16 ? GGML_TYPE_F16 : GGML_TYPE_F32,
            int64_t(keys.shape(0)),
            int64_t(keys.shape(1)),
            int64_t(keys.shape(2)),
            size_t(strides[0]),
            size_t(strides[1]),
            positions ? positions->data() : nullptr,
            positions && positions->shape(0) > 1 ? int64_t(keys.shape(1)) : 0};
}

void check_per_token(const twinkv_keys& keys, size_t heads, size_t n) {
    if (int64_t(heads) != keys.n_heads || int64_t(n) != keys.n) {
        throw nb::value_error("there must be one entry per key and head");
    }
}

using Mask = Array<const uint8_t, nb::ndim<2>>;
template <class T> using PerToken = Array<T, nb::ndim<2>>;

} // namespace

void bind_twins(nb::module_& m) {
    m.def(
        "twin_counts",
        [](Keys keys, Positions positions, float tau, int64_t local_window, int n_threads, PerToken<int32_t> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            call([&] { return twinkv_twin_counts(&k, tau, local_window, n_threads, out.data()); });
        },
        "keys"_a, "positions"_a.none(), "tau"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def(
        "best_twin",
        [](Keys keys, Positions positions, Mask retained, int64_t local_window, int n_threads, PerToken<float> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            check_per_token(k, retained.shape(0), retained.shape(1));
            call([&] { return twinkv_best_twin(&k, retained.data(), local_window, n_threads, out.data()); });
        },
        "keys"_a, "positions"_a.none(), "retained"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def(
        "invalid_keys",
        [](Keys keys, int n_threads, PerToken<uint8_t> out) {
            const twinkv_keys k = keys_of(keys, std::nullopt);
            check_per_token(k, out.shape(0), out.shape(1));
            call([&] { return twinkv_invalid_keys(&k, n_threads, out.data()); });
        },
        "keys"_a, "n_threads"_a, "out"_a);
    m.def(
        "content", // vectors: the bits of float16
        [](Array<const float, nb::ndim<3>> keys, Array<const float, nb::ndim<3>> values, float value_scale,
           int n_threads, Array<uint16_t, nb::ndim<3>> vectors, PerToken<float> weights) {
            const size_t n_heads = keys.shape(0), n = keys.shape(1), d = keys.shape(2) + values.shape(2);
            if (values.shape(0) != n_heads || values.shape(1) != n || weights.shape(0) != n_heads ||
                weights.shape(1) != n || vectors.shape(0) != n_heads || vectors.shape(1) != n ||
                vectors.shape(2) != d) {
                throw nb::value_error("keys and values must be of the same heads and tokens");
            }
            call([&] {
                return twinkv_content(keys.data(), values.data(), int64_t(n_heads), int64_t(n), int64_t(keys.shape(2)),
                                      int64_t(values.shape(2)), value_scale, n_threads, vectors.data(), weights.data());
            });
        },
        "keys"_a, "values"_a, "value_scale"_a, "n_threads"_a, "vectors"_a, "weights"_a);
    m.def(
        "repair",
        [](Keys keys, Positions positions, PerToken<uint8_t> retained, int mode, float tau, int64_t local_window,
           int64_t n_sink, int64_t n_recent, double share, float margin, int n_threads,
           std::optional<Array<const float, nb::ndim<2>>> best, std::optional<Array<const float, nb::ndim<2>>> priority,
           std::optional<Array<const float, nb::ndim<2>>> weight, Array<int64_t, nb::ndim<2>> stats) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, retained.shape(0), retained.shape(1));
            for (const auto* values : {&best, &priority, &weight}) {
                if (*values) {
                    check_per_token(k, (*values)->shape(0), (*values)->shape(1));
                }
            }
            static_assert(sizeof(twinkv_repair_stats) == 3 * sizeof(int64_t), "stats [n_heads, 3]");
            if (int64_t(stats.shape(0)) != k.n_heads || stats.shape(1) != 3) {
                throw nb::value_error("stats must be [n_heads, 3]");
            }
            const twinkv_repair_params params{
                twinkv_repair_mode(mode), tau, local_window, n_sink, n_recent, share, margin};
            call([&] {
                return twinkv_repair(&k, &params, n_threads, best ? best->data() : nullptr,
                                     priority ? priority->data() : nullptr, weight ? weight->data() : nullptr,
                                     retained.data(), reinterpret_cast<twinkv_repair_stats*>(stats.data()));
            });
        },
        "keys"_a, "positions"_a.none(), "retained"_a, "mode"_a, "tau"_a, "local_window"_a, "n_sink"_a, "n_recent"_a,
        "share"_a, "margin"_a, "n_threads"_a, "best"_a.none(), "priority"_a.none(), "weight"_a.none(), "stats"_a);
    m.def(
        "device_twin_counts",
        [](std::string device, Keys keys, Positions positions, float tau, int64_t local_window, int n_threads,
           PerToken<int32_t> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            call([&] {
                return twinkv_device_twin_counts(device.c_str(), &k, tau, local_window, n_threads, out.data());
            });
        },
        "device"_a, "keys"_a, "positions"_a.none(), "tau"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def(
        "device_best_twin",
        [](std::string device, Keys keys, Positions positions, Mask retained, int64_t local_window, int n_threads,
           PerToken<float> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            check_per_token(k, retained.shape(0), retained.shape(1));
            call([&] {
                return twinkv_device_best_twin(device.c_str(), &k, retained.data(), local_window, n_threads,
                                               out.data());
            });
        },
        "device"_a, "keys"_a, "positions"_a.none(), "retained"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def("cuda_unavailable", [] { return twinkv_cuda_unavailable(); }); // a reason, or None
    m.def(
        "cuda_twin_counts",
        [](Keys keys, Positions positions, float tau, int64_t local_window, PerToken<int32_t> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            call([&] { return twinkv_cuda_twin_counts(&k, tau, local_window, out.data()); });
        },
        "keys"_a, "positions"_a.none(), "tau"_a, "local_window"_a, "out"_a);
    m.def(
        "cuda_best_twin",
        [](Keys keys, Positions positions, Mask retained, int64_t local_window, PerToken<float> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            check_per_token(k, retained.shape(0), retained.shape(1));
            call([&] { return twinkv_cuda_best_twin(&k, retained.data(), local_window, out.data()); });
        },
        "keys"_a, "positions"_a.none(), "retained"_a, "local_window"_a, "out"_a);
    m.def("devices", [] { // name -> whether it is a GPU
        nb::dict out;
        bool is_gpu = false;
        for (int i = 0; const char* name = twinkv_device_name(i, &is_gpu); ++i) {
            out[name] = is_gpu;
        }
        return out;
    });
    m.def("isas", [] { // name -> whether this processor has it, best first
        nb::dict out;
        bool supported = false;
        for (int i = 0; const char* isa = twinkv_isa_name(i, &supported); ++i) {
            out[isa] = supported;
        }
        return out;
    });
    m.def(
        "peaks", // name -> operations per second, of the multipliers this processor has
        [](int n_threads, double seconds) {
            nb::dict out;
            bool supported = false;
            for (int i = 0; const char* name = twinkv_peak_name(i, &supported); ++i) {
                if (supported) {
                    double rate = 0;
                    call([&] { return twinkv_peak(i, n_threads, seconds, &rate); });
                    out[name] = rate;
                }
            }
            return out;
        },
        "n_threads"_a, "seconds"_a);
    m.def("isa", [] {
        const char* isa = nullptr;
        check(twinkv_isa(&isa));
        return isa;
    });
    m.def(
        "set_isa", [](std::optional<std::string> isa) { check(twinkv_set_isa(isa ? isa->c_str() : nullptr)); },
        "isa"_a.none());
}
