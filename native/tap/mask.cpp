// Attention masks per head: a copy of llama.cpp's mask for every query head, with hidden cells at -inf,
// stands in its place while the node runs. The CPU kernels index the mask by head (ne[2]), so this is exact. Where all
// heads hide the same cells, one copy serves them all.
#include "tap/tap.hpp"

#include <cmath>
#include <cstring>

namespace twinkv {
namespace {

template <class T>
void hide(const HiddenCells& mask, T minus_inf, int64_t n_copies, int64_t n_kv, int64_t n_rows, T* data) {
    const int64_t n_head_kv = int64_t(mask.hidden.size()) / mask.n;
    const int64_t n = std::min(mask.n, n_kv);
    for (int64_t h = 0; h < n_copies; ++h) {
        const uint8_t* hidden = mask.hidden.data() + h * n_head_kv / n_copies * mask.n;
        for (int64_t r = 0; r < n_rows; ++r) {
            T* row = data + (h * n_rows + r) * n_kv;
            for (int64_t c = 0; c < n; ++c) {
                if (hidden[c]) {
                    row[c] = minus_inf;
                }
            }
        }
    }
}

} // namespace

bool put_mask(twinkv_tap& tap, const Layer& layer, ggml_tensor* node, int slot) {
    const HiddenCells& mask = layer.mask;
    if (mask.n == 0) {
        return false;
    }
    ggml_tensor* original = node->src[slot];
    require(original && original->data && layer.facts.is_host &&
                (!original->buffer || ggml_backend_buffer_is_host(original->buffer)),
            "masks per head need a cache and a mask in host memory", TWINKV_EUNSUPPORTED);
    require(original->ne[2] == 1 && original->ne[3] == 1 && ggml_is_contiguous(original),
            "an attention mask of unknown shape", TWINKV_EUNSUPPORTED);
    require(original->type == GGML_TYPE_F16 || original->type == GGML_TYPE_F32, "an attention mask of unknown type",
            TWINKV_EUNSUPPORTED);
    const int64_t n_copies = mask.same ? 1 : layer.facts.n_head;
    const size_t bytes = ggml_nbytes(original);
    StandIn& s = tap.stand_in;
    s.data.resize(bytes * size_t(n_copies));
    for (int64_t h = 0; h < n_copies; ++h) {
        std::memcpy(s.data.data() + size_t(h) * bytes, original->data, bytes);
    }
    if (original->type == GGML_TYPE_F16) {
        hide<ggml_fp16_t>(mask, ggml_fp32_to_fp16(-INFINITY), n_copies, original->ne[0], original->ne[1],
                          reinterpret_cast<ggml_fp16_t*>(s.data.data()));
    } else {
        hide<float>(mask, -INFINITY, n_copies, original->ne[0], original->ne[1],
                    reinterpret_cast<float*>(s.data.data()));
    }
    s.tensor = *original;
    s.tensor.ne[2] = n_copies;
    s.tensor.nb[2] = bytes;
    s.tensor.nb[3] = bytes * size_t(n_copies);
    s.tensor.data = s.data.data();
    s.node = node;
    s.slot = slot;
    s.original = original;
    node->src[slot] = &s.tensor;
    return true;
}

// Graphs are reused from batch to batch: the original must be back before the next one.
void take_mask_out(twinkv_tap& tap) {
    StandIn& s = tap.stand_in;
    if (s.node) {
        s.node->src[s.slot] = s.original;
        s.node = nullptr;
    }
}

} // namespace twinkv

extern "C" twinkv_status twinkv_tap_hide(twinkv_tap* tap, int32_t index, const uint8_t* hidden, int64_t n) {
    return twinkv::guard([&] {
        auto& layer = tap->at(index);
        twinkv::require(n >= 0 && n <= layer.facts.n_cells, "more hidden cells than the cache has");
        layer.mask.hidden.assign(hidden, hidden + n * layer.facts.n_head_kv);
        layer.mask.n = n;
        layer.mask.same = true;
        for (int32_t h = 1; h < layer.facts.n_head_kv && n > 0; ++h) {
            layer.mask.same &= std::memcmp(hidden, hidden + h * n, size_t(n)) == 0;
        }
    });
}
