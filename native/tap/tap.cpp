// Finds every layer's cache tensors at its attention node and hands queries and masks to their own files.
//
// With flash attention the node is FLASH_ATTN_EXT(q, k, v, mask). Without it the layer is three nodes:
// MUL_MAT(k, q), SOFT_MAX(kq, mask), MUL_MAT(v, kq).
#include "tap/tap.hpp"

#include <cstring>

namespace twinkv {
namespace {

// Follows views, casts and copies down to the tensor that owns the data.
const ggml_tensor* root(const ggml_tensor* t) {
    while (t) {
        if (t->view_src) {
            t = t->view_src;
        } else if ((t->op == GGML_OP_CPY || t->op == GGML_OP_CONT || t->op == GGML_OP_DUP) && t->src[0]) {
            t = t->src[0];
        } else {
            break;
        }
    }
    return t;
}

// The layer number in "cache_k_l12", or -1.
int32_t cache_layer(const ggml_tensor* t, char kind) {
    const char prefix[] = {'c', 'a', 'c', 'h', 'e', '_', kind, '_', 'l', 0};
    if (!t || std::strncmp(t->name, prefix, sizeof(prefix) - 1) != 0) {
        return -1;
    }
    char* end = nullptr;
    const long il = std::strtol(t->name + sizeof(prefix) - 1, &end, 10);
    return end == t->name + sizeof(prefix) - 1 || il < 0 ? -1 : int32_t(il);
}

// From an attention node's Q back to the ROPE node that made it, past reshapes, scales and the Hadamard
// product.
const ggml_tensor* find_rope(const ggml_tensor* q, int32_t& hadamard) {
    hadamard = 0;
    for (int depth = 0; q && depth < 16; ++depth) {
        switch (q->op) {
        case GGML_OP_ROPE:
            return q;
        case GGML_OP_MUL_MAT: // llama.cpp's rotation of quantized caches: MUL_MAT(attn_inp_k_rot, x)
            if (std::strncmp(q->src[0]->name, "attn_inp_k_rot", 14) != 0) {
                return nullptr;
            }
            hadamard = int32_t(q->src[0]->ne[0]);
            q = q->src[1];
            break;
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_SCALE:
            q = q->src[0];
            break;
        default:
            return nullptr;
        }
    }
    return nullptr;
}

std::vector<float> read_floats(const ggml_tensor* t, size_t n) {
    if (!t || t->type != GGML_TYPE_F32 || size_t(ggml_nelements(t)) < n) {
        return {};
    }
    std::vector<uint8_t> scratch;
    const uint8_t* bytes = tensor_bytes(t, 0, n * sizeof(float), scratch);
    std::vector<float> out(n);
    std::memcpy(out.data(), bytes, n * sizeof(float));
    return out;
}

void read_rope(Layer& layer, const ggml_tensor* rope) {
    twinkv_rope& r = layer.facts.rope;
    const int32_t* p = rope->op_params;
    r.n_dims = p[1];
    r.mode = p[2];
    r.n_ctx_orig = p[4];
    float* floats[] = {&r.freq_base, &r.freq_scale, &r.ext_factor, &r.attn_factor, &r.beta_fast, &r.beta_slow};
    for (int i = 0; i < 6; ++i) {
        std::memcpy(floats[i], p + 5 + i, sizeof(float));
    }
    r.has_freq_factors = rope->src[2] != nullptr;
    if (r.has_freq_factors && layer.freq_factors.empty()) {
        layer.freq_factors = read_floats(rope->src[2], size_t(r.n_dims / 2));
    }
}

// Attention sinks: src[4] of a flash attention node, src[2] of a softmax.
void learn_sinks(Layer& layer, const ggml_tensor* sinks) {
    if (sinks && layer.sinks.empty()) {
        layer.sinks = read_floats(sinks, size_t(layer.facts.n_head));
    }
}

Layer* learn_k(twinkv_tap& tap, const ggml_tensor* k, const ggml_tensor* q, float scale) {
    const ggml_tensor* cache = root(k);
    const int32_t il = cache_layer(cache, 'k');
    if (il < 0) {
        return nullptr;
    }
    Layer& layer = tap.layers[il];
    int32_t hadamard = 0;
    const ggml_tensor* rope = find_rope(q, hadamard);
    if (layer.k == cache) {
        return &layer;
    }
    layer.k = cache;
    twinkv_layer& f = layer.facts;
    f.il = il;
    f.n_head = int32_t(q->ne[2]);
    f.n_head_kv = int32_t(k->ne[2]);
    f.head_dim_k = int32_t(k->ne[0]);
    f.type_k = cache->type;
    f.n_cells = cache->ne[1];
    f.is_host = is_host(cache);
    f.buffer_id = reinterpret_cast<uintptr_t>(cache->buffer);
    f.kq_scale = scale;
    f.hadamard = hadamard;
    f.rope = {};
    if (rope) {
        read_rope(layer, rope);
    }
    return &layer;
}

void learn_v(Layer& layer, const ggml_tensor* v, bool transposed) {
    const ggml_tensor* cache = root(v);
    if (layer.v == cache || cache_layer(cache, 'v') != layer.facts.il) {
        return;
    }
    layer.v = cache;
    layer.facts.type_v = cache->type;
    layer.facts.v_transposed = transposed;
    layer.facts.head_dim_v = int32_t(cache->ne[0] / layer.facts.n_head_kv);
    layer.facts.is_host = layer.facts.is_host && is_host(cache);
}

float float_param(const ggml_tensor* t, int i) {
    float value;
    std::memcpy(&value, reinterpret_cast<const float*>(t->op_params) + i, sizeof(value));
    return value;
}

// Read when the scheduler asks about a ROPE node: later in the graph the memory may already serve something
// else.
void read_positions(twinkv_tap& tap, const ggml_tensor* positions) {
    std::vector<uint8_t> scratch;
    tap.positions.resize(size_t(positions->ne[0]));
    const size_t size = tap.positions.size() * sizeof(int32_t);
    std::memcpy(tap.positions.data(), tensor_bytes(positions, 0, size, scratch), size);
}

// Whether the scheduler must stop after this node: only for what is wanted.
bool ask(twinkv_tap& tap, ggml_tensor* t) {
    if (t->op == GGML_OP_FLASH_ATTN_EXT) {
        Layer* layer = learn_k(tap, t->src[1], t->src[0], float_param(t, 0));
        if (!layer) {
            return false;
        }
        layer->facts.softcap = float_param(t, 2);
        learn_v(*layer, t->src[2], false);
        learn_sinks(*layer, t->src[4]);
        return put_mask(tap, *layer, t, 3) || tap.captures(*layer);
    }
    if (t->op == GGML_OP_MUL_MAT) {
        if (Layer* layer = learn_k(tap, t->src[0], t->src[1], 0.0f)) {
            tap.current = layer;
            return tap.captures(*layer);
        }
        if (tap.current) {
            // V behind a CONT is stored by rows; a direct view is the transposed store
            learn_v(*tap.current, t->src[0], t->src[0]->op != GGML_OP_CONT);
        }
    } else if (t->op == GGML_OP_SOFT_MAX && tap.current) {
        tap.current->facts.kq_scale = float_param(t, 0);
        learn_sinks(*tap.current, t->src[2]);
        return put_mask(tap, *tap.current, t, 1) || (tap.attention && tap.captures(*tap.current));
    } else if (t->op == GGML_OP_ROPE && tap.capturing()) {
        read_positions(tap, t->src[1]);
    }
    return false;
}

void done(twinkv_tap& tap, ggml_tensor* t) {
    take_mask_out(tap);
    if (t->op == GGML_OP_SOFT_MAX) {
        if (tap.attention && tap.current && tap.captures(*tap.current)) {
            capture_attention(tap, *tap.current, t->src[1]);
        }
        return;
    }
    const bool flash = t->op == GGML_OP_FLASH_ATTN_EXT;
    auto it = tap.layers.find(cache_layer(root(t->src[flash ? 1 : 0]), 'k'));
    if (it == tap.layers.end() || !tap.captures(it->second)) {
        return;
    }
    capture_queries(tap, it->second, t->src[flash ? 0 : 1]);
    if (flash && tap.attention) {
        capture_attention(tap, it->second, t->src[3]);
    }
}

} // namespace

bool is_host(const ggml_tensor* t) {
    return t->data && t->buffer && ggml_backend_buffer_is_host(t->buffer);
}

const uint8_t* tensor_bytes(const ggml_tensor* t, size_t offset, size_t size, std::vector<uint8_t>& scratch) {
    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    if (!buffer || ggml_backend_buffer_is_host(buffer)) {
        return static_cast<const uint8_t*>(t->data) + offset;
    }
    scratch.resize(size);
    ggml_backend_tensor_get(t, scratch.data(), offset, size);
    return scratch.data();
}

} // namespace twinkv

twinkv::Layer& twinkv_tap::at(int32_t index) {
    twinkv::require(index >= 0 && size_t(index) < layers.size(), "no such layer in the tap");
    return std::next(layers.begin(), index)->second;
}

using twinkv::guard;
using twinkv::require;

extern "C" {

twinkv_tap* twinkv_tap_new(void) {
    return new (std::nothrow) twinkv_tap();
}

void twinkv_tap_free(twinkv_tap* tap) {
    delete tap;
}

bool twinkv_tap_eval(struct ggml_tensor* node, bool ask, void* user_data) {
    auto& tap = *static_cast<twinkv_tap*>(user_data);
    try {
        if (ask) {
            return twinkv::ask(tap, node);
        }
        twinkv::done(tap, node);
    } catch (const std::exception& e) {
        tap.failure = e.what();
    } catch (...) {
        tap.failure = "unknown failure while watching the graph";
    }
    return !ask; // ask: nothing more is wanted of this node; otherwise: go on computing
}

const char* twinkv_tap_take_failure(twinkv_tap* tap) {
    tap->reported.swap(tap->failure);
    tap->failure.clear();
    return tap->reported.empty() ? nullptr : tap->reported.c_str();
}

int32_t twinkv_tap_n_layers(const twinkv_tap* tap) {
    return int32_t(tap->layers.size());
}

twinkv_status twinkv_tap_layer(const twinkv_tap* tap, int32_t index, twinkv_layer* out) {
    return guard([&] {
        *out = tap->at(index).facts;
        require(tap->at(index).v != nullptr, "the layer's V cache was not seen in the graph", TWINKV_EUNSUPPORTED);
    });
}

twinkv_status twinkv_tap_watch(twinkv_tap* tap, int32_t index, bool watched) {
    return guard([&] { tap->at(index).watched = watched; });
}

twinkv_status twinkv_tap_freq_factors(const twinkv_tap* tap, int32_t index, float* factors, int64_t n) {
    return guard([&] {
        const auto& have = tap->at(index).freq_factors;
        require(n == int64_t(have.size()), "the layer has " + std::to_string(have.size()) + " frequency factors");
        std::copy(have.begin(), have.end(), factors);
    });
}
}
