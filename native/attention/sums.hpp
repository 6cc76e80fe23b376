// The attention every cached key received from every query, summed up as the graph runs: what H2O scores by.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace twinkv {

struct Layer;

// Queries of some tokens, what each may see, and where it stands.
struct Queries {
    std::vector<float> rows;        // [n, n_head, d] as attention uses them
    std::vector<int32_t> positions; // [n]
    std::vector<int32_t> limits;    // [n] cells that each sees: those before its limit; ascending

    size_t size() const { return positions.size(); }
    void append(const Queries& other);
    void keep_first(size_t n);
};

struct AttentionSums {
    int64_t count = 0;                    // queries summed up, pending ones included
    int32_t max_pos = -1;                 // position of the last of them
    std::vector<std::vector<float>> sums; // [n_head_kv][cells]: over queries and the group
    Queries pending;                      // not summed up yet: a few tokens at a time would be as dear as a block
};

// Memory that is used again and again: keys of one head, and what each thread works on.
class AttentionWorkspace {
  public:
    std::vector<float> panels;

    // Something like a stack of buffers: as many as threads ever worked at once.
    std::vector<float> take(size_t size);
    void put_back(std::vector<float> buffer);

  private:
    std::mutex mutex_;
    std::vector<std::vector<float>> buffers_;
};

// Cells that the rows of a causal mask [n_kv, >= n_tokens] let each token see. Throws when a mask is anything but
// cells 0 .. limit-1 open and the rest shut.
std::vector<int32_t> mask_limits(const ggml_tensor* mask, size_t n_tokens);

// Adds what the queries attend to, at once or a little later.
void add_attention(Layer& layer, const Queries& queries, AttentionWorkspace& work, int n_threads);
// Sums up what is pending.
void settle_attention(Layer& layer, AttentionWorkspace& work, int n_threads);
// The tokens at positions >= pos are taken back. known: queries that are still held, among them those that go; the sums
// are dropped if one that was summed up is not.
void subtract_attention(Layer& layer, const Queries& known, int32_t pos, AttentionWorkspace& work, int n_threads);
// Cells were evicted: cells [n_head_kv, n_keep] of each head are left, in this order.
void gather_attention(Layer& layer, int64_t n_keep, const int32_t* cells);

} // namespace twinkv
