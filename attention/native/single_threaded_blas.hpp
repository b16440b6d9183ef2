#pragma once

namespace annulus {

/// While one lives, OpenBLAS computes on the thread that calls it: our threads run the tiles, and
/// OpenBLAS must not start more for each of them. OpenBLAS has one number of threads for the whole
/// process (what later versions call local is not, without OpenMP), so the first to live notes it
/// and the last to go puts it back, unless somebody has changed it meanwhile. Products that other
/// threads of the process ask for at the same time run on one thread, too.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas();
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;
};

}  // namespace annulus
