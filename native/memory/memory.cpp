// What the cache really occupies, and giving unused rows back to the system.
//
// ggml clears the whole cache when it is made, so every page is resident from the start. Rows past the last
// used cell are never read unmasked; a page given back reads as zero, which is what ggml had written there.
#include "tap/tap.hpp"

#if defined(__GLIBC__) || defined(__linux__)
#include <malloc.h> // defines __GLIBC__, where it is glibc's
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define TWINKV_HAVE_PAGES 1
#endif

namespace twinkv {
namespace {

#ifdef TWINKV_HAVE_PAGES

size_t page_size() {
    static const size_t size = size_t(sysconf(_SC_PAGESIZE));
    return size;
}

uint64_t resident_bytes(const ggml_tensor* t) {
    const size_t page = page_size();
    const uintptr_t begin = reinterpret_cast<uintptr_t>(t->data), end = begin + ggml_nbytes(t);
    const uintptr_t first = begin / page * page;
    std::vector<unsigned char> pages((end - first + page - 1) / page);
#if defined(__APPLE__)
    const int failed = mincore(reinterpret_cast<void*>(first), end - first, reinterpret_cast<char*>(pages.data()));
#else
    const int failed = mincore(reinterpret_cast<void*>(first), end - first, pages.data());
#endif
    if (failed) {
        return ggml_nbytes(t);
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < pages.size(); ++i) {
        if (pages[i] & 1) {
            const uintptr_t from = std::max(begin, first + i * page), to = std::min(end, first + (i + 1) * page);
            bytes += to - from;
        }
    }
    return bytes;
}

// Only whole pages inside the range: neighbours on a shared page belong to other cells or other tensors.
uint64_t release_range(uintptr_t begin, uintptr_t end) {
    const size_t page = page_size();
    const uintptr_t from = (begin + page - 1) / page * page, to = end / page * page;
    if (from >= to) {
        return 0;
    }
#if defined(__linux__)
    return madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED) == 0 ? to - from : 0;
#elif defined(MADV_FREE_REUSABLE) // macOS: taken at once, counted out of the process's footprint
    return madvise(reinterpret_cast<void*>(from), to - from, MADV_FREE_REUSABLE) == 0 ? to - from : 0;
#else
    return 0; // no call that is known to give anonymous pages back at once
#endif
}

#else

uint64_t resident_bytes(const ggml_tensor* t) {
    return ggml_nbytes(t);
}
uint64_t release_range(uintptr_t, uintptr_t) {
    return 0;
}

#endif

// Host memory that only this process maps: not pinned, not shared with a device.
bool is_plain_host(const ggml_tensor* t) {
    return is_host(t) && ggml_backend_buffer_get_type(t->buffer) == ggml_backend_cpu_buffer_type();
}

uint64_t release_rows(const ggml_tensor* t, int64_t first, int64_t last) {
    if (!is_plain_host(t)) {
        return 0;
    }
    const uintptr_t base = reinterpret_cast<uintptr_t>(t->data);
    return release_range(base + size_t(first) * t->nb[1], base + size_t(last) * t->nb[1]);
}

} // namespace
} // namespace twinkv

extern "C" {

void twinkv_trim_heap(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

twinkv_status twinkv_tap_memory(const twinkv_tap* tap, int32_t index, twinkv_memory* out) {
    return twinkv::guard([&] {
        const auto& layer = tap->at(index);
        *out = {};
        for (const ggml_tensor* t : {layer.k, layer.v}) {
            twinkv::require(t != nullptr, "the layer's cache was not seen in the graph", TWINKV_EUNSUPPORTED);
            out->allocated += ggml_nbytes(t);
            out->resident += twinkv::is_plain_host(t) ? twinkv::resident_bytes(t) : ggml_nbytes(t);
        }
    });
}

twinkv_status twinkv_tap_release(twinkv_tap* tap, int32_t index, int64_t first, int64_t last, uint64_t* released) {
    return twinkv::guard([&] {
        const auto& layer = tap->at(index);
        twinkv::require(first >= 0 && first <= last && last <= layer.facts.n_cells, "cells past the end of the cache");
        twinkv::require(layer.v != nullptr, "the layer's cache was not seen in the graph", TWINKV_EUNSUPPORTED);
        *released = twinkv::release_rows(layer.k, first, last);
        if (!layer.facts.v_transposed) {
            *released += twinkv::release_rows(layer.v, first, last);
        }
    });
}
}
