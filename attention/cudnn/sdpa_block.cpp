#include "cudnn/sdpa_block.hpp"

#include <algorithm>
#include <array>
#include <cudnn.h>
#include <functional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

#include "cuda/upload.hpp"
#include "cudnn/sdpa.hpp"

namespace annulus {
namespace {

constexpr std::size_t kBrokenWindowVersion = 91400;  // see version_obstacle
constexpr std::uintptr_t kVectorBytes = 16;

std::vector<std::int32_t> at_least_one(std::vector<std::int32_t> lengths) {
  for (std::int32_t& length : lengths) length = std::max(length, 1);
  return lengths;
}

std::string layout_obstacle(const AttentionBlock& block) {
  const std::array<std::pair<const char*, const ConstTensorView*>, 3> tensors{
      {{"query", &block.query}, {"key", &block.key}, {"value", &block.value}}};
  for (const auto& [name, tensor] : tensors) {
    if (std::string obstacle = sdpa_layout_obstacle(name, *tensor); !obstacle.empty()) {
      return obstacle;
    }
  }
  return {};
}

// A bug of one version. It is known only where that version is loaded, so plans for other machines
// ignore it.
std::string version_obstacle(const LocalMask& mask, std::int64_t columns) {
  if (is_limited(mask.band.low) && !is_limited(mask.band.high) && columns > 1024 &&
      cudnnGetVersion() == kBrokenWindowVersion) {
    return "cuDNN 9.14.0 gets windows without a right side wrong beyond 1024 columns";
  }
  return {};
}

void set_mask(SdpaDescriptor& d, const LocalMask& mask) {
  if (is_limited(mask.band.low)) d.left = 1 - mask.band.low;
  if (is_limited(mask.band.high)) d.right = mask.band.high;
  d.padded = mask.padded();
  // cuDNN has kernels of its own for a diagonal that ends in the corner.
  const std::int64_t shift = d.columns - d.rows;
  if (shift > 0 && d.right == shift && !d.padded) {
    d.bottom_right = true;
    d.right = 0;
    if (d.left) *d.left += shift;
  }
}

std::size_t hash_of_both(const SdpaDescriptor& shape, const AttentionBlock& block) {
  std::size_t hash = hash_of(shape);
  if (block.unmasked) return hash;
  const auto add = [&hash](std::int64_t value) {
    hash = hash * 0x100000001b3U ^ std::hash<std::int64_t>()(value);
  };
  add(block.first_batch);
  for (const PositionRanges* positions : {&block.rows, &block.columns}) {
    for (const PositionRange& range : positions->ranges()) {
      add(range.start.value());
      add(range.length);
    }
  }
  return hash;
}

}  // namespace

std::string sdpa_layout_obstacle(const char* name, const ConstTensorView& tensor) {
  if (tensor.stride(3) != 1) return fmt::format("the head dimension of {} is strided", name);
  for (int dim = 0; dim < 3; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) % kSdpaVector != 0) {
      return fmt::format("{} has strides {}, which are not multiples of {}", name,
                         to_string(tensor.strides()), kSdpaVector);
    }
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data()) % kVectorBytes != 0) {
    return fmt::format("{} does not begin at a multiple of {} bytes", name, kVectorBytes);
  }
  return {};
}

bool is_empty(const AttentionBlock& block) {
  return block.query.elements() == 0 || block.key.elements() == 0;
}

SdpaDescriptor describe(const AttentionProblem& problem, const AttentionBlock& block) {
  SdpaDescriptor d;
  d.dtype = problem.dtype;
  d.batch = block.query.size(0);
  d.rows = block.query.size(1);
  d.columns = block.key.size(1);
  d.heads = block.query.size(2);
  d.kv_heads = block.key.size(2);
  d.head_dim = block.query.size(3);
  d.value_dim = block.value.size(3);
  d.query = first_strides(block.query);
  d.key = first_strides(block.key);
  d.value = first_strides(block.value);
  d.scale = static_cast<float>(problem.logit_scale());
  return d;
}

SdpaDescriptor::Strides first_strides(const ConstTensorView& view) {
  return {view.stride(0), view.stride(1), view.stride(2)};
}

SdpaLengths::SdpaLengths(const LocalMask& mask, MemoryPool& memory)
    : batches_(static_cast<std::int64_t>(mask.row_lengths.size())) {
  if (!mask.padded()) return;
  std::vector<std::int32_t> all = at_least_one(mask.row_lengths);
  for (const std::vector<std::int32_t>& more :
       {at_least_one(mask.column_lengths), mask.row_lengths, mask.column_lengths}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  all_ = upload(all, memory);
}

ConstTensorView SdpaLengths::part(std::int64_t i) const {
  if (batches_ == 0) return {};
  return all_.view().slice(0, i * batches_, batches_);
}

const SdpaKept& SdpaBlocks::find(const SdpaDescriptor& shape, const AttentionBlock& block) {
  const std::size_t hash = hash_of_both(shape, block);
  const auto [first, last] = entries_.equal_range(hash);
  for (auto known = first; known != last; ++known) {
    const Entry& entry = known->second;
    if (entry.shape == shape && entry.unmasked == block.unmasked &&
        (block.unmasked || (entry.first_batch == block.first_batch && entry.rows == block.rows &&
                            entry.columns == block.columns))) {
      return entry.kept;
    }
  }
  Entry entry{shape,          block.rows,        block.columns, block.first_batch,
              block.unmasked, make(shape, block)};
  return entries_.emplace(hash, std::move(entry))->second.kept;
}

SdpaKept SdpaBlocks::make(SdpaDescriptor descriptor, const AttentionBlock& block) const {
  const bool backward = descriptor.backward;
  const BlockGeometry geometry = geometry_of(block);
  const LocalMask mask =
      backward ? sdpa_backward_mask(problem_, geometry) : sdpa_mask(problem_, geometry);
  const Capability takes =
      backward ? sdpa_takes_backward(problem_, geometry) : sdpa_takes(problem_, geometry);
  for (const std::string& obstacle :
       {takes.reason(), layout_obstacle(block), version_obstacle(mask, block.key.size(1))}) {
    if (obstacle.empty()) continue;
    throw UnsupportedError((backward ? "cuDNN attention, backward: " : "cuDNN attention: ") +
                           obstacle);
  }
  set_mask(descriptor, mask);
  return {shared_sdpa_plan(descriptor), SdpaLengths(mask, device_.memory())};
}

}  // namespace annulus
