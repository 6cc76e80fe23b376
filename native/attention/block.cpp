#include "attention/block.hpp"

#include "core/status.hpp"
#include "twinkv.h"

#include <atomic>
#include <string>
#include <vector>

namespace twinkv {
namespace {

// Those this processor can run, best first.
const std::vector<BlockKernel>& kernels() {
    static const std::vector<BlockKernel> all = [] {
        std::vector<BlockKernel> found;
#ifdef TWINKV_ATTENTION_AVX512
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            found.push_back(block_kernel_avx512());
        }
#endif
#ifdef TWINKV_ATTENTION_AVX2
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            found.push_back(block_kernel_avx2());
        }
#endif
        found.push_back(block_kernel_portable());
        return found;
    }();
    return all;
}

std::atomic<size_t> chosen{0};

const BlockKernel& kernel() {
    return kernels()[chosen.load()];
}

} // namespace

int64_t block_scratch(int64_t n_rows, int64_t n_keys) {
    const int64_t tiles = (n_keys + block_tile - 1) / block_tile, rows = kernel().shape.rows;
    return tiles * ((n_rows + rows - 1) / rows * rows) * (block_tile + 2);
}

BlockShape block_shape() {
    return kernel().shape;
}

void attend(const Block& block) {
    kernel().attend(block);
}

} // namespace twinkv

extern "C" twinkv_status twinkv_set_attention_isa(const char* isa) {
    return twinkv::guard([&] {
        std::string known;
        for (size_t i = 0; i < twinkv::kernels().size(); ++i) {
            if (std::string(isa) == twinkv::kernels()[i].isa) {
                twinkv::chosen.store(i);
                return;
            }
            known += std::string(i ? ", " : "") + twinkv::kernels()[i].isa;
        }
        throw twinkv::Error(TWINKV_EINVAL,
                            std::string("no attention kernel '") + isa + "' runs here: choose one of " + known);
    });
}
