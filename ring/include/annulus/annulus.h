#ifndef ANNULUS_ANNULUS_H
#define ANNULUS_ANNULUS_H

#include <stddef.h>
#include <stdint.h>

/* The C interface: contexts and attention behind opaque handles. annulus/ring/context.hpp and
 * annulus/ring/attention.hpp explain each parameter, at the member or function of the same name.
 *
 * Functions that return annulus_status report errors by it and never throw. Text and arrays of the
 * caller are copied, but the memory of tensors is not. Handles are opaque, and every field has its
 * own function, so a program that is compiled today runs with later versions. */

#ifdef __cplusplus
extern "C" {
#endif

/* Later versions may return further statuses: from 16 on, errors of the library, like
 * ANNULUS_LIBRARY_ERROR; below, errors of the caller. */
typedef enum annulus_status {
  ANNULUS_SUCCESS = 0,
  ANNULUS_USER_ERROR = 1,        /* the caller's input is wrong, on this rank or on another one */
  ANNULUS_ARGUMENT_ERROR = 2,    /* one named argument: annulus_error_argument() */
  ANNULUS_UNSUPPORTED_ERROR = 3, /* a valid request that this build or implementation refuses */
  ANNULUS_FILE_ERROR = 4,
  ANNULUS_LIBRARY_ERROR = 16, /* the job can only be ended */
  ANNULUS_TIMEOUT_ERROR = 17, /* a peer did not answer in time */
  ANNULUS_SYSTEM_ERROR = 18,
  ANNULUS_MPI_ERROR = 19,
  ANNULUS_INTERNAL_ERROR = 20,
  ANNULUS_MEMORY_ERROR = 21,
  ANNULUS_INTERRUPTED_ERROR = 22 /* annulus_set_interruption() */
} annulus_status;

/* The message of this thread's last error, "" if there was none; valid until the thread's next call
 * that returns a status. */
const char* annulus_error_message(void);
/* The name of the argument, "" unless the last error was ANNULUS_ARGUMENT_ERROR. */
const char* annulus_error_argument(void);

/* "0.1.0". */
const char* annulus_version(void);
/* The name of the MPI library that this library uses, from MPI_Get_library_version(); "" if it
 * cannot be loaded. Before passing a communicator, a caller can compare it with the name of the MPI
 * that made the communicator. Needs no MPI_Init. */
const char* annulus_mpi_library(void);
/* 1 if this process is one of several that MPI connects (mpirun, srun); 2 if it is one of several
 * that MPI does not connect (torchrun, or the variables RANK, WORLD_SIZE and MASTER_ADDR); 0 if it
 * is alone. */
int annulus_is_launched(void);
/* Returns ANNULUS_LIBRARY_ERROR if a launcher has started several processes, but MPI, whose world
 * has `ranks` ranks, does not connect them, so that each would run alone. */
annulus_status annulus_check_connected(int ranks);
/* Sets a function for the whole process. Every long wait for another rank or a device calls it, on
 * the waiting thread, about 50 times a second; if it returns a number other than 0, the call fails
 * with ANNULUS_INTERRUPTED_ERROR. Null, the default: nothing is called. */
void annulus_set_interruption(int (*interrupted)(void));

typedef enum annulus_dtype {
  ANNULUS_BOOLEAN = 0, /* one byte, 0 or 1 */
  ANNULUS_UINT8 = 1,
  ANNULUS_INT32 = 2,
  ANNULUS_FLOAT16 = 3,
  ANNULUS_BFLOAT16 = 4,
  ANNULUS_FLOAT32 = 5,
  ANNULUS_FLOAT64 = 6
} annulus_dtype;

/* The number of a CUDA device, or the host. */
typedef int32_t annulus_place;
#define ANNULUS_HOST ((annulus_place)-1)
/* For contexts alone: the CUDA device that is current; ANNULUS_UNSUPPORTED_ERROR where there is
 * none. */
#define ANNULUS_CURRENT_CUDA_DEVICE ((annulus_place)-2)

#define ANNULUS_MAXIMUM_DIMENSIONS 6

/* ---- Context ------------------------------------------------------------------------------- */

typedef struct annulus_context annulus_context;
typedef struct annulus_context_options annulus_context_options;

annulus_status annulus_context_options_create(annulus_context_options** options);
void annulus_context_options_destroy(annulus_context_options* options); /* null: does nothing */
annulus_status annulus_context_options_set_mesh(annulus_context_options* options, const char* mesh);
annulus_status annulus_context_options_set_place(annulus_context_options* options,
                                                 annulus_place place);
annulus_status annulus_context_options_set_threads(annulus_context_options* options, int threads);
annulus_status annulus_context_options_set_timeout(annulus_context_options* options,
                                                   double seconds);
annulus_status annulus_context_options_set_share_gpus(annulus_context_options* options, int share);
/* "auto", "composite", "nccl" or "peer". */
annulus_status annulus_context_options_set_transport(annulus_context_options* options,
                                                     const char* transport);

/* `communicator` points to an MPI_Comm, which is duplicated; null: one rank, without MPI.
 * Collective over the communicator. `options` may be null. */
annulus_status annulus_context_create(const void* communicator,
                                      const annulus_context_options* options,
                                      annulus_context** context);

/* A key-value store that all ranks reach, such as torch's TCPStore or the coordination service of
 * JAX. It connects ranks without MPI; these ranks exchange data between GPUs only. */
typedef struct annulus_store annulus_store;
/* The operations of a store; they return 0 for success. A thread of the library calls them, one at
 * a time, while the caller of the library waits. Keys are text without spaces, values any bytes. */
typedef struct annulus_store_calls {
  void* user; /* passed to every operation */
  /* Stores a value, in place of an earlier one. */
  int (*set)(void* user, const char* key, const void* value, size_t bytes);
  /* Waits at most `seconds` until there is a value, and writes it to `value` and its length to
   * `bytes`; ANNULUS_STORE_NO_VALUE if there is none. `capacity`, 65536, is enough for all. */
  int (*get)(void* user, const char* key, double seconds, void* value, size_t capacity,
             size_t* bytes);
  /* Does nothing if there is no value. */
  int (*remove)(void* user, const char* key);
} annulus_store_calls;
#define ANNULUS_STORE_NO_VALUE 1
/* An operation that fails passes the reason here before it returns a number other than 0 and
 * ANNULUS_STORE_NO_VALUE; the message of the ANNULUS_LIBRARY_ERROR that follows contains it. */
void annulus_store_set_error(const char* reason);

/* Rank `rank` of `size` ranks on a store, for all its contexts there. All keys begin with
 * "annulus/". If other groups of ranks or other jobs use the store, `calls` must put a prefix
 * before every key. Communicates with nobody. */
annulus_status annulus_store_create(const annulus_store_calls* calls, int rank, int size,
                                    annulus_store** store);
/* To be called after the contexts on the store have been destroyed. Null: does nothing. */
void annulus_store_destroy(annulus_store* store);
/* A context of all ranks of a store. Collective over these ranks, which make their contexts on the
 * store in the same order. `options` may be null. */
annulus_status annulus_context_create_on_store(annulus_store* store,
                                               const annulus_context_options* options,
                                               annulus_context** context);

/* Collective. To be called before MPI_Finalize, and after the context's attention has been
 * destroyed. Null: does nothing. */
void annulus_context_destroy(annulus_context* context);
int annulus_context_rank(const annulus_context* context);
int annulus_context_size(const annulus_context* context);
annulus_place annulus_context_place(const annulus_context* context);
/* The number of ranks along an axis; ANNULUS_USER_ERROR for an axis that the mesh lacks. */
annulus_status annulus_context_axis_size(const annulus_context* context, const char* axis,
                                         int* size);
/* Collective: if a rank passes the text of an error, all ranks get it as ANNULUS_USER_ERROR. Null:
 * no error. */
annulus_status annulus_context_agree(annulus_context* context, const char* error);
/* Gathers `bytes` bytes of every rank, the same number on all, into `all`, in order of rank.
 * Collective. For small amounts, since control messages carry them. */
annulus_status annulus_context_gather(annulus_context* context, const void* data, size_t bytes,
                                      void* all);
/* Sums `count` numbers over the ranks, in place: every rank gets the same bits. Collective. For
 * small amounts, since control messages carry them. */
annulus_status annulus_context_sum(annulus_context* context, double* values, size_t count);
/* The global positions, in local order, that `rank` holds of dimension `dimension` of an array of
 * `shape`, sharded by `spec` ("dp,sp,tp,-"). `layout` ("contiguous", "zigzag" or "striped") and
 * `granule` distribute the dimension `sequence`; -1: none. Writes up to `capacity` positions, and
 * their whole number to `count`. Communicates with nobody. */
annulus_status annulus_context_positions(const annulus_context* context, const char* spec,
                                         int dimensions, const int64_t* shape, int sequence,
                                         const char* layout, int64_t granule, int rank,
                                         int dimension, int64_t* positions, int64_t capacity,
                                         int64_t* count);

/* ---- The problem, its layout and choices ----------------------------------------------------- */

/* The setters record what is asked for. annulus_attention_create() checks it, together on all
 * ranks, so that an error of one rank becomes an error of all. */
typedef struct annulus_attention_options annulus_attention_options;

annulus_status annulus_attention_options_create(annulus_attention_options** options);
void annulus_attention_options_destroy(annulus_attention_options* options);

/* Choices by name: "query_spec", "kv_spec", "mode", "layout", "kv_layout", "schedule",
 * "implementation", "transport", "tuning", "bias_policy", "backward_schedule",
 * "backward_implementation"; "reproducible": "no", "run" or "world"; "offset": "bottom-right". */
annulus_status annulus_attention_options_set_text(annulus_attention_options* options,
                                                  const char* name, const char* value);
/* Numbers by name: "query_length", "kv_length" and "kv_heads" of the whole problem, if they do not
 * follow from a local shape; "offset", "prefix", "sink_tokens", "chunk", "granule",
 * "ulysses_degree", "inner_size", "head_group_bytes"; and, 0 or 1, "causal", "weights",
 * "normalize_output", "call_lengths", "call_offsets", "call_dropout_seed" (values that come with
 * the calls). "call_sinks": every call passes its own sinks, this many per head. */
annulus_status annulus_attention_options_set_integer(annulus_attention_options* options,
                                                     const char* name, int64_t value);
/* "scale", "soft_cap". */
annulus_status annulus_attention_options_set_real(annulus_attention_options* options,
                                                  const char* name, double value);

/* B, T, S, N, K, D, Dv of the whole problem … */
annulus_status annulus_attention_options_set_shape(annulus_attention_options* options,
                                                   const int64_t shape[7]);
/* … or of this rank's shards, if all ranks have equal ones: each size is multiplied by the number
 * of ranks that share it, unless "query_length", "kv_length" or "kv_heads" is set. */
annulus_status annulus_attention_options_set_local_shape(annulus_attention_options* options,
                                                         const int64_t shape[7]);
annulus_status annulus_attention_options_set_dtype(annulus_attention_options* options,
                                                   annulus_dtype dtype);
annulus_status annulus_attention_options_set_softmax_dtype(annulus_attention_options* options,
                                                           annulus_dtype dtype);
annulus_status annulus_attention_options_set_window(annulus_attention_options* options,
                                                    int64_t left, int64_t right);
/* One number for each of the B batches. */
annulus_status annulus_attention_options_set_offsets(annulus_attention_options* options,
                                                     const int32_t* offsets, size_t count);
annulus_status annulus_attention_options_set_prefixes(annulus_attention_options* options,
                                                      const int32_t* prefixes, size_t count);
annulus_status annulus_attention_options_set_query_lengths(annulus_attention_options* options,
                                                           const int32_t* lengths, size_t count);
annulus_status annulus_attention_options_set_kv_lengths(annulus_attention_options* options,
                                                        const int32_t* lengths, size_t count);
/* Segment ids [B,T] and [B,S]. */
annulus_status annulus_attention_options_set_segments(annulus_attention_options* options,
                                                      const int32_t* query_ids, size_t query_count,
                                                      const int32_t* kv_ids, size_t kv_count);
/* Packed documents, alike in every batch: a prefix sum from 0 to T = S. */
annulus_status annulus_attention_options_set_cu_seqlens(annulus_attention_options* options,
                                                        const int32_t* cu_seqlens, size_t count);
/* Two packings. `alignment`: "top-left", "bottom-right", or null where positions do not matter. */
annulus_status annulus_attention_options_set_packings(annulus_attention_options* options,
                                                      const int32_t* query_cu_seqlens,
                                                      size_t query_count,
                                                      const int32_t* kv_cu_seqlens, size_t kv_count,
                                                      const char* alignment);
/* Entries 0 or 1, row-major, up to [B,N,query blocks,key blocks]. */
annulus_status annulus_attention_options_set_block_mask(annulus_attention_options* options,
                                                        int dimensions, const int64_t* shape,
                                                        const uint8_t* entries, int64_t query_size,
                                                        int64_t kv_size);
annulus_status annulus_attention_options_set_dropout(annulus_attention_options* options,
                                                     double probability, uint64_t seed);
/* [N,M], or [M] for all heads. */
annulus_status annulus_attention_options_set_sinks(annulus_attention_options* options,
                                                   int dimensions, const int64_t* shape,
                                                   const float* logits);
/* Which of the dimensions [B,N,T,S] a bias, or a dense mask, has: 0 where it is broadcast. */
annulus_status annulus_attention_options_set_bias(annulus_attention_options* options,
                                                  const int has[4]);
annulus_status annulus_attention_options_set_dense_mask(annulus_attention_options* options,
                                                        const int has[4]);

/* ---- Attention ------------------------------------------------------------------------------- */

typedef struct annulus_attention annulus_attention;
typedef struct annulus_tensors annulus_tensors;

/* Operands of a call: all are this rank's shards. Later versions may add some. */
typedef enum annulus_operand {
  ANNULUS_QUERY = 0, /* [b,t,n,D] */
  ANNULUS_KEY = 1,   /* [b,s,k,D] */
  ANNULUS_VALUE = 2, /* [b,s,k,Dv] */
  ANNULUS_OUTPUT = 3,
  ANNULUS_LSE = 4,  /* [b,n,t], float32 */
  ANNULUS_BIAS = 5, /* [b,n,t,S], float32: this rank's rows and all keys */
  ANNULUS_MASK = 6, /* likewise, boolean */
  ANNULUS_MAXIMUM = 7,
  ANNULUS_SUM = 8,
  ANNULUS_WEIGHTS = 9, /* [b,n,t,S] */
  /* Values of a call: int32 [1] or [b]; the sinks, float32 [n,M] or [M]. */
  ANNULUS_QUERY_LENGTHS = 10,
  ANNULUS_KV_LENGTHS = 11,
  ANNULUS_OFFSETS = 12,
  ANNULUS_SINKS = 13,
  /* Gradients, each with the shape of its operand. */
  ANNULUS_GRAD_OUTPUT = 14,
  ANNULUS_GRAD_LSE = 15,
  ANNULUS_GRAD_QUERY = 16,
  ANNULUS_GRAD_KEY = 17,
  ANNULUS_GRAD_VALUE = 18,
  ANNULUS_GRAD_SINKS = 19,
  ANNULUS_GRAD_BIAS = 20
} annulus_operand;

annulus_status annulus_tensors_create(annulus_tensors** tensors);
void annulus_tensors_destroy(annulus_tensors* tensors);
/* `strides` count elements; null: contiguous. Results are written, other operands only read. */
annulus_status annulus_tensors_set(annulus_tensors* tensors, annulus_operand operand, void* data,
                                   annulus_dtype dtype, annulus_place place, int dimensions,
                                   const int64_t* shape, const int64_t* strides);
/* Sets new memory for `count` operands that were set before, with the same dtype, shape, strides
 * and place. Cheaper than annulus_tensors_set() for calls that are repeated. */
annulus_status annulus_tensors_set_data(annulus_tensors* tensors, int count,
                                        const annulus_operand* operands, void* const* data);
annulus_status annulus_tensors_set_dropout_seed(annulus_tensors* tensors, uint64_t seed);
/* The seed, in the memory of the device. */
annulus_status annulus_tensors_set_device_dropout_seed(annulus_tensors* tensors,
                                                       const uint64_t* seed);

/* Collective over the context, which must outlive it. */
annulus_status annulus_attention_create(annulus_context* context,
                                        const annulus_attention_options* options,
                                        annulus_attention** attention);
/* Waits for calls under way. Null: does nothing. */
void annulus_attention_destroy(annulus_attention* attention);
/* Collective. On a GPU the call is enqueued on `stream`, a cudaStream_t; on the CPU it is done when
 * this returns. `tensors` may be changed or destroyed afterwards. */
annulus_status annulus_attention_run(annulus_attention* attention, const annulus_tensors* tensors,
                                     void* stream);
/* Likewise. `accumulate`: adds to the gradients that are there. */
annulus_status annulus_attention_backward(annulus_attention* attention,
                                          const annulus_tensors* tensors, int accumulate,
                                          void* stream);
annulus_status annulus_attention_wait(annulus_attention* attention);

/* This rank's local shape of an operand; without dimensions if the problem lacks it. */
annulus_status annulus_attention_shape(const annulus_attention* attention, annulus_operand operand,
                                       int64_t shape[ANNULUS_MAXIMUM_DIMENSIONS], int* dimensions);
/* The global positions, in local order, that `rank` holds of a dimension of QUERY, KEY, VALUE,
 * OUTPUT, LSE, BIAS or MASK; as annulus_context_positions(). */
annulus_status annulus_attention_positions(const annulus_attention* attention,
                                           annulus_operand operand, int rank, int dimension,
                                           int64_t* positions, int64_t capacity, int64_t* count);
/* The plan of every rank, with the tasks of up to `ranks` ranks, and its reasons: implementations,
 * schedules and prices that were compared. The text lives until the next call or the object's
 * end. Only rank 0 knows why schedules were passed over. */
annulus_status annulus_attention_plan_text(annulus_attention* attention, int ranks,
                                           const char** text);
annulus_status annulus_attention_explanation(annulus_attention* attention, const char** text);

#ifdef __cplusplus
}
#endif

#endif
