// Rows and sequence states.
#include "python/bind_tap.hpp"

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

void bind_state(nb::module_& m) {
    m.def(
        "state_inspect",
        [](Array<const uint8_t, nb::ndim<1>> blob) {
            twinkv_state_info info;
            check(twinkv_state_inspect(blob.data(), blob.size(), &info));
            nb::dict d;
            d["n_layer"] = info.n_layer;
            d["n_cells"] = info.n_cells;
            d["pos_min"] = info.pos_min;
            d["pos_max"] = info.pos_max;
            d["v_transposed"] = bool(info.v_transposed);
            d["n_sections"] = info.n_sections;
            return d;
        },
        "blob"_a);
    m.def(
        "state_match",
        [](const Tap& t, Array<const uint8_t, nb::ndim<1>> blob, Array<int32_t, nb::ndim<1>> indices) {
            check(twinkv_state_match(t.tap, blob.data(), blob.size(), int32_t(indices.shape(0)), indices.data()));
        },
        "tap"_a, "blob"_a, "indices"_a);
    m.def(
        "evict",
        [](uintptr_t ctx, int32_t seq_id, Array<const int32_t, nb::ndim<3>> index,
           Array<const int32_t, nb::ndim<1>> positions, int n_threads) {
            if (!ctx || positions.shape(0) != index.shape(2)) {
                throw nb::value_error("index must be [n_layer, n_head_kv, n_keep], positions [n_keep]");
            }
            call([&] {
                return twinkv_evict(reinterpret_cast<llama_context*>(ctx), seq_id, int32_t(index.shape(0)),
                                    int32_t(index.shape(1)), int64_t(index.shape(2)), index.data(), positions.data(),
                                    n_threads);
            });
        },
        "ctx"_a, "seq_id"_a, "index"_a, "positions"_a, "n_threads"_a = 0);
    m.def(
        "evict_in_place",
        [](uintptr_t ctx, const Tap& tap, int32_t seq_id, int32_t spare_seq, Array<const int32_t, nb::ndim<1>> layers,
           int64_t n_cells, Array<const int32_t, nb::ndim<3>> index, Array<const int32_t, nb::ndim<1>> tail,
           int n_threads) {
            if (!ctx || layers.shape(0) != index.shape(0) ||
                int64_t(tail.shape(0)) != n_cells - int64_t(index.shape(2)) + 1) {
                throw nb::value_error("index must be [n_layer, n_head_kv, n_keep], tail [n_cells - n_keep + 1]");
            }
            call([&] {
                return twinkv_evict_in_place(reinterpret_cast<llama_context*>(ctx), tap.tap, seq_id, spare_seq,
                                             layers.data(), int32_t(layers.shape(0)), int32_t(index.shape(1)), n_cells,
                                             int64_t(index.shape(2)), index.data(), tail.data(), n_threads);
            });
        },
        "ctx"_a, "tap"_a, "seq_id"_a, "spare_seq"_a, "layers"_a, "n_cells"_a, "index"_a, "tail"_a, "n_threads"_a = 0);
    m.def("test_spoil_states", &twinkv_test_spoil_states, "n"_a);
}
