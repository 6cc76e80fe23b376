// Softmax over keys for a block of query rows, and what each key receives: the inner loop of the attention sums.
#pragma once

#include <cstdint>

namespace twinkv {

// How an instruction set wants its operands laid out.
struct BlockShape {
    int64_t rows;  // query rows that are multiplied at once
    int64_t width; // keys of a panel
};

// A block of query rows of one KV head against all keys they may see.
struct Block {
    const float* queries; // [n_rows / rows, d, rows], scaled as attention scales them; the last group padded with zeros
    const int32_t* limits; // [n_rows] keys that a row sees: those before its limit; ascending
    const float* sinks;    // [n_rows] logits that take part in the softmax without a key, or null
    int64_t n_rows, d;
    const float* panels;   // keys, [n_panels, d, width]
    const uint8_t* hidden; // [n_hidden] 1 where no row sees a key, or null
    int64_t n_hidden;
    float softcap;   // logits are softcap * tanh(logit / softcap); 0: they are not
    float* scratch;  // block_scratch(n_rows, limits[n_rows - 1]) floats
    float* received; // [limits[n_rows - 1] rounded up to block_tile] attention of all rows is added here
};

constexpr int64_t block_tile = 256; // keys whose logits are in the first-level cache together
constexpr int64_t block_rows = 48;  // rows of a block at most: what a tile of keys is used for while it is cached

// Floats of scratch for a block.
int64_t block_scratch(int64_t n_rows, int64_t n_keys);

// The kernel in use: the best of this processor, unless twinkv_set_attention_isa() says otherwise.
BlockShape block_shape();
void attend(const Block& block);

struct BlockKernel {
    const char* isa;
    BlockShape shape;
    void (*attend)(const Block&);
};
BlockKernel block_kernel_portable();
BlockKernel block_kernel_avx2();
BlockKernel block_kernel_avx512();

} // namespace twinkv
