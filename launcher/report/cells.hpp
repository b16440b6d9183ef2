#pragma once

#include <map>
#include <optional>
#include <string>

#include <annulus/attention/problem.hpp>
#include <annulus/core/place.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/mpi.hpp>
#include <annulus/ring/sharded_operands.hpp>

#include "launcher/report/report.hpp"

namespace annulus::launcher {

/// Formats of cells in reports.

/// "1,8192,8192,8,2,64,64", for a column of unit kShapeUnit.
[[nodiscard]] std::string shape_cell(const AttentionShape& shape);
inline constexpr const char* kShapeUnit = "B,T,S,N,K,D,Dv";
/// "causal+offset:3+window:8,0+dense": without spaces, so that a table splits into columns.
[[nodiscard]] std::string mask_cell(const AttentionProblem& problem);
/// "sp=4"; "-" for a mesh without axes.
[[nodiscard]] std::string mesh_cell(const MeshShape& mesh);
/// "12.345", for 0.012345 seconds.
[[nodiscard]] std::string milliseconds_cell(double seconds);
/// "1.500", for 1.5 MiB given in bytes.
[[nodiscard]] std::string mebibytes_cell(double bytes, int digits = 3);
/// "12.5", for a share of 0.125; "-" if it is absent.
[[nodiscard]] std::string percent_cell(const std::optional<double>& share, int digits = 1);
/// The text of an optional value; "-" if it is absent.
template <class Value, class Text>
[[nodiscard]] std::string cell_of(const std::optional<Value>& value, const Text& text) {
  return value ? std::string(text(*value)) : kNothing;
}

/// "native 3, sdpa 5"; "none" without counts.
[[nodiscard]] std::string counts_text(const std::map<std::string, int>& counts);

/// "sp=4: 4 ranks on 1 node, 2 threads per rank, cpu".
[[nodiscard]] std::string mesh_text(const Mesh& mesh, int threads, Place place);
/// Adds a line "rank order: by node: mpirun's ranks 0, 2, 1, 3" if mpirun numbers ranks otherwise.
void add_rank_order(Report& report, const MpiSession& session);
/// "B=1 T=64 S=64 N=4 K=2 D=16 Dv=16 float32, causal": with every modifier.
[[nodiscard]] std::string problem_text(const AttentionProblem& problem);
/// The same with "; query -,sp,-,-, key/value -,sp,-,-".
[[nodiscard]] std::string problem_text(const AttentionProblem& problem,
                                       const ring::OperandLayout& layout);

}  // namespace annulus::launcher
