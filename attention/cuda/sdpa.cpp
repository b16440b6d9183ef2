#include "cuda/sdpa.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cudnn.h>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/local_mask.hpp>
#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cuda/cudnn_handle.hpp"
#include "cuda/sdpa_plan.hpp"
#include "cuda/upload.hpp"

namespace annulus {
namespace {

constexpr std::size_t kOldestVersion = 91200;        // strided LSE
constexpr std::size_t kBrokenWindowVersion = 91400;  // see version_obstacle
constexpr std::uintptr_t kVectorBytes = 16;

// A bug of one version, which plans for other machines do not know.
std::string version_obstacle(const LocalMask& mask, std::int64_t columns) {
  if (is_limited(mask.band.low) && !is_limited(mask.band.high) && columns > 1024 &&
      cudnnGetVersion() == kBrokenWindowVersion) {
    return "cuDNN 9.14.0 gets windows without a right side wrong beyond 1024 columns";
  }
  return {};
}

std::string layout_obstacle(const char* name, const ConstTensorView& tensor) {
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

std::string layout_obstacle(const AttentionBlock& block) {
  const std::array<std::pair<const char*, const ConstTensorView*>, 3> tensors{
      {{"query", &block.query}, {"key", &block.key}, {"value", &block.value}}};
  for (const auto& [name, tensor] : tensors) {
    if (std::string obstacle = layout_obstacle(name, *tensor); !obstacle.empty()) return obstacle;
  }
  return {};
}

SdpaDescriptor::Strides first_strides(const ConstTensorView& view) {
  return {view.stride(0), view.stride(1), view.stride(2)};
}

std::vector<std::int32_t> at_least_one(std::vector<std::int32_t> lengths) {
  for (std::int32_t& length : lengths) length = std::max(length, 1);
  return lengths;
}

bool fits(const AttentionBlock& block) {
  const Extents& query = block.query.shape();
  const Extents& key = block.key.shape();
  return query.rank() == 4 && key == Extents{query[0], key[1], key[2], query[3]} &&
         block.value.shape() == Extents{key[0], key[1], key[2], block.value.size(3)} &&
         key[2] > 0 && query[2] % key[2] == 0 && block.rows.size() == query[1] &&
         block.columns.size() == key[1];
}

class SdpaKernel final : public Kernel {
 public:
  SdpaKernel(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device) {}

  void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
    if (is_empty(block)) return;
    if (const std::string obstacle = layout_obstacle("output", result.output); !obstacle.empty()) {
      throw UnsupportedError("cuDNN attention: " + obstacle);
    }
    const auto current = device_.make_current();
    (void)find(block, result);
  }

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    check(block, result);
    const auto current = device_.make_current();
    if (is_empty(block)) return cuda::reset(result, context.stream);
    const Entry& entry = find(block, result);
    entry.plan->run(cudnn_handle(CudaStream::of(context.stream).raw()),
                    {block.query.data(), block.key.data(), block.value.data(), result.output.data(),
                     result.lse.data(), workspace_.data(), entry.query_lengths.data(),
                     entry.kv_lengths.data()});
    if (entry.visible_rows.data() != nullptr) {
      cuda::reset_beyond(entry.visible_rows, result, context.stream);
    }
  }

 private:
  // What a block looks like, and its plan. Blocks of different positions may share one.
  struct Entry {
    SdpaDescriptor shape;  // without the mask
    PositionRanges rows;
    PositionRanges columns;
    std::int64_t first_batch;
    bool unmasked;
    std::shared_ptr<const SdpaPlan> plan;
    // Per batch, on the device; all null where batches have no lengths of their own. cuDNN gives
    // NaN for batches of no length, and promises nothing for rows past a length: it gets at least
    // one row and column, and the rows from the visible ones on are emptied afterwards.
    Tensor lengths;  // all three
    ConstTensorView query_lengths, kv_lengths, visible_rows;
  };

  static std::size_t hash_of(const SdpaDescriptor& shape, const AttentionBlock& block) {
    std::size_t hash = annulus::hash_of(shape);
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

  static bool is_empty(const AttentionBlock& block) {
    return block.query.elements() == 0 || block.key.elements() == 0;
  }

  void check(const AttentionBlock& block, const SoftmaxState& result) const {
    const Extents& query = block.query.shape();
    const bool good =
        fits(block) && block.query.dtype() == problem_.dtype &&
        block.key.dtype() == problem_.dtype && block.value.dtype() == problem_.dtype &&
        result.output.dtype() == problem_.dtype && result.lse.dtype() == DType::float32 &&
        result.output.shape() == Extents{query[0], query[1], query[2], block.value.size(3)} &&
        result.lse.shape() == Extents{query[0], query[2], query[1]};
    if (good) return;
    throw InternalError(
        fmt::format("cuDNN attention: query {}, key {}, value {}, {} output {}, {} LSE {}",
                    to_string(query), to_string(block.key.shape()), to_string(block.value.shape()),
                    name_of(result.output.dtype()), to_string(result.output.shape()),
                    name_of(result.lse.dtype()), to_string(result.lse.shape())));
  }

  [[nodiscard]] SdpaDescriptor describe(const AttentionBlock& block,
                                        const SoftmaxState& result) const {
    SdpaDescriptor d;
    d.dtype = problem_.dtype;
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
    d.output = first_strides(result.output);
    d.lse = first_strides(result.lse);
    d.scale = static_cast<float>(problem_.logit_scale());
    return d;
  }

  const Entry& find(const AttentionBlock& block, const SoftmaxState& result) {
    const SdpaDescriptor shape = describe(block, result);
    const std::size_t hash = hash_of(shape, block);
    const auto [first, last] = entries_.equal_range(hash);
    for (auto known = first; known != last; ++known) {
      const Entry& entry = known->second;
      if (entry.shape == shape && entry.unmasked == block.unmasked &&
          (block.unmasked || (entry.first_batch == block.first_batch && entry.rows == block.rows &&
                              entry.columns == block.columns))) {
        return entry;
      }
    }
    if (!fits(block)) throw InternalError("cuDNN attention: tensors do not fit together");
    const BlockGeometry geometry = geometry_of(block);
    const Capability can = sdpa_takes(problem_, geometry);
    const LocalMask mask = sdpa_mask(problem_, geometry);
    for (const std::string& obstacle :
         {can.reason(), layout_obstacle(block), version_obstacle(mask, block.key.size(1))}) {
      if (!obstacle.empty()) throw UnsupportedError("cuDNN attention: " + obstacle);
    }
    SdpaDescriptor descriptor = shape;
    set_mask(descriptor, mask);
    Entry entry{shape,
                block.rows,
                block.columns,
                block.first_batch,
                block.unmasked,
                shared_sdpa_plan(descriptor),
                {},
                {},
                {},
                {}};
    grow(workspace_, entry.plan->workspace_bytes());
    set_lengths(entry, mask);
    return entries_.emplace(hash, std::move(entry))->second;
  }

  void set_lengths(Entry& entry, const LocalMask& mask) {
    if (!mask.padded()) return;
    std::vector<std::int32_t> all = at_least_one(mask.row_lengths);
    for (const std::vector<std::int32_t>& more :
         {at_least_one(mask.column_lengths), mask.row_lengths}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    entry.lengths = upload(all, device_.memory());
    const auto batches = static_cast<std::int64_t>(mask.row_lengths.size());
    const auto part = [&](std::int64_t i) {
      return entry.lengths.view().slice(0, i * batches, batches);
    };
    entry.query_lengths = part(0);
    entry.kv_lengths = part(1);
    entry.visible_rows = part(2);
  }

  static void set_mask(SdpaDescriptor& d, const LocalMask& mask) {
    if (is_limited(mask.band.low)) d.left = 1 - mask.band.low;
    if (is_limited(mask.band.high)) d.right = mask.band.high;
    d.padded = mask.padded();
    // A diagonal that ends in the corner has kernels of its own in cuDNN.
    const std::int64_t shift = d.columns - d.rows;
    if (shift > 0 && d.right == shift && !d.padded) {
      d.bottom_right = true;
      d.right = 0;
      if (d.left) *d.left += shift;
    }
  }

  void grow(Buffer& buffer, std::size_t bytes) {
    if (bytes <= buffer.bytes()) return;
    // Work in flight may still use the smaller one.
    outgrown_.push_back(std::move(buffer));
    buffer = device_.memory().allocate(bytes);
  }

  const AttentionProblem& problem_;
  Device& device_;
  std::unordered_multimap<std::size_t, Entry> entries_;  // by hash_of
  Buffer workspace_;
  std::vector<Buffer> outgrown_;
};

}  // namespace

Capability sdpa_available(Place place) {
  if (cudnnGetVersion() < kOldestVersion) {
    return Capability::no(fmt::format("cuDNN {} is loaded, but {} or newer is needed",
                                      cudnnGetVersion(), kOldestVersion));
  }
  if (const std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return Capability::no(reason);
  }
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, place.device),
             "cudaDeviceGetAttribute");
  if (major < 8) return Capability::no("cuDNN attention needs compute capability 8.0");
  return Capability::yes();
}

std::unique_ptr<Kernel> make_sdpa_kernel(const AttentionProblem& problem, Device& device) {
  return std::make_unique<SdpaKernel>(problem, device);
}

}  // namespace annulus
