// Tells which of the layers that the tap sees lie in the state's first cache. On sliding-window models two
// caches exist and nothing in a public header says which layer is in which; the bytes do.
#include "state/state.hpp"
#include "tap/tap.hpp"

#include <cstring>

namespace twinkv {
namespace {

bool same_row(const Layer& layer, const State& state, const Block& block) {
    int32_t type;
    std::memcpy(&type, state.bytes + block.header, sizeof(type));
    if (type != layer.facts.type_k || block.unit != layer.k->nb[1]) {
        return false;
    }
    std::vector<uint8_t> scratch;
    return std::memcmp(tensor_bytes(layer.k, 0, block.unit, scratch), state.bytes + block.data, block.unit) == 0;
}

void match(const twinkv_tap& tap, const State& state, int32_t n_layer, int32_t* indices) {
    const Section& s = state.sections[0];
    require(s.n_cells == 1, "take the state while the cache holds one token");
    require(n_layer == int32_t(s.k.size()), "the state has " + std::to_string(s.k.size()) + " layers");
    auto candidate = tap.layers.begin();
    int32_t index = 0;
    for (int32_t l = 0; l < n_layer; ++l) {
        while (candidate != tap.layers.end() && !same_row(candidate->second, state, s.k[size_t(l)])) {
            ++candidate, ++index;
        }
        require(candidate != tap.layers.end(), "the cache in the state is not the one the graph uses",
                TWINKV_EUNSUPPORTED);
        indices[l] = index;
        ++candidate, ++index;
    }
}

} // namespace
} // namespace twinkv

extern "C" twinkv_status twinkv_state_match(const twinkv_tap* tap, const uint8_t* blob, size_t size, int32_t n_layer,
                                            int32_t* indices) {
    return twinkv::guard([&] { twinkv::match(*tap, twinkv::parse_state(blob, size), n_layer, indices); });
}
