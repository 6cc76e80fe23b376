// Scratch memory. Fresh pages cost as much as the work done in them, so within a call of the C API what one
// head frees the next one takes; nothing is kept once no call is running.
#pragma once

#include <cstddef>
#include <utility>

namespace twinkv {

// Held by every function of the C API that works on heads.
class ScratchScope {
  public:
    ScratchScope();
    ~ScratchScope();
    ScratchScope(const ScratchScope&) = delete;
    ScratchScope& operator=(const ScratchScope&) = delete;
};

void* scratch_take(size_t bytes); // aligned to 64; throws std::bad_alloc
void scratch_give(void* p, size_t bytes) noexcept;

// size elements, aligned to a cache line and to the widest vector; contents not initialized.
template <class T> class AlignedArray {
  public:
    AlignedArray() = default;
    explicit AlignedArray(size_t size)
        : data_(static_cast<T*>(scratch_take(size * sizeof(T)))), bytes_(size * sizeof(T)) {}
    AlignedArray(AlignedArray&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    AlignedArray& operator=(AlignedArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~AlignedArray() {
        if (data_) {
            scratch_give(data_, bytes_);
        }
    }
    T* data() { return data_; }
    const T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    size_t bytes_ = 0;
};

} // namespace twinkv
