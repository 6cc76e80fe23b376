// Which kernels run: the best that this processor has, unless TWINKV_ISA or twinkv_set_isa() says otherwise.
#include "core/status.hpp"
#include "twins/kernels.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace twinkv {

#if defined(TWINKV_AMX)
extern const Kernels kernels_bf16_amx;
#endif
#if defined(TWINKV_AVX512VNNI)
extern const Kernels kernels_i8_avx512vnni;
#endif
#if defined(TWINKV_AVX512BF16)
extern const Kernels kernels_bf16_avx512;
#endif
#if defined(TWINKV_AVXVNNI)
extern const Kernels kernels_i8_avxvnni;
#endif
#if defined(TWINKV_AVX2)
extern const Kernels kernels_i8_avx2, kernels_f32_avx2;
#endif
#if defined(TWINKV_NEON)
extern const Kernels kernels_f32_neon;
#endif
extern const Kernels kernels_f32_scalar;

const Kernels* const all_kernels[] = {
#if defined(TWINKV_AMX)
    &kernels_bf16_amx,
#endif
#if defined(TWINKV_AVX512VNNI)
    &kernels_i8_avx512vnni,
#endif
#if defined(TWINKV_AVX512BF16)
    &kernels_bf16_avx512,
#endif
#if defined(TWINKV_AVXVNNI)
    &kernels_i8_avxvnni,
#endif
#if defined(TWINKV_AVX2)
    &kernels_i8_avx2,       &kernels_f32_avx2,
#endif
#if defined(TWINKV_NEON)
    &kernels_f32_neon,
#endif
    &kernels_f32_scalar,
};
const int n_all_kernels = int(sizeof(all_kernels) / sizeof(all_kernels[0]));

namespace {

std::atomic<const Kernels*> chosen{nullptr};

const Kernels* best() {
    for (const Kernels* k : all_kernels) {
        if (k->supported()) {
            return k;
        }
    }
    return nullptr; // cannot be: the last one always runs
}

const Kernels* named(const char* isa) {
    std::string known;
    for (const Kernels* k : all_kernels) {
        if (std::strcmp(k->isa, isa) == 0) {
            require(k->supported(), std::string("this processor does not have ") + isa);
            return k;
        }
        known += known.empty() ? k->isa : std::string(", ") + k->isa;
    }
    throw Error(TWINKV_EINVAL, std::string("no instruction set '") + isa + "' is built in: choose one of " + known);
}

} // namespace

const Kernels& active_kernels() {
    const Kernels* k = chosen.load();
    if (!k) {
        const char* isa = std::getenv("TWINKV_ISA");
        k = isa && *isa ? named(isa) : best();
        chosen.store(k);
    }
    return *k;
}

} // namespace twinkv

extern "C" {

const char* twinkv_isa_name(int index, bool* supported) {
    if (index < 0 || index >= twinkv::n_all_kernels) {
        return nullptr;
    }
    if (supported) {
        *supported = twinkv::all_kernels[index]->supported();
    }
    return twinkv::all_kernels[index]->isa;
}

twinkv_status twinkv_isa(const char** isa) {
    return twinkv::guard([&] { *isa = twinkv::active_kernels().isa; });
}

twinkv_status twinkv_set_isa(const char* isa) {
    return twinkv::guard([&] { twinkv::chosen.store(isa ? twinkv::named(isa) : twinkv::best()); });
}
}
