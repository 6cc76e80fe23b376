// Attention masks per head: a copy of llama.cpp's mask for every query head, with hidden cells at -inf,
// stands in its place while the node runs. The CPU kernels index the mask by head (ne[2]), so this is exact. Where all
// heads hide the same cells, one copy serves them all. Rows of a batch may hide different sets: many compressions of
// one prompt are then decoded side by side, each in a sequence of its own.
#include "tap/tap.hpp"

#include <cmath>
#include <cstring>

namespace twinkv {
namespace {

// data [n_copies, padded, n_kv]: the first sets.size() rows are the batch's.
template <class T>
void hide(const HiddenCells& mask, const std::vector<int32_t>& sets, T minus_inf, int64_t n_copies, int64_t n_kv,
          int64_t padded, T* data) {
    const int64_t n_head_kv = int64_t(mask.hidden.size()) / (mask.n_sets * mask.n);
    const int64_t n = std::min(mask.n, n_kv);
    for (int64_t h = 0; h < n_copies; ++h) {
        for (size_t r = 0; r < sets.size(); ++r) {
            const int64_t head = sets[r] * n_head_kv + h * n_head_kv / n_copies;
            const uint8_t* hidden = mask.hidden.data() + head * mask.n;
            T* row = data + (h * padded + int64_t(r)) * n_kv;
            for (int64_t c = 0; c < n; ++c) {
                if (hidden[c]) {
                    row[c] = minus_inf;
                }
            }
        }
    }
}

// The set of every row of the batch that runs now.
std::vector<int32_t> sets_of_rows(const twinkv_tap& tap, const HiddenCells& mask, int64_t n_rows) {
    if (tap.sets.empty()) {
        return std::vector<int32_t>(size_t(n_rows), 0);
    }
    require(int64_t(tap.sets.size()) == n_rows, "sets of hidden cells were named for a batch of " +
                                                    std::to_string(tap.sets.size()) + " tokens, not of " +
                                                    std::to_string(n_rows));
    for (const int32_t set : tap.sets) {
        require(set < mask.n_sets, "a row of the batch names a set of hidden cells that the layer does not have");
    }
    return tap.sets;
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
    const std::vector<int32_t> sets = sets_of_rows(tap, mask, node->src[0]->ne[1]);
    const size_t bytes = ggml_nbytes(original);
    StandIn& s = tap.stand_in;
    s.data.resize(bytes * size_t(n_copies));
    for (int64_t h = 0; h < n_copies; ++h) {
        std::memcpy(s.data.data() + size_t(h) * bytes, original->data, bytes);
    }
    if (original->type == GGML_TYPE_F16) {
        hide<ggml_fp16_t>(mask, sets, ggml_fp32_to_fp16(-INFINITY), n_copies, original->ne[0], original->ne[1],
                          reinterpret_cast<ggml_fp16_t*>(s.data.data()));
    } else {
        hide<float>(mask, sets, -INFINITY, n_copies, original->ne[0], original->ne[1],
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

extern "C" {

twinkv_status twinkv_tap_hide(twinkv_tap* tap, int32_t index, const uint8_t* hidden, int64_t n_sets, int64_t n) {
    return twinkv::guard([&] {
        auto& layer = tap->at(index);
        twinkv::require(n >= 0 && n <= layer.facts.n_cells, "more hidden cells than the cache has");
        twinkv::require(n_sets >= 1, "no set of hidden cells");
        const int32_t heads = layer.facts.n_head_kv;
        layer.mask.hidden.assign(hidden, hidden + n_sets * heads * n);
        layer.mask.n_sets = n_sets;
        layer.mask.n = n;
        layer.mask.same = true;
        for (int64_t i = 0; i < n_sets * heads && n > 0; ++i) {
            const uint8_t* first = hidden + i / heads * heads * n;
            layer.mask.same &= std::memcmp(first, hidden + i * n, size_t(n)) == 0;
        }
    });
}

twinkv_status twinkv_tap_hide_rows(twinkv_tap* tap, const int32_t* sets, int64_t n_rows) {
    return twinkv::guard([&] {
        twinkv::require(n_rows >= 0, "a negative number of rows");
        for (int64_t r = 0; r < n_rows; ++r) {
            twinkv::require(sets[r] >= 0, "a negative set of hidden cells");
        }
        tap->sets.assign(sets, sets + n_rows);
    });
}
}
