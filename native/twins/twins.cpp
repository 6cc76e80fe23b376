#include "twins/twins.hpp"

#include "core/parallel.hpp"
#include "core/status.hpp"
#include "twins/filter_f32.hpp"

#include <cmath>
#include <numeric>

namespace twinkv {
namespace {

constexpr int64_t rows_per_task = 64;

std::vector<int32_t> iota(int64_t n) {
    std::vector<int32_t> out(size_t(n), 0);
    std::iota(out.begin(), out.end(), 0);
    return out;
}

// Work of f(first row, number of rows) over all rows, in tasks of their own.
template <class F> void for_row_tasks(int64_t n_rows, int n_threads, F&& f) {
    parallel_for((n_rows + rows_per_task - 1) / rows_per_task, n_threads, [&](int64_t task) {
        f(task * rows_per_task, std::min(rows_per_task, n_rows - task * rows_per_task));
    });
}

} // namespace

std::vector<int32_t> twin_counts(const Head& head, float tau, int n_threads) {
    const auto rows = iota(head.n);
    const Columns columns = pack_columns(head, rows);
    const float bound = f32_bound(head.d);
    std::vector<int32_t> counts(size_t(head.n), 0);
    for_row_tasks(head.n, n_threads, [&](int64_t first, int64_t count) {
        for_each_pair(head, rows.data() + first, count, columns, [&](int64_t r, int64_t j, float approx) {
            const int64_t i = first + r;
            if (approx <= tau - bound || !head.valid[size_t(i)] || !head.valid[size_t(j)]) {
                return;
            }
            if (approx > tau + bound || similarity(head.row(i), head.row(j), head.d) > tau) {
                ++counts[size_t(i)];
            }
        });
    });
    return counts;
}

std::vector<float> best_twin(const Head& head, const uint8_t* retained, int n_threads) {
    const auto rows = iota(head.n);
    std::vector<int32_t> kept;
    for (int64_t j = 0; j < head.n; ++j) {
        if (retained[j] && head.valid[size_t(j)]) {
            kept.push_back(int32_t(j));
        }
    }
    const Columns columns = pack_columns(head, std::move(kept));
    const float bound = f32_bound(head.d);
    std::vector<float> best(size_t(head.n), -1.0f);
    for_row_tasks(head.n, n_threads, [&](int64_t first, int64_t count) {
        for_each_pair(head, rows.data() + first, count, columns, [&](int64_t r, int64_t c, float approx) {
            const int64_t i = first + r;
            if (approx + bound > best[size_t(i)] && head.valid[size_t(i)]) {
                best[size_t(i)] =
                    std::max(best[size_t(i)], similarity(head.row(i), head.row(columns.index[size_t(c)]), head.d));
            }
        });
    });
    return best;
}

std::vector<uint8_t> twin_rows(const Head& head, const std::vector<int32_t>& rows, const std::vector<int32_t>& columns,
                               float tau, int n_threads) {
    const Columns packed = pack_columns(head, columns);
    const float bound = f32_bound(head.d);
    std::vector<uint8_t> bits(rows.size() * columns.size(), 0);
    for_row_tasks(int64_t(rows.size()), n_threads, [&](int64_t first, int64_t count) {
        for_each_pair(head, rows.data() + first, count, packed, [&](int64_t r, int64_t c, float approx) {
            const int32_t i = rows[size_t(first + r)], j = columns[size_t(c)];
            if (approx < tau - bound || !head.valid[size_t(i)] || !head.valid[size_t(j)]) {
                return;
            }
            bits[size_t(first + r) * columns.size() + size_t(c)] =
                approx >= tau + bound || similarity(head.row(i), head.row(j), head.d) >= tau;
        });
    });
    return bits;
}

} // namespace twinkv
