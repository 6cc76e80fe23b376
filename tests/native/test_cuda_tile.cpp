// The tile loops of the CUDA kernels on the CPU: the same index arithmetic and verdicts (native/twins/cuda/tile.hpp),
// a block's threads one after the other, and the tensor core's product by the fragment layout of the PTX ISA. What the
// kernels count and find must be what the definition says.
#include "check.hpp"
#include "keys.hpp"

#include "twins/cuda/tile.hpp"
#include "twins/head.hpp"

#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <set>

using namespace twinkv;
using namespace twinkv::cuda;

namespace {

float bf16(float x) {
    return ggml_bf16_to_fp32(ggml_fp32_to_bf16(x));
}

struct Tokens {
    int n, d, k, padded;
    std::vector<float> half, slack; // [padded, k], [padded]
    const Head& head;

    explicit Tokens(const Head& head)
        : n(int(head.n)), d(int(head.d)), k((d + step - 1) / step * step), padded((n + tile - 1) / tile * tile),
          half(size_t(padded) * size_t(k), 0.0f), slack(size_t(padded), 0.0f), head(head) {
        for (int i = 0; i < n; ++i) {
            float left = 0;
            for (int c = 0; c < d; ++c) {
                const float x = head.row(i)[c];
                half[size_t(i) * size_t(k) + size_t(c)] = bf16(x);
                left += (x - bf16(x)) * (x - bf16(x));
            }
            slack[size_t(i)] = slack_of(std::sqrt(left) * 1.001f + 1e-6f, d);
        }
    }
};

// D += A B of mma.m16n8k16, from the registers of 32 lanes. The layout is written down here a second time, from the PTX
// ISA: A(row, k) lies in lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8), half k % 2; B(k, column) in lane
// 4 column + k % 8 / 2, register k / 8; D(row, column) in lane 4 (row % 8) + column / 2, register 2 (row / 8) + column
// % 2.
void multiply(float (*sums)[4], const float (*a)[4][2], const float (*b)[2][2]) {
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            float& sum = sums[4 * (row % 8) + column / 2][2 * (row / 8) + column % 2];
            for (int k = 0; k < 16; ++k) {
                sum += a[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)][k % 2] *
                       b[4 * column + k % 8 / 2][k / 8][k % 2];
            }
        }
    }
}

void load_shared(const Tokens& t, int first, int k0, std::vector<float>& shared) {
    std::vector<int> written(size_t(tile * step), 0);
    for (int thread = 0; thread < threads; ++thread) {
        for (int c = 0; c < copies; ++c) {
            const RowAndDim from = copy_source(thread, c);
            CHECK(from.row < tile && from.dim % copy_elements == 0, "thread %d, copy %d", thread, c);
            CHECK(shared_offset(from.row, from.dim) * 2 % 16 == 0, "a copy of 16 bytes to an odd address");
            for (int e = 0; e < copy_elements; ++e) {
                shared[size_t(shared_offset(from.row, from.dim + e))] =
                    t.half[size_t(first + from.row) * size_t(t.k) + size_t(k0 + from.dim + e)];
                ++written[size_t(from.row * step + from.dim + e)];
            }
        }
    }
    CHECK(std::all_of(written.begin(), written.end(), [](int w) { return w == 1; }), "values copied twice or never");
}

template <class F> void for_each_pair(const Tokens& a, int row0, const Tokens& b, int column0, F&& f) {
    constexpr int warps = threads / 32;
    std::vector<float> sums(size_t(warps * m_tiles * n_tiles * 32 * 4), 0.0f);
    const auto block = [&](int warp, int m, int c) {
        return reinterpret_cast<float (*)[4]>(sums.data() + ((warp * m_tiles + m) * n_tiles + c) * 32 * 4);
    };
    std::vector<float> rows(size_t(tile * stride)), columns(size_t(tile * stride));
    for (int k0 = 0; k0 < a.k; k0 += step) {
        load_shared(a, row0, k0, rows);
        load_shared(b, column0, k0, columns);
        for (int warp = 0; warp < warps; ++warp) {
            for (int k = 0; k < step; k += 16) {
                for (int m = 0; m < m_tiles; ++m) {
                    float fa[32][4][2];
                    for (int lane = 0; lane < 32; ++lane) {
                        for (int r = 0; r < 4; ++r) {
                            std::memcpy(fa[lane][r], &rows[size_t(a_offset(warp_row(warp) + m * 16, lane, r, k))], 8);
                        }
                    }
                    for (int c = 0; c < n_tiles; ++c) {
                        float fb[32][2][2];
                        for (int lane = 0; lane < 32; ++lane) {
                            for (int r = 0; r < 2; ++r) {
                                const int at = b_offset(warp_column(warp) + c * 8, lane, r, k);
                                std::memcpy(fb[lane][r], &columns[size_t(at)], 8);
                            }
                        }
                        multiply(block(warp, m, c), fa, fb);
                    }
                }
            }
        }
    }
    for (int warp = 0; warp < warps; ++warp) {
        for (int lane = 0; lane < 32; ++lane) {
            for (int m = 0; m < m_tiles; ++m) {
                for (int c = 0; c < n_tiles; ++c) {
                    for (int e = 0; e < 4; ++e) {
                        f(row0 + warp_row(warp) + m * 16 + accumulator_row(lane, e),
                          column0 + warp_column(warp) + c * 8 + accumulator_column(lane, e),
                          block(warp, m, c)[lane][e]);
                    }
                }
            }
        }
    }
}

int64_t total_twins = 0, total_open = 0;

void test_counts(const Head& head, float tau) {
    const Tokens t(head);
    std::vector<int32_t> first(size_t(t.n), 0), counts(size_t(t.n), 0), expected(size_t(t.n), 0);
    for (int i = 0, j = 0; i < t.n; ++i) {
        while (j < t.n && head.pos[size_t(j)] <= head.pos[size_t(i)] + head.window) {
            ++j;
        }
        first[size_t(i)] = j;
    }
    int64_t open = 0;
    for (int down = 0; down < t.padded / tile; ++down) {
        for (int across = 0; across < t.padded / tile; ++across) {
            if (!holds_pairs(down, across, t.n, first.data())) {
                continue;
            }
            for_each_pair(t, down * tile, t, across * tile, [&](int i, int j, float approximate) {
                if (i >= t.n || j >= t.n || j < first[size_t(i)] || !head.valid[size_t(i)] || !head.valid[size_t(j)]) {
                    return;
                }
                const float slack = t.slack[size_t(i)] + t.slack[size_t(j)];
                const float truth = similarity(head.row(i), head.row(j), head.d);
                CHECK(std::fabs(approximate - truth) <= slack, "pair %d, %d is off by more than its bound", i, j);
                const Verdict verdict = judge(approximate, tau, slack);
                open += verdict == Verdict::open;
                if (verdict == Verdict::yes || (verdict == Verdict::open && truth > tau)) {
                    ++counts[size_t(i)];
                    ++counts[size_t(j)];
                }
            });
        }
    }
    int64_t twins = 0;
    for (int i = 0; i < t.n; ++i) {
        for (int j = 0; j < t.n; ++j) {
            const bool far = std::abs(head.pos[size_t(i)] - head.pos[size_t(j)]) > head.window;
            expected[size_t(i)] += far && head.valid[size_t(i)] && head.valid[size_t(j)] &&
                                   similarity(head.row(i), head.row(j), head.d) > tau;
        }
        twins += expected[size_t(i)];
    }
    CHECK(counts == expected, "counts of %d tokens, %d dimensions", t.n, t.d);
    total_twins += twins;
    total_open += open;
}

void test_best(const Head& head) {
    const Tokens t(head);
    std::vector<int32_t> floor(size_t(t.n)), best(size_t(t.n));
    int32_t none;
    const float minus_one = -1.0f;
    std::memcpy(&none, &minus_one, 4);
    std::fill(floor.begin(), floor.end(), ordered(none));
    best = floor;
    const auto as_ordered = [](float x) {
        int32_t bits;
        std::memcpy(&bits, &x, 4);
        return ordered(bits);
    };
    for (int pass = 0; pass < 2; ++pass) {
        for (int down = 0; down < t.padded; down += tile) {
            for (int across = 0; across < t.padded; across += tile) {
                for_each_pair(t, down, t, across, [&](int i, int j, float approximate) {
                    if (i >= t.n || j >= t.n || std::abs(head.pos[size_t(i)] - head.pos[size_t(j)]) <= head.window ||
                        !head.valid[size_t(i)] || !head.valid[size_t(j)]) {
                        return;
                    }
                    const float slack = t.slack[size_t(i)] + t.slack[size_t(j)];
                    if (pass == 0) {
                        floor[size_t(i)] = std::max(floor[size_t(i)], as_ordered(approximate - slack));
                    } else if (as_ordered(approximate + slack) >= floor[size_t(i)]) {
                        const float truth = similarity(head.row(i), head.row(j), head.d);
                        best[size_t(i)] = std::max(best[size_t(i)], as_ordered(truth));
                    }
                });
            }
        }
    }
    for (int i = 0; i < t.n; ++i) {
        float expected = -1, found;
        for (int j = 0; j < t.n; ++j) {
            if (std::abs(head.pos[size_t(i)] - head.pos[size_t(j)]) > head.window && head.valid[size_t(i)] &&
                head.valid[size_t(j)]) {
                expected = std::max(expected, similarity(head.row(i), head.row(j), head.d));
            }
        }
        const int32_t bits = ordered(best[size_t(i)]);
        std::memcpy(&found, &bits, 4);
        CHECK(found == expected, "best twin of token %d of %d", i, t.n);
    }
}

// The 32 lanes of a fragment load touch 32 different banks of shared memory, 4 bytes each.
void test_banks() {
    for (int k0 = 0; k0 < step; k0 += 16) {
        for (int r = 0; r < 4; ++r) {
            std::set<int> banks_a, banks_b;
            for (int lane = 0; lane < 32; ++lane) {
                banks_a.insert(a_offset(16, lane, r, k0) * 2 / 4 % 32);
                banks_b.insert(b_offset(8, lane, r % 2, k0) * 2 / 4 % 32);
            }
            CHECK(banks_a.size() == 32 && banks_b.size() == 32, "bank conflicts");
        }
    }
}

} // namespace

int main() {
    test_banks();
    for (const std::string& kind : {"plain", "nearly equal", "one channel", "alternating", "without direction"}) {
        for (int64_t n : {1, 127, 128, 129, 300}) {
            for (int64_t d : {5, 32, 64, 80}) {
                const auto keys = make_keys(kind, n, d, uint32_t(n + d));
                const twinkv_keys view{keys.data(), GGML_TYPE_F32, 1, n, d, 0, size_t(d) * 4, nullptr, 0};
                const Head head = load_head(view, 0, 7, 1);
                test_counts(head, kind == "nearly equal" ? 0.9999f : 0.5f);
                if (n <= 129) {
                    test_best(head);
                }
            }
        }
    }
    CHECK(total_twins > 1000 && total_open > 100, "keys too easy: %d twins, %d computed twice", int(total_twins),
          int(total_open));
    std::printf("%d twins counted, %d pairs computed twice\nok\n", int(total_twins), int(total_open));
}
