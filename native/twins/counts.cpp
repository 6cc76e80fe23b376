// Eq. 2 (twin_counts), and rows of twins for the repair: whether a similarity exceeds a threshold.
#include "twins/sweep.hpp"
#include "twins/twins.hpp"

#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>

namespace twinkv {
namespace {

// The pairs of a tile whose true similarity is above tau. Most tiles hold none even by the approximate
// similarities; where the error bound leaves a pair open, it is computed again, in float32 and if need be
// exactly.
class Above {
  public:
    Above(const Problem& problem, float tau)
        : problem_(problem), tau_(tau), dot_bound_(dot_bound(problem.head.d)),
          threshold_(double(tau) - problem.center.square) {}

    // found(masks [32]) is told of the pairs that may be above, then reject(r, c) of each that is not after
    // all.
    template <class Found, class Reject> void operator()(const Tile& tile, Found&& found, Reject&& reject) {
        const float* column = problem_.columns.shift.data() + tile.panel * tile_size;
        const float* row = problem_.rows.shift.data() + tile.group * tile_size;
        float maybe_above[tile_size], surely_above[tile_size];
        for (int64_t r = 0; r < tile_size; ++r) {
            const float base = float(threshold_) - row[r];
            maybe_above[r] = base - tile.error;
            surely_above[r] = base + tile.error;
        }
        uint32_t masks[tile_size], sure[tile_size];
        if (!problem_.kernels.above(tile.sim, column, maybe_above, masks)) {
            return;
        }
        for (int64_t r = 0; tile.partial && r < tile_size; ++r) {
            masks[r] &= tile.allowed[r];
        }
        problem_.kernels.above(tile.sim, column, surely_above, sure);
        found(masks);
        for (int64_t r = 0; r < tile_size; ++r) {
            for (uint32_t open = masks[r] & ~sure[r]; open != 0; open &= open - 1) {
                const int c = __builtin_ctz(open);
                if (!truly_above(tile.group * tile_size + r, tile.panel * tile_size + c)) {
                    reject(r, c);
                }
            }
        }
    }

  private:
    bool truly_above(int64_t row, int64_t column) const {
        const Head& head = problem_.head;
        const int32_t i = problem_.rows.token[size_t(row)], j = problem_.columns.token[size_t(column)];
        const float approximate = problem_.kernels.dot(head.row(i), head.row(j), head.ld);
        if (approximate > tau_ + dot_bound_) {
            return true;
        }
        return approximate > tau_ - dot_bound_ && exact_similarity(head, problem_.kernels, i, j) > tau_;
    }

    const Problem& problem_;
    float tau_, dot_bound_;
    double threshold_;
};

class Counting {
  public:
    Counting(const Problem& problem, float tau, std::mutex& mutex, int32_t* counts)
        : problem_(problem), above_(problem, tau), mutex_(mutex), counts_(counts),
          mine_(size_t(problem.rows.groups * tile_size), 0) {}

    void begin(const Task&) {}
    void end(const Task&) {}
    bool open(int64_t) const { return true; }

    void process(const Tile& tile) {
        int32_t* row = mine_.data() + tile.group * tile_size;
        int32_t* column = mine_.data() + tile.panel * tile_size;
        // the row counts of a tile on the diagonal are column counts too: both ends of a pair count
        above_(
            tile, [&](const uint32_t* masks) { problem_.kernels.count(masks, row, column); },
            [&](int64_t r, int64_t c) {
                --row[r];
                --column[c];
            });
    }

    void finish() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (int64_t i = 0; i < problem_.head.n; ++i) {
            counts_[i] += mine_[size_t(i)];
        }
    }

  private:
    const Problem& problem_;
    Above above_;
    std::mutex& mutex_;
    int32_t* counts_;
    std::vector<int32_t> mine_; // counts of this thread
};

class Marking {
  public:
    Marking(const Problem& problem, float tau, TwinRows& out)
        : problem_(problem), above_(problem, tau), out_(out) {}

    void begin(const Task&) {}
    void end(const Task&) {}
    void finish() {}
    bool open(int64_t) const { return true; }

    void process(const Tile& tile) {
        const int64_t first = tile.group * tile_size,
                      rows = std::min(tile_size, problem_.rows.size() - first);
        uint32_t* out = out_.bits.data() + first * out_.words + tile.panel;
        above_(
            tile,
            [&](const uint32_t* masks) {
                for (int64_t r = 0; r < rows; ++r) {
                    out[r * out_.words] = masks[r];
                }
            },
            [&](int64_t r, int64_t c) { out[r * out_.words] &= ~(uint32_t(1) << c); });
    }

  private:
    const Problem& problem_;
    Above above_;
    TwinRows& out_;
};

} // namespace

void twin_counts(const Context& context, float tau, int32_t* counts) {
    const Head& head = context.head;
    std::fill_n(counts, head.n, 0);
    std::vector<int32_t> everything(size_t(head.n), 0);
    std::iota(everything.begin(), everything.end(), 0);
    const Packed set =
        pack(head, context.kernels, context.center, std::move(everything), Side::both, context.n_threads);
    const Problem problem{
        head, context.kernels,           context.center, set,
        set,  triangle_bands(head, set), true,           {head, set.operand, context.center}};
    std::mutex mutex;
    sweep(problem, context.n_threads, [&] { return Counting(problem, tau, mutex, counts); });
}

TwinRows twin_rows(const Context& context, const std::vector<int32_t>& rows, const Packed& columns,
                   float tau) {
    const Head& head = context.head;
    const Packed packed = pack(head, context.kernels, context.center, rows, Side::rows, 1);
    const Problem problem{head,           context.kernels,
                          context.center, packed,
                          columns,        window_bands(head, packed, columns),
                          false,          {head, packed.operand, context.center}};
    TwinRows out;
    out.words = columns.groups;
    out.bits.assign(rows.size() * size_t(out.words), 0);
    // sim >= tau is sim > the float before tau
    const float below = std::nextafterf(tau, -std::numeric_limits<float>::infinity());
    sweep(problem, context.n_threads, [&] { return Marking(problem, below, out); });
    return out;
}

} // namespace twinkv
