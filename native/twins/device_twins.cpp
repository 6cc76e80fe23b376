// Twin counts and best twins on a device of ggml.
#include "core/status.hpp"
#include "twins/device.hpp"
#include "twins/sweep.hpp"

#include <algorithm>
#include <cstring>

namespace twinkv {
namespace {

ggml_tensor* rows_of(ggml_context* c, ggml_tensor* keys, int64_t begin, int64_t end) {
    return ggml_view_2d(c, keys, keys->ne[0], end - begin, keys->nb[1], size_t(begin) * keys->nb[1]);
}

std::vector<float> unit_keys(const Head& head, const std::vector<int32_t>& token) {
    std::vector<float> out(token.size() * size_t(head.d));
    for (size_t i = 0; i < token.size(); ++i) {
        std::memcpy(out.data() + i * size_t(head.d), head.row(token[i]), size_t(head.d) * sizeof(float));
    }
    return out;
}

std::vector<int32_t> tokens_with_direction(const Head& head, const uint8_t* among) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < head.n; ++i) {
        if (head.valid[size_t(i)] && (!among || among[i])) {
            out.push_back(int32_t(i));
        }
    }
    return out;
}

// Rows x columns, a block of rows at a time. The columns of a block fall into three parts: those before and after the
// windows of all its rows, which the device judges whole, and the few in between, whose products come to the host.
class Blocks {
  public:
    struct Part {
        int32_t begin, end;              // columns
        ggml_tensor* products = nullptr; // [columns, rows of the block]; null when there are none
        int64_t size() const { return end - begin; }
    };

    Blocks(Device& device, const Context& context, std::vector<int32_t> rows, std::vector<int32_t> columns)
        : device_(device), head_(context.head), kernels_(context.kernels), rows_(std::move(rows)),
          columns_(std::move(columns)), bands_(window_bands(head_, rows_, columns_)),
          row_keys_(device, unit_keys(head_, rows_), head_.d),
          column_keys_(device, unit_keys(head_, columns_), head_.d), bound_(device.product_bound(head_.d)) {}

    // f(first row, its number of rows, graph context, parts) for every block: adds to the graph, computes, and reads.
    template <class F> void for_each(F&& f) {
        constexpr int64_t floats = 4 << 20; // products of a block: 16 MB
        const int64_t step = std::clamp<int64_t>(floats / int64_t(columns_.size()), 16, 512);
        for (int64_t row = 0; row < int64_t(rows_.size()); row += step) {
            const int64_t count = std::min(step, int64_t(rows_.size()) - row);
            Band hull = bands_[size_t(row)];
            for (int64_t r = row; r < row + count; ++r) {
                hull.begin = std::min(hull.begin, bands_[size_t(r)].begin);
                hull.end = std::max(hull.end, bands_[size_t(r)].end);
            }
            const ContextPtr c = graph_context();
            std::vector<Part> parts{{0, hull.begin}, {hull.end, int32_t(columns_.size())}, {hull.begin, hull.end}};
            ggml_tensor* block = rows_of(c.get(), row_keys_.tensor, row, row + count);
            for (Part& part : parts) {
                if (part.size() > 0) {
                    part.products =
                        product(c.get(), rows_of(c.get(), column_keys_.tensor, part.begin, part.end), block);
                    ggml_set_output(part.products); // read after the graph has run
                }
            }
            f(row, count, c.get(), parts);
        }
    }

    float similarity(int64_t row, int64_t column) const {
        return exact_similarity(head_, kernels_, rows_[size_t(row)], columns_[size_t(column)]);
    }
    bool allowed(int64_t row, int64_t column) const {
        const Band& band = bands_[size_t(row)];
        return column < band.begin || column >= band.end;
    }
    int32_t row_token(int64_t row) const { return rows_[size_t(row)]; }
    float bound() const { return bound_; }
    Device& device() { return device_; }

  private:
    Device& device_;
    const Head& head_;
    const Kernels& kernels_;
    std::vector<int32_t> rows_, columns_;
    std::vector<Band> bands_;
    DeviceKeys row_keys_, column_keys_;
    float bound_;
};

// How many products of each row exceed a threshold, [1, rows].
ggml_tensor* count_above(ggml_context* c, ggml_tensor* products, float threshold) {
    return ggml_sum_rows(c, ggml_step(c, ggml_scale_bias(c, products, 1.0f, -threshold)));
}

} // namespace

void device_twin_counts(Device& device, const Context& context, float tau, int32_t* counts) {
    std::fill_n(counts, context.head.n, 0);
    const auto tokens = tokens_with_direction(context.head, nullptr);
    if (tokens.empty()) {
        return;
    }
    Blocks blocks(device, context, tokens, tokens);
    AllocatorPtr allocator;
    const float low = tau - blocks.bound(), high = tau + blocks.bound();
    blocks.for_each([&](int64_t row0, int64_t n_rows, ggml_context* c, std::vector<Blocks::Part>& parts) {
        std::vector<ggml_tensor*> results, sure(2), maybe(2);
        for (size_t p = 0; p < 3; ++p) {
            if (p < 2 && parts[p].products) {
                sure[p] = count_above(c, parts[p].products, high);
                maybe[p] = count_above(c, parts[p].products, low);
                results.insert(results.end(), {sure[p], maybe[p]});
            } else if (parts[p].products) {
                results.push_back(parts[p].products);
            }
        }
        device.compute(c, results, allocator);
        for (size_t p = 0; p < 3; ++p) {
            const Blocks::Part& part = parts[p];
            if (!part.products) {
                continue;
            }
            const auto n_sure = p < 2 ? read_all<float>(sure[p]) : std::vector<float>();
            const auto n_maybe = p < 2 ? read_all<float>(maybe[p]) : std::vector<float>();
            for (int64_t r = 0; r < n_rows; ++r) {
                int32_t count = 0;
                if (p < 2 && n_sure[size_t(r)] == n_maybe[size_t(r)]) {
                    count = int32_t(n_sure[size_t(r)]);
                } else { // some pair is too close to tell: look at all of the row
                    const auto products = read_rows<float>(part.products, r, 1);
                    for (int64_t k = 0; k < part.size(); ++k) {
                        const int64_t column = part.begin + k;
                        if (products[size_t(k)] > low && blocks.allowed(row0 + r, column)) {
                            count += products[size_t(k)] > high || blocks.similarity(row0 + r, column) > tau;
                        }
                    }
                }
                counts[blocks.row_token(row0 + r)] += count;
            }
        }
    });
}

namespace {

// Best similarity of a row among the products of one part that may be at least `floor`.
float best_of_row(const Blocks& blocks, int64_t row, const Blocks::Part& part, const std::vector<float>& products,
                  float floor) {
    float best = floor;
    for (int64_t k = 0; k < part.size(); ++k) {
        if (products[size_t(k)] + blocks.bound() > best && blocks.allowed(row, part.begin + k)) {
            best = std::max(best, blocks.similarity(row, part.begin + k));
        }
    }
    return best;
}

// Products that a graph has computed, as a leaf of the next.
ggml_tensor* leaf(ggml_context* c, const ggml_tensor* computed) {
    ggml_tensor* out = ggml_new_tensor_2d(c, GGML_TYPE_F32, computed->ne[0], computed->ne[1]);
    if (ggml_backend_tensor_alloc(computed->buffer, out, computed->data) != GGML_STATUS_SUCCESS) {
        throw Error(TWINKV_EINTERNAL, "a tensor cannot be seen by a second graph");
    }
    return out;
}

} // namespace

void device_best_twin(Device& device, const Context& context, const uint8_t* retained, float* best) {
    std::fill_n(best, context.head.n, -1.0f);
    const auto rows = tokens_with_direction(context.head, nullptr);
    const auto columns = tokens_with_direction(context.head, retained);
    if (columns.empty()) {
        return;
    }
    Blocks blocks(device, context, rows, columns);
    AllocatorPtr first, second;
    blocks.for_each([&](int64_t row0, int64_t n_rows, ggml_context* c, std::vector<Blocks::Part>& parts) {
        std::vector<ggml_tensor*> results, most(2);
        for (size_t p = 0; p < 3; ++p) {
            if (parts[p].products) {
                results.push_back(parts[p].products);
            }
            if (p < 2 && parts[p].products) {
                most[p] = ggml_argmax(c, parts[p].products);
                results.push_back(most[p]);
            }
        }
        device.compute(c, results, first);
        // the exact similarity of the largest product: a floor under the best
        std::vector<float> floor(size_t(n_rows), -1.0f);
        for (size_t p = 0; p < 2; ++p) {
            const auto index = most[p] ? read_all<int32_t>(most[p]) : std::vector<int32_t>();
            for (size_t r = 0; r < index.size(); ++r) {
                floor[r] = std::max(floor[r], blocks.similarity(row0 + int64_t(r), parts[p].begin + index[r]));
            }
        }
        // rows where another product comes as close
        const ContextPtr c2 = graph_context();
        ggml_tensor* threshold = ggml_new_tensor_2d(c2.get(), GGML_TYPE_F32, 1, n_rows);
        ggml_set_input(threshold);
        const BufferPtr buffer(ggml_backend_alloc_ctx_tensors(c2.get(), device.backend()));
        if (!buffer) {
            throw std::bad_alloc();
        }
        std::vector<float> low(floor);
        for (float& x : low) {
            x -= blocks.bound();
        }
        ggml_backend_tensor_set(threshold, low.data(), 0, low.size() * sizeof(float));
        std::vector<ggml_tensor*> close(2), wanted;
        for (size_t p = 0; p < 2; ++p) {
            if (parts[p].products) {
                ggml_tensor* above = ggml_sub(c2.get(), leaf(c2.get(), parts[p].products), threshold);
                close[p] = ggml_sum_rows(c2.get(), ggml_step(c2.get(), above));
                wanted.push_back(close[p]);
            }
        }
        if (!wanted.empty()) {
            device.compute(c2.get(), wanted, second);
        }
        for (size_t p = 0; p < 3; ++p) {
            const auto n_close = p < 2 && close[p] ? read_all<float>(close[p]) : std::vector<float>();
            for (int64_t r = 0; r < n_rows && parts[p].products; ++r) {
                if (p == 2 || n_close[size_t(r)] > 1) {
                    floor[size_t(r)] = best_of_row(blocks, row0 + r, parts[p],
                                                   read_rows<float>(parts[p].products, r, 1), floor[size_t(r)]);
                }
            }
        }
        for (int64_t r = 0; r < n_rows; ++r) {
            best[blocks.row_token(row0 + r)] = floor[size_t(r)];
        }
    });
}

} // namespace twinkv
