#pragma once

#include <map>
#include <memory>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/ring/sharded_attention.hpp>

namespace annulus::launcher {

/// The blocks of one rank's plan, without the hops between them and the merges after them: what the
/// local kernel alone can do. A device records and replays them. Queries, keys and values repeat
/// those of the rank's own shard, as the time does not depend on the numbers. Each block is
/// computed by the same implementation as in the plan.
class LocalBlocks {
 public:
  /// The references must outlive it. Not collective.
  LocalBlocks(const AttentionProblem& problem, const ring::ShardedAttention& attention,
              const ring::LocalTensors& shards, Device& device, Watchdog watchdog, int threads);
  /// Computes every block once; the first call prepares the others.
  void run();

 private:
  void submit();

  const AttentionProblem& problem_;
  Device& device_;
  int threads_;
  std::unique_ptr<Stream> stream_;
  Tensor query_, key_, value_, lse_;
  std::map<DType, Tensor> outputs_;
  struct Call {
    AttentionBlock block;
    SoftmaxState result;
    Kernel* kernel = nullptr;
  };
  std::map<const Implementation*, std::unique_ptr<Kernel>> kernels_;
  std::vector<Call> calls_;
  std::unique_ptr<Recording> recording_;
  bool warm_ = false;
};

}  // namespace annulus::launcher
