// The kernels of every instruction set this processor has: their error bound, and the C API against the definition.
#include "check.hpp"
#include "keys.hpp"

#include "core/status.hpp"
#include "twins/pack.hpp"
#include "twins/twins.hpp"

#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <numeric>

using namespace twinkv;

namespace {

twinkv_keys describe(const std::vector<float>& keys, int64_t n, int64_t d) {
    return {keys.data(), GGML_TYPE_F32, 1, n, d, 0, size_t(d) * 4, nullptr, 0};
}

// What tile, shifts and bound say of every pair, against the true similarity; the closest call, as a share.
double worst_share_of_bound(const Head& head, const Kernels& kernels) {
    const Center center = center_of(head, kernels);
    std::vector<int32_t> everything(size_t(head.n), 0);
    std::iota(everything.begin(), everything.end(), 0);
    const Packed set = pack(head, kernels, center, everything, Side::both, 1);
    const ErrorBound bound(head, set.operand, center);
    alignas(64) uint8_t state[64];
    if (kernels.enter) {
        kernels.enter(state);
    }
    double worst = 0;
    for (int64_t g = 0; g < set.groups; ++g) {
        for (int64_t p = 0; p < set.groups; ++p) {
            alignas(64) float tile[tile_size * tile_size];
            kernels.tile(set.operand, g, set.operand, p, tile);
            for (int64_t i = g * tile_size; i < std::min(head.n, (g + 1) * tile_size); ++i) {
                for (int64_t j = p * tile_size; j < std::min(head.n, (p + 1) * tile_size); ++j) {
                    if (!head.valid[size_t(i)] || !head.valid[size_t(j)]) {
                        continue;
                    }
                    const float value = tile[(i % tile_size) * tile_size + j % tile_size];
                    const double approximate =
                        double(value) + double(set.shift.data()[i]) + double(set.shift.data()[j]) + center.square;
                    const double error = std::fabs(approximate - double(similarity(head.row(i), head.row(j), head.d)));
                    const double own = bound(set.lengths[size_t(i)], set.lengths[size_t(j)]);
                    const double group = bound(set.group_lengths[size_t(g)], set.group_lengths[size_t(p)]);
                    CHECK(own <= group, "%s: a pair's bound %g above its tile's %g", kernels.isa, own, group);
                    worst = std::max(worst, error / own);
                }
            }
        }
    }
    if (kernels.leave) {
        kernels.leave(state);
    }
    return worst;
}

void test_bounds(const Kernels& kernels) {
    double worst = 0;
    for (const std::string& kind : key_kinds()) {
        for (int64_t d : {1, 2, 7, 16, 33, 64, 80, 128, 257}) {
            const int64_t n = 70;
            const auto keys = make_keys(kind, n, d, uint32_t(d));
            const Head head = load_head(describe(keys, n, d), 0, 0, 1);
            const double share = worst_share_of_bound(head, kernels);
            CHECK(share < 1, "%s, %s, d=%d: error is %g of its bound", kernels.isa, kind.c_str(), int(d), share);
            worst = std::max(worst, share);
        }
    }
    std::printf("%-10s errors up to %.2f of their bound\n", kernels.isa, worst);
}

void test_products(const Kernels& kernels) {
    for (const std::string& kind : key_kinds()) {
        for (int64_t d : {1, 15, 16, 17, 64, 100, 128}) {
            const int64_t n = 40;
            const auto keys = make_keys(kind, n, d, uint32_t(7 * d));
            const Head head = load_head(describe(keys, n, d), 0, 0, 1);
            for (int32_t i = 0; i < n; ++i) {
                for (int32_t j = 0; j < n; ++j) {
                    const float truth = similarity(head.row(i), head.row(j), d);
                    CHECK(exact_similarity(head, kernels, i, j) == truth, "%s, %s, d=%d", kernels.isa, kind.c_str(),
                          int(d));
                    float product;
                    kernels.dots(head.khat.data(), head.ld, &i, &j, 1, &product);
                    CHECK(std::fabs(product - truth) <= dot_bound(d), "%s, %s, d=%d", kernels.isa, kind.c_str(),
                          int(d));
                }
            }
        }
    }
}

// Whatever the fast way is sure of is what the definition says, bit for bit.
void test_normalize(const Kernels& kernels) {
    int64_t sure = 0, all = 0;
    for (const std::string& kind : key_kinds()) {
        for (int64_t d : {1, 2, 3, 8, 31, 64, 128, 576}) {
            const int64_t n = 200;
            const auto keys = make_keys(kind, n, d, uint32_t(13 * d));
            std::vector<float> unit(size_t(d), 0.0f);
            for (int64_t i = 0; i < n; ++i, ++all) {
                const float* key = keys.data() + i * d;
                if (!kernels.normalize(key, d, unit.data())) {
                    continue;
                }
                ++sure;
                double square = 0;
                for (int64_t k = 0; k < d; ++k) {
                    square += double(key[k]) * double(key[k]);
                }
                const double norm = std::sqrt(square);
                CHECK(std::isfinite(norm) && norm > 0, "%s normalizes what has no direction", kernels.isa);
                for (int64_t k = 0; k < d; ++k) {
                    const auto expected = float(double(key[k]) / norm);
                    CHECK(std::memcmp(&unit[size_t(k)], &expected, 4) == 0, "%s, %s, d=%d", kernels.isa, kind.c_str(),
                          int(d));
                }
            }
        }
    }
    CHECK(sure > all * 8 / 10, "%s is sure of %d keys of %d only", kernels.isa, int(sure), int(all));
}

struct Truth {
    std::vector<int32_t> counts;
    std::vector<float> best;
};

Truth compute(const Head& head, const std::vector<uint8_t>& retained, float tau) {
    Truth out{std::vector<int32_t>(size_t(head.n), 0), std::vector<float>(size_t(head.n), -1.0f)};
    for (int64_t i = 0; i < head.n; ++i) {
        for (int64_t j = 0; j < head.n; ++j) {
            if (std::abs(int64_t(head.pos[size_t(i)]) - head.pos[size_t(j)]) <= head.window || !head.valid[size_t(i)] ||
                !head.valid[size_t(j)]) {
                continue;
            }
            const float sim = similarity(head.row(i), head.row(j), head.d);
            out.counts[size_t(i)] += sim > tau;
            if (retained[size_t(j)]) {
                out.best[size_t(i)] = std::max(out.best[size_t(i)], sim);
            }
        }
    }
    return out;
}

// The C API on rows of a cache tensor: any type, heads side by side, rows that start at odd addresses.
void test_api(const Kernels& kernels, int type, int64_t n, int64_t d, int64_t n_heads) {
    const auto traits = ggml_get_type_traits(ggml_type(type));
    const size_t head_bytes = ggml_row_size(ggml_type(type), d), row_bytes = head_bytes * size_t(n_heads);
    const size_t offset = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 ? 3 : 0; // blocks hold aligned members
    std::vector<uint8_t> memory(row_bytes * size_t(n) + offset);
    uint8_t* rows = memory.data() + offset;
    std::vector<float> plain;
    for (int64_t h = 0; h < n_heads; ++h) {
        const auto keys = make_keys(h % 2 ? "nearly equal" : "common mean", n, d, uint32_t(h + d));
        for (int64_t i = 0; i < n; ++i) {
            uint8_t* row = rows + size_t(i) * row_bytes + size_t(h) * head_bytes;
            if (type == GGML_TYPE_F32) {
                std::memcpy(row, keys.data() + i * d, head_bytes);
            } else {
                traits->from_float_ref(keys.data() + i * d, row, d);
            }
        }
    }
    std::vector<int32_t> position(size_t(n), 0);
    for (int64_t i = 0; i < n; ++i) {
        position[size_t(i)] = int32_t(i + i / 3);
    }
    const twinkv_keys keys{rows, type, n_heads, n, d, head_bytes, row_bytes, position.data(), 0};
    std::vector<uint8_t> retained(size_t(n_heads * n), 0), invalid(retained);
    for (size_t i = 0; i < retained.size(); ++i) {
        retained[i] = i % 3 != 0;
    }
    std::vector<int32_t> counts(retained.size());
    std::vector<float> best(retained.size());
    const float tau = 0.99f;
    for (int threads : {1, 3}) {
        CHECK(twinkv_twin_counts(&keys, tau, 6, threads, counts.data()) == TWINKV_OK, "%s", twinkv_last_error());
        CHECK(twinkv_best_twin(&keys, retained.data(), 6, threads, best.data()) == TWINKV_OK, "%s",
              twinkv_last_error());
        CHECK(twinkv_invalid_keys(&keys, threads, invalid.data()) == TWINKV_OK, "%s", twinkv_last_error());
        for (int64_t h = 0; h < n_heads; ++h) {
            const Head head = load_head(keys, h, 6, 1);
            const std::vector<uint8_t> mine(retained.begin() + h * n, retained.begin() + (h + 1) * n);
            const Truth truth = compute(head, mine, tau);
            for (int64_t i = 0; i < n; ++i) {
                CHECK(counts[size_t(h * n + i)] == truth.counts[size_t(i)], "%s, type %d, head %d, token %d",
                      kernels.isa, type, int(h), int(i));
                CHECK(best[size_t(h * n + i)] == truth.best[size_t(i)], "%s, type %d, head %d, token %d", kernels.isa,
                      type, int(h), int(i));
                CHECK(invalid[size_t(h * n + i)] == !head.valid[size_t(i)], "%s", kernels.isa);
            }
        }
    }
    std::vector<int32_t> device_counts(counts.size());
    std::vector<float> device_best(best.size());
    CHECK(twinkv_device_twin_counts("CPU", &keys, tau, 6, 2, device_counts.data()) == TWINKV_OK, "%s",
          twinkv_last_error());
    CHECK(twinkv_device_best_twin("CPU", &keys, retained.data(), 6, 2, device_best.data()) == TWINKV_OK, "%s",
          twinkv_last_error());
    CHECK(device_counts == counts && device_best == best, "ggml's CPU device differs, type %d", type);
    for (auto mode : {TWINKV_REPAIR_PAPER, TWINKV_REPAIR_CONSISTENT, TWINKV_REPAIR_COVERAGE}) {
        const twinkv_repair_params params{mode, 0.9f, 6, 4, 16, 0.5, 0.05f};
        auto repaired = retained;
        std::vector<twinkv_repair_stats> stats{size_t(n_heads)};
        CHECK(twinkv_repair(&keys, &params, 2, nullptr, nullptr, nullptr, repaired.data(), stats.data()) == TWINKV_OK,
              "%s", twinkv_last_error());
        for (int64_t h = 0; h < n_heads; ++h) {
            const auto count = [&](const std::vector<uint8_t>& set) {
                return std::accumulate(set.begin() + h * n, set.begin() + (h + 1) * n, 0);
            };
            CHECK(count(repaired) == count(retained), "the budget of head %d changed", int(h));
        }
    }
}

void test_bad_arguments() {
    const std::vector<float> data(64, 1.0f);
    std::vector<int32_t> counts(8);
    const twinkv_keys good{data.data(), GGML_TYPE_F32, 1, 8, 8, 0, 32, nullptr, 0};
    CHECK(twinkv_twin_counts(&good, 2.0f, 0, 1, counts.data()) == TWINKV_EINVAL, "tau 2");
    CHECK(twinkv_twin_counts(&good, NAN, 0, 1, counts.data()) == TWINKV_EINVAL, "tau nan");
    CHECK(twinkv_twin_counts(&good, 0.9f, -1, 1, counts.data()) == TWINKV_EINVAL, "window");
    CHECK(twinkv_twin_counts(nullptr, 0.9f, 0, 1, counts.data()) == TWINKV_EINVAL, "no keys");
    twinkv_keys bad = good;
    bad.type = 12345;
    CHECK(twinkv_twin_counts(&bad, 0.9f, 0, 1, counts.data()) == TWINKV_EUNSUPPORTED, "type");
    bad = good;
    bad.type = GGML_TYPE_Q8_0;
    CHECK(twinkv_twin_counts(&bad, 0.9f, 0, 1, counts.data()) == TWINKV_EINVAL, "8 values are no block of q8_0");
    bad = good;
    const int32_t backwards[] = {7, 6, 5, 4, 3, 2, 1, 0};
    bad.positions = backwards;
    CHECK(twinkv_twin_counts(&bad, 0.9f, 0, 1, counts.data()) == TWINKV_EINVAL, "positions");
    CHECK(twinkv_device_twin_counts("abacus", &good, 0.9f, 0, 1, counts.data()) == TWINKV_EUNSUPPORTED, "device");
    CHECK(twinkv_set_isa("abacus") == TWINKV_EINVAL, "isa");
}

} // namespace

int main() {
    for (int i = 0; i < n_all_kernels; ++i) {
        const Kernels& kernels = *all_kernels[i];
        if (!kernels.supported()) {
            std::printf("%-10s skipped: this processor does not have it\n", kernels.isa);
            continue;
        }
        CHECK(twinkv_set_isa(kernels.isa) == TWINKV_OK, "%s", twinkv_last_error());
        test_bounds(kernels);
        test_products(kernels);
        test_normalize(kernels);
        for (int type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0}) {
            test_api(kernels, type, 150, 64, 3);
            test_api(kernels, type, 33, 96, 1);
        }
    }
    CHECK(twinkv_set_isa(nullptr) == TWINKV_OK, "%s", twinkv_last_error());
    test_bad_arguments();
    std::puts("ok");
}
