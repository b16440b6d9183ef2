#pragma once

#include <cstdint>
#include <functional>

namespace annulus {

/// Runs body(task, worker) once for each task in [0, tasks), on `workers` ≥ 1 threads that take the
/// tasks in ascending order. The calling thread is worker 0; once it finds no task it calls `wait`,
/// if there is one, at least once and over and over until the others have finished. The first
/// exception, from anywhere, stops the handing out of tasks and is thrown again here after every
/// thread has ended.
void parallel_for(std::int64_t tasks, int workers,
                  const std::function<void(std::int64_t task, int worker)>& body,
                  const std::function<void()>& wait = {});

}  // namespace annulus
