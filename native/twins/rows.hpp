// What happens to every key once, normalizing and packing, and the maxima of a tile, in vectors as wide as
// the instruction set has them (the vector extension of GCC and Clang). Compiled for each instruction set by
// the file that includes it (see kernels.hpp), hence the unnamed namespace.
#pragma once

#include "twins/kernels.hpp"

namespace twinkv {
namespace {
namespace rows {

#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#elif defined(__AVX__)
constexpr int64_t lanes = 8;
#else
constexpr int64_t lanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * lanes)));
typedef int32_t Integers __attribute__((vector_size(4 * lanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * lanes)));
typedef uint8_t Bytes __attribute__((vector_size(lanes)));
typedef float HalfFloats __attribute__((vector_size(2 * lanes)));
typedef double Doubles __attribute__((vector_size(4 * lanes)));
typedef int64_t Longs __attribute__((vector_size(4 * lanes)));
constexpr int64_t double_lanes = lanes / 2;

template <class V> V load(const void* p) { // p need not be aligned
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}

template <class V> void store(void* p, V v) {
    __builtin_memcpy(p, &v, sizeof(V));
}

inline float total(Floats v) {
    float t = 0;
    for (int64_t c = 0; c < lanes; ++c) {
        t += v[c];
    }
    return t;
}

// The fast way to normalize: the squares summed in any order, and a product with the reciprocal for the
// quotient, are off by less than `reach`; where the quotient's float32 value is the same at both ends of that
// range, it is the value.
inline bool normalize(const float* key, int64_t d, float* unit) {
    Doubles sums = {};
    double rest = 0;
    const int64_t whole = d / double_lanes * double_lanes;
    for (int64_t k = 0; k < whole; k += double_lanes) {
        const Doubles x = __builtin_convertvector(load<HalfFloats>(key + k), Doubles);
        sums += x * x;
    }
    for (int64_t k = whole; k < d; ++k) {
        rest += double(key[k]) * double(key[k]);
    }
    double square = rest;
    for (int64_t c = 0; c < double_lanes; ++c) {
        square += sums[c];
    }
    if (!(square > 0) || !(square < 1e300)) { // zero, or not finite
        return false;
    }
    const double inverse = 1 / __builtin_sqrt(square), reach = double(d + 16) * 0x1p-52;
    const double above = inverse * (1 + reach), below = inverse * (1 - reach);
    Longs unsure = {};
    for (int64_t k = 0; k < whole; k += double_lanes) {
        const Doubles x = __builtin_convertvector(load<HalfFloats>(key + k), Doubles);
        const HalfFloats most = __builtin_convertvector(x * above, HalfFloats);
        const HalfFloats least = __builtin_convertvector(x * below, HalfFloats);
        store<HalfFloats>(unit + k, most);
        unsure |= __builtin_convertvector(most, Doubles) != __builtin_convertvector(least, Doubles);
    }
    bool sure = true;
    for (int64_t k = whole; k < d; ++k) {
        unit[k] = float(double(key[k]) * above);
        sure = sure && unit[k] == float(double(key[k]) * below);
    }
    for (int64_t c = 0; c < double_lanes; ++c) {
        sure = sure && unsure[c] == 0;
    }
    return sure;
}

// e = unit - center, and the sums over it. The scratch holds e and, behind it, what packing makes of it.
inline void center(PackRow& p, int64_t width) {
    Floats square = {}, shift = {};
    for (int64_t k = 0; k < p.ld; k += lanes) {
        const Floats c = load<Floats>(p.center + k), x = load<Floats>(p.unit + k) - c;
        store<Floats>(p.scratch + k, x);
        square += x * x;
        shift += x * c;
    }
    for (int64_t k = p.ld; k < width; ++k) {
        p.scratch[k] = 0;
    }
    p.square = total(square);
    p.shift = total(shift);
}

// Values of k_pack neighbouring dimensions, 4 bytes, go to a lane of a panel, which is 32 lanes wide.
inline void to_panel(const void* values, int64_t bytes, void* panel) {
    const auto* from = static_cast<const unsigned char*>(values);
    auto* to = static_cast<unsigned char*>(panel);
    for (int64_t b = 0; b < bytes; b += 4) {
        __builtin_memcpy(to + b * tile_size, from + b, 4);
    }
}

inline int64_t padded(int64_t k) {
    return (k + lanes - 1) / lanes * lanes;
}

inline void pack_f32(PackRow& p) {
    center(p, padded(p.k));
    p.row_left = p.panel_left = 0;
    if (p.row) {
        __builtin_memcpy(p.row, p.scratch, uint64_t(p.k) * 4);
    }
    if (p.panel) {
        to_panel(p.scratch, p.k * 4, p.panel);
    }
}

inline void pack_bf16(PackRow& p) {
    const int64_t width = padded(p.k);
    center(p, width);
    auto* rounded = reinterpret_cast<uint16_t*>(p.scratch + width);
    Floats left = {};
    for (int64_t k = 0; k < width; k += lanes) {
        const Bits wide = load<Bits>(p.scratch + k);
        const Bits narrow = (wide + 0x7fff + (wide >> 16 & 1)) >> 16; // to nearest, ties to even; e is finite
        const Bits back = narrow << 16;
        const Floats lost = load<Floats>(p.scratch + k) - load<Floats>(&back);
        store<Shorts>(rounded + k, __builtin_convertvector(narrow, Shorts));
        left += lost * lost;
    }
    p.row_left = p.panel_left = total(left);
    if (p.row) {
        __builtin_memcpy(p.row, rounded, uint64_t(p.k) * 2);
    }
    if (p.panel) {
        to_panel(rounded, p.k * 2, p.panel);
    }
}

// Adds and subtracts lanes that are h apart, h less than a vector.
template <int64_t h> inline void butterfly_within(float* x, int64_t width) {
    for (int64_t k = 0; k < width; k += lanes) {
        const Floats v = load<Floats>(x + k);
        Floats other, sign;
        for (int64_t c = 0; c < lanes; ++c) { // constants and a permutation, once compiled
            other[c] = v[c ^ h];
            sign[c] = c & h ? -1.0f : 1.0f;
        }
        store<Floats>(x + k, other + v * sign);
    }
}

inline void butterfly_across(float* x, int64_t width, int64_t h) {
    for (int64_t block = 0; block < width; block += 2 * h) {
        for (int64_t k = block; k < block + h; k += lanes) {
            const Floats a = load<Floats>(x + k), b = load<Floats>(x + k + h);
            store<Floats>(x + k, a + b);
            store<Floats>(x + k + h, a - b);
        }
    }
}

// A rotation that spreads a few large dimensions over all, so that integers with one scale lose less: signs
// from a hash, then a Hadamard transform of blocks. Signs, because a quantized cache of llama.cpp has had a
// plain one already, and a second would undo the first. Products do not change; rounding stays below 1e-6 of
// |e| (docs/kernels.md).
inline void rotate(float* x, int64_t width) {
    Bits index;
    for (int64_t c = 0; c < lanes; ++c) {
        index[c] = uint32_t(c);
    }
    for (int64_t k = 0; k < width; k += lanes) {
        const Bits sign = (index + uint32_t(k)) * 0x9e3779b9u >> 31 << 31;
        store<Bits>(x + k, load<Bits>(x + k) ^ sign);
    }
    butterfly_within<1>(x, width);
    butterfly_within<2>(x, width);
    if (lanes > 4) {
        butterfly_within<4 % lanes>(x, width);
    }
    if (lanes > 8) {
        butterfly_within<8 % lanes>(x, width);
    }
    int64_t size = lanes;
    for (; size < 256 && width % (2 * size) == 0; size *= 2) {
        butterfly_across(x, width, size);
    }
    const float scale = 1 / __builtin_sqrtf(float(size));
    for (int64_t k = 0; k < width; k += lanes) {
        store<Floats>(x + k, load<Floats>(x + k) * scale);
    }
}

// e as integers in [-levels, levels] + offset, times the scale returned; *left and *sum are of the integers.
inline float quantize(const float* e, int64_t width, int levels, int offset, uint8_t* out, float* left, int32_t* sum) {
    Floats peaks = {};
    for (int64_t k = 0; k < width; k += lanes) {
        const Floats x = load<Floats>(e + k), positive = x < 0 ? -x : x;
        peaks = peaks > positive ? peaks : positive;
    }
    float peak = 0;
    for (int64_t c = 0; c < lanes; ++c) {
        peak = peak > peaks[c] ? peak : peaks[c];
    }
    const float scale = peak / float(levels), inverse = peak > 0 ? float(levels) / peak : 0;
    constexpr float magic = 12582912; // 1.5 * 2^23: adding it rounds to the nearest integer
    Floats lost = {};
    Integers sums = {};
    for (int64_t k = 0; k < width; k += lanes) {
        const Floats x = load<Floats>(e + k), rounded = (x * inverse + magic) - magic, rest = x - rounded * scale;
        const Integers integers = __builtin_convertvector(rounded, Integers);
        store<Bytes>(out + k, __builtin_convertvector(integers + offset, Bytes));
        sums += integers;
        lost += rest * rest;
    }
    *left = total(lost);
    *sum = 0;
    for (int64_t c = 0; c < lanes; ++c) {
        *sum += sums[c];
    }
    return scale;
}

template <int row_levels, int row_offset> void pack_i8(PackRow& p) {
    const int64_t width = padded(p.k);
    center(p, width);
    rotate(p.scratch, width);
    auto* integers = reinterpret_cast<uint8_t*>(p.scratch + width);
    int32_t sum;
    if (p.row) {
        p.row_scale = quantize(p.scratch, width, row_levels, row_offset, integers, &p.row_left, &sum);
        __builtin_memcpy(p.row, integers, uint64_t(p.k));
    }
    if (p.panel) {
        p.panel_scale = quantize(p.scratch, width, 127, 0, integers, &p.panel_left, &p.panel_sum);
        to_panel(integers, p.k, p.panel);
    }
}

// row_most[r] = max over c of tile[r][c] + column[c]; column_most[c] = max over r of tile[r][c] + row[r].
inline void maxima(const float* tile, const float* column, const float* row, float* row_most, float* column_most) {
    constexpr int64_t vectors = tile_size / lanes;
    Floats shift[vectors], down[vectors];
    for (int64_t v = 0; v < vectors; ++v) {
        shift[v] = load<Floats>(column + v * lanes);
        down[v] = load<Floats>(tile + v * lanes) + row[0];
    }
    for (int64_t r = 0; r < tile_size; ++r) {
        Floats along = load<Floats>(tile + r * tile_size) + shift[0];
        for (int64_t v = 0; v < vectors; ++v) {
            const Floats x = load<Floats>(tile + r * tile_size + v * lanes), y = x + shift[v], z = x + row[r];
            along = along > y ? along : y;
            down[v] = down[v] > z ? down[v] : z;
        }
        float most = along[0];
        for (int64_t c = 1; c < lanes; ++c) {
            most = most > along[c] ? most : along[c];
        }
        row_most[r] = most;
    }
    for (int64_t v = 0; v < vectors; ++v) {
        store<Floats>(column_most + v * lanes, down[v]);
    }
}

} // namespace rows
} // namespace
} // namespace twinkv
