// What every binding shares: array types, statuses turned into our exceptions, the GIL released around long
// work.
#pragma once

#include "twinkv.h"

#include "ggml.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

template <class T, class... Shape> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu, Shape...>;

// twinkv_edge.errors.<class> for a status.
inline void check(twinkv_status status) {
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

void bind_rows(nb::module_& m);
void bind_twins(nb::module_& m);
void bind_tap(nb::module_& m);
void bind_state(nb::module_& m);
