#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/plan.hpp>

#include "report/names.hpp"
#include "task_labels.hpp"

namespace annulus::ring {
namespace {

template <class Range>
std::string range_text(const Range& range) {
  return fmt::format("{}:{}", range.begin, range.begin + range.count);
}

std::string range_text(const LocalRange& range) {
  return fmt::format("{}:{}", range.begin.value(), range.end().value());
}

std::string region_text(const Region& region) {
  return fmt::format("buffer {} tokens {} heads {} batches {}", region.buffer,
                     range_text(region.tokens), range_text(region.heads),
                     range_text(region.batches));
}

std::string after_text(std::string_view what, const std::vector<Dependency>& dependencies) {
  std::string text;
  for (const Dependency& dependency : dependencies) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", dependency.task,
                        dependency.stage == Stage::released ? " released" : "");
  }
  return text.empty() ? "" : fmt::format("; {} {}", what, text);
}

std::string transfer_text(const RankPlan& plan, const Exchange& exchange, const Transfer& transfer,
                          std::string_view direction) {
  const PlanGroup& group = plan.groups[static_cast<std::size_t>(exchange.group)];
  return fmt::format("{} rank {}: {} of rank {}, buffer {} tokens {}, {} bytes", direction,
                     group.ranks[static_cast<std::size_t>(transfer.peer)],
                     contents_of(plan.buffer(transfer.buffer)),
                     group.ranks[static_cast<std::size_t>(transfer.origin)], transfer.buffer,
                     range_text(transfer.tokens), transfer.bytes);
}

std::string work_text(const RankPlan& /*plan*/, const Copy& copy) {
  return fmt::format("copy {} from buffer {} token {} to {}", name_of(copy.content), copy.from,
                     copy.from_begin.value(), region_text(copy.to));
}

std::string work_text(const RankPlan& plan, const Exchange& exchange) {
  std::string text = fmt::format(
      "exchange along {}", to_string(plan.groups[static_cast<std::size_t>(exchange.group)].axes));
  text += after_text("receives after", exchange.receive_after);
  for (const Transfer& send : exchange.sends) {
    text += "\n        " + transfer_text(plan, exchange, send, "send to");
  }
  for (const Transfer& receive : exchange.receives) {
    text += "\n        " + transfer_text(plan, exchange, receive, "receive from");
  }
  return text;
}

std::string tile_text(const RankPlan& plan, const Tile& tile) {
  return fmt::format("rows {} x columns {} (buffer {}), heads {}, batches {}, {}, {} pairs, by {}",
                     to_string(tile.row_positions), to_string(tile.column_positions), tile.key,
                     range_text(tile.heads), range_text(tile.batches),
                     tile.full ? "full" : "masked", tile.pairs, plan.implementation_of(tile));
}

std::string work_text(const RankPlan& plan, const Block& block) {
  std::string text =
      fmt::format("compute {}, into buffer {}", tile_text(plan, block), block.result.output.buffer);
  if (block.state) text += fmt::format(", continuing buffer {}", block.state->output.buffer);
  for (const Arrival& arrival : block.arrivals) {
    text +=
        fmt::format("\n        awaits tokens {} of {}", range_text(arrival.columns), arrival.task);
  }
  return text;
}

std::string work_text(const RankPlan& plan, const BackwardBlock& block) {
  std::string text = "backward of " + tile_text(plan, block);
  for (const auto& [content, gradient] : {std::pair(Content::grad_query, &block.grad_query),
                                          std::pair(Content::grad_key, &block.grad_key),
                                          std::pair(Content::grad_value, &block.grad_value),
                                          std::pair(Content::grad_bias, &block.grad_bias)}) {
    if (gradient->buffer < 0) continue;
    text += fmt::format("\n        {} added to {}", name_of(content), region_text(*gradient));
  }
  return text;
}

std::string work_text(const RankPlan& /*plan*/, const Delta& delta) {
  return fmt::format("delta of {} and buffer {}, into buffer {}", region_text(delta.output),
                     delta.grad_output, delta.delta);
}

std::string work_text(const RankPlan& /*plan*/, const SinkGradient& gradient) {
  return fmt::format("gradient of the sinks from {} and buffer {}, into buffer {}",
                     region_text(gradient.delta), gradient.lse, gradient.grad_sinks);
}

std::string work_text(const RankPlan& /*plan*/, const Reduce& reduce) {
  std::string text =
      fmt::format("reduce ({}{}) into {}", name_of(reduce.reduction),
                  reduce.unnormalised ? ", unnormalised" : "", region_text(reduce.into.output));
  for (const Result& part : reduce.parts) text += "\n        " + region_text(part.output);
  if (reduce.sinks) text += "\n        the sinks";
  return text;
}

void append_rank(std::string& text, const RankPlan& plan) {
  auto out = std::back_inserter(text);
  fmt::format_to(out, "\nrank {}\n", plan.rank);
  for (const PlanGroup& group : plan.groups) {
    fmt::format_to(out, "  group along {}: rank {} of {}\n", to_string(group.axes), group.rank,
                   group.ranks.size());
  }
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const Buffer& buffer = plan.buffers[i];
    fmt::format_to(out, "  buffer {}: {}, {} {}, tokens {}, heads {}{}{}\n", i,
                   name_of(buffer.kind), contents_of(buffer), annulus::name_of(buffer.dtype),
                   range_text(buffer.tokens), range_text(buffer.heads),
                   buffer.columns ? fmt::format(", columns {}", to_string(*buffer.columns)) : "",
                   buffer.reuses >= 0 ? fmt::format(", memory of buffer {}", buffer.reuses) : "");
  }
  int step = -1;
  for (std::size_t i = 0; i < plan.tasks.size(); ++i) {
    const Task& task = plan.tasks[i];
    if (task.step != step) fmt::format_to(out, "  step {}\n", task.step);
    step = task.step;
    const std::string work =
        std::visit([&](const auto& one) { return work_text(plan, one); }, task.work);
    const auto line = std::min(work.find('\n'), work.size());
    fmt::format_to(out, "    {:>3} {}{}{}\n", i, work.substr(0, line),
                   after_text("after", task.after), work.substr(line));
  }
}

}  // namespace

std::string to_text(const Plan& plan, int max_ranks) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{} {}, {}\n", to_string(plan.problem.shape),
                 annulus::name_of(plan.problem.dtype), mask_and_modifiers_text(plan.problem));
  const AxisNames axes = plan.ranks.empty() ? AxisNames{} : plan.ranks.front().groups.front().axes;
  fmt::format_to(out, "mesh {}, key/value sequence on {}, layout {}, schedule {}{}\n",
                 to_string(plan.mesh), to_string(axes), plan.layout,
                 variant_text({plan.schedule, plan.ulysses_degree, plan.inner_size}),
                 plan.backward ? ", backward" : "");
  fmt::format_to(out, "imbalance {:.2f} %\n", plan.imbalance() * 100);
  if (plan.is_sample()) {
    fmt::format_to(out, "{} of {} ranks planned\n", plan.ranks.size(), plan.mesh.ranks());
  }
  const auto shown = std::min(plan.ranks.size(), static_cast<std::size_t>(std::max(max_ranks, 0)));
  for (std::size_t i = 0; i < shown; ++i) append_rank(text, plan.ranks[i]);
  return text;
}

}  // namespace annulus::ring
