#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// An array that annulus run writes.
struct Result {
  std::string name;  ///< of the tensor; "grad_query" is that of --grad-query
  std::string path;
  DType dtype;
  NamedSharding sharding;
  bool bhtd = false;  ///< stored with heads before rows
  /// The dimension of rows. If those of a striped sequence are small, ranks first exchange them, so
  /// that each writes neighbouring rows. −1: they do not.
  int rows = -1;
};

/// Output, LSE or maximum and sum, and attention weights, as far as the options name their files.
[[nodiscard]] std::vector<Result> forward_results(const Options& options,
                                                  const AttentionProblem& problem,
                                                  const ring::ShardedOperands& operands);

/// The files of results, each of which holds one or, if it is a .safetensors file, several. They
/// are created before the work, so that an unwritable name or a full disk fails early; without
/// commit() nothing remains.
class ResultFiles {
 public:
  /// Collective over the mesh. Throws as ArrayWriter does.
  ResultFiles(std::vector<Result> results, Mesh& mesh);

  /// Writes the rank's shard of a result. Collective.
  void write(std::string_view name, const TensorView& shard);
  /// Writes the rank's shards of all results of the forward pass. Collective.
  void write(const ring::LocalTensors& tensors);
  /// All files get their names once all are complete. Collective.
  void commit();

 private:
  struct Place {
    std::size_t file;   ///< in writers_
    std::size_t array;  ///< in the file
  };

  Mesh& mesh_;
  HostDevice host_;
  std::vector<Result> results_;
  std::vector<Place> places_;
  std::vector<std::unique_ptr<files::ArrayWriter>> writers_;
};

}  // namespace annulus::launcher
