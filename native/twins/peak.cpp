// What this machine's multipliers can do at most: the yardstick of `bench kernels`. Loops of independent
// multiply-adds on registers, in assembly because compilers spill a dozen named vectors.
#include "core/parallel.hpp"
#include "core/status.hpp"
#include "twins/kernels.hpp"

#include <chrono>
#include <cstring>
#include <mutex>

namespace twinkv {
namespace {

struct Peak {
    const char* name;
    const char* isa;            // the kernels whose supported() answers for it, or null
    double operations;          // per repetition: two for a multiply-add
    void (*run)(int64_t times); // repetitions
};

#if defined(__x86_64__)

// Twelve instructions on twelve accumulators: enough to hide the latency of two per cycle.
#define TWINKV_TWELVE(op, reg)                                                                                         \
    op " %%" reg "0, %%" reg "1, %%" reg "2\n" op " %%" reg "0, %%" reg "1, %%" reg "3\n" op " %%" reg "0, %%" reg     \
       "1, %%" reg "4\n" op " %%" reg "0, %%" reg "1, %%" reg "5\n" op " %%" reg "0, %%" reg "1, %%" reg "6\n" op      \
       " %%" reg "0, %%" reg "1, %%" reg "7\n" op " %%" reg "0, %%" reg "1, %%" reg "8\n" op " %%" reg "0, %%" reg     \
       "1, %%" reg "9\n" op " %%" reg "0, %%" reg "1, %%" reg "10\n" op " %%" reg "0, %%" reg "1, %%" reg "11\n" op    \
       " %%" reg "0, %%" reg "1, %%" reg "12\n" op " %%" reg "0, %%" reg "1, %%" reg "13\n"
#define TWINKV_LOOP(function, op, reg)                                                                                 \
    void function(int64_t times) {                                                                                     \
        asm volatile("vzeroall\n1:\n" TWINKV_TWELVE(op, reg) "dec %0\njnz 1b\nvzeroupper\n"                            \
                     : "+r"(times)                                                                                     \
                     :                                                                                                 \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",  \
                       "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                                   \
    }
TWINKV_LOOP(fp32_avx512, "vfmadd231ps", "zmm")
TWINKV_LOOP(fp32_avx2, "vfmadd231ps", "ymm")
TWINKV_LOOP(bf16_avx512, "vdpbf16ps", "zmm")
TWINKV_LOOP(int8_avx512, "vpdpbusd", "zmm")
TWINKV_LOOP(int8_avxvnni, "%{vex%} vpdpbusd", "ymm")

#if defined(TWINKV_AMX)
const Kernels& amx_kernels() {
    for (int i = 0; i < n_all_kernels; ++i) {
        if (std::strcmp(all_kernels[i]->isa, "amx") == 0) {
            return *all_kernels[i];
        }
    }
    throw Error(TWINKV_EINTERNAL, "no AMX kernels");
}

void amx_bf16(int64_t times) {
    alignas(64) uint8_t state[64], zeros[1024] = {};
    amx_kernels().enter(state);
    asm volatile("tileloadd (%1,%2,1), %%tmm4\ntileloadd (%1,%2,1), %%tmm5\n"
                 "tileloadd (%1,%2,1), %%tmm6\ntileloadd (%1,%2,1), %%tmm7\n"
                 "tilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n"
                 "1:\n"
                 "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\ntdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
                 "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\ntdpbf16ps %%tmm7, %%tmm5, %%tmm3\n"
                 "dec %0\njnz 1b\n"
                 : "+r"(times)
                 : "r"(zeros), "r"(int64_t(64))
                 : "cc", "memory");
    amx_kernels().leave(state);
}
#endif

const Peak peaks[] = {
    {"fp32 AVX-512", "avx512vnni", 12 * 16 * 2, fp32_avx512}, {"fp32 AVX2", "avx2", 12 * 8 * 2, fp32_avx2},
    {"bf16 AVX-512", "avx512bf16", 12 * 32 * 2, bf16_avx512}, {"int8 AVX-512", "avx512vnni", 12 * 64 * 2, int8_avx512},
    {"int8 AVX-VNNI", "avxvnni", 12 * 32 * 2, int8_avxvnni},
#if defined(TWINKV_AMX)
    {"bf16 AMX", "amx", 4 * 16 * 16 * 32 * 2, amx_bf16},
#endif
};

#elif defined(__aarch64__)

void fp32_neon(int64_t times) {
    asm volatile("1:\n"
                 "fmla v2.4s, v0.4s, v1.4s\nfmla v3.4s, v0.4s, v1.4s\nfmla v4.4s, v0.4s, v1.4s\n"
                 "fmla v5.4s, v0.4s, v1.4s\nfmla v6.4s, v0.4s, v1.4s\nfmla v7.4s, v0.4s, v1.4s\n"
                 "fmla v16.4s, v0.4s, v1.4s\nfmla v17.4s, v0.4s, v1.4s\nfmla v18.4s, v0.4s, v1.4s\n"
                 "fmla v19.4s, v0.4s, v1.4s\nfmla v20.4s, v0.4s, v1.4s\nfmla v21.4s, v0.4s, v1.4s\n"
                 "fmla v22.4s, v0.4s, v1.4s\nfmla v23.4s, v0.4s, v1.4s\nfmla v24.4s, v0.4s, v1.4s\n"
                 "fmla v25.4s, v0.4s, v1.4s\nsubs %0, %0, #1\nb.ne 1b\n"
                 : "+r"(times)
                 :
                 : "cc", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23",
                   "v24", "v25");
}

const Peak peaks[] = {{"fp32 NEON", "neon", 16 * 4 * 2, fp32_neon}};

#else

void nothing(int64_t) {}
const Peak peaks[] = {{"none", "no such kernels", 0, nothing}};

#endif

bool available(const Peak& peak) {
    for (int i = 0; i < n_all_kernels; ++i) {
        if (std::strcmp(all_kernels[i]->isa, peak.isa) == 0) {
            return all_kernels[i]->supported();
        }
    }
    return false;
}

// Operations per second of n_threads together: each runs for the time given, and all rates are added.
double measure(const Peak& peak, int n_threads, double seconds) {
    using Clock = std::chrono::steady_clock;
    std::mutex mutex;
    double total = 0;
    parallel_for(n_threads, n_threads, [&](int64_t) {
        const auto start = Clock::now();
        double spent = 0;
        int64_t times = 0;
        do {
            constexpr int64_t at_once = 20000;
            peak.run(at_once);
            times += at_once;
            spent = std::chrono::duration<double>(Clock::now() - start).count();
        } while (spent < seconds);
        std::lock_guard<std::mutex> lock(mutex);
        total += double(times) * peak.operations / spent;
    });
    return total;
}

} // namespace
} // namespace twinkv

extern "C" {

const char* twinkv_peak_name(int index, bool* supported) {
    constexpr int count = int(sizeof(twinkv::peaks) / sizeof(twinkv::peaks[0]));
    if (index < 0 || index >= count) {
        return nullptr;
    }
    if (supported) {
        *supported = twinkv::available(twinkv::peaks[index]);
    }
    return twinkv::peaks[index].name;
}

twinkv_status twinkv_peak(int index, int n_threads, double seconds, double* operations_per_second) {
    return twinkv::guard([&] {
        bool supported = false;
        twinkv::require(twinkv_peak_name(index, &supported) != nullptr && supported,
                        "this processor has no such multipliers");
        *operations_per_second = twinkv::measure(twinkv::peaks[index], twinkv::resolve_threads(n_threads), seconds);
    });
}
}
