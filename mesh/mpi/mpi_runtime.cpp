#include <array>

#include <annulus/mesh/mpi_bootstrap.hpp>
#include <annulus/mesh/mpi_runtime.hpp>

namespace annulus {
namespace {

std::unique_ptr<Bootstrap> bootstrap(const void* communicator) {
  return make_mpi_bootstrap(*static_cast<const MPI_Comm*>(communicator));
}

std::string library() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check_mpi(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  const std::string whole(text.data());  // the length may count the terminating zero
  return whole.substr(0, whole.find('\n'));
}

constexpr MpiRuntime kLinked{bootstrap, library};

}  // namespace

const MpiRuntime& mpi_runtime() {
  return kLinked;
}

const MpiRuntime* loaded_mpi_runtime() {
  return &kLinked;
}

}  // namespace annulus
