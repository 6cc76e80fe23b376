/* twinkv: TwinKV key-redundancy kernels and per-head KV cache eviction for llama.cpp.
 *
 * A plain C interface over a C++17 library, usable from any program that links llama.cpp; the Python package
 * twinkv_edge is one such program. Conventions:
 *   - every function that can fail returns twinkv_status; on failure nothing was changed and
 *     twinkv_last_error() says what to do (per thread, valid until the next failure on it);
 *   - no exception crosses this boundary; sizes are checked before memory is touched;
 *   - arrays are dense, row major, the last index fastest; n_threads <= 0 means one thread per core;
 *   - results never depend on the number of threads.
 */
#ifndef TWINKV_H
#define TWINKV_H

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(_WIN32)
#define TWINKV_API __declspec(dllexport)
#else
#define TWINKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_tensor;
struct llama_context;

typedef enum twinkv_status {
    TWINKV_OK = 0,
    TWINKV_EINVAL = 1,       /* an argument is out of range; the message names it */
    TWINKV_ENOMEM = 2,       /* an allocation failed */
    TWINKV_EFORMAT = 3,      /* a sequence state is not laid out as this version of llama.cpp lays it out */
    TWINKV_EUNSUPPORTED = 4, /* a model or cache this library cannot rewrite */
    TWINKV_EINTERNAL = 5,
} twinkv_status;

TWINKV_API const char* twinkv_last_error(void);

/* ---- rows: cache rows of any type as float32 (native/rows) ---------------------------------------------- */

/* True when rows of this ggml_type can be read. */
TWINKV_API bool twinkv_rows_supported(int ggml_type);

/* Reads n_rows rows of n_values values each, row_stride bytes apart, into dst [n_rows, n_values].
 * n_values must be a multiple of the type's block size. */
TWINKV_API twinkv_status twinkv_rows_to_f32(int ggml_type, const void* src, size_t src_bytes, size_t row_stride,
                                            int64_t n_rows, int64_t n_values, int n_threads, float* dst);

/* ---- twins: Eq. 2 and Eq. 4 of the TwinKV paper (native/twins) ------------------------------------------- */

/* Eq. 2. keys [n, d]; counts [n] receives, for each token i, the number of j with |i-j| > local_window and
 * sim(i, j) > tau. A zero or non-finite key has no twins. */
TWINKV_API twinkv_status twinkv_twin_counts(const float* keys, int64_t n, int64_t d, float tau,
                                            int64_t local_window, int n_threads, int32_t* counts);

/* Eq. 4. retained [n] (0/1); best [n] receives max sim(i, j) over retained j with |i-j| > local_window,
 * j != i, and -1 where there is none. */
TWINKV_API twinkv_status twinkv_best_twin(const float* keys, const uint8_t* retained, int64_t n, int64_t d,
                                          int64_t local_window, int n_threads, float* best);

#ifdef __cplusplus
}
#endif

#endif /* TWINKV_H */
