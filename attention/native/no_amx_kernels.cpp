// For compilers and machines without AMX.
#include <cstdlib>

#include "native/amx_kernels.hpp"

namespace annulus::amx {

bool available() {
  return false;
}

// Never called, since available() is false.
void pack_transposed(const std::uint16_t* /*rows*/, std::int64_t /*stride*/, std::int64_t /*depth*/,
                     std::uint16_t* /*tiles*/) {
  std::abort();
}
bool pack(const std::uint16_t* /*rows*/, std::int64_t /*stride*/, std::int64_t /*columns*/,
          std::uint16_t* /*tiles*/) {
  std::abort();
}
bool split(const float* /*values*/, std::int64_t /*count*/, const Parts& /*parts*/) {
  std::abort();
}
bool split_float16(const std::uint16_t* /*values*/, std::int64_t /*count*/,
                   const Parts& /*parts*/) {
  std::abort();
}
void multiply(const Shape& /*shape*/, const Parts& /*left*/, const Parts& /*right*/, bool /*add*/,
              float* /*result*/) {
  std::abort();
}
void transpose(const std::uint16_t* /*rows*/, std::int64_t /*count*/, std::int64_t /*columns*/,
               std::uint16_t* /*to*/, std::int64_t /*to_stride*/) {
  std::abort();
}
void scale(float* /*values*/, std::int64_t /*count*/, float /*factor*/) {
  std::abort();
}
void add_to(float* /*sums*/, const float* /*values*/, std::int64_t /*count*/) {
  std::abort();
}

}  // namespace annulus::amx
