#include "state/handover.hpp"

#include "twinkv.h"

#include <atomic>

namespace twinkv {
namespace {
std::atomic<int> spoil{0};
} // namespace

std::vector<uint8_t> take_state(llama_context* ctx, int32_t seq_id) {
    const size_t size = llama_state_seq_get_size(ctx, seq_id);
    std::vector<uint8_t> state(size);
    require(size > 0 && llama_state_seq_get_data(ctx, state.data(), size, seq_id) == size,
            "llama.cpp did not hand out the sequence's state", TWINKV_EUNSUPPORTED);
    return state;
}

bool give_state(llama_context* ctx, const std::vector<uint8_t>& state, int32_t seq_id) {
    if (spoil.load() > 0) {
        --spoil;
        // cut short: llama.cpp notices at the end, when it has already taken the sequence apart
        return llama_state_seq_set_data(ctx, state.data(), state.size() - 1, seq_id) == state.size();
    }
    return llama_state_seq_set_data(ctx, state.data(), state.size(), seq_id) == state.size();
}

} // namespace twinkv

extern "C" void twinkv_test_spoil_states(int n) {
    twinkv::spoil.store(n);
}
