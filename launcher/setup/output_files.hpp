#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/device.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// The files of --output, --lse or --maximum and --sum, and --weights. They are created before the
/// work, so that an unwritable name or a full disk fails early; without commit() nothing remains.
class OutputFiles {
 public:
  /// Collective over `group`. Throws as ArrayWriter does. `problem` must outlive it.
  OutputFiles(const Options& options, const AttentionProblem& problem, Control& group);

  /// Collective. Every rank writes its shards. All files, including the files of the writers
  /// `beside`, get their names once all are complete.
  void commit(const ring::LocalTensors& tensors, const ring::ShardedOperands& operands, Mesh& mesh,
              const std::vector<files::ArrayWriter*>& beside = {});

 private:
  /// `sequence` is the dimension of the rows. If rows of a striped sequence are small, ranks first
  /// exchange them, so that each writes neighbouring rows.
  void write(const NamedSharding& sharding, int sequence, const TensorView& shard, bool bhtd,
             Mesh& mesh, files::ArrayWriter& writer, std::size_t array);

  const AttentionProblem& problem_;
  Control& group_;
  bool bhtd_;
  HostDevice host_;
  std::unique_ptr<files::ArrayWriter> output_;
  /// LSE, maximum or sum: a tensor of the call, and its destination.
  struct RowResult {
    TensorView ring::LocalTensors::*tensor;
    std::unique_ptr<files::ArrayWriter> writer;  ///< null: the output's writer
    std::size_t array = 0;                       ///< in the file
  };
  std::vector<RowResult> row_results_;
  std::unique_ptr<files::ArrayWriter> weights_;  ///< null if there is none
};

}  // namespace annulus::launcher
