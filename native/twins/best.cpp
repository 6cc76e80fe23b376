// Eq. 4 (best_twin): the largest similarity of every token with the retained set. Only retained columns are
// touched, and of two retained tokens each pair once.
#include "twins/sweep.hpp"
#include "twins/twins.hpp"

#include <algorithm>
#include <limits>
#include <mutex>

namespace twinkv {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// What is known of every token's best twin so far, shared by all threads; a thread works on a copy of the
// part its task needs. A copy that is behind costs some work, never a result: only true similarities get in.
struct Shared {
    std::mutex mutex;
    std::vector<float> rows, columns; // the same vector's place in the symmetric case is `rows` alone
};

class Maximum {
  public:
    // symmetric: rows and columns are one set, and a pair counts for both ends
    Maximum(const Problem& problem, bool symmetric, float enough, Shared& shared)
        : problem_(problem), symmetric_(symmetric), enough_(enough), dot_bound_(dot_bound(problem.head.d)),
          square_(problem.center.square), shared_(shared) {}

    void begin(const Task& task) {
        first_row_ = task.group_begin * tile_size;
        first_column_ = task.panel_begin * tile_size;
        const size_t rows = size_t(task.group_end * tile_size - first_row_);
        const size_t columns = size_t(task.panel_end * tile_size - first_column_);
        {
            std::lock_guard<std::mutex> lock(shared_.mutex);
            row_best_.assign(shared_.rows.begin() + first_row_,
                             shared_.rows.begin() + first_row_ + int64_t(rows));
            if (symmetric_) {
                column_best_.assign(shared_.rows.begin() + first_column_,
                                    shared_.rows.begin() + first_column_ + int64_t(columns));
            }
        }
        row_threshold_.resize(rows);
        for (size_t r = 0; r < rows; ++r) {
            row_threshold_[r] = threshold(row_best_[r]) - problem_.rows.shift.data()[first_row_ + int64_t(r)];
        }
        column_threshold_.resize(symmetric_ ? columns : 0);
        for (size_t c = 0; c < column_threshold_.size(); ++c) {
            column_threshold_[c] = threshold(column_best_[c]);
        }
    }

    void end(const Task&) {
        std::lock_guard<std::mutex> lock(shared_.mutex);
        raise(row_best_, shared_.rows.data() + first_row_);
        raise(column_best_, shared_.rows.data() + first_column_);
    }

    void finish() {}

    bool open(int64_t group) const {
        if (enough_ == infinity || symmetric_) {
            return true;
        }
        const float* threshold = row_threshold_.data() + group * tile_size - first_row_;
        return std::any_of(threshold, threshold + tile_size, [](float t) { return t != infinity; });
    }

    void process(const Tile& tile) {
        const int64_t row0 = tile.group * tile_size - first_row_,
                      column0 = tile.panel * tile_size - first_column_;
        float by_row[tile_size], by_column[tile_size];
        for (int64_t r = 0; r < tile_size; ++r) {
            by_row[r] = row_threshold_[size_t(row0 + r)] - tile.error;
        }
        for (int64_t c = 0; symmetric_ && c < tile_size; ++c) {
            by_column[c] = column_threshold_[size_t(column0 + c)] - tile.error;
        }
        const float* column = problem_.columns.shift.data() + tile.panel * tile_size;
        const float* row = problem_.rows.shift.data() + tile.group * tile_size;
        uint32_t masks[tile_size];
        const bool any = symmetric_
                             ? problem_.kernels.above_either(tile.sim, column, row, by_row, by_column, masks)
                             : problem_.kernels.above(tile.sim, column, by_row, masks);
        if (!any) {
            return;
        }
        for (int64_t r = 0; r < tile_size; ++r) {
            for (uint32_t open = masks[r] & (tile.partial ? tile.allowed[r] : ~uint32_t(0)); open != 0;
                 open &= open - 1) {
                look(row0 + r, column0 + __builtin_ctz(open));
            }
        }
    }

  private:
    // Of the approximate similarity less its shifts, above which a pair could be better than `best`.
    float threshold(float best) const { return best >= enough_ ? infinity : float(double(best) - square_); }

    static void raise(const std::vector<float>& mine, float* shared) {
        for (size_t i = 0; i < mine.size(); ++i) {
            shared[i] = std::max(shared[i], mine[i]);
        }
    }

    void look(int64_t r, int64_t c) {
        const Head& head = problem_.head;
        const int32_t i = problem_.rows.token[size_t(first_row_ + r)];
        const int32_t j = problem_.columns.token[size_t(first_column_ + c)];
        const float most = problem_.kernels.dot(head.row(i), head.row(j), head.ld) + dot_bound_;
        const bool row = most > row_best_[size_t(r)];
        const bool column = symmetric_ && most > column_best_[size_t(c)];
        if (!row && !column) {
            return;
        }
        const float sim = exact_similarity(head, problem_.kernels, i, j);
        if (sim > row_best_[size_t(r)]) {
            row_best_[size_t(r)] = sim;
            row_threshold_[size_t(r)] = threshold(sim) - problem_.rows.shift.data()[first_row_ + r];
        }
        if (symmetric_ && sim > column_best_[size_t(c)]) {
            column_best_[size_t(c)] = sim;
            column_threshold_[size_t(c)] = threshold(sim);
        }
    }

    const Problem& problem_;
    bool symmetric_;
    float enough_, dot_bound_;
    double square_;
    Shared& shared_;
    int64_t first_row_ = 0, first_column_ = 0;
    std::vector<float> row_best_, column_best_;           // as known to this thread
    std::vector<float> row_threshold_, column_threshold_; // what a tile's values are held against
};

std::vector<float> run(const Context& context, const Packed& rows, const Packed& columns, bool symmetric,
                       float enough) {
    const Problem problem{
        context.head,
        context.kernels,
        context.center,
        rows,
        columns,
        symmetric ? triangle_bands(context.head, rows) : window_bands(context.head, rows, columns),
        symmetric,
        {context.head, rows.operand, context.center}};
    Shared shared;
    shared.rows.assign(size_t(rows.groups * tile_size), -1.0f);
    sweep(problem, context.n_threads, [&] { return Maximum(problem, symmetric, enough, shared); });
    return std::move(shared.rows);
}

} // namespace

void best_twin(const Context& context, const uint8_t* retained, float enough, float enough_retained,
               float* best) {
    const Head& head = context.head;
    std::vector<int32_t> kept, rest;
    for (int64_t i = 0; i < head.n; ++i) {
        (retained[i] ? kept : rest).push_back(int32_t(i));
    }
    const auto packed = [&](std::vector<int32_t>& token, Side side) {
        return pack(head, context.kernels, context.center, std::move(token), side, context.n_threads);
    };
    const Packed columns = packed(kept, Side::both), rows = packed(rest, Side::rows);
    const auto of_kept = run(context, columns, columns, true, enough_retained);
    const auto of_rest = run(context, rows, columns, false, enough);
    for (int64_t c = 0; c < columns.size(); ++c) {
        best[columns.token[size_t(c)]] = of_kept[size_t(c)];
    }
    for (int64_t r = 0; r < rows.size(); ++r) {
        best[rows.token[size_t(r)]] = of_rest[size_t(r)];
    }
}

} // namespace twinkv
