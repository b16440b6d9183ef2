#pragma once

#include <cstdint>
#include <functional>

namespace annulus {

/// Runs body(task, worker) once for each task in [0, tasks), on `workers` ≥ 1 threads that take the
/// tasks in ascending order. The calling thread is worker 0. When it finds no further task, it
/// calls `wait`, if given, at least once and until the other workers have finished. After the first
/// exception no further task starts; the exception is rethrown here when every thread is done. The
/// calling thread keeps the other threads, idle, for its next call.
void parallel_for(std::int64_t tasks, int workers,
                  const std::function<void(std::int64_t task, int worker)>& body,
                  const std::function<void()>& wait = {});

}  // namespace annulus
