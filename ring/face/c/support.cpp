#include <cstdlib>
#include <exception>
#include <new>
#include <span>
#include <string>

#include <annulus/core/error.hpp>
#include <annulus/mesh/launched.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/mpi_runtime.hpp>
#include <annulus/ring/machine.hpp>

#include "face/c/handles.hpp"

namespace annulus::c {
namespace {

thread_local std::string last_message;
thread_local std::string last_argument;

annulus_status status_of(const Error& error) {
  if (dynamic_cast<const ArgumentError*>(&error) != nullptr) return ANNULUS_ARGUMENT_ERROR;
  if (dynamic_cast<const UnsupportedError*>(&error) != nullptr) return ANNULUS_UNSUPPORTED_ERROR;
  if (dynamic_cast<const FileError*>(&error) != nullptr) return ANNULUS_FILE_ERROR;
  if (dynamic_cast<const UserError*>(&error) != nullptr) return ANNULUS_USER_ERROR;
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return ANNULUS_TIMEOUT_ERROR;
  if (dynamic_cast<const SystemError*>(&error) != nullptr) return ANNULUS_SYSTEM_ERROR;
  if (dynamic_cast<const MpiError*>(&error) != nullptr) return ANNULUS_MPI_ERROR;
  if (dynamic_cast<const InternalError*>(&error) != nullptr) return ANNULUS_INTERNAL_ERROR;
  if (dynamic_cast<const InterruptedError*>(&error) != nullptr) return ANNULUS_INTERRUPTED_ERROR;
  return ANNULUS_LIBRARY_ERROR;
}

annulus_status status_of_current() {
  try {
    throw;
  } catch (const Error& error) {
    last_message = error.what();
    if (const auto* argument = dynamic_cast<const ArgumentError*>(&error)) {
      last_argument = argument->argument();
    }
    return status_of(error);
  } catch (const std::bad_alloc&) {
    last_message = "out of memory";
    return ANNULUS_MEMORY_ERROR;
  } catch (const std::exception& error) {
    last_message = error.what();
    return ANNULUS_INTERNAL_ERROR;
  } catch (...) {
    last_message = "unknown error";
    return ANNULUS_INTERNAL_ERROR;
  }
}

}  // namespace

annulus_status note_error() noexcept {
  try {
    return status_of_current();
  } catch (...) {  // There is no memory for the message.
    return ANNULUS_MEMORY_ERROR;
  }
}

void clear_error() noexcept {
  last_message.clear();
  last_argument.clear();
}

DType dtype_of_c(annulus_dtype dtype) {
  switch (dtype) {
    case ANNULUS_BOOLEAN:
      return DType::boolean;
    case ANNULUS_UINT8:
      return DType::uint8;
    case ANNULUS_INT32:
      return DType::int32;
    case ANNULUS_FLOAT16:
      return DType::float16;
    case ANNULUS_BFLOAT16:
      return DType::bfloat16;
    case ANNULUS_FLOAT32:
      return DType::float32;
    case ANNULUS_FLOAT64:
      return DType::float64;
  }
  throw ArgumentError("dtype", std::to_string(static_cast<int>(dtype)), "an annulus_dtype");
}

Place place_of_c(annulus_place place) {
  if (place < ANNULUS_HOST) {
    throw ArgumentError("place", std::to_string(place), "ANNULUS_HOST or a CUDA device");
  }
  return place == ANNULUS_HOST ? Place::host() : Place::cuda(place);
}

Extents extents_of_c(const char* name, int dimensions, const std::int64_t* sizes) {
  if (dimensions < 0 || dimensions > Extents::kMaxRank) {
    throw ArgumentError(name, std::to_string(dimensions) + " dimensions", "0 to 6");
  }
  if (dimensions == 0) return {};
  return Extents(std::span(&checked(sizes, name), static_cast<std::size_t>(dimensions)));
}

void write_positions(const NamedSharding& sharding, int rank, int dimension,
                     std::int64_t* positions, std::int64_t capacity, std::int64_t* count) {
  if (rank < 0 || rank >= sharding.mesh().ranks()) {
    throw ArgumentError("rank", std::to_string(rank),
                        "0 to " + std::to_string(sharding.mesh().ranks() - 1));
  }
  if (dimension < 0 || dimension >= sharding.dimensions()) {
    throw ArgumentError("dimension", std::to_string(dimension),
                        "0 to " + std::to_string(sharding.dimensions() - 1));
  }
  const PositionRanges held = sharding.positions(rank, dimension);
  checked(count, "count") = held.size();
  if (capacity <= 0) return;
  checked(positions, "positions");
  std::int64_t written = 0;
  for (const PositionRange& range : held.ranges()) {
    for (std::int64_t i = 0; i < range.length && written < capacity; ++i) {
      positions[written++] = range.start.value() + i * range.stride;
    }
  }
}

}  // namespace annulus::c

const char* annulus_error_message(void) {
  return annulus::c::last_message.c_str();
}
const char* annulus_error_argument(void) {
  return annulus::c::last_argument.c_str();
}
const char* annulus_version(void) {
  return annulus::library_version().data();
}
const char* annulus_mpi_library(void) {
  thread_local std::string text;
  try {
    text = annulus::mpi_runtime().library();
  } catch (...) {
    text.clear();
  }
  return text.c_str();
}
void annulus_set_interruption(int (*interrupted)(void)) {
  annulus::set_interruption(interrupted);
}
int annulus_is_launched(void) {
  try {
    const auto process =
        annulus::process_number([](const char* name) { return std::getenv(name); });
    if (!process) return 0;
    return process->of_mpi ? 1 : 2;
  } catch (...) {
    return 1;  // a launcher that left the environment incomplete
  }
}
annulus_status annulus_check_connected(int ranks) {
  return annulus::c::guarded(
      [&] { annulus::check_connected(ranks, [](const char* name) { return std::getenv(name); }); });
}
