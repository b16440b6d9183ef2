/* The C interface without MPI: ranks, processes of this program, find each other on a store whose
 * calls are functions of this program. It keeps values in files of a folder. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <annulus/annulus.h>

static int failures = 0;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      printf("line %d: " #condition " (%s)\n", __LINE__, annulus_error_message()); \
      ++failures;                                                                  \
    }                                                                              \
  } while (0)
#define SUCCEEDS(call) CHECK((call) == ANNULUS_SUCCESS)

static void path_of(const char* folder, const char* prefix, const char* key, char path[512]) {
  char* at = path + snprintf(path, 512, "%s/%s", folder, prefix);
  for (; *key != 0; ++key) *at++ = *key == '/' ? '%' : *key;
  *at = 0;
}

static int set_value(void* user, const char* key, const void* value, size_t bytes) {
  char path[512];
  char written[512];
  char prefix[32];
  FILE* file;
  size_t done;
  snprintf(prefix, sizeof prefix, ".%d", (int)getpid());
  path_of(user, prefix, key, written);
  path_of(user, "", key, path);
  file = fopen(written, "wb");
  if (file == NULL) return 7;
  done = fwrite(value, 1, bytes, file);
  return fclose(file) != 0 || done != bytes || rename(written, path) != 0 ? 7 : 0;
}

static int get_value(void* user, const char* key, double seconds, void* value, size_t capacity,
                     size_t* bytes) {
  char path[512];
  const struct timespec pause = {0, 1000000};
  path_of(user, "", key, path);
  for (; access(path, R_OK) != 0; seconds -= 0.001) {
    if (seconds <= 0) return ANNULUS_STORE_NO_VALUE;
    nanosleep(&pause, NULL);
  }
  {
    FILE* const file = fopen(path, "rb");
    if (file == NULL) return ANNULUS_STORE_NO_VALUE; /* removed meanwhile */
    *bytes = fread(value, 1, capacity, file);
    fclose(file);
  }
  return 0;
}

static int remove_value(void* user, const char* key) {
  char path[512];
  path_of(user, "", key, path);
  return remove(path) != 0 && errno != ENOENT ? 7 : 0;
}

static int fails(void* user, const char* key) {
  (void)user;
  (void)key;
  annulus_store_set_error("the disk is full");
  return 9;
}

static int get_nothing(void* user, const char* key, double seconds, void* value, size_t capacity,
                       size_t* bytes) {
  (void)user, (void)key, (void)seconds, (void)value, (void)capacity, (void)bytes;
  return ANNULUS_STORE_NO_VALUE;
}

static int set_fails(void* user, const char* key, const void* value, size_t bytes) {
  (void)value;
  (void)bytes;
  return fails(user, key);
}

/* Attention along `axis`, which all ranks share. */
static annulus_status attend(annulus_context* context, const char* spec) {
  const int64_t shape[7] = {1, 6, 6, 2, 2, 8, 8};
  annulus_attention_options* options = NULL;
  annulus_attention* attention = NULL;
  annulus_status status;
  SUCCEEDS(annulus_attention_options_create(&options));
  SUCCEEDS(annulus_attention_options_set_text(options, "query_spec", spec));
  SUCCEEDS(annulus_attention_options_set_text(options, "kv_spec", spec));
  SUCCEEDS(annulus_attention_options_set_local_shape(options, shape));
  status = annulus_attention_create(context, options, &attention);
  annulus_attention_options_destroy(options);
  annulus_attention_destroy(attention);
  return status;
}

static int run_rank(char* folder, int rank, int size) {
  annulus_store_calls calls = {folder, set_value, get_value, remove_value};
  annulus_context_options* options = NULL;
  annulus_store* store = NULL;
  annulus_context* context = NULL;
  int all[8];
  double sums[2];

  SUCCEEDS(annulus_context_options_create(&options));
  SUCCEEDS(annulus_context_options_set_mesh(options, "sp=-1"));
  SUCCEEDS(annulus_context_options_set_place(options, ANNULUS_HOST));
  SUCCEEDS(annulus_context_options_set_threads(options, 1));
  SUCCEEDS(annulus_context_options_set_timeout(options, 60));
  SUCCEEDS(annulus_store_create(&calls, rank, size, &store));
  SUCCEEDS(annulus_context_create_on_store(store, options, &context));
  if (context == NULL) return 1;
  CHECK(annulus_context_rank(context) == rank && annulus_context_size(context) == size);
  SUCCEEDS(annulus_context_agree(context, NULL));
  CHECK(annulus_context_agree(context, rank == size - 1 ? "my own" : NULL) == ANNULUS_USER_ERROR);
  CHECK(strstr(annulus_error_message(), "my own") != NULL);
  SUCCEEDS(annulus_context_gather(context, &rank, sizeof rank, all));
  for (int i = 0; i < size; ++i) CHECK(all[i] == i);

  sums[0] = rank;
  sums[1] = 0.5;
  SUCCEEDS(annulus_context_sum(context, sums, 2));
  CHECK(sums[0] == size * (size - 1) / 2 && sums[1] == 0.5 * size);
  CHECK(annulus_context_sum(context, NULL, 2) == ANNULUS_ARGUMENT_ERROR);

  /* Data between CPUs needs MPI; if ranks share nothing, no data moves. */
  SUCCEEDS(attend(context, "sp,-,-,-"));
  CHECK(attend(context, "-,sp,-,-") == (size == 1 ? ANNULUS_SUCCESS : ANNULUS_UNSUPPORTED_ERROR));
  CHECK(size == 1 || strstr(annulus_error_message(), "needs MPI") != NULL);
  annulus_context_destroy(context);
  annulus_store_destroy(store);

  CHECK(annulus_store_create(&calls, size, size, &store) == ANNULUS_SUCCESS);
  CHECK(annulus_context_create_on_store(store, options, &context) == ANNULUS_ARGUMENT_ERROR);
  CHECK(strcmp(annulus_error_argument(), "rank") == 0);
  annulus_store_destroy(store);
  calls.remove = NULL;
  CHECK(annulus_store_create(&calls, rank, size, &store) == ANNULUS_ARGUMENT_ERROR);
  CHECK(annulus_context_create_on_store(NULL, options, &context) == ANNULUS_ARGUMENT_ERROR);
  calls.remove = fails;
  calls.set = set_fails;
  if (size > 1) { /* another store has the keys of the first one */
    SUCCEEDS(annulus_store_create(&calls, rank, size, &store));
    CHECK(annulus_context_create_on_store(store, options, &context) == ANNULUS_LIBRARY_ERROR);
    CHECK(strstr(annulus_error_message(), "annulus/0/rank/") != NULL);
    annulus_store_destroy(store);
  }
  calls.get = get_nothing;
  SUCCEEDS(annulus_store_create(&calls, 0, 2, &store));
  CHECK(annulus_context_create_on_store(store, options, &context) == ANNULUS_LIBRARY_ERROR);
  CHECK(strstr(annulus_error_message(), "the disk is full") != NULL);
  annulus_store_destroy(store);
  annulus_context_options_destroy(options);
  return failures != 0;
}

int main(void) {
  for (int size = 1; size <= 4; size += size == 1 ? 1 : 2) { /* 1, 2, 4 */
    char folder[] = "/tmp/annulus_store_XXXXXX";
    char command[64];
    int status = 0;
    if (mkdtemp(folder) == NULL) return 2;
    for (int rank = 0; rank < size; ++rank) {
      if (fork() == 0) {
        const int code = run_rank(folder, rank, size);
        fflush(stdout);
        _Exit(code);
      }
    }
    while (wait(&status) > 0) failures += status != 0;
    snprintf(command, sizeof command, "rm -r %s", folder);
    if (system(command) != 0) return 2;
  }
  if (failures != 0) printf("%d ranks failed\n", failures);
  return failures != 0;
}
