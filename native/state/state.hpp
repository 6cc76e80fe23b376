// The layout of llama_state_seq_get_data, read strictly. The format carries no version: every count and size
// is checked against what a KV cache of this llama.cpp must have, and anything else is refused before the
// cache is touched.
//
//   u32 magic, i32 seq_id
//   one section per cache (two on sliding-window models: the full-attention one first):
//     u32 n_stream, u32 n_cells
//     n_cells x { i32 pos, u32 n_seq_id = 1, i32 seq_id }
//     u32 v_transposed, u32 n_layer
//     K, per layer: i32 ggml_type, u64 row_bytes, n_cells rows
//     V, per layer: the same; or, transposed: i32 ggml_type, u32 element_bytes, u32 n_embd_v, n_embd_v x
//     n_cells elements
#pragma once

#include "core/status.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace twinkv {

// One K or V block of a layer: where its rows start in the blob and how they are cut.
struct Block {
    size_t header = 0;  // offset of the block's own header
    size_t data = 0;    // offset of the first row (or element)
    size_t unit = 0;    // bytes of a row; bytes of an element when transposed
    size_t n_units = 0; // transposed: n_embd_v rows of n_cells elements; otherwise 1 row per cell
};

struct Section {
    size_t begin = 0, end = 0;
    uint32_t n_cells = 0;
    std::vector<int32_t> positions; // [n_cells], in cell order
    size_t meta = 0;                // offset of the first cell's entry
    size_t body = 0;                // offset of v_transposed
    bool v_transposed = false;
    std::vector<Block> k, v;
};

struct State {
    const uint8_t* bytes = nullptr;
    size_t size = 0;
    std::vector<Section> sections; // 1 or 2
};

constexpr size_t state_header = 8;   // magic, seq_id
constexpr size_t cell_entry = 12;    // pos, n_seq_id, seq_id
constexpr size_t row_header = 12;    // type, row_bytes
constexpr size_t column_header = 12; // type, element_bytes, n_embd_v

State parse_state(const uint8_t* bytes, size_t size);

// Rows [n_rows, n_keep] of an index: kept cells, ascending; after the last of them only -1.
void check_index(const int32_t* index, int64_t n_rows, int64_t n_cells, int64_t n_keep);

// The blob after keeping cell index[l, h, c] as cell c of the first section; the other section goes over
// unchanged.
std::vector<uint8_t> gather_state(const State& state, int32_t n_head_kv, int64_t n_keep, const int32_t* index,
                                  const int32_t* positions, int n_threads);

} // namespace twinkv
