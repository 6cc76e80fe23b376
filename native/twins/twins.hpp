// The operations on one head that the repair is made of.
#pragma once

#include "twins/pack.hpp"

#include <vector>

namespace twinkv {

// A head, the kernels that work on it, and what they need to know of it.
struct Context {
    const Head& head;
    const Kernels& kernels;
    Center center;
    int n_threads;

    Context(const Head& head, int n_threads)
        : head(head), kernels(active_kernels()), center(center_of(head, kernels)), n_threads(n_threads) {}
};

void twin_counts(const Context& context, float tau, int32_t* counts);

// best [n] over retained [n]. Exact, except that a token whose best is at least `enough` may be given any
// value from `enough` up to its best (enough_retained: the same for retained tokens). Infinity: exact
// throughout.
void best_twin(const Context& context, const uint8_t* retained, float enough, float enough_retained, float* best);

// Rows of bits: which of the columns (in order of position) are twins of a row, with sim >= tau.
struct TwinRows {
    int64_t words = 0; // of 32 columns, per row
    std::vector<uint32_t> bits;
    const uint32_t* row(size_t r) const { return bits.data() + r * size_t(words); }
};

TwinRows twin_rows(const Context& context, const std::vector<int32_t>& rows, const Packed& columns, float tau);

// Rewrites retained [n] within its budget. best [n] as best_twin() gives it, or null.
twinkv_repair_stats repair(const Context& context, const twinkv_repair_params& params, const float* best,
                           uint8_t* retained);

// The same by coverage, on one thread. best [n] as best_twin() gives it. priority [n]: what the tokens of the set are
// worth, or null: the later, the more. weight [n]: what it costs that a token is not covered, or null: all cost the
// same.
twinkv_repair_stats cover(const Context& context, const twinkv_repair_params& params, const float* best,
                          const float* priority, const float* weight, uint8_t* retained);

} // namespace twinkv
