// The repair by coverage (docs/kernels.md): the least covered tokens come in, one after the other, each judged against
// those that came in before it; for each goes the token worth least of those that are better covered.
#include "twins/twins.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

namespace twinkv {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr size_t lanes = 16;         // columns of a block of admitted keys, side by side so that sums vectorize
constexpr size_t rows_at_once = 256; // donors looked up at once

// Tokens that may go, in the order in which they do: those first that are worth least, the older of two equals.
std::vector<int32_t> leaving(const Head& head, const twinkv_repair_params& params, const float* priority,
                             const uint8_t* retained) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < head.n; ++i) {
        if (retained[i] && head.valid[size_t(i)] && !head.protected_token(i, params.n_sink, params.n_recent)) {
            tokens.push_back(int32_t(i));
        }
    }
    if (priority) {
        const auto worth = [&](int32_t i) { return std::isnan(priority[i]) ? -infinity : priority[i]; };
        std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t i, int32_t j) { return worth(i) < worth(j); });
    }
    return tokens;
}

// Tokens that are out, the least covered one first. What came in covers them too, which is looked up only for those
// that get to the front: a token's best only grows, so one that is first with its true best is the least covered.
class Outside {
  public:
    Outside(const Head& head, const std::vector<float>& best, const uint8_t* retained) : head_(head) {
        seen_.assign(size_t(head.n), 0);
        for (int64_t i = 0; i < head.n; ++i) {
            if (!retained[i] && head.valid[size_t(i)]) {
                queue_.push({best[size_t(i)], int32_t(i)});
            }
        }
    }

    // The least covered token, ties to the earlier one; false when all are in.
    bool top(float* best, int32_t* token) {
        while (!queue_.empty()) {
            Entry entry = queue_.top();
            const float now = std::max(entry.best, best_admitted(entry.token));
            if (now == entry.best) {
                *best = entry.best;
                *token = entry.token;
                return true;
            }
            queue_.pop();
            queue_.push({now, entry.token});
        }
        return false;
    }

    // Takes in the token that top() gave.
    void admit() {
        const int32_t token = queue_.top().token;
        queue_.pop();
        const size_t lane = admitted_.size() % lanes;
        if (lane == 0) {
            keys_.resize(keys_.size() + size_t(head_.d) * lanes, 0.0f);
        }
        float* block = keys_.data() + (admitted_.size() / lanes) * size_t(head_.d) * lanes;
        for (int64_t k = 0; k < head_.d; ++k) {
            block[size_t(k) * lanes + lane] = head_.row(token)[k];
        }
        admitted_.push_back(token);
    }

    const std::vector<int32_t>& admitted() const { return admitted_; }

  private:
    struct Entry {
        float best;
        int32_t token;
        bool operator<(const Entry& other) const { // a queue gives the largest first
            return best != other.best ? best > other.best : token > other.token;
        }
    };

    // The largest similarity with those admitted since this was last asked.
    float best_admitted(int32_t token) {
        float best = -1;
        for (size_t first = seen_[size_t(token)] / lanes * lanes; first < admitted_.size(); first += lanes) {
            // sums as in similarity(): in double, in the order of the dimensions
            double sum[lanes] = {};
            const float* block = keys_.data() + first * size_t(head_.d);
            const float* row = head_.row(token);
            for (int64_t k = 0; k < head_.d; ++k) {
                const double value = row[k];
                for (size_t c = 0; c < lanes; ++c) {
                    sum[c] += value * double(block[size_t(k) * lanes + c]);
                }
            }
            const size_t end = std::min(lanes, admitted_.size() - first);
            for (size_t c = 0; c < end; ++c) {
                const int64_t apart =
                    int64_t(head_.pos[size_t(token)]) - head_.pos[size_t(admitted_[first + c])];
                if (std::abs(apart) > head_.window) {
                    best = std::max(best, float(sum[c]));
                }
            }
        }
        seen_[size_t(token)] = admitted_.size();
        return best;
    }

    const Head& head_;
    std::priority_queue<Entry> queue_;
    std::vector<size_t> seen_; // [n], of the admitted
    std::vector<int32_t> admitted_;
    std::vector<float> keys_; // of the admitted: blocks [d, lanes]
};

// Who may go: a token of the set given that another one of it, still there, covers better than an orphan is covered.
class Inside {
  public:
    Inside(const Context& context, std::vector<int32_t> donors, const std::vector<float>& best, const uint8_t* retained)
        : context_(context), donors_(std::move(donors)), best_(best) {
        for (int64_t j = 0; j < context.head.n; ++j) {
            if (retained[j]) {
                column_of_.push_back(int64_t(kept_.size()));
                kept_.push_back(int32_t(j));
            } else {
                column_of_.push_back(-1);
            }
        }
        stays_.assign(kept_.size(), 1);
        columns_ = pack(context.head, context.kernels, context.center, kept_, Side::panels, context.n_threads);
    }

    // The next that may go for an orphan covered by `covered`, or -1. Those passed over may not go later either:
    // orphans are covered better and better, and the set only shrinks.
    int32_t release(float covered) {
        for (; next_ < donors_.size(); ++next_) {
            const int32_t token = donors_[next_];
            if (!(best_[size_t(token)] > covered)) {
                continue;
            }
            if (still_covered(token, covered)) {
                stays_[size_t(column_of_[size_t(token)])] = 0;
                ++next_;
                return token;
            }
        }
        return -1;
    }

  private:
    bool still_covered(int32_t token, float covered) {
        if (next_ >= looked_up_end_) { // at this threshold: a superset for all later ones
            looked_up_begin_ = next_;
            looked_up_end_ = std::min(donors_.size(), next_ + rows_at_once);
            const std::vector<int32_t> rows(donors_.begin() + int64_t(looked_up_begin_),
                                            donors_.begin() + int64_t(looked_up_end_));
            twins_ = twin_rows(context_, rows, columns_, covered);
        }
        const uint32_t* row = twins_.row(next_ - looked_up_begin_);
        const Head& head = context_.head;
        for (int64_t w = 0; w < twins_.words; ++w) {
            for (uint32_t bits = row[w]; bits != 0; bits &= bits - 1) {
                const auto c = size_t(w * tile_size + __builtin_ctz(bits));
                if (stays_[c] && exact_similarity(head, context_.kernels, token, kept_[c]) > covered) {
                    return true;
                }
            }
        }
        return false;
    }

    const Context& context_;
    std::vector<int32_t> donors_;
    const std::vector<float>& best_;
    std::vector<int32_t> kept_;
    std::vector<int64_t> column_of_; // [n], -1 for those not kept
    std::vector<uint8_t> stays_;
    Packed columns_;
    TwinRows twins_;
    size_t next_ = 0, looked_up_begin_ = 0, looked_up_end_ = 0;
};

// How many tokens are less covered than the best covered donor, and how many donors are covered better than the least
// covered token: those among which swaps can happen.
void count(const Head& head, const std::vector<float>& best, const uint8_t* retained,
           const std::vector<int32_t>& donors, twinkv_repair_stats* stats) {
    float most = -infinity, least = infinity;
    for (int32_t j : donors) {
        most = std::max(most, best[size_t(j)]);
    }
    for (int64_t i = 0; i < head.n; ++i) {
        if (!retained[i] && head.valid[size_t(i)]) {
            least = std::min(least, best[size_t(i)]);
            stats->n_orphans += best[size_t(i)] < most;
        }
    }
    stats->n_donors =
        std::count_if(donors.begin(), donors.end(), [&](int32_t j) { return best[size_t(j)] > least; });
}

} // namespace

twinkv_repair_stats cover(const Context& context, const twinkv_repair_params& params, const float* known,
                          const float* priority, uint8_t* retained) {
    const Head& head = context.head;
    std::vector<float> best(size_t(head.n));
    if (known) {
        std::copy_n(known, best.size(), best.data());
    } else {
        best_twin(context, retained, infinity, infinity, best.data());
    }
    const auto budget = std::count_if(retained, retained + head.n, [](uint8_t r) { return r != 0; });
    const auto limit = size_t(std::floor(params.share * double(budget)));
    std::vector<int32_t> donors = leaving(head, params, priority, retained), released;
    twinkv_repair_stats stats{};
    count(head, best, retained, donors, &stats);
    if (limit == 0 || stats.n_orphans == 0) {
        return stats;
    }
    Outside outside(head, best, retained);
    Inside inside(context, std::move(donors), best, retained);
    float covered = 0;
    int32_t orphan = 0;
    while (released.size() < limit && outside.top(&covered, &orphan)) {
        const int32_t donor = inside.release(covered);
        if (donor < 0) {
            break;
        }
        released.push_back(donor);
        outside.admit();
    }
    for (size_t s = 0; s < released.size(); ++s) {
        retained[released[s]] = 0;
        retained[outside.admitted()[s]] = 1;
    }
    stats.n_swaps = int64_t(released.size());
    return stats;
}

} // namespace twinkv
