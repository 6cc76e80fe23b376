// AMX in bf16: a 32 x 32 tile of similarities is the four accumulator tiles.
//
// The tile registers belong to the whole thread, and llama.cpp configures them once and relies on it: what we
// find is saved and put back. Configuring by intrinsic is miscompiled by GCC 12 (it sees only 8 of the 64
// bytes), hence asm.
#include "twins/avx512.hpp"
#include "twins/rows.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace twinkv {
namespace {

struct alignas(64) TileConfig {
    uint8_t bytes[64];
};

bool supported() {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("popcnt") || !__builtin_cpu_supports("amx-tile") ||
        !__builtin_cpu_supports("amx-bf16")) {
        return false;
    }
    constexpr long request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void enter(void* state) {
    TileConfig config = {};
    config.bytes[0] = 1; // palette
    for (int t = 0; t < 8; ++t) {
        config.bytes[16 + 2 * t] = 64; // bytes in a row
        config.bytes[48 + t] = 16;     // rows
    }
    asm volatile("sttilecfg %0" : "=m"(*static_cast<TileConfig*>(state)));
    asm volatile("ldtilecfg %0" : : "m"(config));
}

void leave(void* state) {
    asm volatile("ldtilecfg %0" : : "m"(*static_cast<TileConfig*>(state)));
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const auto* rows = static_cast<const uint16_t*>(a.rows) + group * tile_size * a.k;
    const auto* columns = static_cast<const uint16_t*>(b.panels) + panel * tile_size * b.k;
    const int64_t row_bytes = a.k * 2;
    constexpr int64_t lane_bytes = tile_size * 4; // 32 tokens, two dimensions each
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    // each operand is loaded while products that do not need it run; the last step loads the first again, for
    // nothing
    _tile_loadd(4, rows, row_bytes);
    _tile_loadd(6, columns, lane_bytes);
    for (int64_t k = 0; k < a.k; k += 32) {
        const int64_t next = k + 32 < a.k ? k + 32 : 0;
        _tile_loadd(5, rows + k + 16 * a.k, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, columns + k * tile_size + 32, lane_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, columns + next * tile_size, lane_bytes);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(4, rows + next, row_bytes);
        _tile_dpbf16ps(3, 5, 7);
    }
    constexpr int64_t out_bytes = tile_size * 4;
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 16 * tile_size, out_bytes);
    _tile_stored(3, out + 16 * tile_size + 16, out_bytes);
}

} // namespace

extern const Kernels kernels_bf16_amx;
const Kernels kernels_bf16_amx = {
    "amx",
    Filter::bf16,
    32,
    2,
    0,
    supported,
    enter,
    leave,
    tile,
    avx512::above,
    avx512::above_either,
    rows::maxima,
    avx512::count,
    avx512::dots,
    avx512::dot_double,
    rows::normalize,
    rows::pack_bf16,
};

} // namespace twinkv
