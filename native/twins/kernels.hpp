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

struct Kernels {
    const char* isa;
    Filter filter;
    int64_t k_step; // dimensions come in multiples of this
    int64_t k_pack; // neighbouring dimensions that lie together in a lane of a panel
    int row_levels; // i8: rows are stored as integers in [-row_levels, row_levels] + row_offset
    int row_offset;

    bool (*supported)();
    // Called by a thread before its first and after its last tile; state: 64 bytes, aligned to 64. May be
    // null.
    void (*enter)(void* state);
    void (*leave)(void* state);

    // out [32, 32] = products of row group `group` of a with panel `panel` of b.
    void (*tile)(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out);

    // Bit c of out[r]: tile[r][c] + column[c] > row_threshold[r]. True when any bit is set.
    bool (*above)(const float* tile, const float* column, const float* row_threshold, uint32_t* out);

    // Bit c of out[r]: tile[r][c] + column[c] > row_threshold[r] or tile[r][c] + column[c] + row[r] >
    // column_threshold[c]. True when any bit is set.
    bool (*above_either)(const float* tile, const float* column, const float* row, const float* row_threshold,
                         const float* column_threshold, uint32_t* out);

    // row_count[r] += bits in masks[r]; column_count[c] += masks with bit c (unless null).
    void (*count)(const uint32_t* masks, int32_t* row_count, int32_t* column_count);

    // Products of two keys [ld], ld a multiple of 16, in float32 and in double, summed in any order.
    float (*dot)(const float* a, const float* b, int64_t ld);
    double (*dot_double)(const float* a, const float* b, int64_t ld);
};

// Kernels built into this library, best first; which of them run here is for supported() to say.
extern const Kernels* const all_kernels[];
extern const int n_all_kernels;

// The kernels in use: the best supported ones, or those of the TWINKV_ISA environment variable, or those set
// last.
const Kernels& active_kernels();

} // namespace twinkv
