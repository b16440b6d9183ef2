#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include <annulus/attention/modifiers.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/ring/plan.hpp>

#include "report/names.hpp"

namespace annulus::ring {
namespace {

using nlohmann::json;

template <class Range>
json range_json(const Range& range) {
  return json::array({range.begin, range.begin + range.count});
}

json range_json(const LocalRange& range) {
  return json::array({range.begin.value(), range.end().value()});
}

json shape_json(const AttentionShape& shape) {
  return {{"batch", shape.batch},         {"query_length", shape.query_length},
          {"kv_length", shape.kv_length}, {"heads", shape.heads},
          {"kv_heads", shape.kv_heads},   {"head_dim", shape.head_dim},
          {"value_dim", shape.value_dim}};
}

json region_json(const Region& region) {
  return {{"buffer", region.buffer},
          {"tokens", range_json(region.tokens)},
          {"heads", range_json(region.heads)},
          {"batches", range_json(region.batches)}};
}

json result_json(const Result& result) {
  json all{{"output", region_json(result.output)}, {"lse", result.lse}};
  if (result.maximum >= 0) all["maximum"] = result.maximum;
  return all;
}

json dependencies_json(const std::vector<Dependency>& dependencies) {
  json all = json::array();
  for (const Dependency& dependency : dependencies) {
    all.push_back({{"task", dependency.task},
                   {"stage", dependency.stage == Stage::released ? "released" : "done"}});
  }
  return all;
}

json transfers_json(const std::vector<Transfer>& transfers) {
  json all = json::array();
  for (const Transfer& transfer : transfers) {
    all.push_back({{"peer", transfer.peer},
                   {"origin", transfer.origin},
                   {"buffer", transfer.buffer},
                   {"tokens", range_json(transfer.tokens)},
                   {"bytes", transfer.bytes}});
  }
  return all;
}

json work_json(const RankPlan& /*plan*/, const Copy& copy) {
  return {{"kind", "copy"},
          {"content", name_of(copy.content)},
          {"from", copy.from},
          {"from_begin", copy.from_begin.value()},
          {"to", region_json(copy.to)}};
}

json work_json(const RankPlan& /*plan*/, const Exchange& exchange) {
  return {{"kind", "exchange"},
          {"group", exchange.group},
          {"sends", transfers_json(exchange.sends)},
          {"receives", transfers_json(exchange.receives)},
          {"receive_after", dependencies_json(exchange.receive_after)}};
}

json tile_json(const RankPlan& plan, std::string_view kind, const Tile& tile) {
  json result{{"kind", kind},
              {"rows", range_json(tile.rows)},
              {"row_positions", to_string(tile.row_positions)},
              {"columns", range_json(tile.columns)},
              {"column_positions", to_string(tile.column_positions)},
              {"heads", range_json(tile.heads)},
              {"batches", range_json(tile.batches)},
              {"query", tile.query},
              {"key", tile.key},
              {"value", tile.value},
              {"pairs", tile.pairs},
              {"full", tile.full},
              {"implementation", plan.implementation_of(tile)}};
  if (tile.bias >= 0) result["bias"] = tile.bias;
  if (tile.dense_mask >= 0) result["dense_mask"] = tile.dense_mask;
  return result;
}

json work_json(const RankPlan& plan, const Block& block) {
  json result = tile_json(plan, "block", block);
  result["result"] = result_json(block.result);
  if (block.state) result["state"] = result_json(*block.state);
  for (const Arrival& arrival : block.arrivals) {
    result["arrivals"].push_back(
        {{"columns", range_json(arrival.columns)}, {"task", arrival.task}});
  }
  return result;
}

json work_json(const RankPlan& plan, const BackwardBlock& block) {
  json result = tile_json(plan, "backward_block", block);
  result["grad_output"] = block.grad_output;
  result["lse"] = block.lse;
  result["delta"] = block.delta;
  for (const auto& [name, gradient] :
       {std::pair("grad_query", &block.grad_query), std::pair("grad_key", &block.grad_key),
        std::pair("grad_value", &block.grad_value), std::pair("grad_bias", &block.grad_bias)}) {
    if (gradient->buffer >= 0) result[name] = region_json(*gradient);
  }
  if (block.repeats_bits) result["repeats_bits"] = true;
  return result;
}

json work_json(const RankPlan& /*plan*/, const Delta& delta) {
  json result{{"kind", "delta"},
              {"output", region_json(delta.output)},
              {"grad_output", delta.grad_output},
              {"delta", delta.delta}};
  if (delta.grad_lse >= 0) result["grad_lse"] = delta.grad_lse;
  return result;
}

json work_json(const RankPlan& /*plan*/, const SinkGradient& gradient) {
  return {{"kind", "sink_gradient"},
          {"delta", region_json(gradient.delta)},
          {"lse", gradient.lse},
          {"grad_sinks", gradient.grad_sinks}};
}

json work_json(const RankPlan& /*plan*/, const Reduce& reduce) {
  json parts = json::array();
  for (const Result& part : reduce.parts) parts.push_back(result_json(part));
  json result{{"kind", "reduce"},
              {"reduction", name_of(reduce.reduction)},
              {"parts", parts},
              {"into", result_json(reduce.into)}};
  if (reduce.sinks) result["sinks"] = true;
  if (reduce.unnormalised) result["unnormalised"] = true;
  return result;
}

json buffer_json(const Buffer& buffer) {
  json contents = json::array();
  for (const Content content : buffer.contents) contents.push_back(name_of(content));
  json result{{"kind", name_of(buffer.kind)},
              {"contents", contents},
              {"dtype", annulus::name_of(buffer.dtype)},
              {"tokens", range_json(buffer.tokens)},
              {"heads", range_json(buffer.heads)}};
  if (buffer.reuses >= 0) result["reuses"] = buffer.reuses;
  if (buffer.columns) result["columns"] = to_string(*buffer.columns);
  return result;
}

json rank_json(const RankPlan& plan) {
  json groups = json::array();
  for (const PlanGroup& group : plan.groups) {
    groups.push_back({{"axes", group.axes}, {"ranks", group.ranks}, {"rank", group.rank}});
  }
  json tasks = json::array();
  for (const Task& task : plan.tasks) {
    json entry = std::visit([&](const auto& work) { return work_json(plan, work); }, task.work);
    entry["step"] = task.step;
    entry["after"] = dependencies_json(task.after);
    tasks.push_back(std::move(entry));
  }
  json buffers = json::array();
  for (const Buffer& buffer : plan.buffers) buffers.push_back(buffer_json(buffer));
  return {{"rank", plan.rank},
          {"local", shape_json(plan.local)},
          {"first_batch", plan.first_batch},
          {"first_head", plan.first_head},
          {"work", plan.work()},
          {"bytes_sent", plan.bytes_sent()},
          {"bytes_received", plan.bytes_received()},
          {"groups", groups},
          {"buffers", buffers},
          {"tasks", tasks}};
}

}  // namespace

std::string to_json(const Plan& plan) {
  json mesh = json::array();
  for (const MeshAxis& axis : plan.mesh.axes()) {
    mesh.push_back({{"name", axis.name}, {"size", axis.size}});
  }
  json ranks = json::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(rank_json(rank));
  return json{{"version", 3},
              {"shape", shape_json(plan.problem.shape)},
              {"dtype", annulus::name_of(plan.problem.dtype)},
              {"mask", to_string(plan.problem.mask)},
              {"modifiers", modifiers_text(plan.problem)},
              {"mesh", mesh},
              {"pass", plan.backward ? "backward" : "forward"},
              {"schedule", name_of(plan.schedule)},
              {"ulysses_degree", plan.ulysses_degree},
              {"inner_size", plan.inner_size},
              {"layout", plan.layout},
              {"imbalance", plan.imbalance()},
              {"ranks", ranks}}
      .dump(1);
}

}  // namespace annulus::ring
