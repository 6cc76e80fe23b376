// Eq. 4 (best_twin): the largest similarity of every token with the retained set. Only retained columns are
// touched, and of two retained tokens each pair once.
//
// The sweep computes no similarity exactly. An approximate one, less its error bound, is a floor under a
// token's best; pairs whose approximate similarity plus error bound is above the floor are remembered, and at
// the end those still above it, a few per token, are computed exactly (docs/kernels.md).
#include "twins/sweep.hpp"
#include "twins/twins.hpp"

#include <algorithm>
#include <limits>
#include <mutex>

namespace twinkv {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// What all threads know of every row (and column, in the symmetric case, where they are the same). A thread
// works on a copy of the part its task needs: one that is behind costs some work, never a result.
struct Shared {
    std::mutex mutex;
    std::vector<float> floor; // the best is at least this
    std::vector<float> best;  // the largest exact similarity so far

    explicit Shared(const Packed& rows) : floor(size_t(rows.groups * tile_size), -1.0f), best(floor) {}
};

class Maximum {
  public:
    // symmetric: rows and columns are one set, and a pair counts for both ends
    Maximum(const Problem& problem, bool symmetric, float enough, Shared& shared)
        : problem_(problem), symmetric_(symmetric), enough_(enough), dot_bound_(dot_bound(problem.head.d)),
          square_(float(problem.center.square)), shared_(shared) {}

    void begin(const Task& task) {
        first_row_ = task.group_begin * tile_size;
        first_column_ = task.panel_begin * tile_size;
        const int64_t rows = task.group_end * tile_size - first_row_;
        const int64_t columns = symmetric_ ? task.panel_end * tile_size - first_column_ : 0;
        {
            std::lock_guard<std::mutex> lock(shared_.mutex);
            const auto floor = shared_.floor.begin();
            row_floor_.assign(floor + first_row_, floor + first_row_ + rows);
            column_floor_.assign(floor + first_column_, floor + first_column_ + columns);
        }
        row_threshold_.resize(size_t(rows));
        column_threshold_.resize(size_t(columns));
        for (int64_t r = 0; r < rows; ++r) {
            set_row_threshold(r);
        }
        for (int64_t c = 0; c < columns; ++c) {
            set_column_threshold(c);
        }
    }

    void end(const Task&) {
        std::lock_guard<std::mutex> lock(shared_.mutex);
        raise(row_floor_, shared_.floor.data() + first_row_);
        raise(column_floor_, shared_.floor.data() + first_column_);
        make_room();
    }

    void finish() {
        std::lock_guard<std::mutex> lock(shared_.mutex);
        settle();
    }

    bool open(int64_t group) const {
        if (enough_ == infinity || symmetric_) {
            return true;
        }
        const float* threshold = row_threshold_.data() + group * tile_size - first_row_;
        return std::any_of(threshold, threshold + tile_size, [](float t) { return t != infinity; });
    }

    void process(Tile& tile) {
        uint16_t place[tile_size * tile_size];
        int64_t count = candidates(tile, place);
        if (count > 2 * tile_size) {
            // Little was known, and nearly every pair looks good: floors for the whole tile first.
            raise_floors(tile);
            count = candidates(tile, place);
        }
        if (count > 0) {
            look(tile, place, count);
        }
        if (candidates_.size() > candidates_kept) {
            std::lock_guard<std::mutex> lock(shared_.mutex);
            raise(row_floor_, shared_.floor.data() + first_row_);
            raise(column_floor_, shared_.floor.data() + first_column_);
            make_room();
        }
    }

  private:
    struct Candidate {
        int32_t row, column;
        float ceiling; // the similarity is at most this
    };
    // bounds memory where very many pairs are equally similar, as copies of one key are
    static constexpr size_t candidates_kept = 1 << 16;

    // Thresholds are for approximate similarities less what a tile does not hold: shifts and c . c.
    void set_row_threshold(int64_t r) {
        const float floor = row_floor_[size_t(r)];
        row_threshold_[size_t(r)] =
            floor >= enough_ ? infinity : floor - square_ - problem_.rows.shift.data()[first_row_ + r];
    }
    void set_column_threshold(int64_t c) {
        const float floor = column_floor_[size_t(c)];
        column_threshold_[size_t(c)] = floor >= enough_ ? infinity : floor - square_;
    }

    static void raise(const std::vector<float>& mine, float* shared) {
        for (size_t i = 0; i < mine.size(); ++i) {
            shared[i] = std::max(shared[i], mine[i]);
        }
    }

    // Pairs of a tile that may be better than what is known, as places (32 * row + column); how many.
    int64_t candidates(const Tile& tile, uint16_t* place) const {
        uint32_t masks[tile_size];
        const int64_t row0 = tile.group * tile_size, column0 = tile.panel * tile_size;
        const float *row = problem_.rows.shift.data() + row0, *column = problem_.columns.shift.data() + column0;
        const float* by_row = row_threshold_.data() + row0 - first_row_;
        const float* by_column = column_threshold_.data() + column0 - first_column_;
        const bool any =
            symmetric_ ? problem_.kernels.above_either(tile.sim, column, row, tile.error, by_row, by_column, masks)
                       : problem_.kernels.above(tile.sim, column, tile.error, by_row, masks);
        if (!any) {
            return 0;
        }
        for (int64_t r = 0; tile.partial && r < tile_size; ++r) {
            masks[r] &= tile.allowed[r];
        }
        return list_bits(masks, place, tile_size * tile_size);
    }

    void raise_floors(Tile& tile) {
        const int64_t row0 = tile.group * tile_size - first_row_, column0 = tile.panel * tile_size - first_column_;
        const float* column = problem_.columns.shift.data() + tile.panel * tile_size;
        const float* row = problem_.rows.shift.data() + tile.group * tile_size;
        for (int64_t r = 0; tile.partial && r < tile_size; ++r) {
            for (uint32_t hidden = ~tile.allowed[r]; hidden != 0; hidden &= hidden - 1) {
                tile.sim[r * tile_size + __builtin_ctz(hidden)] = -infinity;
            }
        }
        float row_most[tile_size], column_most[tile_size];
        problem_.kernels.maxima(tile.sim, column, row, row_most, column_most);
        for (int64_t r = 0; r < tile_size; ++r) {
            const float floor = row_most[r] + row[r] + square_ - tile.error;
            if (floor > row_floor_[size_t(row0 + r)]) {
                row_floor_[size_t(row0 + r)] = floor;
                set_row_threshold(row0 + r);
            }
        }
        for (int64_t c = 0; symmetric_ && c < tile_size; ++c) {
            const float floor = column_most[c] + column[c] + square_ - tile.error;
            if (floor > column_floor_[size_t(column0 + c)]) {
                column_floor_[size_t(column0 + c)] = floor;
                set_column_threshold(column0 + c);
            }
        }
    }

    // Pairs that may be better than what is known, each with an error bound of its own: first raise the
    // floors, then remember those that still are above them.
    void look(const Tile& tile, const uint16_t* place, int64_t count) {
        float ceiling[tile_size * tile_size];
        const int64_t row0 = tile.group * tile_size, column0 = tile.panel * tile_size;
        const float *row = problem_.rows.shift.data() + row0, *column = problem_.columns.shift.data() + column0;
        const Lengths* row_lengths = problem_.rows.lengths.data() + row0;
        const Lengths* column_lengths = problem_.columns.lengths.data() + column0;
        float* row_floor = row_floor_.data() + row0 - first_row_;
        float* column_floor = column_floor_.data() + column0 - first_column_;
        // few branches here: which pair is better than what is known cannot be predicted
        for (int64_t p = 0; p < count; ++p) {
            const int64_t r = place[p] / tile_size, c = place[p] % tile_size;
            const float error = problem_.bound(row_lengths[r], column_lengths[c]);
            const float approximate = tile.sim[place[p]] + column[c] + (row[r] + square_);
            ceiling[p] = approximate + error;
            row_floor[r] = std::max(row_floor[r], approximate - error);
            if (symmetric_) {
                column_floor[c] = std::max(column_floor[c], approximate - error);
            }
        }
        size_t kept = candidates_.size();
        candidates_.resize(kept + size_t(count));
        for (int64_t p = 0; p < count; ++p) {
            const int64_t r = place[p] / tile_size, c = place[p] % tile_size;
            bool keep = wanted(row_floor[r], ceiling[p]);
            set_row_threshold(row0 - first_row_ + r);
            if (symmetric_) {
                keep |= wanted(column_floor[c], ceiling[p]);
                set_column_threshold(column0 - first_column_ + c);
            }
            candidates_[kept] = {int32_t(row0 + r), int32_t(column0 + c), ceiling[p]};
            kept += keep;
        }
        candidates_.resize(kept);
    }

    // Whether a pair at most this similar can change what is known of a token.
    bool wanted(float floor, float ceiling) const { return bool(int(ceiling > floor) & int(floor < enough_)); }

    // Floors have risen since most candidates were found; the caller holds the lock, as for the next.
    void make_room() {
        if (candidates_.size() > candidates_kept / 2) {
            forget();
        }
        if (candidates_.size() > candidates_kept / 2) {
            settle();
        }
    }

    void forget() {
        const auto needed = [&](const Candidate& c) {
            return wanted(shared_.floor[size_t(c.row)], c.ceiling) ||
                   (symmetric_ && wanted(shared_.floor[size_t(c.column)], c.ceiling));
        };
        candidates_.erase(
            std::remove_if(candidates_.begin(), candidates_.end(), [&](const Candidate& c) { return !needed(c); }),
            candidates_.end());
    }

    // Candidates to exact similarities, into the shared ones.
    void settle() {
        forget();
        std::vector<int32_t> i, j;
        for (const Candidate& c : candidates_) {
            i.push_back(problem_.rows.token[size_t(c.row)]);
            j.push_back(problem_.columns.token[size_t(c.column)]);
        }
        std::vector<float> product(i.size());
        const Head& head = problem_.head;
        problem_.kernels.dots(head.khat.data(), head.ld, i.data(), j.data(), int64_t(i.size()), product.data());
        for (size_t p = 0; p < i.size(); ++p) {
            float& row = shared_.best[size_t(candidates_[p].row)];
            float& column = shared_.best[size_t(symmetric_ ? candidates_[p].column : candidates_[p].row)];
            if (product[p] + dot_bound_ > std::min(row, column)) {
                const float sim = exact_similarity(head, problem_.kernels, i[p], j[p]);
                row = std::max(row, sim);
                column = std::max(column, sim);
            }
        }
        for (const Candidate& c : candidates_) { // an exact similarity is the best floor of all
            shared_.floor[size_t(c.row)] = std::max(shared_.floor[size_t(c.row)], shared_.best[size_t(c.row)]);
            if (symmetric_) {
                float& floor = shared_.floor[size_t(c.column)];
                floor = std::max(floor, shared_.best[size_t(c.column)]);
            }
        }
        candidates_.clear();
    }

    const Problem& problem_;
    bool symmetric_;
    float enough_, dot_bound_, square_;
    Shared& shared_;
    int64_t first_row_ = 0, first_column_ = 0;
    std::vector<float> row_floor_, column_floor_;         // as known to this thread
    std::vector<float> row_threshold_, column_threshold_; // what a tile's values are held against
    std::vector<Candidate> candidates_;
};

// best of the tokens of a set; where enough was enough, only the floor is known
void scatter(const Packed& rows, const Shared& shared, float enough, float* best) {
    for (size_t r = 0; r < rows.token.size(); ++r) {
        const float floor = shared.floor[r];
        best[rows.token[r]] = floor >= enough ? std::max(floor, shared.best[r]) : shared.best[r];
    }
}

} // namespace

void best_twin(const Context& context, const uint8_t* retained, float enough, float enough_retained, float* best) {
    const Head& head = context.head;
    std::vector<int32_t> kept, rest;
    for (int64_t i = 0; i < head.n; ++i) {
        (retained[i] ? kept : rest).push_back(int32_t(i));
    }
    const auto packed = [&](std::vector<int32_t>& token, Side side) {
        return pack(head, context.kernels, context.center, std::move(token), side, context.n_threads);
    };
    const Packed columns = packed(kept, Side::both), rows = packed(rest, Side::rows);
    const Problem among_kept(head, context.kernels, context.center, columns, columns, triangle_bands(head, columns),
                             true);
    const Problem of_rest(head, context.kernels, context.center, rows, columns,
                          window_bands(head, rows.token, columns.token), false);
    Shared kept_shared(columns), rest_shared(rows);
    sweep({&of_rest, &among_kept}, context.n_threads, [&](const Problem& problem) {
        return problem.triangle ? Maximum(problem, true, enough_retained, kept_shared)
                                : Maximum(problem, false, enough, rest_shared);
    });
    scatter(columns, kept_shared, enough_retained, best);
    scatter(rows, rest_shared, enough, best);
}

} // namespace twinkv
