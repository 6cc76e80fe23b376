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

// What the error bound has to know of a token; each is at least what it says.
struct Lengths {
    float norm = 0;  // |e|
    float row = 0;   // |e - the rows' value of it|
    float panel = 0; // |e - the panels' value of it|
};

struct Packed {
    std::vector<int32_t> token; // [n], in order of position unless it is only used as rows
    int64_t groups = 0;         // of 32
    Operand operand{};
    AlignedArray<float> shift;          // [32 groups]: c . e_i; minus infinity for padding and keys without direction
    std::vector<Lengths> lengths;       // [32 groups]
    std::vector<Lengths> group_lengths; // [groups]: the largest of each kind in a group

    int64_t size() const { return int64_t(token.size()); }

    AlignedArray<uint8_t> rows, panels;
    AlignedArray<float> row_scale, panel_scale;
    AlignedArray<int32_t> panel_start;
};

enum class Side { rows, panels, both };

Packed pack(const Head& head, const Kernels& kernels, const Center& center, std::vector<int32_t> token, Side side,
            int n_threads);

// How far tile values, shifts and thresholds of a row group and a panel can be from the true similarity,
// together (docs/kernels.md has the proof). u is the unit roundoff of float32.
class ErrorBound {
  public:
    ErrorBound(const Head& head, const Operand& operand, const Center& center);

    float operator()(const Lengths& a, const Lengths& b) const {
        const float packed = a.norm + a.row; // at least the length of the packed row
        const float rounding = a.row * b.norm + packed * b.panel;
        const float summing = gamma_ * packed * (b.norm + b.panel);
        return (rounding + summing + slack_ * (1 + a.norm) * (1 + b.norm)) * 1.001f;
    }

  private:
    float gamma_, slack_;
};

// A bound on |dot() - similarity()| for any order of summation.
float dot_bound(int64_t d);

// similarity() at the speed of dot_double(): a sum in double in another order is off by 1e-14 at most, which
// matters only next to a rounding boundary of float32, where the sum is taken again in the stated order.
float exact_similarity(const Head& head, const Kernels& kernels, int32_t i, int32_t j);

} // namespace twinkv
