// Keys that are hard on a low-precision filter, by name; each [n, d] float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

inline std::vector<std::string> key_kinds() {
    return {"plain",       "common mean", "one channel", "nearly equal", "heavy tails",
            "alternating", "huge",        "denormal",    "sparse",       "without direction"};
}

inline std::vector<float> make_keys(const std::string& kind, int64_t n, int64_t d, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> keys(size_t(n * d));
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t k = 0; k < d; ++k) {
            float x = normal(random);
            if (kind == "common mean") {
                x += 10;
            } else if (kind == "one channel") {
                x *= k == d / 2 ? 300.0f : 1.0f;
            } else if (kind == "nearly equal") {
                x = float(k % 7) - 3.5f + 1e-3f * x;
            } else if (kind == "heavy tails") {
                x = x * x * x * x * x;
            } else if (kind == "alternating") {
                x = (i % 2 ? 1.0f : -1.0f) * (float(k % 5) - 2.2f) + 0.05f * x;
            } else if (kind == "huge") {
                x *= 1e37f;
            } else if (kind == "denormal") {
                x *= 1e-41f;
            } else if (kind == "sparse") {
                x *= random() % 20 == 0;
            } else if (kind == "without direction" && i % 5 < 3) {
                x = i % 5 == 0 ? 0.0f : i % 5 == 1 ? NAN : k == d - 1 ? INFINITY : x;
            }
            keys[size_t(i * d + k)] = x;
        }
    }
    return keys;
}
