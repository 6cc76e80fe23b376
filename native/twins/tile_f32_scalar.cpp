// Plain C++ for every processor; compilers make vectors of the inner loops.
#include "twins/portable.hpp"
#include "twins/rows.hpp"

namespace twinkv {
namespace {

bool always() {
    return true;
}

void tile(const Operand& a, int64_t group, const Operand& b, int64_t panel, float* out) {
    const float* rows = static_cast<const float*>(a.rows) + group * tile_size * a.k;
    const float* columns = static_cast<const float*>(b.panels) + panel * tile_size * b.k;
    for (int64_t r = 0; r < tile_size; r += 2) {
        for (int64_t c0 = 0; c0 < tile_size; c0 += 8) {
            float sums[2][8] = {};
            for (int64_t k = 0; k < a.k; ++k) {
                const float* lane = columns + k * tile_size + c0;
                const float x = rows[r * a.k + k], y = rows[(r + 1) * a.k + k];
                for (int64_t c = 0; c < 8; ++c) {
                    sums[0][c] += x * lane[c];
                    sums[1][c] += y * lane[c];
                }
            }
            for (int64_t c = 0; c < 8; ++c) {
                out[r * tile_size + c0 + c] = sums[0][c];
                out[(r + 1) * tile_size + c0 + c] = sums[1][c];
            }
        }
    }
}

} // namespace

extern const Kernels kernels_f32_scalar;
const Kernels kernels_f32_scalar = {
    "scalar",
    Filter::f32,
    1,
    1,
    0,
    always,
    nullptr,
    nullptr,
    tile,
    portable::above,
    portable::above_either,
    rows::maxima,
    portable::count,
    portable::dots,
    portable::dot<double>,
    rows::normalize,
    rows::pack_f32,
};

} // namespace twinkv
