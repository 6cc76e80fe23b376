// What an instruction set has to provide, and the table of those that are built in.
//
// A kernel computes approximate similarities of 32 x 32 tokens at a time in low precision; the shared driver
// (sweep.hpp) decides from them and from a proved bound on their error (docs/kernels.md), and recomputes the
// few pairs that the bound leaves open. So a new instruction set is one file with the functions below.
//
// Files with a Kernels table are compiled with flags of their own. They must not use anything inline from the
// standard library, nor any function that is not static: the linker would be free to keep their copy of it
// for the whole program, and that copy would not run on an older processor.
#pragma once

#include <cstdint>

namespace twinkv {

constexpr int64_t tile_size = 32;

enum class Filter { f32, bf16, i8 };

// Tokens packed for the tile kernels. k: their dimensions, padded with zeros to a multiple of the kernel's
// k_step.
struct Operand {
    int64_t k;
    const void* rows;           // [groups of 32][32][k]
    const void* panels;         // [groups of 32][k / k_pack][32][k_pack]: 32 tokens are 32 lanes
    const float* row_scale;     // i8: value of a row = integer * row_scale, [n]
    const float* panel_scale;   // i8: value of a panel's token = integer * panel_scale, [n]
    const int32_t* panel_start; // i8: -row_offset * sum of the panel's integers, [n]: where sums start
};

// One token for pack(): where it comes from, where it goes, and what the error bound has to know of it.
struct PackRow {
    const float* unit;   // [ld] the normalized key
    const float* center; // [ld]
    int64_t ld;          // a multiple of 16
    int64_t k;           // packed dimensions, at least the key's
    float* scratch;      // [2 * k rounded up to 16]
    void* row;           // [k] elements, or null
    void* panel;         // its lane of a panel: k / k_pack times k_pack elements, 32 k_pack apart; or null

    float shift;                  // center . e, where e = unit - center
    float square;                 // e . e
    float row_left, panel_left;   // squared length of what is lost: e - what row and panel hold
    float row_scale, panel_scale; // i8
    int32_t panel_sum;            // i8: sum of the panel's integers
};

struct Kernels {
    const char* isa;
    Filter filter;
    int64_t k_step; // dimensions come in multiples of this
    int64_t k_pack; // neighbouring dimensions that lie together in a lane of a panel
    int row_offset; // i8: what the bytes of a row are above its integers

    bool (*supported)();
    // Called by a thread before its first and after its last tile; state: 64 bytes, aligned to 64. May be
    // null.
    void (*enter)(void* state);
    void (*leave)(void* state);

    // out [32, 32] = products of row group `group` of a with panel `panel` of b.
    void (*tile)(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out);

    // Bit c of out[r]: x = tile[r][c] + (column[c] + delta) > row_threshold[r]. True when any bit is set.
    bool (*above)(const float* tile, const float* column, float delta, const float* row_threshold, uint32_t* out);

    // The same for x > row_threshold[r] or x + row[r] > column_threshold[c].
    bool (*above_either)(const float* tile, const float* column, const float* row, float delta,
                         const float* row_threshold, const float* column_threshold, uint32_t* out);

    // row_most[r] = max over c of tile[r][c] + column[c]; column_most[c] = max over r of tile[r][c] + row[r].
    void (*maxima)(const float* tile, const float* column, const float* row, float* row_most, float* column_most);

    // row_count[r] += bits in masks[r]; column_count[c] += masks with bit c.
    void (*count)(const uint32_t* masks, int32_t* row_count, int32_t* column_count);

    // out[p] = product of keys[i[p]] and keys[j[p]] in float32, summed in any order; keys are ld apart.
    void (*dots)(const float* keys, int64_t ld, const int32_t* i, const int32_t* j, int64_t n, float* out);

    // The same in double, for one pair.
    double (*dot_double)(const float* a, const float* b, int64_t ld);

    // unit [d] = key / |key| as head.hpp defines it. False, and unit undefined, where the fast way is not
    // sure of the last bit or the key has no direction.
    bool (*normalize)(const float* key, int64_t d, float* unit);

    void (*pack)(PackRow& row);
};

namespace {
// For dots(): keys come from a table larger than the caches, in no order.
inline __attribute__((always_inline)) void prefetch_pair(const float* keys, int64_t ld, const int32_t* i,
                                                         const int32_t* j, int64_t p, int64_t n) {
    constexpr int64_t ahead = 8;
    if (p + ahead < n) {
        for (int64_t k = 0; k < ld; k += 16) {
            __builtin_prefetch(keys + i[p + ahead] * ld + k);
            __builtin_prefetch(keys + j[p + ahead] * ld + k);
        }
    }
}
} // namespace

// Kernels built into this library, best first; which of them run here is for supported() to say.
extern const Kernels* const all_kernels[];
extern const int n_all_kernels;

// The kernels in use: the best supported ones, or those of the TWINKV_ISA environment variable, or those set
// last.
const Kernels& active_kernels();

} // namespace twinkv
