// The package's library does not link MPI. If a communicator is given, it loads a library from its
// folder that does.
#include <dlfcn.h>
#include <string>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/mpi_runtime.hpp>

namespace annulus {
namespace {

const MpiRuntime* loaded = nullptr;

// "folder/libannulus_mpi.so" for this library's "folder/libannulus.so".
std::string path_of_plugin() {
  Dl_info here{};
  if (dladdr(static_cast<const void*>(&loaded), &here) == 0) return "libannulus_mpi.so";
  std::string path(here.dli_fname);
  return path.substr(0, path.rfind('/') + 1) + "libannulus_mpi.so";
}

const MpiRuntime& load() {
  void* const library = dlopen(path_of_plugin().c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw LibraryError(fmt::format("MPI cannot be loaded: {}", dlerror()));
  // The other library has its own copy of the waiting code, so it needs to be told of
  // interruptions.
  using Start = const MpiRuntime* (*)(int (*interrupted)());
  const auto start = reinterpret_cast<Start>(dlsym(library, "annulus_mpi_start"));
  if (start == nullptr) throw LibraryError(fmt::format("MPI cannot be loaded: {}", dlerror()));
  return *start([] { return interrupted() ? 1 : 0; });
}

}  // namespace

const MpiRuntime& mpi_runtime() {
  static const MpiRuntime& runtime = load();
  loaded = &runtime;
  return runtime;
}

const MpiRuntime* loaded_mpi_runtime() {
  return loaded;
}

}  // namespace annulus
