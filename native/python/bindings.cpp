// The Python face of twinkv.h: names and argument checks, no logic.
#include "python/bind.hpp"

NB_MODULE(_native, m) {
    m.doc() = "twinkv_edge's native core (see native/include/twinkv.h)";
    m.attr("BUILT_WITH_LLAMA_CPP_PYTHON") = TWINKV_LLAMA_CPP_PYTHON;
    bind_rows(m);
    bind_twins(m);
    bind_tap(m);
    bind_state(m);
}
