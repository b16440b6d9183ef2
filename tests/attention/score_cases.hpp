#pragma once

#include <limits>
#include <vector>

#include "tests/attention/native_run.hpp"

/// Problems with a bias or a dense mask.
namespace annulus::test {

/// Every shape that can be broadcast to [batch, heads, rows, columns].
inline std::vector<Extents> score_shapes(std::int64_t batch, std::int64_t heads, std::int64_t rows,
                                         std::int64_t columns) {
  std::vector<Extents> shapes;
  for (unsigned broadcast = 0; broadcast < 16; ++broadcast) {
    Extents shape{batch, heads, rows, columns};
    for (int dim = 0; dim < 4; ++dim) {
      if ((broadcast >> static_cast<unsigned>(dim) & 1U) != 0) shape[dim] = 1;
    }
    shapes.push_back(shape);
  }
  return shapes;
}

/// Sets bias entries to NaN, +∞ or −∞ if the mask or the dense mask hides all of their pairs.
/// Returns the number of such entries.
inline int spoil_hidden_bias(const WholeAttention& whole) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr std::array kSpoilt{std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity};
  if (!whole.problem.bias) return 0;
  const AttentionShape& s = whole.problem.shape;
  const Extents& bias = *whole.problem.bias;
  ScoreTensors dense = whole.scores();
  dense.bias.reset();
  std::vector<bool> used(static_cast<std::size_t>(bias.product()));
  const Extents strides = contiguous_strides(bias);
  for_each_of<4>({s.batch, s.heads, s.query_length, s.kv_length},
                 [&](auto b, auto n, auto t, auto j) {
                   if (!whole.problem.mask.visible(b, n, GlobalPosition(t), GlobalPosition(j)) ||
                       !dense.shows(b, n, t, j)) {
                     return;
                   }
                   std::int64_t at = 0;
                   int dim = 0;
                   for (const std::int64_t index : {b, n, t, j}) {
                     if (bias[dim] > 1) at += index * strides[dim];
                     ++dim;
                   }
                   used[static_cast<std::size_t>(at)] = true;
                 });
  int spoilt = 0;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    whole.bias.view().as<float>()[i] = kSpoilt.at(static_cast<std::size_t>(spoilt++) % 3);
  }
  return spoilt;
}

/// Some entries of a dimension of a bias or a mask; where it is broadcast, its only one.
inline Tensor gather_along(int dim, const Tensor& whole, const PositionRanges& positions) {
  Extents shape = whole.shape();
  const bool broadcast = shape[dim] == 1;
  if (!broadcast) shape[dim] = positions.size();
  Tensor part(whole.dtype(), shape, test_memory());
  for (std::int64_t i = 0; i < shape[dim]; ++i) {
    const std::int64_t from = broadcast ? 0 : positions.global(LocalPosition(i)).value();
    copy(whole.view().slice(dim, from, 1), part.view().slice(dim, i, 1));
  }
  return part;
}
/// Some rows of a bias or a mask [b,n,T,S].
inline Tensor gather_rows(const Tensor& whole, const PositionRanges& rows) {
  return gather_along(2, whole, rows);
}
inline Tensor gather_keys(const Tensor& whole, const PositionRanges& keys) {
  return gather_along(3, whole, keys);
}

/// The same for a call of these columns: see ScoreTensors::by_column.
inline ScoreTensors scores_by_column(const Tensor& bias, const Tensor& mask, Extents shape,
                                     const PositionRanges& columns) {
  shape[3] = columns.size();
  ScoreTensors scores = broadcast_scores(bias.view(), mask.view(), shape);
  scores.by_column = true;
  return scores;
}

}  // namespace annulus::test
