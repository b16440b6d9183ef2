#include "cuda/ragged_sdpa.hpp"

#include <algorithm>
#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include <annulus/attention/softmax_state_cuda.hpp>
#include <annulus/attention/straight_pieces.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>

#include "cuda/cudnn_handle.hpp"
#include "cuda/device_scope.hpp"
#include "cuda/sdpa_plan.hpp"
#include "cuda/upload.hpp"
#include "ragged_groups.hpp"

namespace annulus {
namespace {

SdpaDescriptor::Strides first_strides(const ConstTensorView& view) {
  return {view.stride(0), view.stride(1), view.stride(2)};
}

class RaggedSdpaKernel final : public Kernel {
 public:
  RaggedSdpaKernel(const AttentionProblem& problem, Device& device)
      : problem_(problem), device_(device) {}

  void prepare(const AttentionBlock& block, const SoftmaxState& result) override {
    const DeviceScope scope(device_.place().device);
    (void)find(block, result);
  }

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    const DeviceScope scope(device_.place().device);
    const Entry& entry = find(block, result);
    const SoftmaxState state{result.output, lse_view(block)};
    if (!entry.every_row) cuda::reset(state, context.stream);
    for (const Call& call : entry.calls) {
      const std::int32_t* const lengths =
          static_cast<const std::int32_t*>(call.lengths.view().data());
      call.plan->run(
          cudnn_handle(CudaStream::of(context.stream).raw()),
          {block.query.data(), block.key.data(), block.value.data(), result.output.data(),
           lse_.data(), workspace_.data(), lengths, lengths + call.sequences, call.offsets.data()});
    }
    cuda::copy(state.lse, result.lse, context.stream);
  }

 private:
  struct Call {
    std::shared_ptr<const SdpaPlan> plan;
    std::int64_t sequences;
    Tensor lengths;  // int32 [2, sequences]: of rows, of columns
    Buffer offsets;
  };
  struct Entry {
    SdpaDescriptor shape;  // of the block
    PositionRanges rows, columns;
    std::int64_t first_batch;
    bool unmasked;
    bool every_row;
    std::vector<Call> calls;
  };

  // cuDNN is known to write the LSE of ragged batches position by position, heads innermost. It
  // lies so in memory of our own before it goes where the result wants it.
  [[nodiscard]] TensorView lse_view(const AttentionBlock& block) const {
    const Extents& query = block.query.shape();
    return {lse_.data(),
            DType::float32,
            {query[0], query[2], query[1]},
            {query[1] * query[2], 1, query[2]},
            device_.place()};
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
    d.lse = {d.rows * d.heads, 1, d.heads};
    d.scale = static_cast<float>(problem_.logit_scale());
    d.padded = true;
    d.ragged = true;
    return d;
  }

  const Entry& find(const AttentionBlock& block, const SoftmaxState& result) {
    const SdpaDescriptor shape = describe(block, result);
    for (const Entry& entry : entries_) {
      if (entry.shape == shape && entry.unmasked == block.unmasked &&
          entry.first_batch == block.first_batch && entry.rows == block.rows &&
          entry.columns == block.columns) {
        return entry;
      }
    }
    const RaggedGroups groups =
        ragged_groups(straight_pieces(block.unmasked ? Mask() : problem_.mask, block.first_batch,
                                      shape.batch, block.rows, block.columns),
                      shape.batch, shape.rows);
    if (!groups.obstacle.empty()) {
      throw UnsupportedError("cuDNN attention of many documents: " + groups.obstacle);
    }
    Entry entry{
        shape, block.rows, block.columns, block.first_batch, block.unmasked, groups.every_row, {}};
    for (const RaggedGroup& group : groups.groups) entry.calls.push_back(call_of(shape, group));
    const auto bytes =
        static_cast<std::size_t>(shape.batch * shape.rows * shape.heads) * sizeof(float);
    grow(lse_, bytes);
    entries_.push_back(std::move(entry));
    return entries_.back();
  }

  Call call_of(const SdpaDescriptor& shape, const RaggedGroup& group) {
    SdpaDescriptor d = shape;
    d.batch = static_cast<std::int64_t>(group.sequences.size());
    d.rows = group.most_rows;
    d.columns = group.most_columns;
    if (group.band.low != -Band::kUnlimited) d.left = 1 - group.band.low;
    if (group.band.high != Band::kUnlimited) d.right = group.band.high;
    // Not used, and no reason to plan anew.
    for (SdpaDescriptor::Strides* strides : {&d.query, &d.key, &d.value, &d.output, &d.lse}) {
      strides->front() = strides == &d.key || strides == &d.value ? d.columns * (*strides)[1]
                                                                  : d.rows * (*strides)[1];
    }
    d.lse[0] = d.rows * d.heads;

    std::vector<std::int32_t> lengths;
    for (const RaggedSequence& sequence : group.sequences) {
      lengths.push_back(static_cast<std::int32_t>(sequence.rows.count));
    }
    for (const RaggedSequence& sequence : group.sequences) {
      lengths.push_back(static_cast<std::int32_t>(sequence.columns.count));
    }
    std::vector<std::int64_t> offsets;
    const auto add = [&](std::int64_t of_batch, std::int64_t of_position,
                         LocalRange RaggedSequence::*range) {
      for (const RaggedSequence& sequence : group.sequences) {
        offsets.push_back(sequence.batch * of_batch +
                          (sequence.*range).begin.value() * of_position);
      }
      offsets.push_back(offsets.back() + (group.sequences.back().*range).count * of_position);
    };
    add(shape.query[0], shape.query[1], &RaggedSequence::rows);
    add(shape.key[0], shape.key[1], &RaggedSequence::columns);
    add(shape.value[0], shape.value[1], &RaggedSequence::columns);
    add(shape.output[0], shape.output[1], &RaggedSequence::rows);
    add(shape.lse[0], shape.lse[2], &RaggedSequence::rows);

    Call call{shared_sdpa_plan(d), d.batch, upload(lengths, device_.memory()),
              upload(offsets, device_.memory())};
    grow(workspace_, call.plan->workspace_bytes());
    return call;
  }

  void grow(Buffer& buffer, std::size_t bytes) {
    if (bytes <= buffer.bytes()) return;
    // Work in flight may still use the smaller one.
    outgrown_.push_back(std::move(buffer));
    buffer = device_.memory().allocate(bytes);
  }

  const AttentionProblem& problem_;
  Device& device_;
  std::list<Entry> entries_;
  Buffer workspace_;
  Buffer lse_;  // [batch, rows, heads]
  std::vector<Buffer> outgrown_;
};

}  // namespace

std::unique_ptr<Kernel> make_ragged_sdpa_kernel(const AttentionProblem& problem, Device& device) {
  return std::make_unique<RaggedSdpaKernel>(problem, device);
}

}  // namespace annulus
