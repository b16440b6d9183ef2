#include "launcher/report/cells.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/modifiers.hpp>

namespace annulus::launcher {

std::string shape_cell(const AttentionShape& shape) {
  return fmt::format("{},{},{},{},{},{},{}", shape.batch, shape.query_length, shape.kv_length,
                     shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim);
}

std::string mask_cell(const AttentionProblem& problem) {
  std::string cell = to_string(problem.mask);
  if (problem.dense_mask) cell = problem.mask.hides_any() ? cell + ", dense" : "dense";
  for (auto at = cell.find(", "); at != std::string::npos; at = cell.find(", ")) {
    cell.erase(at, 1);
    cell[at] = '+';
  }
  std::replace(cell.begin(), cell.end(), ' ', ':');
  return cell;
}

std::string mesh_cell(const MeshShape& mesh) {
  return mesh.axes().empty() ? kNothing : to_string(mesh);
}

std::string milliseconds_cell(double seconds) {
  return fmt::format("{:.3f}", seconds * 1e3);
}

std::string mebibytes_cell(double bytes, int digits) {
  return fmt::format("{:.{}f}", bytes / (1 << 20), digits);
}

std::string percent_cell(const std::optional<double>& share, int digits) {
  return share ? fmt::format("{:.{}f}", *share * 100, digits) : kNothing;
}

std::string counts_text(const std::map<std::string, int>& counts) {
  std::string text;
  for (const auto& [name, count] : counts) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, count);
  }
  return text.empty() ? "none" : text;
}

std::string mesh_text(const Mesh& mesh, int threads, Place place) {
  return fmt::format("{}: {} on {}, {} per rank, {}", to_string(mesh.shape()),
                     counted(mesh.size(), "rank"), counted(mesh.topology().nodes(), "node"),
                     counted(threads, "thread"), place.is_host() ? "cpu" : "cuda");
}

void add_rank_order(Report& report, const MpiSession& session) {
  constexpr std::size_t kMaximum = 16;
  std::vector<int> ranks = session.mpirun_ranks();
  if (std::is_sorted(ranks.begin(), ranks.end())) return;
  const bool all = ranks.size() <= kMaximum;
  ranks.resize(std::min(ranks.size(), kMaximum));
  report.add_meta("rank order", fmt::format("by node: mpirun's ranks {}{}", fmt::join(ranks, ", "),
                                            all ? "" : ", …"));
}

std::string problem_text(const AttentionProblem& problem) {
  return fmt::format("{} {}, {}", to_string(problem.shape), annulus::name_of(problem.dtype),
                     mask_and_modifiers_text(problem));
}

std::string problem_text(const AttentionProblem& problem, const ring::OperandLayout& layout) {
  std::string text = fmt::format("{}; query {}, key/value {}", problem_text(problem),
                                 to_string(layout.query), to_string(layout.kv));
  const auto add = [&](const char* name, const std::optional<Extents>& scores) {
    if (!scores) return;
    text += fmt::format(", {} {}", name, to_string(ring::scores_spec(*scores, layout.query)));
  };
  add("bias", problem.bias);
  add("mask", problem.dense_mask);
  return text;
}

}  // namespace annulus::launcher
