#include "twins/scratch.hpp"

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace twinkv {
namespace {

constexpr size_t small = 64 << 10; // below this the allocator is as good
constexpr size_t huge_page = 2 << 20;

struct Pool {
    std::mutex mutex;
    int scopes = 0;
    std::multimap<size_t, void*> free; // by size
};

Pool& pool() {
    static Pool instance;
    return instance;
}

size_t rounded(size_t bytes) {
    const size_t step = bytes >= huge_page ? huge_page : 64;
    return bytes == 0 ? step : (bytes + step - 1) / step * step;
}

void* allocate(size_t bytes) { // bytes as rounded() gives them
    void* p = std::aligned_alloc(bytes >= huge_page ? huge_page : 64, bytes);
    if (!p) {
        throw std::bad_alloc();
    }
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (bytes >= huge_page) {
        madvise(p, bytes, MADV_HUGEPAGE); // advice: where it is not taken, nothing is lost
    }
#endif
    return p;
}

} // namespace

ScratchScope::ScratchScope() {
    std::lock_guard<std::mutex> lock(pool().mutex);
    ++pool().scopes;
}

ScratchScope::~ScratchScope() {
    std::lock_guard<std::mutex> lock(pool().mutex);
    if (--pool().scopes == 0) {
        for (auto& block : pool().free) {
            std::free(block.second);
        }
        pool().free.clear();
    }
}

void* scratch_take(size_t bytes) {
    bytes = rounded(bytes);
    if (bytes >= small) {
        std::lock_guard<std::mutex> lock(pool().mutex);
        const auto block = pool().free.lower_bound(bytes);
        if (block != pool().free.end() && block->first <= bytes + bytes / 2) {
            void* p = block->second;
            pool().free.erase(block);
            return p;
        }
    }
    return allocate(bytes);
}

void scratch_give(void* p, size_t bytes) noexcept {
    bytes = rounded(bytes);
    if (bytes >= small) {
        std::lock_guard<std::mutex> lock(pool().mutex);
        if (pool().scopes > 0) {
            try {
                pool().free.emplace(bytes,
                                    p); // a larger block taken for this size counts as this size from now on
                return;
            } catch (const std::bad_alloc&) {
            }
        }
    }
    std::free(p);
}

} // namespace twinkv
