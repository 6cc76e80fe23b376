// Per-head eviction: attention is a set operation and keys carry their rotation, so a cell may hold, for
// every head, the key and value of a different token. The sequence state is rewritten so and handed back to
// llama.cpp.
#include "core/parallel.hpp"
#include "state/handover.hpp"
#include "state/state.hpp"

#include <algorithm>
#include <cstring>

namespace twinkv {
namespace {

template <class T> void put(std::vector<uint8_t>& out, size_t at, T value) {
    std::memcpy(out.data() + at, &value, sizeof(T));
}

struct Plan {
    const State& state;
    const Section& section;
    int32_t n_head_kv;
    int64_t n_keep;
    const int32_t* index; // [n_layer, n_head_kv, n_keep]
};

// Where the blocks of the new first section start, in the order they are written.
struct Target {
    std::vector<size_t> k, v;
    size_t end;
};

Target lay_out(const Plan& p, size_t begin) {
    Target t;
    size_t at = begin + 8 + size_t(p.n_keep) * cell_entry + 8;
    for (const Block& b : p.section.k) {
        t.k.push_back(at);
        at += row_header + b.unit * b.n_units * size_t(p.n_keep);
    }
    for (const Block& b : p.section.v) {
        t.v.push_back(at);
        at += row_header + b.unit * b.n_units * size_t(p.n_keep);
    }
    t.end = at;
    return t;
}

void gather_rows(const Plan& p, const Block& b, const int32_t* index, uint8_t* dst) {
    require(b.unit % size_t(p.n_head_kv) == 0, "rows that do not divide into KV heads", TWINKV_EFORMAT);
    const size_t piece = b.unit / size_t(p.n_head_kv);
    const uint8_t* src = p.state.bytes + b.data;
    for (int32_t h = 0; h < p.n_head_kv; ++h) {
        const int32_t* cells = index + int64_t(h) * p.n_keep;
        for (int64_t c = 0; c < p.n_keep && cells[c] >= 0; ++c) { // what follows stays zero
            std::memcpy(dst + size_t(c) * b.unit + size_t(h) * piece,
                        src + size_t(cells[c]) * b.unit + size_t(h) * piece, piece);
        }
    }
}

template <class T> void gather_elements(const Plan& p, const Block& b, const int32_t* index, uint8_t* dst_bytes) {
    const size_t per_head = b.n_units / size_t(p.n_head_kv);
    for (size_t j = 0; j < b.n_units; ++j) {
        const int32_t* cells = index + int64_t(j / per_head) * p.n_keep;
        const uint8_t* src = p.state.bytes + b.data + j * p.section.n_cells * sizeof(T);
        uint8_t* dst = dst_bytes + j * size_t(p.n_keep) * sizeof(T);
        for (int64_t c = 0; c < p.n_keep && cells[c] >= 0; ++c) {
            std::memcpy(dst + size_t(c) * sizeof(T), src + size_t(cells[c]) * sizeof(T), sizeof(T));
        }
    }
}

void gather_columns(const Plan& p, const Block& b, const int32_t* index, uint8_t* dst) {
    require(b.n_units % size_t(p.n_head_kv) == 0, "rows that do not divide into KV heads", TWINKV_EFORMAT);
    if (b.unit == 2) {
        gather_elements<uint16_t>(p, b, index, dst);
    } else if (b.unit == 4) {
        gather_elements<uint32_t>(p, b, index, dst);
    } else {
        throw Error(TWINKV_EFORMAT, "a transposed V cache of elements that are not 2 or 4 bytes");
    }
}

} // namespace

void check_index(const int32_t* index, int64_t n_rows, int64_t n_cells, int64_t n_keep) {
    for (int64_t row = 0; row < n_rows; ++row, index += n_keep) {
        int64_t kept = 0;
        while (kept < n_keep && index[kept] >= 0) {
            require(index[kept] < n_cells && (kept == 0 || index[kept - 1] < index[kept]),
                    "kept cells must ascend and lie inside the cache");
            ++kept;
        }
        require(kept > 0 && std::all_of(index + kept, index + n_keep, [](int32_t cell) { return cell == -1; }),
                "every head must keep a cell, and have -1 after its last");
    }
}

std::vector<uint8_t> gather_state(const State& state, int32_t n_head_kv, int64_t n_keep, const int32_t* index,
                                  const int32_t* positions, int n_threads) {
    const Section& s = state.sections[0];
    const Plan p{state, s, n_head_kv, n_keep, index};
    const Target t = lay_out(p, s.begin);
    std::vector<uint8_t> out(t.end + (state.size - s.end));
    std::memcpy(out.data(), state.bytes, s.begin + 4); // header, n_stream
    put(out, s.begin + 4, uint32_t(n_keep));
    for (int64_t c = 0; c < n_keep; ++c) {
        const size_t at = s.begin + 8 + size_t(c) * cell_entry;
        std::memcpy(out.data() + at, state.bytes + s.meta, cell_entry); // n_seq_id and seq_id of any cell
        put(out, at, positions[c]);
    }
    std::memcpy(out.data() + s.begin + 8 + size_t(n_keep) * cell_entry, state.bytes + s.body, 8);
    std::memcpy(out.data() + t.end, state.bytes + s.end, state.size - s.end);
    const int64_t n_layer = int64_t(s.k.size());
    parallel_for(2 * n_layer, n_threads, [&](int64_t i) {
        const bool is_k = i < n_layer;
        const size_t l = size_t(i % n_layer);
        const Block& b = is_k ? s.k[l] : s.v[l];
        const size_t at = is_k ? t.k[l] : t.v[l];
        std::memcpy(out.data() + at, state.bytes + b.header, row_header);
        const int32_t* layer_index = index + int64_t(l) * n_head_kv * n_keep;
        if (!is_k && s.v_transposed) {
            gather_columns(p, b, layer_index, out.data() + at + row_header);
        } else {
            gather_rows(p, b, layer_index, out.data() + at + row_header);
        }
    });
    return out;
}

namespace {

void check_request(const Section& s, int32_t n_layer, int32_t n_head_kv, int64_t n_keep, const int32_t* index,
                   const int32_t* positions) {
    require(s.n_cells > 0, "the sequence is empty");
    require(n_layer == int32_t(s.k.size()),
            "the index has " + std::to_string(n_layer) + " layers, the cache " + std::to_string(s.k.size()));
    require(n_head_kv > 0 && n_keep > 0 && n_keep <= s.n_cells, "keep between 1 and all of the cells");
    const int32_t last = *std::max_element(s.positions.begin(), s.positions.end());
    for (int64_t c = 0; c < n_keep; ++c) {
        require(positions[c] >= 0 && (c == 0 || positions[c - 1] < positions[c]), "positions must ascend");
    }
    require(positions[n_keep - 1] == last, "the last kept cell must carry the sequence's last position");
    check_index(index, int64_t(n_layer) * n_head_kv, s.n_cells, n_keep);
}

void evict(llama_context* ctx, int32_t seq_id, int32_t n_layer, int32_t n_head_kv, int64_t n_keep, const int32_t* index,
           const int32_t* positions, int n_threads) {
    const std::vector<uint8_t> before = take_state(ctx, seq_id);
    const State state = parse_state(before.data(), before.size());
    check_request(state.sections[0], n_layer, n_head_kv, n_keep, index, positions);
    const std::vector<uint8_t> after = gather_state(state, n_head_kv, n_keep, index, positions, n_threads);
    if (give_state(ctx, after, seq_id)) {
        return;
    }
    const bool whole = give_state(ctx, before, seq_id);
    throw Error(TWINKV_EINTERNAL, whole ? "llama.cpp refused the rewritten state; the cache is as it was"
                                        : "llama.cpp refused the rewritten state and the old one: call reset()");
}

} // namespace
} // namespace twinkv

extern "C" twinkv_status twinkv_evict(struct llama_context* ctx, int32_t seq_id, int32_t n_layer, int32_t n_head_kv,
                                      int64_t n_keep, const int32_t* index, const int32_t* positions, int n_threads) {
    return twinkv::guard([&] { twinkv::evict(ctx, seq_id, n_layer, n_head_kv, n_keep, index, positions, n_threads); });
}
