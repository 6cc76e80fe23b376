// Tokens in the low precision of the kernels, with what is needed to bound the error of every similarity.
#pragma once

#include "twins/head.hpp"
#include "twins/kernels.hpp"

#include <vector>

namespace twinkv {

// The similarities of a head share a large part: keys point around a common mean c. With e = khat - c,
//   khat_i . khat_j = e_i . e_j + c . e_i + c . e_j + c . c
// and only e_i . e_j, whose error is in proportion to |e|^2, is left to low precision. Any c is right.
struct Center {
    AlignedArray<float> value; // [ld]
    double square = 0;         // c . c
    bool used = false;         // float32 needs none
};

Center center_of(const Head& head, const Kernels& kernels);

struct Packed {
    std::vector<int32_t> token; // [n], in order of position unless it is only used as rows
    int64_t groups = 0;         // of 32
    Operand operand{};
    AlignedArray<float> shift; // [32 groups]: c . e_i; minus infinity for padding and keys without direction
    std::vector<float> norm;   // [groups]: at least |e_i| of each of its tokens
    std::vector<float> row_residual;   // [groups]: at least |e_i - rows' value of it|
    std::vector<float> panel_residual; // [groups]

    int64_t size() const { return int64_t(token.size()); }

    AlignedArray<uint8_t> rows, panels;
    AlignedArray<float> row_scale, panel_scale;
    AlignedArray<int32_t> panel_start;
};

enum class Side { rows, panels, both };

Packed pack(const Head& head, const Kernels& kernels, const Center& center, std::vector<int32_t> token,
            Side side, int n_threads);

// How far tile values, shifts and thresholds of a row group and a panel can be from the true similarity,
// together (docs/kernels.md has the proof). u is the unit roundoff of float32.
class ErrorBound {
  public:
    ErrorBound(const Head& head, const Operand& operand, const Center& center);

    float operator()(const Packed& a, int64_t group, const Packed& b, int64_t panel) const {
        const double ea = a.norm[size_t(group)], eb = b.norm[size_t(panel)];
        const double ra = a.row_residual[size_t(group)], rb = b.panel_residual[size_t(panel)];
        const double rounding = ra * eb + (ea + ra) * rb;      // of the packed values
        const double summing = gamma_ * (ea + ra) * (eb + rb); // of the tile's float32 sums
        return float((rounding + summing + slack_ * (1 + ea) * (1 + eb)) * 1.001);
    }

  private:
    double gamma_, slack_;
};

// A bound on |dot() - similarity()| for any order of summation.
float dot_bound(int64_t d);

// similarity() at the speed of dot_double(): a sum in double in another order is off by 1e-14 at most, which
// matters only next to a rounding boundary of float32, where the sum is taken again in the stated order.
float exact_similarity(const Head& head, const Kernels& kernels, int32_t i, int32_t j);

} // namespace twinkv
