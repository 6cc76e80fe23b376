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
// exactly. Open pairs wait for others, so that the keys of the next can come in from memory while one is
// computed.
class Above {
  public:
    Above(const Problem& problem, float tau)
        : problem_(problem), tau_(tau), dot_bound_(dot_bound(problem.head.d)),
          row_threshold_(size_t(problem.rows.groups * tile_size)) {
        for (size_t r = 0; r < row_threshold_.size(); ++r) {
            row_threshold_[r] = float(double(tau) - problem.center.square - double(problem.rows.shift.data()[r]));
        }
    }

    // The owner is told of pairs found: found(tile, masks [32]) of many that may be above, with reject(row,
    // column) later for each that is not after all; accept(row, column) of one that is.
    template <class Owner> void operator()(const Tile& tile, Owner& owner) {
        const float* column = problem_.columns.shift.data() + tile.panel * tile_size;
        const float* threshold = row_threshold_.data() + tile.group * tile_size;
        uint32_t masks[tile_size], sure[tile_size];
        if (!problem_.kernels.above(tile.sim, column, tile.error, threshold, masks)) {
            return;
        }
        for (int64_t r = 0; tile.partial && r < tile_size; ++r) {
            masks[r] &= tile.allowed[r];
        }
        uint16_t place[few];
        const int64_t count = list_bits(masks, place, few);
        if (count >= 0) {
            for (int64_t p = 0; p < count; ++p) {
                look(tile, place[p] / tile_size, place[p] % tile_size, threshold[place[p] / tile_size], false, owner);
            }
        } else {
            problem_.kernels.above(tile.sim, column, -tile.error, threshold, sure);
            owner.found(tile, masks);
            for (int64_t r = 0; r < tile_size; ++r) {
                for (uint32_t bits = masks[r] & ~sure[r]; bits != 0; bits &= bits - 1) {
                    look(tile, r, __builtin_ctz(bits), threshold[r], true, owner);
                }
            }
        }
        if (open_.size() >= open_pairs) {
            settle(owner);
        }
    }

    template <class Owner> void settle(Owner& owner) {
        const Head& head = problem_.head;
        i_.clear();
        j_.clear();
        for (const Open& pair : open_) {
            i_.push_back(problem_.rows.token[size_t(pair.row)]);
            j_.push_back(problem_.columns.token[size_t(pair.column)]);
        }
        sim_.resize(open_.size());
        problem_.kernels.dots(head.khat.data(), head.ld, i_.data(), j_.data(), int64_t(i_.size()), sim_.data());
        for (size_t p = 0; p < open_.size(); ++p) {
            bool above = sim_[p] > tau_;
            if (std::fabs(sim_[p] - tau_) <= dot_bound_) {
                above = exact_similarity(head, problem_.kernels, i_[p], j_[p]) > tau_;
            }
            if (above && !open_[p].counted) {
                owner.accept(open_[p].row, open_[p].column);
            } else if (!above && open_[p].counted) {
                owner.reject(open_[p].row, open_[p].column);
            }
        }
        open_.clear();
    }

  private:
    static constexpr int64_t few = 64; // pairs of a tile that are better looked at one by one
    static constexpr size_t open_pairs = 256;
    struct Open {
        int32_t row, column;
        bool counted; // by found()
    };

    // One pair, with an error bound of its own.
    template <class Owner>
    void look(const Tile& tile, int64_t r, int64_t c, float threshold, bool counted, Owner& owner) {
        const auto row = int32_t(tile.group * tile_size + r), column = int32_t(tile.panel * tile_size + c);
        const float approximate = tile.sim[r * tile_size + c] + problem_.columns.shift.data()[column];
        const float error =
            problem_.bound(problem_.rows.lengths[size_t(row)], problem_.columns.lengths[size_t(column)]);
        if (approximate - error > threshold) {
            if (!counted) {
                owner.accept(row, column);
            }
        } else if (approximate + error > threshold) {
            open_.push_back({row, column, counted});
        } else if (counted) {
            owner.reject(row, column);
        }
    }

    const Problem& problem_;
    float tau_, dot_bound_;
    std::vector<float> row_threshold_; // for a tile's values and the shifts of its columns
    std::vector<Open> open_;
    std::vector<int32_t> i_, j_; // tokens of the open pairs
    std::vector<float> sim_;
};

class Counting {
  public:
    Counting(const Problem& problem, float tau, std::mutex& mutex, int32_t* counts)
        : problem_(problem), above_(problem, tau), mutex_(mutex), counts_(counts),
          mine_(size_t(problem.rows.groups * tile_size), 0) {}

    void begin(const Task&) {}
    void end(const Task&) {}
    bool open(int64_t) const { return true; }
    void process(const Tile& tile) { above_(tile, *this); }

    void finish() {
        above_.settle(*this);
        std::lock_guard<std::mutex> lock(mutex_);
        for (int64_t i = 0; i < problem_.head.n; ++i) {
            counts_[i] += mine_[size_t(i)];
        }
    }

    void found(const Tile& tile, const uint32_t* masks) {
        problem_.kernels.count(masks, mine_.data() + tile.group * tile_size, mine_.data() + tile.panel * tile_size);
    }

    void accept(int32_t row, int32_t column) {
        ++mine_[size_t(row)];
        ++mine_[size_t(column)];
    }

    void reject(int32_t row, int32_t column) {
        --mine_[size_t(row)];
        --mine_[size_t(column)];
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
    Marking(const Problem& problem, float tau, TwinRows& out) : problem_(problem), above_(problem, tau), out_(out) {}

    void begin(const Task&) {}
    void end(const Task&) {}
    bool open(int64_t) const { return true; }
    void process(const Tile& tile) { above_(tile, *this); }
    void finish() { above_.settle(*this); }

    void found(const Tile& tile, const uint32_t* masks) {
        const int64_t first = tile.group * tile_size, rows = std::min(tile_size, problem_.rows.size() - first);
        for (int64_t r = 0; r < rows; ++r) {
            out_.bits[size_t((first + r) * out_.words + tile.panel)] = masks[r];
        }
    }

    void accept(int32_t row, int32_t column) {
        out_.bits[size_t(row * out_.words + column / tile_size)] |= uint32_t(1) << column % tile_size;
    }

    void reject(int32_t row, int32_t column) {
        out_.bits[size_t(row * out_.words + column / tile_size)] &= ~(uint32_t(1) << column % tile_size);
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
    const Problem problem(head, context.kernels, context.center, set, set, triangle_bands(head, set), true);
    std::mutex mutex;
    sweep({&problem}, context.n_threads, [&](const Problem& p) { return Counting(p, tau, mutex, counts); });
}

TwinRows twin_rows(const Context& context, const std::vector<int32_t>& rows, const Packed& columns, float tau) {
    const Head& head = context.head;
    const Packed packed = pack(head, context.kernels, context.center, rows, Side::rows, 1);
    const Problem problem(head, context.kernels, context.center, packed, columns,
                          window_bands(head, packed.token, columns.token), false);
    TwinRows out;
    out.words = columns.groups;
    out.bits.assign(rows.size() * size_t(out.words), 0);
    // sim >= tau is sim > the float before tau
    const float below = std::nextafterf(tau, -std::numeric_limits<float>::infinity());
    sweep({&problem}, context.n_threads, [&](const Problem& p) { return Marking(p, below, out); });
    return out;
}

} // namespace twinkv
