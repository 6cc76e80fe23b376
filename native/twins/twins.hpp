// The operations on one head that the repair is made of.
#pragma once

#include "twins/head.hpp"

#include <vector>

namespace twinkv {

std::vector<int32_t> twin_counts(const Head& head, float tau, int n_threads);

// retained [n]
std::vector<float> best_twin(const Head& head, const uint8_t* retained, int n_threads);

// bits [rows, columns]: 1 where the two tokens are twins with sim >= tau. columns in order of position.
std::vector<uint8_t> twin_rows(const Head& head, const std::vector<int32_t>& rows, const std::vector<int32_t>& columns,
                               float tau, int n_threads);

// Rewrites retained [n] within its budget.
twinkv_repair_stats repair(const Head& head, const twinkv_repair_params& params, int n_threads, uint8_t* retained);

} // namespace twinkv
