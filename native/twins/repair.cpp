// Section 3.4 of the TwinKV paper, and the repair that judges again after every swap.
#include "twins/twins.hpp"

#include <algorithm>

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
constexpr size_t rows_at_once = 64;

// Orphans that come in, most severe first, each unless a twin of its own came in before it; `limit` at most.
std::vector<int32_t> admit(const Head& head, float tau, const std::vector<int32_t>& by_severity, size_t limit,
                           int n_threads) {
    std::vector<int32_t> columns = by_severity;
    std::sort(columns.begin(), columns.end());
    std::vector<uint8_t> covered(columns.size(), 0);
    std::vector<size_t> column_of(size_t(head.n), 0);
    for (size_t c = 0; c < columns.size(); ++c) {
        column_of[size_t(columns[c])] = c;
    }
    std::vector<int32_t> admitted;
    for (size_t next = 0; next < by_severity.size() && admitted.size() < limit;) {
        std::vector<int32_t> rows;
        for (; next < by_severity.size() && rows.size() < rows_at_once; ++next) {
            if (!covered[column_of[size_t(by_severity[next])]]) {
                rows.push_back(by_severity[next]);
            }
        }
        const auto bits = twin_rows(head, rows, columns, tau, n_threads);
        for (size_t r = 0; r < rows.size() && admitted.size() < limit; ++r) {
            if (covered[column_of[size_t(rows[r])]]) {
                continue;
            }
            admitted.push_back(rows[r]);
            for (size_t c = 0; c < columns.size(); ++c) {
                covered[c] |= bits[r * columns.size() + c];
            }
        }
    }
    return admitted;
}

// Donors that go, oldest first, `limit` at most. One may go while a twin of it stays and while every token
// that went before it keeps another twin that stays. Admitted orphans have no twin here, so they need no
// look.
std::vector<int32_t> release(const Head& head, float tau, std::vector<int32_t> donors, const uint8_t* retained,
                             size_t limit, int n_threads) {
    std::sort(donors.begin(), donors.end());
    std::vector<int32_t> columns;
    std::vector<size_t> column_of(size_t(head.n), 0);
    for (int64_t j = 0; j < head.n; ++j) {
        if (retained[j]) {
            column_of[size_t(j)] = columns.size();
            columns.push_back(int32_t(j));
        }
    }
    std::vector<uint8_t> stays(columns.size(), 1);
    std::vector<int32_t> twins_staying(columns.size(), 0); // of tokens that went; set when they go
    std::vector<int32_t> released;
    for (size_t next = 0; next < donors.size() && released.size() < limit;) {
        const size_t end = std::min(donors.size(), next + rows_at_once);
        const std::vector<int32_t> rows(donors.begin() + int64_t(next), donors.begin() + int64_t(end));
        const auto bits = twin_rows(head, rows, columns, tau, n_threads);
        for (size_t r = 0; r < rows.size() && released.size() < limit; ++r) {
            const uint8_t* twin = bits.data() + r * columns.size();
            int32_t staying = 0;
            bool last_copy = false; // of a token that went before
            for (size_t c = 0; c < columns.size(); ++c) {
                if (twin[c] && stays[c]) {
                    ++staying;
                } else if (twin[c] && twins_staying[c] < 2) {
                    last_copy = true;
                    break;
                }
            }
            if (staying == 0 || last_copy) {
                continue;
            }
            const size_t self = column_of[size_t(rows[r])];
            stays[self] = 0;
            twins_staying[self] = staying;
            for (size_t c = 0; c < columns.size(); ++c) {
                twins_staying[c] -= (twin[c] && !stays[c]) ? 1 : 0;
            }
            released.push_back(rows[r]);
        }
        next = end;
    }
    return released;
}

} // namespace

twinkv_repair_stats repair(const Head& head, const twinkv_repair_params& params, int n_threads, uint8_t* retained) {
    const auto best = best_twin(head, retained, n_threads);
    Candidates c = judge(head, params, best, retained);
    twinkv_repair_stats stats{0, int64_t(c.orphans.size()), int64_t(c.donors.size())};
    if (params.mode == TWINKV_REPAIR_CONSISTENT) {
        c.orphans = admit(head, params.tau, c.orphans, c.donors.size(), n_threads);
        c.donors = release(head, params.tau, c.donors, retained, c.orphans.size(), n_threads);
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
