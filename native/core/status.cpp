#include "core/status.hpp"

#include <cstdio>
#include <new>

namespace twinkv {
namespace {
// A fixed buffer: reporting an error must not allocate, it may be the allocation that failed.
thread_local char last_error[512] = "";
} // namespace

twinkv_status set_error(twinkv_status status, const char* what) noexcept {
    std::snprintf(last_error, sizeof(last_error), "%s", what);
    return status;
}

twinkv_status current_exception_status() noexcept {
    try {
        throw;
    } catch (const Error& e) {
        return set_error(e.status, e.what());
    } catch (const std::bad_alloc&) {
        return set_error(TWINKV_ENOMEM, "out of memory");
    } catch (const std::exception& e) {
        return set_error(TWINKV_EINTERNAL, e.what());
    } catch (...) {
        return set_error(TWINKV_EINTERNAL, "unknown error");
    }
}

} // namespace twinkv

extern "C" const char* twinkv_last_error(void) {
    return twinkv::last_error;
}
