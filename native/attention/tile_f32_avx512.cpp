#define TWINKV_LANES 16
#define TWINKV_ROWS 8
#include "attention/tile_f32.inl"

twinkv::BlockKernel twinkv::block_kernel_avx512() {
    return {"avx512", {rows, width}, attend_block};
}
