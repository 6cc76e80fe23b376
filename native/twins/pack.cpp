#include "twins/pack.hpp"

#include "core/parallel.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace twinkv {
namespace {

const double unit_roundoff = std::ldexp(1.0, -24);

int64_t element_size(Filter filter) {
    return filter == Filter::f32 ? 4 : filter == Filter::bf16 ? 2 : 1;
}

// Sums over lanes of 16, which compilers turn into vectors.
struct Lanes {
    float sum[16] = {};
    float total() const {
        float t = 0;
        for (float s : sum) {
            t += s;
        }
        return t;
    }
};

float sum_of_products(const float* a, const float* b, int64_t n) { // n a multiple of 16
    Lanes s;
    for (int64_t k = 0; k < n; k += 16) {
        for (int64_t c = 0; c < 16; ++c) {
            s.sum[c] += a[k + c] * b[k + c];
        }
    }
    return s.total();
}

float largest(const float* a, int64_t n) { // n a multiple of 16
    Lanes s;
    for (int64_t k = 0; k < n; k += 16) {
        for (int64_t c = 0; c < 16; ++c) {
            s.sum[c] = std::max(s.sum[c], std::fabs(a[k + c]));
        }
    }
    return *std::max_element(s.sum, s.sum + 16);
}

uint16_t to_bf16(float x) { // round to nearest, ties to even; x is finite
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// The length of what is left, a little more than computed: its own rounding must not make it too small.
float residual_norm(const float* left, int64_t n, float norm) {
    return std::sqrt(sum_of_products(left, left, n)) * 1.001f + 1e-6f * norm + 1e-30f;
}

// Buffers of one group of 32 tokens; k is a multiple of 16 here so that sums can run in lanes.
struct Group {
    int64_t k;
    std::vector<float> e, left;   // [k]
    std::vector<int8_t> integers; // [k]
    explicit Group(int64_t k) : k(k), e(size_t(k)), left(size_t(k)), integers(size_t(k)) {}

    // e rounded to integers * the scale returned; left = what that loses
    float quantize(int levels) {
        const float peak = largest(e.data(), k);
        const float scale = peak / float(levels), inverse = peak > 0 ? float(levels) / peak : 0;
        for (size_t c = 0; c < e.size(); ++c) {
            constexpr float magic = 12582912; // 1.5 * 2^23: adding it rounds to the nearest integer
            const float rounded = (e[c] * inverse + magic) - magic;
            integers[c] = int8_t(int(rounded));
            left[c] = e[c] - rounded * scale;
        }
        return scale;
    }
};

void pack_f32(Packed& out, Group& work, int64_t i, bool rows, bool panels) {
    const int64_t k = out.operand.k, group = i / tile_size, lane = i % tile_size;
    if (rows) {
        std::copy_n(work.e.data(), k, reinterpret_cast<float*>(out.rows.data()) + i * k);
    }
    float* panel = reinterpret_cast<float*>(out.panels.data()) + group * tile_size * k + lane;
    for (int64_t c = 0; panels && c < k; ++c) {
        panel[c * tile_size] = work.e[size_t(c)];
    }
}

void pack_bf16(Packed& out, Group& work, int64_t i, float norm, bool rows, bool panels) {
    const int64_t k = out.operand.k, group = i / tile_size, lane = i % tile_size;
    thread_local std::vector<uint16_t> short_row;
    short_row.assign(size_t(work.k), 0);
    for (size_t c = 0; c < work.e.size(); ++c) {
        short_row[c] = to_bf16(work.e[c]);
        work.left[c] = work.e[c] - from_bf16(short_row[c]);
    }
    const float residual = residual_norm(work.left.data(), work.k, norm);
    out.row_residual[size_t(group)] = std::max(out.row_residual[size_t(group)], residual);
    out.panel_residual[size_t(group)] = std::max(out.panel_residual[size_t(group)], residual);
    if (rows) {
        std::copy_n(short_row.data(), k, reinterpret_cast<uint16_t*>(out.rows.data()) + i * k);
    }
    uint8_t* panel = out.panels.data() + (group * tile_size * k + lane * 2) * 2;
    for (int64_t c = 0; panels && c < k; c += 2) {
        std::memcpy(panel + c * tile_size * 2, short_row.data() + c, 4);
    }
}

void pack_i8(Packed& out, const Kernels& kernels, Group& work, int64_t i, float norm, bool rows,
             bool panels) {
    const int64_t k = out.operand.k, group = i / tile_size, lane = i % tile_size;
    if (rows) {
        out.row_scale.data()[i] = work.quantize(kernels.row_levels);
        uint8_t* row = out.rows.data() + i * k;
        for (int64_t c = 0; c < k; ++c) {
            row[c] = uint8_t(work.integers[size_t(c)] + kernels.row_offset);
        }
        const float residual = residual_norm(work.left.data(), work.k, norm);
        out.row_residual[size_t(group)] = std::max(out.row_residual[size_t(group)], residual);
    }
    if (panels) {
        out.panel_scale.data()[i] = work.quantize(127);
        uint8_t* panel = out.panels.data() + group * tile_size * k + lane * 4;
        int32_t sum = 0;
        for (int64_t c = 0; c < k; c += 4) {
            std::memcpy(panel + c * tile_size, work.integers.data() + c, 4);
        }
        for (int64_t c = 0; c < k; ++c) {
            sum += work.integers[size_t(c)];
        }
        out.panel_start.data()[i] = -kernels.row_offset * sum;
        const float residual = residual_norm(work.left.data(), work.k, norm);
        out.panel_residual[size_t(group)] = std::max(out.panel_residual[size_t(group)], residual);
    }
}

void pack_group(const Head& head, const Kernels& kernels, const Center& center, Packed& out, int64_t group,
                bool rows, bool panels) {
    Group work((out.operand.k + 15) / 16 * 16);
    for (int64_t i = group * tile_size; i < (group + 1) * tile_size; ++i) {
        const bool valid = i < out.size() && head.valid[size_t(out.token[size_t(i)])];
        const float* row = valid ? head.row(out.token[size_t(i)]) : nullptr;
        for (int64_t c = 0; valid && c < head.ld; ++c) {
            work.e[size_t(c)] = row[c] - center.value.data()[c];
        }
        if (!valid) {
            std::fill(work.e.begin(), work.e.end(), 0.0f);
        }
        const float norm = std::sqrt(sum_of_products(work.e.data(), work.e.data(), work.k)) * 1.001f;
        out.norm[size_t(group)] = std::max(out.norm[size_t(group)], norm);
        out.shift.data()[i] = valid ? sum_of_products(work.e.data(), center.value.data(), head.ld)
                                    : -std::numeric_limits<float>::infinity();
        if (kernels.filter == Filter::f32) {
            pack_f32(out, work, i, rows, panels);
        } else if (kernels.filter == Filter::bf16) {
            pack_bf16(out, work, i, norm, rows, panels);
        } else {
            pack_i8(out, kernels, work, i, norm, rows, panels);
        }
    }
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

Packed pack(const Head& head, const Kernels& kernels, const Center& center, std::vector<int32_t> token,
            Side side, int n_threads) {
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
    out.norm.assign(size_t(out.groups), 0.0f);
    out.row_residual.assign(size_t(out.groups), 0.0f);
    out.panel_residual.assign(size_t(out.groups), 0.0f);
    out.operand = {k,
                   out.rows.data(),
                   out.panels.data(),
                   out.row_scale.data(),
                   out.panel_scale.data(),
                   out.panel_start.data()};
    parallel_for(out.groups, n_threads,
                 [&](int64_t g) { pack_group(head, kernels, center, out, g, rows, panels); });
    return out;
}

ErrorBound::ErrorBound(const Head& head, const Operand& operand, const Center& center) {
    const double u = unit_roundoff, k = double(operand.k);
    gamma_ = (k + 8) * u / (1 - (k + 8) * u);
    slack_ = ((center.used ? double(head.d) : 0) + 32) * u;
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
