#include "twins/pack.hpp"

#include "core/parallel.hpp"

#include <cmath>
#include <limits>

namespace twinkv {
namespace {

const double unit_roundoff = std::ldexp(1.0, -24);

int64_t element_size(Filter filter) {
    return filter == Filter::f32 ? 4 : filter == Filter::bf16 ? 2 : 1;
}

// A length from its square, a little more than computed: rounding must not make a bound too small.
float length(float square, float of) {
    return std::sqrt(square) * 1.001f + 1e-6f * of + 1e-30f;
}

// Where element i of the packed set goes.
PackRow place(const Packed& out, const Kernels& kernels, int64_t i, bool rows, bool panels) {
    const int64_t k = out.operand.k, group = i / tile_size, lane = i % tile_size;
    const int64_t element = element_size(kernels.filter);
    PackRow p{};
    p.k = k;
    p.row = rows ? const_cast<uint8_t*>(out.rows.data()) + i * k * element : nullptr;
    p.panel = panels ? const_cast<uint8_t*>(out.panels.data()) + group * tile_size * k * element +
                           lane * kernels.k_pack * element
                     : nullptr;
    return p;
}

void pack_group(const Head& head, const Kernels& kernels, const Center& center, Packed& out, int64_t group, bool rows,
                bool panels) {
    const AlignedArray<float> scratch(size_t(2 * ((out.operand.k + 15) / 16 * 16)));
    const bool exact = kernels.filter == Filter::f32; // nothing is rounded
    Lengths most;
    for (int64_t i = group * tile_size; i < (group + 1) * tile_size; ++i) {
        const bool valid = i < out.size() && head.valid[size_t(out.token[size_t(i)])];
        PackRow p = place(out, kernels, i, rows, panels);
        p.unit = valid ? head.row(out.token[size_t(i)]) : center.value.data(); // e = 0
        p.center = center.value.data();
        p.ld = head.ld;
        p.scratch = const_cast<float*>(scratch.data());
        kernels.pack(p);
        out.shift.data()[i] = valid ? p.shift : -std::numeric_limits<float>::infinity();
        if (kernels.filter == Filter::i8) {
            out.row_scale.data()[i] = p.row_scale;
            out.panel_scale.data()[i] = p.panel_scale;
            out.panel_start.data()[i] = -kernels.row_offset * p.panel_sum;
        }
        Lengths& token = out.lengths[size_t(i)];
        token.norm = length(p.square, 0);
        token.row = exact ? 0 : length(p.row_left, token.norm);
        token.panel = exact ? 0 : length(p.panel_left, token.norm);
        most.norm = std::max(most.norm, token.norm);
        most.row = std::max(most.row, token.row);
        most.panel = std::max(most.panel, token.panel);
    }
    out.group_lengths[size_t(group)] = most;
}

} // namespace

Center center_of(const Head& head, const Kernels& kernels) {
    Center out;
    out.value = AlignedArray<float>(size_t(head.ld));
    std::fill_n(out.value.data(), head.ld, 0.0f);
    out.used = kernels.filter != Filter::f32 && head.n > 0;
    if (!out.used) {
        return out;
    }
    const int64_t step = std::max<int64_t>(1, head.n / 512); // a sample is as good: any center is right
    int64_t count = 0;
    for (int64_t i = 0; i < head.n; i += step) {
        count += head.valid[size_t(i)];
        for (int64_t c = 0; c < head.ld; ++c) {
            out.value.data()[c] += head.row(i)[c];
        }
    }
    for (int64_t c = 0; c < head.ld; ++c) {
        out.value.data()[c] /= float(std::max<int64_t>(count, 1));
        out.square += double(out.value.data()[c]) * double(out.value.data()[c]);
    }
    return out;
}

Packed pack(const Head& head, const Kernels& kernels, const Center& center, std::vector<int32_t> token, Side side,
            int n_threads) {
    Packed out;
    out.token = std::move(token);
    out.groups = (out.size() + tile_size - 1) / tile_size;
    const bool rows = side != Side::panels, panels = side != Side::rows;
    const int64_t k = (head.d + kernels.k_step - 1) / kernels.k_step * kernels.k_step;
    const size_t n = size_t(out.groups * tile_size), bytes = n * size_t(k * element_size(kernels.filter));
    out.rows = AlignedArray<uint8_t>(rows ? bytes : 0);
    out.panels = AlignedArray<uint8_t>(panels ? bytes : 0);
    out.shift = AlignedArray<float>(n);
    if (kernels.filter == Filter::i8) {
        out.row_scale = AlignedArray<float>(n);
        out.panel_scale = AlignedArray<float>(n);
        out.panel_start = AlignedArray<int32_t>(n);
    }
    out.lengths.resize(n);
    out.group_lengths.resize(size_t(out.groups));
    out.operand = {
        k, out.rows.data(), out.panels.data(), out.row_scale.data(), out.panel_scale.data(), out.panel_start.data()};
    parallel_for(out.groups, n_threads, [&](int64_t g) { pack_group(head, kernels, center, out, g, rows, panels); });
    return out;
}

ErrorBound::ErrorBound(const Head& head, const Operand& operand, const Center& center) {
    const double u = unit_roundoff, k = double(operand.k);
    gamma_ = float((k + 8) * u / (1 - (k + 8) * u));
    slack_ = float(((center.used ? double(head.d) : 0) + 32) * u);
}

float dot_bound(int64_t d) {
    const double u = unit_roundoff, k = double(d + 16);
    return float((k * u / (1 - k * u) + 4 * u) * 1.01);
}

float exact_similarity(const Head& head, const Kernels& kernels, int32_t i, int32_t j) {
    const double sum = kernels.dot_double(head.row(i), head.row(j), head.ld);
    const double reach = double(head.ld + 16) * 4 * std::numeric_limits<double>::epsilon();
    const float low = float(sum - reach), high = float(sum + reach);
    return low == high ? low : similarity(head.row(i), head.row(j), head.d);
}

} // namespace twinkv
