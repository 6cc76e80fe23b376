// The repair by coverage (docs/repair.md): the tokens whose lack of cover costs most come in, one after the other, each
// judged against those that came in before it; for each goes the token worth least of those that are better covered.
#include "twins/twins.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <queue>

namespace twinkv {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

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

// Similarities of one token with others, to within a bound; those that decide something are computed exactly.
class Comparison {
  public:
    explicit Comparison(const Context& context) : context_(context), bound_(dot_bound(context.head.d)) {}

    // f(other, similarity) for each of the others outside the token's local window, until f returns true.
    // Returns whether it did.
    template <class F> bool with_each(int32_t token, const int32_t* others, size_t n, F&& f) {
        const Head& head = context_.head;
        self_.fill(token);
        size_t count = 0;
        for (size_t first = 0; first < n; first += count) {
            count = std::min({at_once, first + few, n - first}); // a search often ends with the first ones
            context_.kernels.dots(head.khat.data(), head.ld, self_.data(), others + first, int64_t(count),
                                  products_.data());
            for (size_t c = 0; c < count; ++c) {
                const int32_t other = others[first + c];
                const int64_t apart = int64_t(head.pos[size_t(token)]) - head.pos[size_t(other)];
                if (std::abs(apart) > head.window && f(other, products_[c])) {
                    return true;
                }
            }
        }
        return false;
    }

    float bound() const { return bound_; } // how far those are from the exact ones, at most
    float exact(int32_t i, int32_t j) const { return exact_similarity(context_.head, context_.kernels, i, j); }

  private:
    static constexpr size_t few = 16, at_once = 128;

    const Context& context_;
    float bound_;
    std::array<int32_t, at_once> self_;
    std::array<float, at_once> products_;
};

// Tokens that are out, the one first whose lack of cover costs most. What came in covers them too, which is looked up
// only for those that get to the front: a token's best only grows and what it lacks shrinks, so one that is first with
// its true best is the first.
class Outside {
  public:
    Outside(const Context& context, const std::vector<float>& best, const float* weight, const uint8_t* retained)
        : compare_(context), weight_(weight) {
        const Head& head = context.head;
        seen_.assign(size_t(head.n), 0);
        for (int64_t i = 0; i < head.n; ++i) {
            if (!retained[i] && head.valid[size_t(i)]) {
                queue_.push(entry(int32_t(i), best[size_t(i)]));
            }
        }
    }

    // The token that lacks most, and how well it is covered; ties to the earlier one; false when none lacks anything.
    bool top(float* best, int32_t* token) {
        while (!queue_.empty() && queue_.top().lack > 0.0f) {
            const Entry first = queue_.top();
            const float now = covered_now(first);
            if (now == first.best) {
                *best = first.best;
                *token = first.token;
                return true;
            }
            queue_.pop();
            queue_.push(entry(first.token, now));
        }
        return false;
    }

    // Takes in the token that top() gave.
    void admit() {
        admitted_.push_back(queue_.top().token);
        queue_.pop();
    }

    const std::vector<int32_t>& admitted() const { return admitted_; }

  private:
    struct Entry {
        float lack, best;
        int32_t token;
        bool operator<(const Entry& other) const { // a queue gives the largest first
            return lack != other.lack ? lack < other.lack : token > other.token;
        }
    };

    Entry entry(int32_t token, float best) const {
        return {(1.0f - best) * (weight_ ? weight_[token] : 1.0f), best, token};
    }

    // How well the token is covered, those included that came in since this was last asked.
    float covered_now(const Entry& entry) {
        float best = entry.best;
        size_t& seen = seen_[size_t(entry.token)];
        compare_.with_each(entry.token, admitted_.data() + seen, admitted_.size() - seen,
                           [&](int32_t other, float similarity) {
                               if (similarity + compare_.bound() > best) {
                                   best = std::max(best, compare_.exact(entry.token, other));
                               }
                               return false;
                           });
        seen = admitted_.size();
        return best;
    }

    Comparison compare_;
    const float* weight_;
    std::priority_queue<Entry> queue_;
    std::vector<size_t> seen_; // [n], of the admitted
    std::vector<int32_t> admitted_;
};

// Who may go: a token of the set given that another one of it, still there, covers well enough.
class Inside {
  public:
    Inside(const Context& context, std::vector<int32_t> donors, const std::vector<float>& best, const uint8_t* retained)
        : compare_(context), donors_(std::move(donors)), best_(best), stays_(retained, retained + context.head.n) {
        for (int64_t j = 0; j < context.head.n; ++j) {
            if (retained[j] && context.head.valid[size_t(j)]) {
                given_.push_back(int32_t(j));
            }
        }
    }

    // The next that is covered better than `covered`, or -1. Those passed over have had their turn.
    int32_t release(float covered) {
        while (next_ < donors_.size()) {
            const int32_t token = donors_[next_++];
            if (best_[size_t(token)] > covered && still_covered(token, covered)) {
                stays_[size_t(token)] = 0;
                released_.push_back(token);
                return token;
            }
        }
        return -1;
    }

  private:
    bool still_covered(int32_t token, float covered) {
        // What covers it best was in the set given: unless that one went since, there is nothing to look for.
        const float best = best_[size_t(token)];
        if (!compare_.with_each(token, released_.data(), released_.size(),
                                [&](int32_t, float similarity) { return similarity + compare_.bound() >= best; })) {
            return true;
        }
        return compare_.with_each(token, given_.data(), given_.size(), [&](int32_t other, float similarity) {
            const float bound = compare_.bound();
            return stays_[size_t(other)] && similarity + bound > covered &&
                   (similarity - bound > covered || compare_.exact(token, other) > covered);
        });
    }

    Comparison compare_;
    std::vector<int32_t> donors_;
    const std::vector<float>& best_;
    std::vector<uint8_t> stays_; // [n]
    std::vector<int32_t> given_, released_;
    size_t next_ = 0;
};

// How many tokens are less covered than the best covered donor, and how many donors are covered better than the least
// covered token, by more than the margin: those among which swaps can happen.
void count(const Head& head, const std::vector<float>& best, const uint8_t* retained, float margin,
           const std::vector<int32_t>& donors, twinkv_repair_stats* stats) {
    float most = -infinity, least = infinity;
    for (int32_t j : donors) {
        most = std::max(most, best[size_t(j)]);
    }
    for (int64_t i = 0; i < head.n; ++i) {
        if (!retained[i] && head.valid[size_t(i)]) {
            least = std::min(least, best[size_t(i)]);
            stats->n_orphans += best[size_t(i)] + margin < most;
        }
    }
    stats->n_donors =
        std::count_if(donors.begin(), donors.end(), [&](int32_t j) { return best[size_t(j)] > least + margin; });
}

} // namespace

twinkv_repair_stats cover(const Context& context, const twinkv_repair_params& params, const float* known,
                          const float* priority, const float* weight, uint8_t* retained) {
    const Head& head = context.head;
    const std::vector<float> best(known, known + head.n);
    const auto budget = std::count_if(retained, retained + head.n, [](uint8_t r) { return r != 0; });
    const auto limit = size_t(std::floor(params.share * double(std::min<int64_t>(budget, head.n - budget))));
    std::vector<int32_t> donors = leaving(head, params, priority, retained), released;
    twinkv_repair_stats stats{};
    count(head, best, retained, params.margin, donors, &stats);
    if (limit == 0 || stats.n_orphans == 0) {
        return stats;
    }
    Outside outside(context, best, weight, retained);
    Inside inside(context, std::move(donors), best, retained);
    float covered = 0;
    int32_t orphan = 0;
    while (released.size() < limit && outside.top(&covered, &orphan)) {
        const int32_t donor = inside.release(covered + params.margin);
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
