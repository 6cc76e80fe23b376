// Errors inside the library are C++ exceptions; none may cross the C boundary. guard() is that boundary.
#pragma once

#include "twinkv.h"

#include <stdexcept>
#include <string>

namespace twinkv {

struct Error : std::runtime_error {
    Error(twinkv_status status, const std::string& what) : std::runtime_error(what), status(status) {}
    twinkv_status status;
};

inline void require(bool ok, const std::string& what, twinkv_status status = TWINKV_EINVAL) {
    if (!ok) {
        throw Error(status, what);
    }
}

// Remembers the message for twinkv_last_error() and returns the status.
twinkv_status set_error(twinkv_status status, const char* what) noexcept;
twinkv_status current_exception_status() noexcept;

template <class F> twinkv_status guard(F&& f) noexcept {
    try {
        f();
        return TWINKV_OK;
    } catch (...) {
        return current_exception_status();
    }
}

} // namespace twinkv
