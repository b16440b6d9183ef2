#pragma once

#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/memory.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/partition/named_sharding.hpp>

#include "launcher/options/options.hpp"

namespace annulus::launcher {

/// Query, key and value of annulus run, open for reading, and the shape and dtype from their
/// headers.
struct InputTensors {
  files::ArrayFile query;
  files::ArrayFile key;
  files::ArrayFile value;
  AttentionShape shape;
  DType dtype = DType::float32;
};

/// Opens the files that the options name and checks that they fit each other. Does not communicate.
/// Throws ArgumentError for a file that is not given, FileError naming what was found and expected.
[[nodiscard]] InputTensors open_inputs(const Options& options);

/// Shape, index or view of a [B,T,N,D] array in the order of the file: [B,N,T,D] if `bhtd`.
[[nodiscard]] Extents file_order(const Extents& shape, bool bhtd);
[[nodiscard]] std::vector<PositionRanges> file_order(std::vector<PositionRanges> index, bool bhtd);
[[nodiscard]] TensorView file_order(const TensorView& view, bool bhtd);

/// The shard of `rank`, as [b,t,n,d], read from a file.
[[nodiscard]] Tensor read_shard(const files::ArrayFile& file, const NamedSharding& sharding,
                                int rank, bool bhtd, MemoryPool& memory);

}  // namespace annulus::launcher
