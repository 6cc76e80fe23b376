#include "attention/block.hpp"

namespace twinkv {
namespace {

BlockKernel choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        return block_kernel_avx512();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return block_kernel_avx2();
    }
#endif
    return block_kernel_portable();
}

const BlockKernel& kernel() {
    static const BlockKernel chosen = choose();
    return chosen;
}

} // namespace

int64_t block_scratch(int64_t n_rows, int64_t n_keys) {
    const int64_t tiles = (n_keys + block_tile - 1) / block_tile, shape = kernel().shape.rows;
    return tiles * ((n_rows + shape - 1) / shape * shape) * (block_tile + 2);
}

BlockShape block_shape() {
    return kernel().shape;
}

void attend(const Block& block) {
    kernel().attend(block);
}

} // namespace twinkv
