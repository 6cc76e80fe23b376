// A device of ggml: graphs on it, and how precisely it multiplies.
#include "twins/device.hpp"

#include "core/status.hpp"

#include <cmath>

namespace twinkv {
namespace {

constexpr size_t graph_nodes = 64;

} // namespace

ContextPtr graph_context() {
    const ggml_init_params params{graph_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(graph_nodes, false),
                                  nullptr, true};
    ContextPtr out(ggml_init(params));
    if (!out) {
        throw std::bad_alloc();
    }
    return out;
}

DeviceKeys::DeviceKeys(Device& device, const std::vector<float>& values, int64_t d) : context(graph_context()) {
    tensor = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, d, int64_t(values.size()) / d);
    buffer.reset(ggml_backend_alloc_ctx_tensors(context.get(), device.backend()));
    if (!buffer) {
        throw std::bad_alloc();
    }
    ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float));
}

ggml_tensor* product(ggml_context* c, ggml_tensor* columns, ggml_tensor* rows) {
    ggml_tensor* out = ggml_mul_mat(c, columns, rows);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return out;
}

Device::Device(const char* name, int n_threads) : name_(name) {
    const ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
    require(device != nullptr, "ggml has no device '" + name_ + "' here", TWINKV_EUNSUPPORTED);
    backend_.reset(ggml_backend_dev_init(device, nullptr));
    require(backend_ != nullptr, "ggml's device '" + name_ + "' does not start", TWINKV_EUNSUPPORTED);
    const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    using SetThreads = void (*)(ggml_backend_t, int);
    const auto set_threads =
        reg ? reinterpret_cast<SetThreads>(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))
            : nullptr;
    if (set_threads) {
        set_threads(backend_.get(), n_threads);
    }
}

void Device::compute(ggml_context* context, const std::vector<ggml_tensor*>& results, AllocatorPtr& allocator) {
    ggml_cgraph* graph = ggml_new_graph_custom(context, graph_nodes, false);
    for (ggml_tensor* result : results) {
        ggml_set_output(result);
        ggml_build_forward_expand(graph, result);
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor* node = ggml_graph_node(graph, i);
        require(ggml_backend_supports_op(backend_.get(), node),
                "ggml's device '" + name_ + "' cannot run " + ggml_op_desc(node), TWINKV_EUNSUPPORTED);
    }
    if (!allocator) {
        allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
    }
    if (!allocator || !ggml_gallocr_alloc_graph(allocator.get(), graph)) {
        throw std::bad_alloc();
    }
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph);
    require(status == GGML_STATUS_SUCCESS, "ggml's device '" + name_ + "' failed", TWINKV_EINTERNAL);
}

Device::Arithmetic Device::probe() {
    // as many rows and columns as a block has: small products may take another way
    constexpr int64_t d = 64, n = 512;
    std::vector<float> a(size_t(d * n), 0.0f), b(a);
    for (int64_t i = 0; i < n; ++i) {
        float* x = a.data() + i * d;
        float* y = b.data() + i * d;
        if (i % 3 == 0) { // 21 bits of an input
            x[i % d] = 1 + std::ldexp(1.0f, -20);
            y[i % d] = 1;
        } else if (i % 3 == 1) { // 11 bits of an input
            x[i % d] = 1 + std::ldexp(1.0f, -10);
            y[i % d] = 1;
        } else { // small terms beside a large one
            for (int64_t k = 0; k < d; ++k) {
                x[k] = k == i % d ? 1.0f : std::ldexp(1.0f, -10);
                y[k] = k == i % d ? 1.0f : std::ldexp(1.0f, -10);
            }
        }
    }
    const DeviceKeys x(*this, a, d), y(*this, b, d);
    const ContextPtr c = graph_context();
    ggml_tensor* out = product(c.get(), x.tensor, y.tensor);
    AllocatorPtr allocator;
    compute(c.get(), {out}, allocator);
    const auto got = read_all<float>(out);
    bool fine = true, coarse = true, sums = true;
    for (int64_t i = 0; i < n; ++i) {
        const double error_of =
            std::fabs(double(got[size_t(i * n + i)]) - (i % 3 == 0   ? 1 + std::ldexp(1.0, -20)
                                                        : i % 3 == 1 ? 1 + std::ldexp(1.0, -10)
                                                                     : 1 + double(d - 1) * std::ldexp(1.0, -20)));
        const double tolerance = i % 3 == 2 ? std::ldexp(1.0, -21) : 0.0;
        (i % 3 == 0 ? fine : i % 3 == 1 ? coarse : sums) &= error_of <= tolerance;
    }
    return !coarse || !sums ? Arithmetic::unknown : fine ? Arithmetic::float32 : Arithmetic::half_inputs;
}

float Device::product_bound(int64_t d) {
    if (arithmetic_ == Arithmetic::unknown) {
        arithmetic_ = probe();
    }
    require(arithmetic_ != Arithmetic::unknown,
            "ggml's device '" + name_ + "' multiplies in less than half precision with float32 sums",
            TWINKV_EUNSUPPORTED);
    if (arithmetic_ == Arithmetic::float32) {
        return dot_bound(d);
    }
    // each key is off by this much at most: 11 bits, and half's smallest step where values are tiny
    const double residual = std::ldexp(1.0, -11) + std::ldexp(1.0, -25) * std::sqrt(double(d));
    return float((2 * residual + residual * residual) * 1.01) + dot_bound(d);
}

} // namespace twinkv
