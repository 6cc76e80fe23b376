#include "python/bind_tap.hpp"

namespace {

nb::dict rope_dict(const Tap& t, int32_t index) {
    const twinkv_layer f = t.layer(index);
    nb::dict d;
    d["n_dims"] = f.rope.n_dims;
    d["mode"] = f.rope.mode;
    d["n_ctx_orig"] = f.rope.n_ctx_orig;
    d["freq_base"] = f.rope.freq_base;
    d["freq_scale"] = f.rope.freq_scale;
    d["ext_factor"] = f.rope.ext_factor;
    d["attn_factor"] = f.rope.attn_factor;
    d["beta_fast"] = f.rope.beta_fast;
    d["beta_slow"] = f.rope.beta_slow;
    std::vector<float> factors(f.rope.has_freq_factors ? size_t(f.rope.n_dims / 2) : 0);
    if (!factors.empty()) {
        check(twinkv_tap_freq_factors(t.tap, index, factors.data(), int64_t(factors.size())));
    }
    d["freq_factors"] = nb::cast(factors);
    return d;
}

nb::dict layer_dict(const Tap& t, int32_t index) {
    const twinkv_layer f = t.layer(index);
    nb::dict d;
    d["il"] = f.il;
    d["n_head"] = f.n_head;
    d["n_head_kv"] = f.n_head_kv;
    d["head_dim_k"] = f.head_dim_k;
    d["head_dim_v"] = f.head_dim_v;
    d["type_k"] = f.type_k;
    d["type_v"] = f.type_v;
    d["v_transposed"] = bool(f.v_transposed);
    d["hadamard"] = f.hadamard;
    d["is_host"] = bool(f.is_host);
    d["n_cells"] = f.n_cells;
    d["buffer_id"] = f.buffer_id;
    d["kq_scale"] = f.kq_scale;
    d["softcap"] = f.softcap;
    d["rope"] = rope_dict(t, index);
    return d;
}

twinkv_rope rope_of(const nb::dict& rope, const std::vector<float>& freq_factors) {
    twinkv_rope r{};
    r.n_dims = nb::cast<int32_t>(rope["n_dims"]);
    r.mode = nb::cast<int32_t>(rope["mode"]);
    r.n_ctx_orig = nb::cast<int32_t>(rope["n_ctx_orig"]);
    r.freq_base = nb::cast<float>(rope["freq_base"]);
    r.freq_scale = nb::cast<float>(rope["freq_scale"]);
    r.ext_factor = nb::cast<float>(rope["ext_factor"]);
    r.attn_factor = nb::cast<float>(rope["attn_factor"]);
    r.beta_fast = nb::cast<float>(rope["beta_fast"]);
    r.beta_slow = nb::cast<float>(rope["beta_slow"]);
    r.has_freq_factors = !freq_factors.empty();
    if (r.has_freq_factors && int64_t(freq_factors.size()) != r.n_dims / 2) {
        throw nb::value_error("freq_factors must be [n_dims / 2]");
    }
    return r;
}

void unrotate(nb::dict rope, std::vector<float> freq_factors, int32_t hadamard,
              nb::ndarray<float, nb::ndim<3>, nb::device::cpu> rows, // contiguous rows, in the order of tokens or heads
              Array<const int32_t, nb::ndim<2>> positions, int n_threads) {
    if (positions.shape(0) != rows.shape(0) || positions.shape(1) != rows.shape(1)) {
        throw nb::value_error("positions must be [n, n_head] for rows [n, n_head, head_dim]");
    }
    if (rows.size() > 0 && rows.shape(2) > 1 && rows.stride(2) != 1) {
        throw nb::value_error("the values of a row must be contiguous");
    }
    const twinkv_rope r = rope_of(rope, freq_factors);
    call([&] {
        return twinkv_unrotate(&r, freq_factors.data(), hadamard, rows.data(), rows.stride(0), rows.stride(1),
                               positions.data(), int64_t(rows.shape(0)), int32_t(rows.shape(1)), int32_t(rows.shape(2)),
                               n_threads);
    });
}

void mean_rotation(nb::dict rope, std::vector<float> freq_factors, int32_t first, int64_t n,
                   Array<double, nb::ndim<1>> cosines, Array<double, nb::ndim<1>> sines) {
    const twinkv_rope r = rope_of(rope, freq_factors);
    if (int64_t(cosines.shape(0)) != r.n_dims / 2 || cosines.shape(0) != sines.shape(0)) {
        throw nb::value_error("cosines and sines must be [n_dims / 2]");
    }
    check(twinkv_mean_rotation(&r, freq_factors.data(), first, n, cosines.data(), sines.data()));
}

} // namespace

void bind_tap(nb::module_& m) {
    nb::class_<Tap>(m, "Tap")
        .def(nb::init<>())
        .def_prop_ro("callback", [](const Tap&) { return reinterpret_cast<uintptr_t>(&twinkv_tap_eval); })
        .def_prop_ro("user_data", [](const Tap& t) { return reinterpret_cast<uintptr_t>(t.tap); })
        .def_prop_ro("n_layers", [](const Tap& t) { return twinkv_tap_n_layers(t.tap); })
        .def("layer", &layer_dict, "index"_a)
        .def("take_failure",
             [](Tap& t) -> nb::object {
                 const char* what = twinkv_tap_take_failure(t.tap);
                 return what ? nb::object(nb::str(what)) : nb::none();
             })
        .def(
            "watch", [](Tap& t, int32_t index, bool watched) { check(twinkv_tap_watch(t.tap, index, watched)); },
            "index"_a, "watched"_a)
        .def(
            "capture",
            [](Tap& t, int32_t window, bool statistics, bool attention, int32_t skip, int32_t n_threads) {
                const twinkv_capture what{window, statistics, attention, skip, n_threads};
                check(twinkv_tap_capture(t.tap, &what));
            },
            "window"_a, "statistics"_a, "attention"_a, "skip"_a, "n_threads"_a)
        .def("reset", [](Tap& t) { twinkv_tap_reset(t.tap); })
        .def(
            "rollback", [](Tap& t, int32_t pos) { check(twinkv_tap_rollback(t.tap, pos)); }, "pos"_a)
        .def(
            "read_k",
            [](Tap& t, int32_t index, int64_t first, Array<float, nb::ndim<3>> dst, int n_threads) {
                t.read(twinkv_tap_read_k, index, first, n_threads, dst, t.layer(index).head_dim_k);
            },
            "index"_a, "first"_a, "dst"_a, "n_threads"_a = 0)
        .def(
            "read_v",
            [](Tap& t, int32_t index, int64_t first, Array<float, nb::ndim<3>> dst, int n_threads) {
                t.read(twinkv_tap_read_v, index, first, n_threads, dst, t.layer(index).head_dim_v);
            },
            "index"_a, "first"_a, "dst"_a, "n_threads"_a = 0)
        .def(
            "window_size", [](const Tap& t, int32_t index) { return twinkv_tap_window_size(t.tap, index); }, "index"_a)
        .def(
            "window",
            [](const Tap& t, int32_t index, Array<float, nb::ndim<3>> queries, Array<int32_t, nb::ndim<1>> positions) {
                const twinkv_layer f = t.layer(index);
                if (int64_t(queries.shape(1)) != f.n_head || int64_t(queries.shape(2)) != f.head_dim_k ||
                    positions.shape(0) != queries.shape(0)) {
                    throw nb::value_error("queries must be [size, n_head, head_dim], positions [size]");
                }
                check(twinkv_tap_window(t.tap, index, int64_t(queries.shape(0)), queries.data(), positions.data()));
            },
            "index"_a, "queries"_a, "positions"_a)
        .def(
            "statistics_count", [](const Tap& t, int32_t index) { return twinkv_tap_statistics_count(t.tap, index); },
            "index"_a)
        .def(
            "statistics",
            [](const Tap& t, int32_t index, Array<double, nb::ndim<2>> mean, Array<double, nb::ndim<3>> covariance) {
                const twinkv_layer f = t.layer(index);
                const size_t h = size_t(f.n_head), d = size_t(f.head_dim_k);
                if (mean.shape(0) != h || mean.shape(1) != d || covariance.shape(0) != h || covariance.shape(1) != d ||
                    covariance.shape(2) != d) {
                    throw nb::value_error("mean must be [n_head, d], covariance [n_head, d, d]");
                }
                check(twinkv_tap_statistics(t.tap, index, mean.data(), covariance.data()));
            },
            "index"_a, "mean"_a, "covariance"_a)
        .def("settle", [](Tap& t) { call([&] { return twinkv_tap_settle(t.tap); }); })
        .def(
            "gather",
            [](Tap& t, int32_t index, Array<const int32_t, nb::ndim<2>> cells) {
                if (int64_t(cells.shape(0)) != t.layer(index).n_head_kv) {
                    throw nb::value_error("cells must be [n_head_kv, n_keep]");
                }
                check(twinkv_tap_gather(t.tap, index, int64_t(cells.shape(1)), cells.data()));
            },
            "index"_a, "cells"_a)
        .def(
            "attention_count", [](const Tap& t, int32_t index) { return twinkv_tap_attention_count(t.tap, index); },
            "index"_a)
        .def(
            "attention",
            [](Tap& t, int32_t index, Array<float, nb::ndim<2>> sums) {
                if (int64_t(sums.shape(0)) != t.layer(index).n_head_kv) {
                    throw nb::value_error("sums must be [n_head_kv, n]");
                }
                call([&] { return twinkv_tap_attention(t.tap, index, int64_t(sums.shape(1)), sums.data()); });
            },
            "index"_a, "sums"_a)
        .def(
            "hide",
            [](Tap& t, int32_t index, Array<const uint8_t, nb::ndim<3>> hidden) {
                if (int64_t(hidden.shape(1)) != t.layer(index).n_head_kv) {
                    throw nb::value_error("hidden must be [n_sets, n_head_kv, n]");
                }
                check(twinkv_tap_hide(t.tap, index, hidden.data(), int64_t(hidden.shape(0)), int64_t(hidden.shape(2))));
            },
            "index"_a, "hidden"_a)
        .def(
            "hide_rows",
            [](Tap& t, Array<const int32_t, nb::ndim<1>> sets) {
                check(twinkv_tap_hide_rows(t.tap, sets.data(), int64_t(sets.shape(0))));
            },
            "sets"_a)
        .def(
            "memory",
            [](const Tap& t, int32_t index) {
                twinkv_memory mem;
                check(twinkv_tap_memory(t.tap, index, &mem));
                return std::make_pair(mem.allocated, mem.resident);
            },
            "index"_a)
        .def(
            "release",
            [](Tap& t, int32_t index, int64_t first, int64_t last) {
                uint64_t released = 0;
                check(twinkv_tap_release(t.tap, index, first, last, &released));
                return released;
            },
            "index"_a, "first"_a, "last"_a);
    m.def("trim_heap", &twinkv_trim_heap, nb::call_guard<nb::gil_scoped_release>());
    m.def("set_attention_isa", [](const char* isa) { check(twinkv_set_attention_isa(isa)); }, "isa"_a);
    m.def("unrotate", &unrotate, "rope"_a, "freq_factors"_a, "hadamard"_a, "rows"_a, "positions"_a, "n_threads"_a = 0);
    m.def("mean_rotation", &mean_rotation, "rope"_a, "freq_factors"_a, "first"_a, "n"_a, "cosines"_a, "sines"_a);
}
