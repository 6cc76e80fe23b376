#pragma once

#include "python/bind.hpp"

// A tap and the pointer llama.cpp calls it by.
struct Tap {
    twinkv_tap* tap = twinkv_tap_new();
    Tap() {
        if (!tap) {
            throw std::bad_alloc();
        }
    }
    Tap(const Tap&) = delete;
    ~Tap() { twinkv_tap_free(tap); }

    twinkv_layer layer(int32_t index) const {
        twinkv_layer out;
        check(twinkv_tap_layer(tap, index, &out));
        return out;
    }
    template <class F>
    void read(F f, int32_t index, int64_t first, int n_threads, Array<float, nb::ndim<3>>& dst, int32_t dim) {
        const twinkv_layer facts = layer(index);
        if (int64_t(dst.shape(1)) != facts.n_head_kv || int64_t(dst.shape(2)) != dim) {
            throw nb::value_error("dst must be [n, n_head_kv, head_dim]");
        }
        call([&] { return f(tap, index, first, int64_t(dst.shape(0)), n_threads, dst.data()); });
    }
};
