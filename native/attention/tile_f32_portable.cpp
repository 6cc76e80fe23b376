#define TWINKV_LANES 4
#define TWINKV_ROWS 6
#include "attention/tile_f32.inl"

twinkv::BlockKernel twinkv::block_kernel_portable() {
    return {"portable", {rows, width}, attend_block};
}
