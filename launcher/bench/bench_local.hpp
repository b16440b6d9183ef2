#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus::launcher {

/// The blocks of one rank's plan without hops, merges and sums, to show the speed of the kernel
/// alone. A device records and replays them. All operands repeat the rank's own shard, since the
/// time does not depend on the numbers. Each block is computed by the same implementation as in the
/// plan.
class LocalBlocks {
 public:
  /// Blocks of the forward pass. The references must outlive the object. Not collective.
  LocalBlocks(const AttentionProblem& problem, const Attention& attention,
              const ring::LocalTensors& shards, Context& context);
  /// Blocks of a backward pass that computes no gradient of the bias.
  LocalBlocks(const AttentionProblem& problem, const ring::ShardedAttention& pass,
              const ring::BackwardLocalTensors& shards, Context& context);
  /// Computes every block once; the first call prepares the others.
  void run();

 private:
  struct Operands {
    ConstTensorView query, key, value, bias, mask;
  };
  LocalBlocks(const AttentionProblem& problem, const ring::RankPlan& plan, const Operands& shards,
              Context& context);
  void submit();
  [[nodiscard]] const Tensor& rows_of_others(int buffer, const ConstTensorView& own);
  [[nodiscard]] Kernel& kernel_of(const Implementation& implementation);
  [[nodiscard]] AttentionBlock operands_of(const ring::Tile& tile);
  [[nodiscard]] Tensor sums_like(const Tensor& tensor) const;

  const AttentionProblem& problem_;
  const ring::RankPlan& plan_;
  Operands shards_;
  Device& device_;
  int threads_;
  std::unique_ptr<Stream> stream_;
  Tensor query_, key_, value_, lse_;
  Tensor grad_output_, grad_query_, grad_key_, grad_value_;
  std::map<DType, Tensor> outputs_;
  std::map<int, Tensor> scores_;  // rows of a bias or a mask that other ranks send, by buffer
  std::map<const Implementation*, std::unique_ptr<Kernel>> kernels_;
  std::vector<std::function<void(const ExecutionContext& context)>> calls_;
  std::unique_ptr<Recording> recording_;
  bool warm_ = false;
};

}  // namespace annulus::launcher
