#include "same_bits.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "entries.hpp"

namespace annulus::verification {

bool is_part_of(const Tensor& part, const NamedSharding& sharding, int rank, const Tensor& whole) {
  if (part.dtype() != whole.dtype() || whole.shape() != sharding.global_shape()) return false;
  const std::size_t bytes = size_of(part.dtype());
  const auto* const own = static_cast<const std::byte*>(part.view().data());
  const auto* const all = static_cast<const std::byte*>(whole.view().data());
  bool same = true;
  for_each_entry(sharding.index(rank), [&](const Entry& entry, std::int64_t i) {
    const std::byte* const expected = all + number_of(entry, whole.shape()) * bytes;
    same = same && std::memcmp(own + static_cast<std::size_t>(i) * bytes, expected, bytes) == 0;
  });
  return same;
}

}  // namespace annulus::verification
