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
TWINKV_API twinkv_status twinkv_rows_to_f32(int ggml_type, const void* src, size_t src_bytes, size_t row_stride,
                                            int64_t n_rows, int64_t n_values, int n_threads, float* dst);

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
TWINKV_API twinkv_status twinkv_twin_counts(const twinkv_keys* keys, float tau, int64_t local_window, int n_threads,
                                            int32_t* counts);

/* Eq. 4. retained [n_heads, n] (0/1); best [n_heads, n]: the largest sim(i, j) over retained j, -1 where
 * there is none (and never less than -1). */
TWINKV_API twinkv_status twinkv_best_twin(const twinkv_keys* keys, const uint8_t* retained, int64_t local_window,
                                          int n_threads, float* best);

/* Keys that have no direction. invalid [n_heads, n]: 1 where the norm is zero or not finite. */
TWINKV_API twinkv_status twinkv_invalid_keys(const twinkv_keys* keys, int n_threads, uint8_t* invalid);

typedef enum twinkv_repair_mode {
    TWINKV_REPAIR_PAPER = 0,      /* section 3.4: every swap judged against the set the policy chose */
    TWINKV_REPAIR_CONSISTENT = 1, /* every swap judged against the set as it stands (docs/kernels.md) */
    TWINKV_REPAIR_COVERAGE = 2,   /* without a threshold: the least covered token against a better covered one */
} twinkv_repair_mode;

typedef struct twinkv_repair_params {
    twinkv_repair_mode mode;
    float tau; /* not of TWINKV_REPAIR_COVERAGE */
    int64_t local_window;
    int64_t n_sink;   /* tokens at positions < n_sink are never evicted */
    int64_t n_recent; /* nor those at positions > last position - n_recent */
    /* of TWINKV_REPAIR_COVERAGE: */
    double share; /* at most floor(share * min(retained, evicted tokens)) swaps per head; in [0, 1] */
    float margin; /* a donor is covered better than the token that comes in for it by more than this; in [0, 2] */
} twinkv_repair_params;

typedef struct twinkv_repair_stats {
    int64_t n_swaps, n_orphans, n_donors; /* orphans and donors as judged against the set given; of
                                             TWINKV_REPAIR_COVERAGE: tokens less covered than some donor, and donors
                                             covered better than some token that is out,
                                             by more than the margin */
} twinkv_repair_stats;

/* Section 3.4: swaps redundant donors for orphans within the budget. retained [n_heads, n] is rewritten in place,
 * as many tokens per head as before; stats [n_heads]. A key without direction is never admitted.
 * best [n_heads, n]: what twinkv_best_twin() gives for the same keys and set, if it is known; else NULL.
 * priority [n_heads, n], of TWINKV_REPAIR_COVERAGE: what retained tokens are worth, as a policy scores them; NULL: the
 * later a token, the more.
 * weight [n_heads, n], of TWINKV_REPAIR_COVERAGE: what it costs that a token is not covered, finite and not negative;
 * NULL: all cost the same. */
TWINKV_API twinkv_status twinkv_repair(const twinkv_keys* keys, const twinkv_repair_params* params, int n_threads,
                                       const float* best, const float* priority, const float* weight, uint8_t* retained,
                                       twinkv_repair_stats* stats);

/* What TWINKV_REPAIR_COVERAGE is meant to compare (docs/repair.md): keys [n_heads, n, d_k] and values [n_heads, n,
 * d_v], finite, side by side. vectors, float16 [n_heads, n, d_k + d_v]: keys over the root mean square of their norms,
 * and values less their mean over the same of theirs, times value_scale. weights [n_heads, n]: norms of values less
 * their mean. */
TWINKV_API twinkv_status twinkv_content(const float* keys, const float* values, int64_t n_heads, int64_t n, int64_t d_k,
                                        int64_t d_v, float value_scale, int n_threads, uint16_t* vectors,
                                        float* weights);

/* Counts and best twins on a device of ggml (a graph on its backend), named as ggml_backend_dev_name() names it: "CPU",
 * "Metal", "Vulkan0". Fails with TWINKV_EUNSUPPORTED where there is none of that name, or none precise enough. */
TWINKV_API twinkv_status twinkv_device_twin_counts(const char* device, const twinkv_keys* keys, float tau,
                                                   int64_t local_window, int n_threads, int32_t* counts);
TWINKV_API twinkv_status twinkv_device_best_twin(const char* device, const twinkv_keys* keys, const uint8_t* retained,
                                                 int64_t local_window, int n_threads, float* best);

/* The same on an NVIDIA GPU (compute capability 8.0 and later), by kernels of our own. keys->data may be a device
 * pointer: float32, float16, bfloat16, q8_0 and q4_0 rows are then read where they lie. Positions, masks and results
 * are in host memory. Why they cannot run here, or NULL when they can: */
TWINKV_API const char* twinkv_cuda_unavailable(void);
TWINKV_API twinkv_status twinkv_cuda_twin_counts(const twinkv_keys* keys, float tau, int64_t local_window,
                                                 int32_t* counts);
TWINKV_API twinkv_status twinkv_cuda_best_twin(const twinkv_keys* keys, const uint8_t* retained, int64_t local_window,
                                               float* best);

/* ggml's devices: NULL past the last. is_gpu may be NULL. */
TWINKV_API const char* twinkv_device_name(int index, bool* is_gpu);

/* The instruction sets the kernels are built for, best first: NULL past the last. supported may be NULL. */
TWINKV_API const char* twinkv_isa_name(int index, bool* supported);

/* The one in use: the best supported, unless the environment variable TWINKV_ISA or twinkv_set_isa() names
 * another (NULL: the best again). Results are the same with each. */
TWINKV_API twinkv_status twinkv_isa(const char** isa);
TWINKV_API twinkv_status twinkv_set_isa(const char* isa);

/* Operations per second (two for a multiply-add) that a kind of this processor's multipliers reach at most, measured
 * for about so many seconds on n_threads at once: what `bench kernels` holds the kernels against. */
TWINKV_API const char* twinkv_peak_name(int index, bool* supported);
TWINKV_API twinkv_status twinkv_peak(int index, int n_threads, double seconds, double* operations_per_second);

/* ---- tap: what a context computes, watched through the public cb_eval (native/tap) ----------------------
 */

/* Give twinkv_tap_eval as llama_context_params.cb_eval and the tap as cb_eval_user_data. With every capture
 * off it asks for no node, and the scheduler runs the graph as if it were not there. One tap per context; it
 * must outlive the context. Not thread safe: read it between calls of llama_decode. */
typedef struct twinkv_tap twinkv_tap;

TWINKV_API twinkv_tap* twinkv_tap_new(void);
TWINKV_API void twinkv_tap_free(twinkv_tap* tap);
TWINKV_API bool twinkv_tap_eval(struct ggml_tensor* node, bool ask, void* tap);

/* How a layer turns positions into rotations, read from the graph's own ROPE node. */
typedef struct twinkv_rope {
    int32_t n_dims;     /* 0: the layer has no rotary embedding */
    int32_t mode;       /* ggml's GGML_ROPE_TYPE_*: 0 interleaved pairs, 2 half-split pairs */
    int32_t n_ctx_orig; /* YaRN */
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int32_t has_freq_factors; /* Llama-3 and LongRoPE: see twinkv_tap_freq_factors */
} twinkv_rope;

/* One attention layer as the graph shows it. il is llama.cpp's layer number. */
typedef struct twinkv_layer {
    int32_t il;
    int32_t n_head, n_head_kv;
    int32_t head_dim_k, head_dim_v;
    int32_t type_k, type_v; /* ggml_type of the cache rows */
    int32_t v_transposed;   /* no flash attention: V is stored [n_embd_v, n_cells] */
    int32_t hadamard;       /* size of the Hadamard blocks a quantized K cache is rotated by after RoPE; 0: none */
    int32_t is_host;        /* the cache tensors can be read in place */
    int64_t n_cells;        /* cells allocated */
    uint64_t buffer_id;     /* layers of one cache share it (sliding-window models keep two caches) */
    float kq_scale, softcap;
    twinkv_rope rope;
} twinkv_layer;

/* Layers seen so far, ascending by il; complete after the first decode. */
TWINKV_API int32_t twinkv_tap_n_layers(const twinkv_tap* tap);
TWINKV_API twinkv_status twinkv_tap_layer(const twinkv_tap* tap, int32_t index, twinkv_layer* out);
/* factors [n_dims / 2] */
TWINKV_API twinkv_status twinkv_tap_freq_factors(const twinkv_tap* tap, int32_t index, float* factors, int64_t n);

/* Reads cells [first, first + n) of layer `index` into dst [n, n_head_kv * head_dim], K or V, any cache type,
 * host or device. Keys come as cached: after RoPE and, on quantized caches, after the Hadamard rotation. */
TWINKV_API twinkv_status twinkv_tap_read_k(const twinkv_tap* tap, int32_t index, int64_t first, int64_t n,
                                           int n_threads, float* dst);
TWINKV_API twinkv_status twinkv_tap_read_v(const twinkv_tap* tap, int32_t index, int64_t first, int64_t n,
                                           int n_threads, float* dst);

/* Whether queries of a layer are captured (they are unless told otherwise). */
TWINKV_API twinkv_status twinkv_tap_watch(twinkv_tap* tap, int32_t index, bool watched);

/* What is captured of the queries of every layer while tokens are evaluated. */
typedef struct twinkv_capture {
    int32_t window;  /* the last so many queries, after RoPE; 0: none */
    bool statistics; /* mean and covariance of queries before RoPE, of tokens at positions >= skip */
    bool attention;  /* sums of the attention that every cached key receives from every query */
    int32_t skip;
    int32_t n_threads; /* for the sums; 0: as many as the machine has */
} twinkv_capture;

/* Captured queries and sums are forgotten when anything but n_threads changes. */
TWINKV_API twinkv_status twinkv_tap_capture(twinkv_tap* tap, const twinkv_capture* what);
/* Forgets everything captured (not the layers). */
TWINKV_API void twinkv_tap_reset(twinkv_tap* tap);
/* Tokens at positions >= pos were taken back: their queries are forgotten, and taken off statistics and attention sums
 * as long as the window still holds them; otherwise those are dropped. Call it before other tokens take their cells. */
TWINKV_API twinkv_status twinkv_tap_rollback(twinkv_tap* tap, int32_t pos);
/* Cells are about to be evicted or hidden: sums up what a few queries attended to that are still waiting. */
TWINKV_API twinkv_status twinkv_tap_settle(twinkv_tap* tap);
/* Cells were evicted: of each head cells [n_head_kv, n_keep] are left, in this order (-1: a cell without a token). */
TWINKV_API twinkv_status twinkv_tap_gather(twinkv_tap* tap, int32_t index, int64_t n_keep, const int32_t* cells);
/* Number of window queries held for a layer (<= window). */
TWINKV_API int64_t twinkv_tap_window_size(const twinkv_tap* tap, int32_t index);
/* queries [size, n_head, head_dim_k] oldest first, positions [size]; size as told by twinkv_tap_window_size.
 */
TWINKV_API twinkv_status twinkv_tap_window(const twinkv_tap* tap, int32_t index, int64_t size, float* queries,
                                           int32_t* positions);
/* Tokens in the statistics of a layer. */
TWINKV_API int64_t twinkv_tap_statistics_count(const twinkv_tap* tap, int32_t index);
/* mean [n_head, head_dim_k], covariance [n_head, head_dim_k, head_dim_k] (divided by the count). */
TWINKV_API twinkv_status twinkv_tap_statistics(const twinkv_tap* tap, int32_t index, double* mean, double* covariance);

/* Queries in the attention sums of a layer. */
TWINKV_API int64_t twinkv_tap_attention_count(const twinkv_tap* tap, int32_t index);
/* sums [n_head_kv, n]: attention that cells 0..n-1 received, over all queries and the heads of the group. */
TWINKV_API twinkv_status twinkv_tap_attention(twinkv_tap* tap, int32_t index, int64_t n, float* sums);

/* For tests: which kernel sums up attention from now on ("avx512", "avx2", "portable"). */
TWINKV_API twinkv_status twinkv_set_attention_isa(const char* isa);

/* Masks cells per KV head at the attention node (host backends): hidden [n_sets, n_head_kv, n] is 1 where a head must
 * not see cells 0..n-1; cells past n stay as llama.cpp masks them. n = 0 removes the mask of that layer. */
TWINKV_API twinkv_status twinkv_tap_hide(twinkv_tap* tap, int32_t index, const uint8_t* hidden, int64_t n_sets,
                                         int64_t n);
/* Row r of the batches decoded from now on sees the cells that set sets[r] leaves: they must have n_rows tokens.
 * n_rows = 0: all rows see the first set, in batches of any size. */
TWINKV_API twinkv_status twinkv_tap_hide_rows(twinkv_tap* tap, const int32_t* sets, int64_t n_rows);

/* The message of a failure inside the callback since the last call of this function, or NULL. Check after
 * llama_decode. */
TWINKV_API const char* twinkv_tap_take_failure(twinkv_tap* tap);

/* Takes RoPE (and the Hadamard rotation) back. rows [n, n_head, head_dim] in place: that of token i and head h starts
 * i * token_stride + h * head_stride floats behind the first. positions [n, n_head]. */
TWINKV_API twinkv_status twinkv_unrotate(const twinkv_rope* rope, const float* freq_factors, int32_t hadamard,
                                         float* rows, int64_t token_stride, int64_t head_stride,
                                         const int32_t* positions, int64_t n, int32_t n_head, int32_t head_dim,
                                         int n_threads);

/* Mean over positions first .. first + n - 1 of what RoPE multiplies the rotary pairs by: cosines and sines
 * [n_dims / 2], YaRN's magnitude included. */
TWINKV_API twinkv_status twinkv_mean_rotation(const twinkv_rope* rope, const float* freq_factors, int32_t first,
                                              int64_t n, double* cosines, double* sines);

/* ---- memory: what the cache occupies, and giving it back (native/memory) ---------------------------------
 */

typedef struct twinkv_memory {
    uint64_t allocated; /* bytes of the K and V tensors */
    uint64_t resident;  /* of those, bytes in memory now; equals allocated where the system cannot tell */
} twinkv_memory;

TWINKV_API twinkv_status twinkv_tap_memory(const twinkv_tap* tap, int32_t index, twinkv_memory* out);
/* Gives the pages of cells first .. last - 1 of layer `index` back to the system; their content becomes zero.
 * *released receives the bytes given back: 0 on device buffers, transposed V and systems without such a call.
 */
TWINKV_API twinkv_status twinkv_tap_release(twinkv_tap* tap, int32_t index, int64_t first, int64_t last,
                                            uint64_t* released);
/* Gives memory that was freed but kept by the allocator back to the system, where it has a call for that (glibc):
 * scoring and repairing a long cache leave some. */
TWINKV_API void twinkv_trim_heap(void);

/* ---- state: per-head eviction by rewriting a sequence state (native/state) --------------------------------
 */

/* What llama_state_seq_get_data holds for the cache that can be evicted from. */
typedef struct twinkv_state_info {
    int32_t n_layer;
    int64_t n_cells;
    int32_t pos_min, pos_max;
    int32_t v_transposed;
    int32_t n_sections; /* 2: a sliding-window cache follows, which stays as it is */
} twinkv_state_info;

TWINKV_API twinkv_status twinkv_state_inspect(const uint8_t* blob, size_t size, twinkv_state_info* out);

/* Which layers of the tap the first cache of a state holds, by comparing key rows: indices [n_layer] of the
 * tap, in the state's order. Take the state while the cache holds one token in cell 0 (right after the first
 * decode): it also proves that states are laid out as this library reads them. */
TWINKV_API twinkv_status twinkv_state_match(const twinkv_tap* tap, const uint8_t* blob, size_t size, int32_t n_layer,
                                            int32_t* indices);

/* Keeps, of sequence seq_id, cell index[l, h, c] of layer l and KV head h as cell c of n_keep; positions
 * [n_keep], ascending, are what llama.cpp is told (the last must be the sequence's last position). index
 * [n_layer, n_head_kv, n_keep] ascending per head; a head that keeps fewer has -1 at the end, and must not see those
 * cells (twinkv_tap_hide). On failure the sequence is put back as it was. */
TWINKV_API twinkv_status twinkv_evict(struct llama_context* ctx, int32_t seq_id, int32_t n_layer, int32_t n_head_kv,
                                      int64_t n_keep, const int32_t* index, const int32_t* positions, int n_threads);

/* The same without a copy of the state: rows move to the front of their own tensors, and llama.cpp's cells are closed
 * up by way of a spare sequence. Needs cache tensors in host memory, one cache (no sliding window), one stream shared
 * by seq_id and spare_seq (kv_unified), and the sequence alone in cells 0..n_cells-1, positions ascending.
 *
 * layers [n_layer]: the tap's indices. index as above. tail [n_cells - n_keep + 1]: the positions llama.cpp has for the
 * cells from n_keep - 1 on. Those cells are taken out, and the last position is put in cell n_keep - 1; positions of
 * the cells before stay. Extra memory: one cell. On failure the sequence is as it was. */
TWINKV_API twinkv_status twinkv_evict_in_place(struct llama_context* ctx, const twinkv_tap* tap, int32_t seq_id,
                                               int32_t spare_seq, const int32_t* layers, int32_t n_layer,
                                               int32_t n_head_kv, int64_t n_cells, int64_t n_keep, const int32_t* index,
                                               const int32_t* tail, int n_threads);

/* For tests of the way back: the next n states handed to llama.cpp are spoiled first, so that it refuses them. */
TWINKV_API void twinkv_test_spoil_states(int n);

#ifdef __cplusplus
}
#endif

#endif /* TWINKV_H */
