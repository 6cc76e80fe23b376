// The float32 filter: approximate similarities a tile at a time, and how far they can be from the true ones.
#pragma once

#include "twins/head.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace twinkv {

// A bound on |approximate - similarity()|, the approximate one summed in float32 in any order, fused or not
// (docs/kernels.md): gamma_d for the sum, half an ulp for the rounding of the true one, one for each
// threshold.
inline float f32_bound(int64_t d) {
    const double u = std::ldexp(1.0, -24);
    return float((double(d + 6) * u) / (1 - double(d) * u) * 1.01);
}

// Some tokens of a head, in order of position, transposed in panels of 16 so that a tile is 16 lanes wide.
struct Columns {
    static constexpr int64_t width = 16;
    std::vector<int32_t> index; // the tokens
    AlignedArray<float> panels; // [n_panels, d, 16], the last one padded with zeros

    int64_t size() const { return int64_t(index.size()); }
    int64_t n_panels() const { return (size() + width - 1) / width; }
};

inline Columns pack_columns(const Head& head, std::vector<int32_t> index) {
    Columns out;
    out.index = std::move(index);
    out.panels = AlignedArray<float>(size_t(out.n_panels() * head.d * Columns::width));
    std::fill_n(out.panels.data(), out.n_panels() * head.d * Columns::width, 0.0f);
    for (int64_t c = 0; c < out.size(); ++c) {
        const float* row = head.row(out.index[size_t(c)]);
        float* panel = out.panels.data() + (c / Columns::width) * head.d * Columns::width + c % Columns::width;
        for (int64_t k = 0; k < head.d; ++k) {
            panel[k * Columns::width] = row[k];
        }
    }
    return out;
}

// Columns that token i must not be compared with: those no further away than the window, itself among them.
struct Band {
    int64_t begin, end;
};

inline Band band_of(const Head& head, const Columns& columns, int64_t i) {
    const int64_t p = head.pos[size_t(i)];
    const auto before = [&](int32_t j, int64_t q) { return int64_t(head.pos[size_t(j)]) < q; };
    const auto first = columns.index.begin();
    return {std::lower_bound(first, columns.index.end(), p - head.window, before) - first,
            std::lower_bound(first, columns.index.end(), p + head.window + 1, before) - first};
}

// out [rows, 16]: approximate similarities of up to 4 tokens with one panel.
inline void tile_f32(const float* const* a, int64_t rows, const float* panel, int64_t d, float (*out)[16]) {
    for (int64_t r = 0; r < rows; ++r) {
        float acc[16] = {};
        for (int64_t k = 0; k < d; ++k) {
            const float x = a[r][k];
            for (int c = 0; c < 16; ++c) {
                acc[c] += x * panel[k * 16 + c];
            }
        }
        std::copy_n(acc, 16, out[r]);
    }
}

// f(row, column, approximate similarity) for every pair that may be compared.
template <class F>
void for_each_pair(const Head& head, const int32_t* rows, int64_t n_rows, const Columns& columns, F&& f) {
    constexpr int64_t height = 4;
    for (int64_t r0 = 0; r0 < n_rows; r0 += height) {
        const int64_t count = std::min(height, n_rows - r0);
        const float* a[height];
        Band band[height];
        for (int64_t r = 0; r < count; ++r) {
            a[r] = head.row(rows[r0 + r]);
            band[r] = band_of(head, columns, rows[r0 + r]);
        }
        for (int64_t p = 0; p < columns.n_panels(); ++p) {
            float tile[height][16];
            tile_f32(a, count, columns.panels.data() + p * head.d * Columns::width, head.d, tile);
            const int64_t end = std::min(columns.size(), (p + 1) * Columns::width);
            for (int64_t r = 0; r < count; ++r) {
                for (int64_t c = p * Columns::width; c < end; ++c) {
                    if (c < band[r].begin || c >= band[r].end) {
                        f(r0 + r, c, tile[r][c - p * Columns::width]);
                    }
                }
            }
        }
    }
}

} // namespace twinkv
