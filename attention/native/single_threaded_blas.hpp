#pragma once

namespace annulus {

/// While one lives, OpenBLAS computes on the thread that calls it: our threads run the tiles, and
/// OpenBLAS must not start more for each of them. OpenBLAS has one number of threads for the whole
/// process (the "local" number of later versions is global too, without OpenMP), so the first to
/// live notes it and the last to go restores it, unless somebody has changed it meanwhile. Products
/// that other threads of the process ask for at the same time run on one thread, too.
class SingleThreadedBlas {
 public:
  /// For products of `callers` threads at once. OpenBLAS maps a buffer for each of them. Throws
  /// LibraryError if the address space, which ulimit -v may bound, has no room for these buffers:
  /// OpenBLAS itself would try again for ever.
  explicit SingleThreadedBlas(int callers);
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;

 private:
  int callers_;
};

}  // namespace annulus
