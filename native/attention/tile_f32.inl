// The kernel itself, in vectors of TWINKV_LANES floats and TWINKV_ROWS query rows at a time. Included once per
// instruction set, which decides what the compiler makes of the vectors. Nothing here may come from a header as an
// inline function: the linker keeps one copy of those, and it could be the one compiled for a newer processor.
#include "attention/block.hpp"

#include <math.h>
#include <string.h>

namespace twinkv {
namespace {

constexpr int64_t lanes = TWINKV_LANES, rows = TWINKV_ROWS, width = 2 * lanes;
static_assert(block_tile % width == 0 && block_rows % rows == 0, "tiles are whole panels, blocks are whole groups");

typedef float V __attribute__((vector_size(4 * TWINKV_LANES)));
typedef int32_t I __attribute__((vector_size(4 * TWINKV_LANES)));

inline V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof(v));
    return v;
}

inline void store(float* p, V v) {
    memcpy(p, &v, sizeof(v));
}

inline V select(I mask, V a, V b) {
    return (V)((mask & (I)a) | (~mask & (I)b));
}

inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

inline int64_t tiles_of(int64_t n) {
    return (n + block_tile - 1) / block_tile;
}

// e^x for x <= 0, to a few units in the last place; 0 below e^-86. With t = x log2 e = n + f: 2^n goes into the
// exponent, 2^f comes from its Taylor polynomial.
inline V exponential(V x) {
    const V t = x * 1.44269504088896341f;
    const V shifted = t + 12582912.0f; // 1.5 * 2^23: rounds to a whole number, which the low bits then hold
    const V f = t - (shifted - 12582912.0f);
    V p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (V)((I)(t > -125.0f) & (((I)shifted << 23) + (I)p));
}

// Logits of a group of query rows with one panel of keys, to out[row * block_tile + key].
inline void multiply(const float* queries, const float* panel, int64_t d, float* out) {
    V acc[rows][2] = {};
    for (int64_t k = 0; k < d; ++k) {
        const V a = load(panel + k * width), b = load(panel + k * width + lanes);
#pragma GCC unroll 16
        for (int64_t r = 0; r < rows; ++r) {
            const float q = queries[k * rows + r];
            acc[r][0] += q * a;
            acc[r][1] += q * b;
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; ++r) {
        store(out + r * block_tile, acc[r][0]);
        store(out + r * block_tile + lanes, acc[r][1]);
    }
}

constexpr float lowest = -1e30f; // where a row sees no key of a tile: finite, so that differences are numbers

// The logits of one row and tile become exponentials over their maximum.
inline void exponentiate(const Block& b, int64_t begin, int64_t seen, float* logits, float& maximum, float& total) {
    for (int64_t c = 0; b.softcap != 0 && c < seen; ++c) {
        logits[c] = b.softcap * tanhf(logits[c] / b.softcap);
    }
    for (int64_t c = 0; c < least(seen, b.n_hidden - begin); ++c) {
        logits[c] = b.hidden[begin + c] ? -INFINITY : logits[c];
    }
    for (int64_t c = seen; c < block_tile; ++c) {
        logits[c] = -INFINITY;
    }
    V most = V{} + lowest;
    for (int64_t c = 0; c < block_tile; c += lanes) {
        const V x = load(logits + c);
        most = select(x > most, x, most);
    }
    maximum = lowest;
    for (int64_t i = 0; i < lanes; ++i) {
        maximum = most[i] > maximum ? most[i] : maximum;
    }
    V sums{};
    for (int64_t c = 0; c < block_tile; c += lanes) {
        const V e = exponential(load(logits + c) - maximum);
        store(logits + c, e);
        sums += e;
    }
    total = 0.0f;
    for (int64_t i = 0; i < lanes; ++i) {
        total += sums[i];
    }
}

struct Scratch {
    int64_t padded; // rows, up to whole groups
    float* e;       // exponentials [tile, row, block_tile]
    float* weights; // [tile, row]: first maxima, then what the exponentials are to be multiplied by
    float* totals;  // [tile, row] sums of exponentials
};

void all_exponentials(const Block& b, const Scratch& s) {
    const int64_t tiles = tiles_of(b.limits[b.n_rows - 1]);
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = t * block_tile;
        for (int64_t g = 0; g < s.padded; g += rows) {
            const int64_t end = least(g + rows, b.n_rows), reach = least(block_tile, b.limits[end - 1] - begin);
            float* e = s.e + (t * s.padded + g) * block_tile;
            for (int64_t c = 0; c < reach; c += width) {
                multiply(b.queries + g * b.d, b.panels + (begin + c) * b.d, b.d, e + c);
            }
            for (int64_t r = g; r < end && reach > 0; ++r) {
                const int64_t seen = least(block_tile, b.limits[r] - begin);
                exponentiate(b, begin, seen > 0 ? seen : 0, e + (r - g) * block_tile, s.weights[t * s.padded + r],
                             s.totals[t * s.padded + r]);
            }
        }
    }
}

// Turns the maxima of the tiles of a row into weights.
void weigh(const Block& b, const Scratch& s, int64_t r) {
    const int64_t tiles = tiles_of(b.limits[r]);
    float most = b.sinks ? b.sinks[r] : lowest;
    for (int64_t t = 0; t < tiles; ++t) {
        const float m = s.weights[t * s.padded + r];
        most = m > most ? m : most;
    }
    float total = b.sinks ? expf(b.sinks[r] - most) : 0.0f;
    for (int64_t t = 0; t < tiles; ++t) {
        float& weight = s.weights[t * s.padded + r];
        weight = expf(weight - most);
        total += weight * s.totals[t * s.padded + r];
    }
    for (int64_t t = 0; t < tiles; ++t) {
        s.weights[t * s.padded + r] /= total > 0 ? total : 1.0f;
    }
}

void add_received(const Block& b, const Scratch& s, int64_t t) {
    int64_t first = 0; // limits ascend: rows from here on see this tile
    while (b.limits[first] <= t * block_tile) {
        ++first;
    }
    for (int64_t c = 0; c < block_tile; c += 2 * lanes) {
        float* out = b.received + t * block_tile + c;
        V x = load(out), y = load(out + lanes);
        for (int64_t r = first; r < b.n_rows; ++r) {
            const float* e = s.e + (t * s.padded + r) * block_tile + c;
            const float weight = s.weights[t * s.padded + r];
            x += weight * load(e);
            y += weight * load(e + lanes);
        }
        store(out, x);
        store(out + lanes, y);
    }
}

void attend_block(const Block& b) {
    const int64_t tiles = tiles_of(b.limits[b.n_rows - 1]);
    Scratch s;
    s.padded = (b.n_rows + rows - 1) / rows * rows;
    s.e = b.scratch;
    s.weights = s.e + tiles * s.padded * block_tile;
    s.totals = s.weights + tiles * s.padded;
    all_exponentials(b, s);
    for (int64_t r = 0; r < b.n_rows; ++r) {
        weigh(b, s, r);
    }
    for (int64_t t = 0; t < tiles; ++t) {
        add_received(b, s, t);
    }
}

} // namespace
} // namespace twinkv
