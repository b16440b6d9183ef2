// Uses one thing of each of the lower libraries, as an installed package.
#include <cstdint>
#include <cstdio>
#include <memory>

#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/mesh/group.hpp>
#include <annulus/partition/sequence_layout.hpp>

int main() {
  annulus::HostMemoryPool pool;
  const annulus::Tensor tensor(annulus::DType::float32, {2, 3}, pool);
  const std::unique_ptr<annulus::Group> group = annulus::make_self_group();
  const annulus::SequenceLayout layout(annulus::LayoutKind::zigzag, 16, 2);
  std::int64_t held = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) held += layout.positions(rank).size();
  const bool good = tensor.bytes() == 24 && group->size() == 1 && held == 16;
  std::puts(good ? "annulus works as a package" : "annulus gave wrong answers");
  return good ? 0 : 1;
}
