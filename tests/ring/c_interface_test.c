/* The C interface, from C: causal attention and its gradients over the ranks of a program, and
 * every kind of error. Query rows are zero, so output row i is the mean of values 0 to i, and value
 * row i is i everywhere. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mpi.h>

#include <annulus/annulus.h>

enum { LENGTH = 30, HEADS = 4, KV_HEADS = 2, DIM = 8 };

static int failures = 0;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      printf("line %d: " #condition " (%s)\n", __LINE__, annulus_error_message()); \
      ++failures;                                                                  \
    }                                                                              \
  } while (0)
#define SUCCEEDS(call) CHECK((call) == ANNULUS_SUCCESS)

static annulus_attention_options* make_options(const char* layout) {
  const int64_t shape[7] = {1, LENGTH, LENGTH, HEADS, KV_HEADS, DIM, DIM};
  annulus_attention_options* options = NULL;
  SUCCEEDS(annulus_attention_options_create(&options));
  SUCCEEDS(annulus_attention_options_set_shape(options, shape));
  SUCCEEDS(annulus_attention_options_set_dtype(options, ANNULUS_FLOAT32));
  SUCCEEDS(annulus_attention_options_set_integer(options, "causal", 1));
  SUCCEEDS(annulus_attention_options_set_text(options, "layout", layout));
  return options;
}

static void* zeros(const annulus_attention* attention, annulus_tensors* tensors,
                   annulus_operand operand, int64_t* rows) {
  int64_t shape[ANNULUS_MAXIMUM_DIMENSIONS];
  int dimensions = 0;
  size_t count = 1;
  void* memory;
  SUCCEEDS(annulus_attention_shape(attention, operand, shape, &dimensions));
  for (int d = 0; d < dimensions; ++d) count *= (size_t)shape[d];
  memory = calloc(count + 1, sizeof(float));
  SUCCEEDS(annulus_tensors_set(tensors, operand, memory, ANNULUS_FLOAT32, ANNULUS_HOST, dimensions,
                               shape, NULL));
  if (rows != NULL) *rows = shape[1];
  return memory;
}

static void compute(annulus_context* context) {
  annulus_attention_options* options = make_options("zigzag");
  annulus_attention* attention = NULL;
  annulus_tensors* tensors = NULL;
  int64_t positions[LENGTH];
  int64_t rows = 0;
  int64_t count = 0;
  const char* text = NULL;
  float* memory[9];
  const annulus_operand results = ANNULUS_OUTPUT;
  const annulus_operand missing = ANNULUS_GRAD_BIAS;
  void* other = calloc(LENGTH * HEADS * DIM, sizeof(float));

  SUCCEEDS(annulus_attention_create(context, options, &attention));
  annulus_attention_options_destroy(options);
  if (attention == NULL) return;
  SUCCEEDS(annulus_tensors_create(&tensors));
  memory[0] = zeros(attention, tensors, ANNULUS_QUERY, NULL);
  memory[1] = zeros(attention, tensors, ANNULUS_KEY, NULL);
  memory[2] = zeros(attention, tensors, ANNULUS_VALUE, &rows);
  memory[3] = zeros(attention, tensors, ANNULUS_OUTPUT, NULL);
  memory[4] = zeros(attention, tensors, ANNULUS_LSE, NULL);
  SUCCEEDS(annulus_attention_positions(attention, ANNULUS_VALUE, annulus_context_rank(context), 1,
                                       positions, LENGTH, &count));
  CHECK(count == rows);
  for (int64_t i = 0; i < rows * KV_HEADS * DIM; ++i) {
    memory[2][i] = (float)positions[i / (KV_HEADS * DIM)];
  }
  /* Results go to other memory than was set at first. */
  SUCCEEDS(annulus_tensors_set_data(tensors, 1, &results, &other));
  CHECK(annulus_tensors_set_data(tensors, 1, &missing, &other) == ANNULUS_ARGUMENT_ERROR);
  SUCCEEDS(annulus_attention_run(attention, tensors, NULL));
  SUCCEEDS(annulus_attention_wait(attention));
  free(memory[3]);
  memory[3] = other;
  for (int64_t i = 0; i < rows * HEADS * DIM; ++i) {
    CHECK(fabs(memory[3][i] - (double)positions[i / (HEADS * DIM)] / 2) < 1e-4);
  }
  for (int64_t n = 0; n < HEADS; ++n) {
    for (int64_t i = 0; i < rows; ++i) {
      CHECK(fabs(memory[4][n * rows + i] - log((double)positions[i] + 1)) < 1e-5);
    }
  }

  /* With a gradient of one everywhere, value row j gets the sum of 1 / (i + 1) over rows i >= j, of
   * each head of its group. */
  memory[5] = zeros(attention, tensors, ANNULUS_GRAD_OUTPUT, NULL);
  for (int64_t i = 0; i < rows * HEADS * DIM; ++i) memory[5][i] = 1;
  memory[6] = zeros(attention, tensors, ANNULUS_GRAD_QUERY, NULL);
  memory[7] = zeros(attention, tensors, ANNULUS_GRAD_KEY, NULL);
  memory[8] = zeros(attention, tensors, ANNULUS_GRAD_VALUE, NULL);
  for (int accumulate = 0; accumulate < 2; ++accumulate) {
    SUCCEEDS(annulus_attention_backward(attention, tensors, accumulate, NULL));
    for (int64_t j = 0; j < rows; ++j) {
      double sum = 0;
      for (int64_t i = positions[j]; i < LENGTH; ++i) sum += 1.0 / (double)(i + 1);
      sum *= (double)(HEADS / KV_HEADS) * (1 + accumulate);
      for (int64_t e = 0; e < KV_HEADS * DIM; ++e) {
        CHECK(fabs(memory[8][j * KV_HEADS * DIM + e] - sum) < 1e-4);
      }
    }
  }

  SUCCEEDS(annulus_attention_plan_text(attention, 1, &text));
  CHECK(text != NULL && strstr(text, "rank 0") != NULL);
  SUCCEEDS(annulus_attention_explanation(attention, &text));
  CHECK(text != NULL && strlen(text) > 0);
  annulus_tensors_destroy(tensors);
  annulus_attention_destroy(attention);
  for (int i = 0; i < 9; ++i) free(memory[i]);
}

/* The setters that compute() does not call, each refused or accepted where attention is made. */
static void parts(annulus_context* context) {
  const int32_t lengths[1] = {LENGTH};
  const int32_t zero[1] = {0};
  const int32_t sums[3] = {0, 10, LENGTH};
  const int32_t ids[LENGTH] = {0};
  const int64_t blocks[2] = {1, 1};
  const int64_t sinks[1] = {1};
  const uint8_t entries[1] = {1};
  const float logits[1] = {0};
  const int scores[4] = {0, 0, 1, 1};
  for (int which = 0; which < 2; ++which) { /* segments, or packings in their place */
    annulus_attention_options* options = make_options("contiguous");
    annulus_attention* attention = NULL;
    SUCCEEDS(annulus_attention_options_set_window(options, 9, 0));
    SUCCEEDS(annulus_attention_options_set_query_lengths(options, lengths, 1));
    SUCCEEDS(annulus_attention_options_set_kv_lengths(options, lengths, 1));
    SUCCEEDS(annulus_attention_options_set_prefixes(options, zero, 1));
    if (which == 0) {
      SUCCEEDS(annulus_attention_options_set_offsets(options, zero, 1));
      SUCCEEDS(annulus_attention_options_set_cu_seqlens(options, sums, 3));
      SUCCEEDS(annulus_attention_options_set_segments(options, ids, LENGTH, ids, LENGTH));
    } else {
      SUCCEEDS(annulus_attention_options_set_packings(options, sums, 3, sums, 3, "top-left"));
    }
    SUCCEEDS(annulus_attention_options_set_block_mask(options, 2, blocks, entries, 128, 128));
    SUCCEEDS(annulus_attention_options_set_dropout(options, 0.5, 3));
    SUCCEEDS(annulus_attention_options_set_sinks(options, 1, sinks, logits));
    SUCCEEDS(annulus_attention_options_set_bias(options, scores));
    SUCCEEDS(annulus_attention_options_set_dense_mask(options, scores));
    SUCCEEDS(annulus_attention_options_set_softmax_dtype(options, ANNULUS_FLOAT32));
    SUCCEEDS(annulus_attention_options_set_real(options, "soft_cap", 20));
    SUCCEEDS(annulus_attention_create(context, options, &attention));
    if (attention != NULL) {
      int64_t shape[ANNULUS_MAXIMUM_DIMENSIONS];
      int dimensions = 0;
      SUCCEEDS(annulus_attention_shape(attention, ANNULUS_BIAS, shape, &dimensions));
      CHECK(dimensions == 4 && shape[1] == 1 && shape[3] == LENGTH);
      SUCCEEDS(annulus_attention_shape(attention, ANNULUS_SINKS, shape, &dimensions));
      CHECK(dimensions == 1);
    }
    annulus_attention_destroy(attention);
    annulus_attention_options_destroy(options);
  }
}

static void local_shape(annulus_context* context) {
  const int64_t shape[7] = {1, 6, 4, 2, 1, 8, 8};
  annulus_attention_options* options = NULL;
  annulus_attention* attention = NULL;
  int64_t found[ANNULUS_MAXIMUM_DIMENSIONS];
  int64_t count = 0;
  int dimensions = 0;
  SUCCEEDS(annulus_attention_options_create(&options));
  SUCCEEDS(annulus_attention_options_set_local_shape(options, shape));
  SUCCEEDS(annulus_attention_options_set_text(options, "offset", "bottom-right"));
  SUCCEEDS(annulus_attention_create(context, options, &attention));
  SUCCEEDS(annulus_attention_shape(attention, ANNULUS_KEY, found, &dimensions));
  CHECK(dimensions == 4 && found[1] == 4 && found[2] == 1);
  SUCCEEDS(annulus_attention_positions(attention, ANNULUS_QUERY, 0, 1, NULL, 0, &count));
  CHECK(count == 6);
  annulus_attention_destroy(attention);
  annulus_attention_options_destroy(options);
}

static annulus_status attempt(annulus_context* context, annulus_attention_options* options) {
  annulus_attention* attention = NULL;
  const annulus_status status = annulus_attention_create(context, options, &attention);
  CHECK(attention == NULL);
  annulus_attention_options_destroy(options);
  return status;
}

static void errors(annulus_context* context) {
  const int rank = annulus_context_rank(context);
  annulus_attention_options* options;
  int64_t count = 0;
  const int64_t shape[1] = {LENGTH};
  int size = 0;

  CHECK(annulus_context_axis_size(context, "tp", &size) == ANNULUS_USER_ERROR);
  CHECK(strlen(annulus_error_message()) > 0);
  SUCCEEDS(annulus_context_axis_size(context, "sp", &size));
  CHECK(size == annulus_context_size(context));
  CHECK(strlen(annulus_error_message()) == 0);
  CHECK(annulus_context_positions(context, "sp", 1, shape, 0, "zigzag", 1, size, 0, NULL, 0,
                                  &count) == ANNULUS_ARGUMENT_ERROR);
  CHECK(strcmp(annulus_error_argument(), "rank") == 0);
  CHECK(annulus_attention_create(context, NULL, NULL) == ANNULUS_ARGUMENT_ERROR);
  CHECK(annulus_attention_run(NULL, NULL, NULL) == ANNULUS_ARGUMENT_ERROR);
  CHECK(annulus_context_options_create(NULL) == ANNULUS_ARGUMENT_ERROR);

  /* All ranks get the error of one, and their own if all have the same. */
  options = make_options(rank == 0 ? "diagonal" : "zigzag");
  CHECK(attempt(context, options) == (size == 1 ? ANNULUS_ARGUMENT_ERROR : ANNULUS_USER_ERROR));
  CHECK(strstr(annulus_error_message(), "diagonal") != NULL);
  options = make_options("zigzag");
  SUCCEEDS(annulus_attention_options_set_integer(options, "casual", 1));
  CHECK(attempt(context, options) == ANNULUS_ARGUMENT_ERROR);
  options = make_options("zigzag");
  SUCCEEDS(annulus_attention_options_set_text(options, "implementation", "sdpa"));
  CHECK(attempt(context, options) != ANNULUS_SUCCESS);
  options = make_options("zigzag");
  SUCCEEDS(annulus_attention_options_set_dtype(options, (annulus_dtype)99));
  CHECK(attempt(context, options) == ANNULUS_ARGUMENT_ERROR);

  CHECK(annulus_context_agree(context, rank == 0 ? "my own" : NULL) == ANNULUS_USER_ERROR);
  CHECK(strstr(annulus_error_message(), "my own") != NULL);
  SUCCEEDS(annulus_context_agree(context, NULL));
}

static int always(void) {
  return 1;
}

/* Rank 0 waits for the others, which let it wait; nobody uses the context again. */
static void interruption(annulus_context* context) {
  if (annulus_context_size(context) == 1 || annulus_context_rank(context) != 0) return;
  annulus_set_interruption(always);
  CHECK(annulus_context_agree(context, NULL) == ANNULUS_INTERRUPTED_ERROR);
  annulus_set_interruption(NULL);
}

/* ANNULUS_CURRENT_CUDA_DEVICE is an error without a GPU: it does not stand for the CPU. */
static void current_device(MPI_Comm communicator) {
  annulus_context_options* options = NULL;
  annulus_context* context = NULL;
  annulus_status status;
  SUCCEEDS(annulus_context_options_create(&options));
  SUCCEEDS(annulus_context_options_set_place(options, ANNULUS_CURRENT_CUDA_DEVICE));
  SUCCEEDS(annulus_context_options_set_share_gpus(options, 1));
  status = annulus_context_create(&communicator, options, &context);
  CHECK(status == ANNULUS_UNSUPPORTED_ERROR ||
        (status == ANNULUS_SUCCESS && annulus_context_place(context) >= 0));
  if (status == ANNULUS_SUCCESS) annulus_context_destroy(context);
  annulus_context_options_destroy(options);
}

int main(int argc, char** argv) {
  annulus_context_options* options = NULL;
  annulus_context* context = NULL;
  MPI_Comm communicator;
  MPI_Init(&argc, &argv);
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);

  SUCCEEDS(annulus_context_options_create(&options));
  SUCCEEDS(annulus_context_options_set_mesh(options, "sp=-1"));
  SUCCEEDS(annulus_context_options_set_place(options, ANNULUS_HOST));
  SUCCEEDS(annulus_context_options_set_threads(options, 1));
  SUCCEEDS(annulus_context_options_set_timeout(options, 60));
  SUCCEEDS(annulus_context_options_set_share_gpus(options, 0));
  SUCCEEDS(annulus_context_options_set_transport(options, "auto"));
  CHECK(annulus_context_options_set_transport(options, "pigeon") == ANNULUS_ARGUMENT_ERROR);
  SUCCEEDS(annulus_context_create(&communicator, options, &context));
  annulus_context_options_destroy(options);
  CHECK(annulus_context_place(context) == ANNULUS_HOST);
  CHECK(strlen(annulus_version()) > 0 && strlen(annulus_mpi_library()) > 0);
  SUCCEEDS(annulus_check_connected(annulus_context_size(context)));
  compute(context);
  parts(context);
  local_shape(context);
  errors(context);
  interruption(context);
  annulus_context_destroy(context);
  current_device(communicator);

  SUCCEEDS(annulus_context_create(NULL, NULL, &context)); /* one rank, without MPI */
  CHECK(annulus_context_size(context) == 1);
  annulus_context_destroy(context);
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  if (failures != 0) printf("%d checks failed\n", failures);
  return failures != 0;
}
