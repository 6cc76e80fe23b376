// The Python face of twinkv.h: argument checks, the GIL released around long work, statuses turned into our exceptions.
#include "twinkv.h"

#include "ggml.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

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
        [](int type, Array<const uint8_t, nb::ndim<1>> src, size_t row_stride, Array<float, nb::ndim<2>> dst, int n_threads) {
            call([&] {
                return twinkv_rows_to_f32(type, src.data(), src.size(), row_stride, int64_t(dst.shape(0)),
                                          int64_t(dst.shape(1)), n_threads, dst.data());
            });
        },
        "ggml_type"_a, "src"_a, "row_stride"_a, "dst"_a, "n_threads"_a = 0);
}

void bind_twins(nb::module_& m) {
    m.def(
        "twin_counts",
        [](Array<const float, nb::ndim<2>> keys, float tau, int64_t local_window, int n_threads, Array<int32_t, nb::ndim<1>> out) {
            if (out.shape(0) != keys.shape(0)) {
                throw nb::value_error("out must have one count per key");
            }
            call([&] {
                return twinkv_twin_counts(keys.data(), int64_t(keys.shape(0)), int64_t(keys.shape(1)), tau, local_window,
                                          n_threads, out.data());
            });
        },
        "keys"_a, "tau"_a, "local_window"_a, "n_threads"_a, "out"_a);
    m.def(
        "best_twin",
        [](Array<const float, nb::ndim<2>> keys, Array<const uint8_t, nb::ndim<1>> retained, int64_t local_window,
           int n_threads, Array<float, nb::ndim<1>> out) {
            if (out.shape(0) != keys.shape(0) || retained.shape(0) != keys.shape(0)) {
                throw nb::value_error("retained and out must have one entry per key");
            }
            call([&] {
                return twinkv_best_twin(keys.data(), retained.data(), int64_t(keys.shape(0)), int64_t(keys.shape(1)),
                                        local_window, n_threads, out.data());
            });
        },
        "keys"_a, "retained"_a, "local_window"_a, "n_threads"_a, "out"_a);
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "twinkv_edge's native core (see native/include/twinkv.h)";
    m.attr("BUILT_WITH_LLAMA_CPP_PYTHON") = TWINKV_LLAMA_CPP_PYTHON;
    bind_rows(m);
    bind_twins(m);
}
