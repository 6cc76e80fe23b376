// Eviction without a copy: every head's kept rows move to the front of the cache tensors they lie in, and llama.cpp's
// cells are closed up through its public API.
//
// llama.cpp insists that the next token stands at the sequence's largest position plus one, so after eviction the last
// of the K cells must carry position n - 1. No call moves a position without rotating keys. But a state of one cell can
// be restored into a spare sequence, at a position of our choosing, and the cell then be shared with ours:
//
//   1. share cell K-1 with the spare sequence and take its state: one cell; write n - 1 into it as its position
//   2. remove cells K-1 and up from both sequences (their data stays in the tensors)
//   3. restore the one-cell state into the spare sequence: the first free cell is K-1; share it with ours
//   4. move the rows
//
// Until 3 has succeeded no row that the old sequence needs was changed: cell K-1 got its own bytes back.
#include "core/parallel.hpp"
#include "state/handover.hpp"
#include "state/state.hpp"
#include "tap/tap.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace twinkv {
namespace {

struct Request {
    llama_context* ctx;
    llama_memory_t memory;
    int32_t seq, spare;
    std::vector<const Layer*> layers;
    int32_t n_head_kv;
    int64_t n_cells, n_keep;
    const int32_t* index;      // [n_layer, n_head_kv, n_keep]
    std::vector<int32_t> tail; // what llama.cpp has as positions of cells n_keep - 1 .. n_cells - 1

    int32_t pos_cut() const { return tail.front(); }
    int32_t pos_last() const { return tail.back(); }
};

void check_request(const Request& r) {
    require(r.n_head_kv > 0 && r.n_keep > 0 && r.n_keep <= r.n_cells, "keep between 1 and all of the cells");
    require(r.tail[0] >= 0 && std::is_sorted(r.tail.begin(), r.tail.end(), std::less_equal<int32_t>()),
            "positions must ascend");
    require(r.memory && int64_t(llama_n_seq_max(r.ctx)) > std::max(r.seq, r.spare) && r.seq != r.spare,
            "a spare sequence is needed: make the context with n_seq_max of at least 2", TWINKV_EUNSUPPORTED);
    require(llama_memory_seq_pos_max(r.memory, r.seq) == r.pos_last(), "the sequence does not end where it should");
    require(llama_memory_seq_pos_max(r.memory, r.spare) < 0, "the spare sequence is in use");
    for (const Layer* layer : r.layers) {
        require(layer->v && layer->facts.is_host, "the cache is not in host memory", TWINKV_EUNSUPPORTED);
        require(layer->facts.n_head_kv == r.n_head_kv && r.n_cells <= layer->facts.n_cells,
                "heads or cells that the cache does not have");
    }
    check_index(r.index, int64_t(r.layers.size()) * r.n_head_kv, r.n_cells, r.n_keep);
}

// Rows are KV heads side by side. Kept cells ascend, so cells[c] >= c: moving forward never overwrites a row still
// to be read.
void move_rows(const Request& r, const ggml_tensor* t, const int32_t* index) {
    const size_t row = t->nb[1];
    require(row % size_t(r.n_head_kv) == 0, "rows that do not divide into KV heads", TWINKV_EUNSUPPORTED);
    const size_t piece = row / size_t(r.n_head_kv);
    uint8_t* data = static_cast<uint8_t*>(t->data);
    for (int64_t c = 0; c < r.n_keep; ++c) {
        for (int32_t h = 0; h < r.n_head_kv; ++h) {
            const int64_t from = index[h * r.n_keep + c];
            if (from > c) { // not its own, nor -1
                std::memcpy(data + size_t(c) * row + size_t(h) * piece, data + size_t(from) * row + size_t(h) * piece,
                            piece);
            }
        }
    }
}

template <class T> void move_elements(const Request& r, const ggml_tensor* t, const int32_t* index) {
    const int64_t n_values = t->ne[0], stride = t->ne[1], per_head = n_values / r.n_head_kv;
    T* data = static_cast<T*>(t->data);
    for (int64_t j = 0; j < n_values; ++j) {
        const int32_t* cells = index + j / per_head * r.n_keep;
        for (int64_t c = 0; c < r.n_keep && cells[c] >= 0; ++c) {
            data[j * stride + c] = data[j * stride + cells[c]];
        }
    }
}

void move_values(const Request& r, const Layer& layer, const int32_t* index) {
    if (!layer.facts.v_transposed) {
        move_rows(r, layer.v, index);
    } else if (ggml_type_size(layer.v->type) == 2) {
        move_elements<uint16_t>(r, layer.v, index);
    } else {
        move_elements<uint32_t>(r, layer.v, index);
    }
}

void check_movable(const Request& r) {
    for (const Layer* layer : r.layers) {
        const size_t element = ggml_type_size(layer->v->type);
        require(!layer->facts.v_transposed || element == 2 || element == 4, "a transposed V cache of an unknown type",
                TWINKV_EUNSUPPORTED);
        require(layer->k->nb[1] % size_t(r.n_head_kv) == 0 && layer->v->ne[0] % r.n_head_kv == 0,
                "rows that do not divide into KV heads", TWINKV_EUNSUPPORTED);
    }
}

// The state of the cells that were taken out. The first comes from its own state, which llama.cpp zeroes in the tensors
// when it refuses; the others still lie there.
std::vector<uint8_t> taken_out(const Request& r, const std::vector<uint8_t>& one) {
    const int64_t second = r.n_keep, count = r.n_cells - r.n_keep + 1;
    const State state = parse_state(one.data(), one.size());
    const std::vector<int32_t> zeros(state.sections[0].k.size() * size_t(r.n_head_kv) * size_t(count), 0);
    std::vector<uint8_t> wide = gather_state(state, r.n_head_kv, count, zeros.data(), r.tail.data(), 0);
    const State target = parse_state(wide.data(), wide.size());
    auto fill = [&](const Block& b, const ggml_tensor* t, bool transposed) {
        const auto* data = static_cast<const uint8_t*>(t->data);
        if (!transposed) {
            std::memcpy(wide.data() + b.data + b.unit, data + size_t(second) * b.unit, b.unit * size_t(count - 1));
            return;
        }
        for (size_t j = 0; j < b.n_units; ++j) {
            std::memcpy(wide.data() + b.data + (j * size_t(count) + 1) * b.unit,
                        data + (j * size_t(t->ne[1]) + size_t(second)) * b.unit, size_t(count - 1) * b.unit);
        }
    };
    for (size_t l = 0; l < r.layers.size(); ++l) {
        fill(target.sections[0].k[l], r.layers[l]->k, false);
        fill(target.sections[0].v[l], r.layers[l]->v, target.sections[0].v_transposed);
    }
    return wide;
}

// Restores a state into the spare sequence and makes its cells ours.
bool adopt(const Request& r, const std::vector<uint8_t>& state) {
    if (!give_state(r.ctx, state, r.spare)) {
        return false;
    }
    llama_memory_seq_cp(r.memory, r.spare, r.seq, -1, -1);
    return llama_memory_seq_rm(r.memory, r.spare, -1, -1);
}

// Steps 1 to 3.
void close_up(const Request& r) {
    llama_memory_seq_cp(r.memory, r.seq, r.spare, r.pos_cut(), r.pos_cut() + 1);
    std::vector<uint8_t> one = take_state(r.ctx, r.spare);
    llama_memory_seq_rm(r.memory, r.spare, -1, -1);
    const State state = parse_state(one.data(), one.size());
    const Section& s = state.sections[0];
    require(state.sections.size() == 1 && s.n_cells == 1 && s.k.size() == r.layers.size(),
            "the cache is not one plain cache of these layers", TWINKV_EUNSUPPORTED);
    const Layer& front = *r.layers.front();
    require(s.positions[0] == r.pos_cut() &&
                std::memcmp(one.data() + s.k[0].data,
                            static_cast<const uint8_t*>(front.k->data) + size_t(r.n_keep - 1) * s.k[0].unit,
                            s.k[0].unit) == 0,
            "cells are not where they should be: the cache was changed from outside; call reset()");
    std::vector<uint8_t> moved = one;
    const int32_t pos_last = r.pos_last();
    std::memcpy(moved.data() + s.meta, &pos_last, sizeof(pos_last));
    llama_memory_seq_rm(r.memory, r.seq, r.pos_cut(), -1);
    if (adopt(r, moved)) {
        return;
    }
    const bool whole = adopt(r, taken_out(r, one));
    throw Error(TWINKV_EINTERNAL, whole ? "llama.cpp refused a state of one cell; the cache is as it was"
                                        : "llama.cpp refused a state and its old cells: call reset()");
}

void evict_in_place(const Request& r, int n_threads) {
    check_request(r);
    check_movable(r);
    if (r.n_keep < r.n_cells) { // otherwise a head keeps everything, and only others move
        close_up(r);
    }
    // from here on nothing can fail
    const int64_t n_layer = int64_t(r.layers.size()), per_layer = int64_t(r.n_head_kv) * r.n_keep;
    parallel_for(2 * n_layer, n_threads, [&](int64_t i) {
        const Layer& layer = *r.layers[size_t(i / 2)];
        const int32_t* index = r.index + i / 2 * per_layer;
        i % 2 == 0 ? move_rows(r, layer.k, index) : move_values(r, layer, index);
    });
}

} // namespace
} // namespace twinkv

extern "C" twinkv_status twinkv_evict_in_place(struct llama_context* ctx, const twinkv_tap* tap, int32_t seq_id,
                                               int32_t spare_seq, const int32_t* layers, int32_t n_layer,
                                               int32_t n_head_kv, int64_t n_cells, int64_t n_keep, const int32_t* index,
                                               const int32_t* tail, int n_threads) {
    return twinkv::guard([&] {
        twinkv::require(n_layer > 0 && n_keep > 0 && n_keep <= n_cells, "keep between 1 and all of the cells");
        twinkv::Request r{};
        r.ctx = ctx;
        r.memory = llama_get_memory(ctx);
        r.seq = seq_id;
        r.spare = spare_seq;
        for (int32_t l = 0; l < n_layer; ++l) {
            r.layers.push_back(&tap->at(layers[l]));
        }
        r.n_head_kv = n_head_kv;
        r.n_cells = n_cells;
        r.n_keep = n_keep;
        r.index = index;
        r.tail.assign(tail, tail + (n_cells - n_keep + 1));
        twinkv::evict_in_place(r, n_threads);
    });
}
