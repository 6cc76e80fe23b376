// The tap's own data. The C face is in twinkv.h; discovery in tap.cpp, queries in capture.cpp and
// statistics.cpp, masks in mask.cpp.
#pragma once

#include "attention/sums.hpp"
#include "core/status.hpp"
#include "twinkv.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <map>
#include <string>
#include <vector>

namespace twinkv {

// Last `window` queries of a layer, a ring of rows [n_head * head_dim].
struct QueryWindow {
    std::vector<float> rows;
    std::vector<int32_t> positions;
    std::vector<int32_t> limits; // cells that each sees, where attention is summed up
    int64_t next = 0, size = 0;

    int64_t capacity() const { return int64_t(positions.size()); }
    // Slot of the i-th query from the oldest.
    size_t slot(int64_t i) const { return size_t((next - size + i + capacity()) % capacity()); }
};

// Sums over queries before RoPE, from which mean and covariance are read.
struct QueryStatistics {
    int64_t count = 0;
    int32_t max_pos = -1;
    // Mean of the first batch, [n_head, d]: it is taken off every query, so that nothing cancels where queries are
    // far from zero and close to each other.
    std::vector<float> pivot;
    std::vector<double> sum;  // [n_head, d]
    std::vector<float> outer; // [n_head, d (d + 1) / 2]: upper triangles, row by row
};

// Cells a layer's heads must not see, in one set or several: which one a row of the batch has is in the tap's `sets`.
struct HiddenCells {
    std::vector<uint8_t> hidden; // [n_sets, n_head_kv, n]
    int64_t n_sets = 0;
    int64_t n = 0;
    bool same = false; // for all heads, in every set
};

// The mask that stands in for llama.cpp's own while one attention node runs. One at a time: the scheduler
// computes a node for which ask() was true before it asks about the next.
struct StandIn {
    ggml_tensor* node = nullptr;
    ggml_tensor* original = nullptr;
    int slot = 0;
    ggml_tensor tensor{};
    std::vector<uint8_t> data;
};

struct Layer {
    twinkv_layer facts{};
    const ggml_tensor* k = nullptr; // the whole cache tensors
    const ggml_tensor* v = nullptr;
    std::vector<float> freq_factors;
    std::vector<float> sinks; // [n_head] logits in every softmax that no key has, or empty
    bool watched = true;      // its queries are captured
    QueryWindow window;
    QueryStatistics statistics;
    AttentionSums attention;
    HiddenCells mask;
};

// Reads a tensor's bytes wherever they are; on host buffers without a copy.
const uint8_t* tensor_bytes(const ggml_tensor* t, size_t offset, size_t size, std::vector<uint8_t>& scratch);
bool is_host(const ggml_tensor* t);

} // namespace twinkv

struct twinkv_tap {
    std::map<int32_t, twinkv::Layer> layers; // by il
    twinkv::Layer* current = nullptr;        // plain attention: the layer whose KQ node was seen last
    int32_t window = 0;
    bool statistics = false;
    bool attention = false;
    int32_t skip = 0;
    int32_t n_threads = 0;          // for the work on captured queries; 0: as many as the machine has
    std::vector<int32_t> positions; // of the batch running now, read from the graph's ROPE nodes
    std::vector<int32_t> sets;      // of hidden cells, by row of the batch; empty: the first for all
    twinkv::StandIn stand_in;
    std::string failure;
    std::string reported;

    twinkv::Queries queries; // of the layer that was captured last
    twinkv::AttentionWorkspace work;

    bool capturing() const { return window > 0 || statistics || attention; }
    bool captures(const twinkv::Layer& layer) const { return capturing() && layer.watched; }
    twinkv::Layer& at(int32_t index);
    const twinkv::Layer& at(int32_t index) const { return const_cast<twinkv_tap*>(this)->at(index); }
};

namespace twinkv {

// Q of an attention node. Where attention is summed up, its mask follows: from the same node with flash attention, from
// the softmax without.
void capture_queries(twinkv_tap& tap, Layer& layer, const ggml_tensor* q);
void capture_attention(twinkv_tap& tap, Layer& layer, const ggml_tensor* mask);
// rows [n, n_head, d] as attention sees them at these positions; they are un-rotated in place.
void add_statistics(Layer& layer, std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t skip,
                    int n_threads);
// The tokens at positions >= pos are taken back, and rows are their queries: all of them, or the statistics are
// dropped.
void subtract_statistics(Layer& layer, std::vector<float>& rows, const std::vector<int32_t>& positions, int32_t pos,
                         int32_t skip, int n_threads);
// Puts the layer's per-head mask in place of node->src[slot]; false when the layer hides nothing.
bool put_mask(twinkv_tap& tap, const Layer& layer, ggml_tensor* node, int slot);
void take_mask_out(twinkv_tap& tap);

} // namespace twinkv
