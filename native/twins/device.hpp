// Twin kernels as ggml graphs on any device that ggml knows, block by block, so that scratch stays bounded.
#pragma once

#include "twins/twins.hpp"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <memory>
#include <string>

namespace twinkv {

struct FreeContext {
    void operator()(ggml_context* p) const { ggml_free(p); }
};
struct FreeBackend {
    void operator()(ggml_backend* p) const { ggml_backend_free(p); }
};
struct FreeBuffer {
    void operator()(ggml_backend_buffer* p) const { ggml_backend_buffer_free(p); }
};
struct FreeAllocator {
    void operator()(ggml_gallocr* p) const { ggml_gallocr_free(p); }
};
using ContextPtr = std::unique_ptr<ggml_context, FreeContext>;
using BackendPtr = std::unique_ptr<ggml_backend, FreeBackend>;
using BufferPtr = std::unique_ptr<ggml_backend_buffer, FreeBuffer>;
using AllocatorPtr = std::unique_ptr<ggml_gallocr, FreeAllocator>;

class Device {
  public:
    Device(const char* name, int n_threads); // throws Error when there is none of that name

    // Runs a graph whose results are the tensors given; memory for it comes from `allocator`.
    void compute(ggml_context* graph_context, const std::vector<ggml_tensor*>& results, AllocatorPtr& allocator);

    // How far a product of two normalized keys of d dimensions can be from their similarity. What arithmetic the device
    // multiplies matrices in is found by multiplying some: float32 throughout, or inputs of 11 bits (half, TF32) and
    // sums in float32. Throws Error when it is less.
    float product_bound(int64_t d);

    ggml_backend_t backend() const { return backend_.get(); }

  private:
    enum class Arithmetic { unknown, half_inputs, float32 };
    Arithmetic probe();

    BackendPtr backend_;
    std::string name_;
    Arithmetic arithmetic_ = Arithmetic::unknown;
};

// An empty context for the tensors of a graph; their memory is elsewhere.
ContextPtr graph_context();

// Keys of a set of tokens on the device, [d, n].
struct DeviceKeys {
    ContextPtr context;
    BufferPtr buffer;
    ggml_tensor* tensor = nullptr;

    DeviceKeys(Device& device, const std::vector<float>& values, int64_t d);
};

// [columns, rows]: products of every column with every row.
ggml_tensor* product(ggml_context* c, ggml_tensor* columns, ggml_tensor* rows);

// Rows of a contiguous tensor, in the host's memory.
template <class T> std::vector<T> read_rows(const ggml_tensor* tensor, int64_t row, int64_t rows) {
    std::vector<T> out(size_t(tensor->ne[0] * rows));
    ggml_backend_tensor_get(tensor, out.data(), size_t(row) * tensor->nb[1], out.size() * sizeof(T));
    return out;
}
template <class T> std::vector<T> read_all(const ggml_tensor* tensor) {
    return read_rows<T>(tensor, 0, tensor->ne[1]);
}

void device_twin_counts(Device& device, const Context& context, float tau, int32_t* counts);
void device_best_twin(Device& device, const Context& context, const uint8_t* retained, float* best);

} // namespace twinkv
