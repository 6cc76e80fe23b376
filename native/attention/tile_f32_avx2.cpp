#define TWINKV_LANES 8
#define TWINKV_ROWS 6
#include "attention/tile_f32.inl"

twinkv::BlockKernel twinkv::block_kernel_avx2() {
    return {"avx2", {rows, width}, attend_block};
}
