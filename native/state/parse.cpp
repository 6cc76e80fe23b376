#include "state/state.hpp"

#include "ggml.h"

#include <cstring>

namespace twinkv {
namespace {

[[noreturn]] void refuse(const std::string& what) {
    throw Error(TWINKV_EFORMAT,
                "the sequence state is not laid out as expected (" + what +
                    "): this llama.cpp is not the one twinkv_edge was built for, or the cache kind is unknown");
}

// Bounds-checked reading, left to right.
class Reader {
  public:
    Reader(const uint8_t* bytes, size_t size, size_t at) : bytes_(bytes), size_(size), at_(at) {}

    template <class T> T read(const char* what) {
        T value;
        std::memcpy(&value, bytes_ + skip(sizeof(T), what), sizeof(T));
        return value;
    }
    // Steps over n bytes and returns where they start.
    size_t skip(size_t n, const char* what) {
        if (n > size_ - at_) {
            refuse(std::string("it ends inside ") + what);
        }
        at_ += n;
        return at_ - n;
    }
    size_t skip(size_t count, size_t unit, const char* what) {
        if (unit != 0 && count > (size_ - at_) / unit) {
            refuse(std::string("it ends inside ") + what);
        }
        return skip(count * unit, what);
    }
    size_t at() const { return at_; }
    bool at_end() const { return at_ == size_; }

  private:
    const uint8_t* bytes_;
    size_t size_, at_;
};

void check_type(int32_t type) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_type_size(ggml_type(type)) == 0) {
        refuse("row type " + std::to_string(type));
    }
}

Block read_rows(Reader& in, uint32_t n_cells) {
    Block b;
    b.header = in.at();
    check_type(in.read<int32_t>("a row type"));
    const uint64_t row_bytes = in.read<uint64_t>("a row size");
    if (row_bytes == 0 || row_bytes > (1u << 26)) {
        refuse("row size " + std::to_string(row_bytes));
    }
    b.unit = size_t(row_bytes);
    b.n_units = 1;
    b.data = in.skip(n_cells, b.unit, "rows");
    return b;
}

Block read_columns(Reader& in, uint32_t n_cells) {
    Block b;
    b.header = in.at();
    check_type(in.read<int32_t>("a row type"));
    b.unit = in.read<uint32_t>("an element size");
    b.n_units = in.read<uint32_t>("a row length");
    if (b.unit == 0 || b.unit > 8 || b.n_units == 0 || b.n_units > (1u << 24)) {
        refuse("element size or row length");
    }
    b.data = in.skip(b.n_units, b.unit * n_cells, "transposed rows");
    return b;
}

Section read_section(Reader& in) {
    Section s;
    s.begin = in.at();
    if (const uint32_t n_stream = in.read<uint32_t>("the stream count"); n_stream != 1) {
        throw Error(TWINKV_EUNSUPPORTED, "a cache with " + std::to_string(n_stream) +
                                             " streams: make the context with kv_unified=True or n_seq_max=1");
    }
    s.n_cells = in.read<uint32_t>("the cell count");
    s.meta = in.at();
    s.positions.resize(std::min<size_t>(s.n_cells, 1u << 26));
    for (uint32_t c = 0; c < s.n_cells; ++c) {
        if (c >= s.positions.size()) {
            refuse("cell count");
        }
        s.positions[c] = in.read<int32_t>("a cell");
        if (s.positions[c] < 0 || in.read<uint32_t>("a cell") != 1) {
            refuse("a cell's position or sequence count");
        }
        in.skip(4, "a cell");
    }
    if (s.n_cells == 0) {
        s.end = in.at();
        return s; // llama.cpp writes nothing more for an empty cache
    }
    s.body = in.at();
    const uint32_t transposed = in.read<uint32_t>("the V layout"), n_layer = in.read<uint32_t>("the layer count");
    if (transposed > 1 || n_layer == 0 || n_layer > 4096) {
        refuse("V layout or layer count");
    }
    s.v_transposed = transposed == 1;
    for (uint32_t l = 0; l < n_layer; ++l) {
        s.k.push_back(read_rows(in, s.n_cells));
    }
    for (uint32_t l = 0; l < n_layer; ++l) {
        s.v.push_back(s.v_transposed ? read_columns(in, s.n_cells) : read_rows(in, s.n_cells));
    }
    s.end = in.at();
    return s;
}

} // namespace

State parse_state(const uint8_t* bytes, size_t size) {
    State state;
    state.bytes = bytes;
    state.size = size;
    Reader in(bytes, size, 0);
    in.skip(state_header, "the header");
    while (!in.at_end()) {
        if (state.sections.size() == 2) {
            refuse("more than two caches");
        }
        state.sections.push_back(read_section(in));
    }
    if (state.sections.empty()) {
        refuse("no cache");
    }
    return state;
}

} // namespace twinkv

extern "C" twinkv_status twinkv_state_inspect(const uint8_t* blob, size_t size, twinkv_state_info* out) {
    return twinkv::guard([&] {
        const twinkv::State state = twinkv::parse_state(blob, size);
        const twinkv::Section& s = state.sections[0];
        *out = {};
        out->n_layer = int32_t(s.k.size());
        out->n_cells = s.n_cells;
        out->pos_min = out->pos_max = s.n_cells ? s.positions[0] : -1;
        for (const int32_t p : s.positions) {
            out->pos_min = std::min(out->pos_min, p);
            out->pos_max = std::max(out->pos_max, p);
        }
        out->v_transposed = s.v_transposed;
        out->n_sections = int32_t(state.sections.size());
    });
}
