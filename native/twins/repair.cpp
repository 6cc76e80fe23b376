// Section 3.4 of the TwinKV paper, and the repair that judges again after every swap.
#include "twins/twins.hpp"

#include <algorithm>
#include <limits>

namespace twinkv {
namespace {

struct Candidates {
    std::vector<int32_t> orphans; // most severe first: no copy of them survives
    std::vector<int32_t> donors;  // most similar to a survivor first
};

// Orphans and donors as judged against the set the policy chose, ranked; ties go to the earlier token.
Candidates judge(const Head& head, const twinkv_repair_params& params, const std::vector<float>& best,
                 const uint8_t* retained) {
    Candidates out;
    for (int64_t i = 0; i < head.n; ++i) {
        const bool covered = best[size_t(i)] >= params.tau;
        if (!retained[i] && !covered && head.valid[size_t(i)]) {
            out.orphans.push_back(int32_t(i));
        } else if (retained[i] && covered && !head.protected_token(i, params.n_sink, params.n_recent)) {
            out.donors.push_back(int32_t(i));
        }
    }
    const auto b = [&](int32_t i) { return best[size_t(i)]; };
    std::stable_sort(out.orphans.begin(), out.orphans.end(), [&](int32_t i, int32_t j) { return b(i) < b(j); });
    std::stable_sort(out.donors.begin(), out.donors.end(), [&](int32_t i, int32_t j) { return b(i) > b(j); });
    return out;
}

// How many rows of twins are looked up at once: enough for the kernels to run at speed, few enough for
// memory.
constexpr size_t rows_at_once = 512;

// f(column) for every bit set in a row of twins.
template <class F> void for_each_twin(const uint32_t* row, int64_t words, F&& f) {
    for (int64_t w = 0; w < words; ++w) {
        for (uint32_t bits = row[w]; bits != 0; bits &= bits - 1) {
            f(size_t(w * tile_size + __builtin_ctz(bits)));
        }
    }
}

Packed pack_columns(const Context& context, std::vector<int32_t> token) {
    return pack(context.head, context.kernels, context.center, std::move(token), Side::panels, context.n_threads);
}

// Orphans that come in, most severe first, each unless a twin of its own came in before it; `limit` at most.
std::vector<int32_t> admit(const Context& context, float tau, const std::vector<int32_t>& by_severity, size_t limit) {
    std::vector<int32_t> admitted;
    if (limit == 0) {
        return admitted;
    }
    std::vector<int32_t> tokens = by_severity;
    std::sort(tokens.begin(), tokens.end());
    std::vector<size_t> column_of(size_t(context.head.n), 0);
    for (size_t c = 0; c < tokens.size(); ++c) {
        column_of[size_t(tokens[c])] = c;
    }
    std::vector<uint8_t> covered(tokens.size(), 0); // a twin came in
    const Packed columns = pack_columns(context, std::move(tokens));
    for (size_t next = 0; next < by_severity.size() && admitted.size() < limit;) {
        std::vector<int32_t> rows;
        for (; next < by_severity.size() && rows.size() < rows_at_once; ++next) {
            if (!covered[column_of[size_t(by_severity[next])]]) {
                rows.push_back(by_severity[next]);
            }
        }
        const TwinRows twins = twin_rows(context, rows, columns, tau);
        for (size_t r = 0; r < rows.size() && admitted.size() < limit; ++r) {
            if (covered[column_of[size_t(rows[r])]]) {
                continue;
            }
            admitted.push_back(rows[r]);
            for_each_twin(twins.row(r), twins.words, [&](size_t c) { covered[c] = 1; });
        }
    }
    return admitted;
}

// Donors that go, oldest first, `limit` at most. One may go while a twin of it stays and while every token
// that went before it keeps another twin that stays. Admitted orphans have no twin here, so they need no
// look.
std::vector<int32_t> release(const Context& context, float tau, std::vector<int32_t> donors, const uint8_t* retained,
                             size_t limit) {
    std::vector<int32_t> released;
    if (limit == 0) {
        return released;
    }
    std::sort(donors.begin(), donors.end());
    std::vector<int32_t> kept;
    std::vector<size_t> column_of(size_t(context.head.n), 0);
    for (int64_t j = 0; j < context.head.n; ++j) {
        if (retained[j]) {
            column_of[size_t(j)] = kept.size();
            kept.push_back(int32_t(j));
        }
    }
    std::vector<uint8_t> stays(kept.size(), 1);
    std::vector<int32_t> twins_staying(kept.size(), 0); // of tokens that went; set when they go
    const Packed columns = pack_columns(context, std::move(kept));
    for (size_t next = 0; next < donors.size() && released.size() < limit;) {
        const size_t end = std::min(donors.size(), next + rows_at_once);
        const std::vector<int32_t> rows(donors.begin() + int64_t(next), donors.begin() + int64_t(end));
        const TwinRows twins = twin_rows(context, rows, columns, tau);
        for (size_t r = 0; r < rows.size() && released.size() < limit; ++r) {
            int32_t staying = 0;
            bool last_copy = false; // of a token that went before
            for_each_twin(twins.row(r), twins.words, [&](size_t c) {
                staying += stays[c];
                last_copy |= !stays[c] && twins_staying[c] < 2;
            });
            if (staying == 0 || last_copy) {
                continue;
            }
            const size_t self = column_of[size_t(rows[r])];
            for_each_twin(twins.row(r), twins.words, [&](size_t c) { twins_staying[c] -= !stays[c]; });
            stays[self] = 0;
            twins_staying[self] = staying;
            released.push_back(rows[r]);
        }
        next = end;
    }
    return released;
}

} // namespace

twinkv_repair_stats repair(const Context& context, const twinkv_repair_params& params, const float* known,
                           uint8_t* retained) {
    // A token that is not retained is an orphan by its exact best below tau or none at all; donors are ranked by
    // theirs in the paper's mode only.
    const bool consistent = params.mode == TWINKV_REPAIR_CONSISTENT;
    std::vector<float> best(size_t(context.head.n));
    if (known) {
        std::copy_n(known, best.size(), best.data());
    } else {
        best_twin(context, retained, params.tau, consistent ? params.tau : std::numeric_limits<float>::infinity(),
                  best.data());
    }
    Candidates c = judge(context.head, params, best, retained);
    twinkv_repair_stats stats{0, int64_t(c.orphans.size()), int64_t(c.donors.size())};
    if (consistent) {
        c.orphans = admit(context, params.tau, c.orphans, c.donors.size());
        c.donors = release(context, params.tau, c.donors, retained, c.orphans.size());
    }
    const size_t m = std::min(c.orphans.size(), c.donors.size());
    for (size_t s = 0; s < m; ++s) {
        retained[c.donors[s]] = 0;
        retained[c.orphans[s]] = 1;
    }
    stats.n_swaps = int64_t(m);
    return stats;
}

} // namespace twinkv
