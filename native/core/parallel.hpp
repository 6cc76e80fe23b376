// Work split over plain threads. Each index is handed out once; which thread takes it never changes a result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace twinkv {

inline int resolve_threads(int n_threads) {
    if (n_threads > 0) {
        return std::min(n_threads, 256);
    }
    return std::max(1u, std::thread::hardware_concurrency());
}

// Calls f(i) for i in [0, n). The first exception of any worker is rethrown here, after all have stopped.
template <class F> void parallel_for(int64_t n, int n_threads, F&& f) {
    n_threads = int(std::min<int64_t>(resolve_threads(n_threads), n));
    if (n_threads <= 1) {
        for (int64_t i = 0; i < n; ++i) {
            f(i);
        }
        return;
    }
    std::atomic<int64_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    auto work = [&] {
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
                f(i);
            }
        } catch (...) {
            std::lock_guard<std::mutex> lock(failure_mutex);
            if (!failure) {
                failure = std::current_exception();
            }
            next.store(n);
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(size_t(n_threads - 1));
    try {
        for (int t = 1; t < n_threads; ++t) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error&) {
        // the system gives no more threads: go on with those that started
    }
    work();
    for (auto& t : threads) {
        t.join();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

} // namespace twinkv
