#include "twins/sweep.hpp"

#include <algorithm>

namespace twinkv {
namespace {

// First index of a set in order of position whose position is at least p. Rows usually come in order too, so
// the search goes on from where the last one ended.
int32_t first_at(const Head& head, const std::vector<int32_t>& token, int32_t hint, int64_t p) {
    const auto position = [&](int32_t c) { return int64_t(head.pos[size_t(token[size_t(c)])]); };
    if (hint > 0 && position(hint - 1) >= p) {
        hint = 0;
    }
    constexpr int32_t near = 64;
    for (int32_t step = 0; step < near; ++step, ++hint) {
        if (hint == int32_t(token.size()) || position(hint) >= p) {
            return hint;
        }
    }
    const auto before = [&](int32_t t, int64_t q) { return int64_t(head.pos[size_t(t)]) < q; };
    return int32_t(std::lower_bound(token.begin() + hint, token.end(), p, before) - token.begin());
}

} // namespace

std::vector<Band> window_bands(const Head& head, const std::vector<int32_t>& rows,
                               const std::vector<int32_t>& columns) {
    std::vector<Band> out;
    out.reserve(rows.size());
    Band band{0, 0};
    for (int32_t token : rows) {
        const int64_t p = head.pos[size_t(token)];
        band.begin = first_at(head, columns, band.begin, p - head.window);
        band.end = first_at(head, columns, band.end, p + head.window + 1);
        out.push_back(band);
    }
    return out;
}

std::vector<Band> triangle_bands(const Head& head, const Packed& set) {
    std::vector<Band> out;
    out.reserve(set.token.size());
    int32_t end = 0;
    for (int32_t token : set.token) {
        const int64_t last = int64_t(head.pos[size_t(token)]) + head.window;
        while (end < int32_t(set.token.size()) && head.pos[size_t(set.token[size_t(end)])] <= last) {
            ++end;
        }
        out.push_back({0, end});
    }
    return out;
}

Problem::Problem(const Head& head, const Kernels& kernels, const Center& center, const Packed& rows,
                 const Packed& columns, std::vector<Band> bands, bool triangle)
    : head(head), kernels(kernels), center(center), rows(rows), columns(columns), bands(std::move(bands)),
      triangle(triangle), bound(head, rows.operand, center), hulls(size_t(rows.groups)) {
    for (int64_t g = 0; g < rows.groups; ++g) {
        const auto first = this->bands.begin() + g * tile_size;
        const auto last = this->bands.begin() + std::min((g + 1) * tile_size, rows.size());
        Band& hull = hulls[size_t(g)];
        hull = *first;
        for (auto band = first; band != last; ++band) {
            hull.begin = std::min(hull.begin, band->begin);
            hull.end = std::max(hull.end, band->end);
        }
    }
}

namespace {

void add_tasks(const Problem& problem, std::vector<Task>& out) {
    // row groups that stay in the first-level cache while panels pass by, and columns whose results stay in
    // the second
    constexpr int64_t row_bytes = 16 << 10, panels_at_once = 64;
    const int64_t element = problem.kernels.filter == Filter::f32 ? 4 : problem.kernels.filter == Filter::bf16 ? 2 : 1;
    const int64_t group_bytes = tile_size * problem.rows.operand.k * element;
    const int64_t groups_at_once = std::clamp<int64_t>(row_bytes / group_bytes, 1, 4);
    const int64_t blocks = (problem.rows.groups + groups_at_once - 1) / groups_at_once;
    // from the last rows to the first: in a triangle, columns too meet their neighbours first
    for (int64_t block = blocks - 1; block >= 0; --block) {
        const int64_t g = block * groups_at_once;
        const int64_t group_end = std::min(g + groups_at_once, problem.rows.groups);
        const Band& band = problem.bands[size_t(g * tile_size)];
        const int64_t near = (problem.triangle ? band.end : band.begin) / tile_size;
        const size_t first = out.size();
        for (int64_t p = problem.triangle ? near : 0; p < problem.columns.groups; p += panels_at_once) {
            const int64_t end = std::min(p + panels_at_once, problem.columns.groups);
            out.push_back({&problem, g, group_end, p, end, std::clamp(near, p, end)});
        }
        std::stable_sort(out.begin() + int64_t(first), out.end(), [&](const Task& a, const Task& b) {
            return std::abs(a.panel_near - near) < std::abs(b.panel_near - near);
        });
    }
}

} // namespace

std::vector<Task> make_tasks(const std::vector<const Problem*>& problems) {
    std::vector<Task> out;
    for (const Problem* problem : problems) {
        add_tasks(*problem, out);
    }
    return out;
}

bool clip_to_bands(const Problem& problem, Tile& tile) {
    const int64_t first = tile.panel * tile_size, row = tile.group * tile_size;
    const int64_t rows = std::min(tile_size, problem.rows.size() - row);
    const Band* band = problem.bands.data() + row;
    uint32_t any = 0;
    const auto bits_below = [&](int32_t end) { // columns of the panel before `end`
        const int64_t count = std::clamp<int64_t>(end - first, 0, tile_size);
        return uint32_t((uint64_t(1) << count) - 1);
    };
    for (int64_t r = 0; r < tile_size; ++r) {
        tile.allowed[r] = r < rows ? ~(bits_below(band[r].end) & ~bits_below(band[r].begin)) : 0;
        any |= tile.allowed[r];
    }
    return any != 0;
}

int useful_threads(const std::vector<const Problem*>& problems, int n_threads) {
    double products = 0;
    for (const Problem* problem : problems) {
        products += double(problem->rows.size()) * double(problem->columns.size()) * double(problem->rows.operand.k) *
                    (problem->triangle ? 0.5 : 1);
    }
    constexpr double products_per_thread = 4e6; // tens of microseconds of work, as a thread takes to start
    return int(std::min<double>(resolve_threads(n_threads), 1 + products / products_per_thread));
}

} // namespace twinkv
