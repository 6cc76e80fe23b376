// The Python face of twinkv.h: argument checks, the GIL released around long work, statuses turned into our
// exceptions.
#include "twinkv.h"

#include "ggml.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T, class... Shape> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu, Shape...>;

// twinkv_edge.errors.<class> for a status.
void check(twinkv_status status) {
    if (status == TWINKV_OK) {
        return;
    }
    if (status == TWINKV_ENOMEM) {
        throw std::bad_alloc();
    }
    const char* name = status == TWINKV_EINVAL         ? "InputError"
                       : status == TWINKV_EFORMAT      ? "StateFormatError"
                       : status == TWINKV_EUNSUPPORTED ? "UnsupportedModelError"
                                                       : "TwinKVError";
    nb::object cls = nb::module_::import_("twinkv_edge.errors").attr(name);
    PyErr_SetString(cls.ptr(), twinkv_last_error());
    throw nb::python_error();
}

// Runs f() without the GIL and raises what it reports.
template <class F> void call(F&& f) {
    twinkv_status status;
    {
        nb::gil_scoped_release release;
        status = f();
    }
    check(status);
}

void bind_rows(nb::module_& m) {
    m.def("rows_supported", &twinkv_rows_supported, "ggml_type"_a);
    m.def(
        "rows_to_f32",
        [](int type, Array<const uint8_t, nb::ndim<1>> src, size_t row_stride, Array<float, nb::ndim<2>> dst,
           int n_threads) {
            call([&] {
                return twinkv_rows_to_f32(type, src.data(), src.size(), row_stride, int64_t(dst.shape(0)),
                                          int64_t(dst.shape(1)), n_threads, dst.data());
            });
        },
        "ggml_type"_a, "src"_a, "row_stride"_a, "dst"_a, "n_threads"_a = 0);
}

// Keys [n_heads, n, d] with any strides between heads and rows, positions [1 or n_heads, n] or none.
using Keys = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Positions = std::optional<Array<const int32_t, nb::ndim<2>>>;

twinkv_keys keys_of(const Keys& keys, const Positions& positions) {
    const bool f16 = keys.dtype() == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1};
    if (!f16 && keys.dtype() != nb::dtype<float>()) {
        throw nb::type_error("keys must be float32 or float16");
    }
    if (keys.size() > 0 && keys.shape(2) > 1 &&
        keys.stride(2) != 1) { // strides of an empty array say nothing
        throw nb::value_error("the values of a key must be contiguous");
    }
    const int64_t item = f16 ? 2 : 4;
    const int64_t strides[] = {keys.stride(0) * item, keys.stride(1) * item};
    if (strides[0] < 0 || strides[1] < 0) {
        throw nb::value_error("keys must not run backwards");
    }
    if (positions && (positions->shape(1) != keys.shape(1) ||
                      (positions->shape(0) != 1 && positions->shape(0) != keys.shape(0)))) {
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

void bind_twins(nb::module_& m) {
    m.def(
        "twin_counts",
        [](Keys keys, Positions positions, float tau, int64_t local_window, int n_threads,
           PerToken<int32_t> out) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, out.shape(0), out.shape(1));
            call([&] { return twinkv_twin_counts(&k, tau, local_window, n_threads, out.data()); });
        },
        "keys"_a, "positions"_a.none(), "tau"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def(
        "best_twin",
        [](Keys keys, Positions positions, Mask retained, int64_t local_window, int n_threads,
           PerToken<float> out) {
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
        "repair",
        [](Keys keys, Positions positions, PerToken<uint8_t> retained, bool consistent, float tau,
           int64_t local_window, int64_t n_sink, int64_t n_recent, int n_threads,
           Array<int64_t, nb::ndim<2>> stats) {
            const twinkv_keys k = keys_of(keys, positions);
            check_per_token(k, retained.shape(0), retained.shape(1));
            static_assert(sizeof(twinkv_repair_stats) == 3 * sizeof(int64_t), "stats [n_heads, 3]");
            if (int64_t(stats.shape(0)) != k.n_heads || stats.shape(1) != 3) {
                throw nb::value_error("stats must be [n_heads, 3]");
            }
            const twinkv_repair_params params{consistent ? TWINKV_REPAIR_CONSISTENT : TWINKV_REPAIR_PAPER,
                                              tau, local_window, n_sink, n_recent};
            call([&] {
                return twinkv_repair(&k, &params, n_threads, retained.data(),
                                     reinterpret_cast<twinkv_repair_stats*>(stats.data()));
            });
        },
        "keys"_a, "positions"_a.none(), "retained"_a, "consistent"_a, "tau"_a, "local_window"_a, "n_sink"_a,
        "n_recent"_a, "n_threads"_a, "stats"_a);
    m.def("isas", [] { // name -> whether this processor has it, best first
        nb::dict out;
        bool supported = false;
        for (int i = 0; const char* isa = twinkv_isa_name(i, &supported); ++i) {
            out[isa] = supported;
        }
        return out;
    });
    m.def("isa", [] {
        const char* isa = nullptr;
        check(twinkv_isa(&isa));
        return isa;
    });
    m.def(
        "set_isa",
        [](std::optional<std::string> isa) { check(twinkv_set_isa(isa ? isa->c_str() : nullptr)); },
        "isa"_a.none());
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "twinkv_edge's native core (see native/include/twinkv.h)";
    m.attr("BUILT_WITH_LLAMA_CPP_PYTHON") = TWINKV_LLAMA_CPP_PYTHON;
    bind_rows(m);
    bind_twins(m);
}
