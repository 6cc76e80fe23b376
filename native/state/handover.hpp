// Sequence states taken from and given to llama.cpp.
#pragma once

#include "core/status.hpp"

#include "llama.h"

#include <vector>

namespace twinkv {

// The state of a sequence.
std::vector<uint8_t> take_state(llama_context* ctx, int32_t seq_id);

// Hands a state to llama.cpp; false when it refuses. It then has removed what the sequence held.
bool give_state(llama_context* ctx, const std::vector<uint8_t>& state, int32_t seq_id);

} // namespace twinkv
