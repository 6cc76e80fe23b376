// One attention head, ready for the kernels: normalized keys, and for every token where its local window
// ends.
#pragma once

#include "twinkv.h"
#include "twins/scratch.hpp"

#include <cstdint>
#include <vector>

namespace twinkv {

struct Head {
    int64_t n = 0, d = 0;
    int64_t ld = 0;             // floats from one row of khat to the next: d rounded up to 16, the rest zero
    AlignedArray<float> khat;   // [n, ld]; a key without direction is a row of zeros
    std::vector<uint8_t> valid; // [n]; 0: norm zero or not finite, no twins
    std::vector<int32_t> pos;   // [n]; true positions, ascending
    int64_t window = 0;

    const float* row(int64_t i) const { return khat.data() + i * ld; }
    bool protected_token(int64_t i, int64_t n_sink, int64_t n_recent) const {
        return pos[size_t(i)] < n_sink || int64_t(pos[size_t(i)]) > int64_t(pos[size_t(n - 1)]) - n_recent;
    }
};

// The similarity of two normalized keys. Products of floats are exact in double, so fused multiply-add or
// not, and on every machine, this gives the same bits.
inline float similarity(const float* a, const float* b, int64_t d) {
    double sum = 0;
    for (int64_t k = 0; k < d; ++k) {
        sum += double(a[k]) * double(b[k]);
    }
    return float(sum);
}

// Throw Error on arguments that cannot be, before any key is read.
void check_keys(const twinkv_keys& keys);
void check_call(const twinkv_keys* keys, int64_t local_window);
void check_tau(float tau);

Head load_head(const twinkv_keys& keys, int64_t head, int64_t window, int n_threads);

} // namespace twinkv
