#include "same_bits.hpp"

#include <cstddef>
#include <cstring>
#include <vector>

namespace annulus::verification {

bool is_part_of(const Tensor& part, const NamedSharding& sharding, int rank, const Tensor& whole) {
  const std::vector<PositionRanges> index = sharding.index(rank);
  const ConstTensorView all = whole.view();
  const auto bytes = static_cast<std::int64_t>(size_of(part.dtype()));
  const auto* entry = static_cast<const std::byte*>(part.view().data());
  bool same = part.dtype() == all.dtype() && whole.shape() == sharding.global_shape();
  const auto compare = [&](const auto& self, int dim, std::int64_t offset) -> void {
    if (dim == all.rank()) {
      const auto* const expected = static_cast<const std::byte*>(all.data()) + offset * bytes;
      same = same && std::memcmp(entry, expected, static_cast<std::size_t>(bytes)) == 0;
      entry += bytes;
      return;
    }
    const PositionRanges& positions = index[static_cast<std::size_t>(dim)];
    for (std::int64_t i = 0; i < positions.size(); ++i) {
      self(self, dim + 1, offset + positions.global(LocalPosition(i)).value() * all.stride(dim));
    }
  };
  if (same) compare(compare, 0, 0);
  return same;
}

}  // namespace annulus::verification
