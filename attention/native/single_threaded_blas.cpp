#include "native/single_threaded_blas.hpp"

#include <mutex>

#include <cblas.h>

namespace annulus {
namespace {

struct Setting {
  std::mutex mutex;
  int users = 0;
  int threads = 1;  // before the first of them
};

Setting& setting() {
  static Setting the_setting;
  return the_setting;
}

}  // namespace

SingleThreadedBlas::SingleThreadedBlas() {
  Setting& shared = setting();
  const std::lock_guard lock(shared.mutex);
  if (shared.users++ > 0) return;
  shared.threads = openblas_get_num_threads();
  if (shared.threads != 1) openblas_set_num_threads(1);
}

SingleThreadedBlas::~SingleThreadedBlas() {
  Setting& shared = setting();
  const std::lock_guard lock(shared.mutex);
  if (--shared.users > 0 || shared.threads == 1) return;
  if (openblas_get_num_threads() == 1) openblas_set_num_threads(shared.threads);
}

}  // namespace annulus
