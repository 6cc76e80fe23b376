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

#include <stdbool.h>
#include <stddef.h>
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

/* ---- rows: cache rows of any type as float32 (native/rows) ----------------------------------------------
 */

/* True when rows of this ggml_type can be read. */
TWINKV_API bool twinkv_rows_supported(int ggml_type);

/* Reads n_rows rows of n_values values each, row_stride bytes apart, into dst [n_rows, n_values].
 * n_values must be a multiple of the type's block size. */
TWINKV_API twinkv_status twinkv_rows_to_f32(int ggml_type, const void* src, size_t src_bytes,
                                            size_t row_stride, int64_t n_rows, int64_t n_values,
                                            int n_threads, float* dst);

/* ---- twins: Eq. 2 and Eq. 4 of the TwinKV paper, and its repair pass (native/twins)
 * ------------------------ */

/* Keys of n_heads attention heads with n tokens each, read where they lie: a float32 array as well as the
 * rows of a KV cache tensor of any type that twinkv_rows_supported() knows. Key i of head h starts at data +
 * h * head_stride + i * row_stride (bytes) and holds d values, which are contiguous.
 *
 * positions: the tokens' true positions, strictly ascending within a head, for a cache that was compressed
 * before; those of head h start at positions + h * position_stride (0: one table for all heads). NULL:
 * 0..n-1. */
typedef struct twinkv_keys {
    const void* data;
    int type; /* a ggml_type; 0 is float32 */
    int64_t n_heads, n, d;
    size_t head_stride, row_stride;
    const int32_t* positions;
    int64_t position_stride;
} twinkv_keys;

/* The one definition of similarity, which every backend returns bit for bit (docs/kernels.md):
 *   norm_i = sqrt(sum k^2) in double, in the order of the dimensions; khat_i = (float)(k / norm_i)
 *   sim(i, j) = (float)(sum khat_i khat_j in double, in the order of the dimensions)
 * and i, j are compared only where |pos_i - pos_j| > local_window. A key whose norm is zero or not finite has
 * no similarity to anything. */

/* Eq. 2. counts [n_heads, n]: the number of j with sim(i, j) > tau. */
TWINKV_API twinkv_status twinkv_twin_counts(const twinkv_keys* keys, float tau, int64_t local_window,
                                            int n_threads, int32_t* counts);

/* Eq. 4. retained [n_heads, n] (0/1); best [n_heads, n]: the largest sim(i, j) over retained j, -1 where
 * there is none (and never less than -1). */
TWINKV_API twinkv_status twinkv_best_twin(const twinkv_keys* keys, const uint8_t* retained,
                                          int64_t local_window, int n_threads, float* best);

/* Keys that have no direction. invalid [n_heads, n]: 1 where the norm is zero or not finite. */
TWINKV_API twinkv_status twinkv_invalid_keys(const twinkv_keys* keys, int n_threads, uint8_t* invalid);

typedef enum twinkv_repair_mode {
    TWINKV_REPAIR_PAPER = 0,      /* section 3.4: every swap judged against the set the policy chose */
    TWINKV_REPAIR_CONSISTENT = 1, /* every swap judged against the set as it stands (docs/kernels.md) */
} twinkv_repair_mode;

typedef struct twinkv_repair_params {
    twinkv_repair_mode mode;
    float tau;
    int64_t local_window;
    int64_t n_sink;   /* tokens at positions < n_sink are never evicted */
    int64_t n_recent; /* nor those at positions > last position - n_recent */
} twinkv_repair_params;

typedef struct twinkv_repair_stats {
    int64_t n_swaps, n_orphans, n_donors; /* orphans and donors as judged against the set given */
} twinkv_repair_stats;

/* Section 3.4: swaps redundant donors for orphans within the budget. retained [n_heads, n] is rewritten in
 * place, as many tokens per head as before; stats [n_heads]. A key without direction is never admitted. */
TWINKV_API twinkv_status twinkv_repair(const twinkv_keys* keys, const twinkv_repair_params* params,
                                       int n_threads, uint8_t* retained, twinkv_repair_stats* stats);

/* The instruction sets the kernels are built for, best first: NULL past the last. supported may be NULL. */
TWINKV_API const char* twinkv_isa_name(int index, bool* supported);

/* The one in use: the best supported, unless the environment variable TWINKV_ISA or twinkv_set_isa() names
 * another (NULL: the best again). Results are the same with each. */
TWINKV_API twinkv_status twinkv_isa(const char** isa);
TWINKV_API twinkv_status twinkv_set_isa(const char* isa);

#ifdef __cplusplus
}
#endif

#endif /* TWINKV_H */
