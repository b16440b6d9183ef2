#include <algorithm>
#include <array>
#include <iterator>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/partition/partition_spec.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {
namespace {

std::string_view name_of(BufferKind kind) {
  constexpr std::array<std::string_view, 3> kNames{"input", "packed", "receive"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string transfer_text(const Transfer& transfer, std::string_view direction) {
  return fmt::format("{} rank {}: {} of rank {}, buffer {} slots {}:{}, {} bytes", direction,
                     transfer.peer, ring::name_of(transfer.payload), transfer.origin,
                     transfer.buffer, transfer.slots.begin.value(), transfer.slots.end().value(),
                     transfer.bytes);
}

void append_rank(std::string& text, const RankPlan& plan) {
  auto out = std::back_inserter(text);
  fmt::format_to(out, "\nrank {} (group rank {})\n", plan.rank, plan.group_rank);
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const KvBuffer& buffer = plan.buffers[i];
    fmt::format_to(out, "  buffer {}: {}, {} slots, kv heads {}:{}{}\n", i, name_of(buffer.kind),
                   buffer.slots, buffer.kv_heads.begin,
                   buffer.kv_heads.begin + buffer.kv_heads.count,
                   buffer.reuses >= 0 ? fmt::format(", memory of buffer {}", buffer.reuses) : "");
  }
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    fmt::format_to(out, "  step {}\n", i);
    for (const Transfer& send : step.sends) {
      fmt::format_to(out, "    {}\n", transfer_text(send, "send to"));
    }
    for (const Transfer& receive : step.receives) {
      fmt::format_to(out, "    {}\n", transfer_text(receive, "receive from"));
    }
    for (const Block& block : step.blocks) {
      fmt::format_to(out,
                     "    compute rows {} x columns {} (buffer {}), heads {}:{}, {}, {} pairs{}\n",
                     to_string(block.row_positions), to_string(block.column_positions),
                     block.buffer, block.heads.begin, block.heads.begin + block.heads.count,
                     block.full ? "full" : "partial", block.pairs, block.merge ? ", merged" : "");
    }
  }
}

}  // namespace

std::string to_text(const Plan& plan, int max_ranks) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{} {} mask {}\n", to_string(plan.problem.shape),
                 annulus::name_of(plan.problem.dtype), to_string(plan.problem.mask));
  fmt::format_to(out, "mesh {}, key/value sequence on {}, layout {}, schedule {}\n",
                 to_string(plan.mesh), to_string(plan.sequence_axes), plan.layout,
                 name_of(plan.schedule));
  fmt::format_to(out, "imbalance {:.2f} %\n", plan.imbalance() * 100);
  const auto shown = std::min(plan.ranks.size(), static_cast<std::size_t>(std::max(max_ranks, 0)));
  for (std::size_t i = 0; i < shown; ++i) append_rank(text, plan.ranks[i]);
  return text;
}

namespace {

using nlohmann::json;

json range_json(const LocalRange& range) {
  return json::array({range.begin.value(), range.end().value()});
}

json heads_json(const HeadRange& heads) {
  return json::array({heads.begin, heads.begin + heads.count});
}

json shape_json(const AttentionShape& shape) {
  return {{"batch", shape.batch},         {"query_length", shape.query_length},
          {"kv_length", shape.kv_length}, {"heads", shape.heads},
          {"kv_heads", shape.kv_heads},   {"head_dim", shape.head_dim},
          {"value_dim", shape.value_dim}};
}

json transfer_json(const Transfer& transfer) {
  return {{"payload", ring::name_of(transfer.payload)},
          {"peer", transfer.peer},
          {"origin", transfer.origin},
          {"buffer", transfer.buffer},
          {"slots", range_json(transfer.slots)},
          {"bytes", transfer.bytes}};
}

json block_json(const Block& block) {
  return {{"rows", range_json(block.rows)},
          {"row_positions", to_string(block.row_positions)},
          {"buffer", block.buffer},
          {"slots", range_json(block.slots)},
          {"column_positions", to_string(block.column_positions)},
          {"heads", heads_json(block.heads)},
          {"pairs", block.pairs},
          {"full", block.full},
          {"merge", block.merge}};
}

json buffer_json(const KvBuffer& buffer) {
  json result{{"kind", name_of(buffer.kind)},
              {"slots", buffer.slots},
              {"kv_heads", heads_json(buffer.kv_heads)}};
  if (buffer.kind != BufferKind::receive) result["source"] = range_json(buffer.source);
  if (buffer.reuses >= 0) result["reuses"] = buffer.reuses;
  return result;
}

json rank_json(const RankPlan& plan) {
  json steps = json::array();
  for (const Step& step : plan.steps) {
    json sends = json::array();
    json receives = json::array();
    json blocks = json::array();
    for (const Transfer& send : step.sends) sends.push_back(transfer_json(send));
    for (const Transfer& receive : step.receives) receives.push_back(transfer_json(receive));
    for (const Block& block : step.blocks) blocks.push_back(block_json(block));
    steps.push_back({{"sends", sends}, {"receives", receives}, {"blocks", blocks}});
  }
  json buffers = json::array();
  for (const KvBuffer& buffer : plan.buffers) buffers.push_back(buffer_json(buffer));
  return {{"rank", plan.rank},
          {"group_rank", plan.group_rank},
          {"local", shape_json(plan.local)},
          {"first_batch", plan.first_batch},
          {"first_head", plan.first_head},
          {"work", plan.work()},
          {"bytes_sent", plan.bytes_sent()},
          {"bytes_received", plan.bytes_received()},
          {"buffers", buffers},
          {"steps", steps}};
}

}  // namespace

std::string to_json(const Plan& plan) {
  json mesh = json::array();
  for (const MeshAxis& axis : plan.mesh.axes()) {
    mesh.push_back({{"name", axis.name}, {"size", axis.size}});
  }
  json ranks = json::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(rank_json(rank));
  return json{{"version", 1},
              {"shape", shape_json(plan.problem.shape)},
              {"dtype", annulus::name_of(plan.problem.dtype)},
              {"mask", to_string(plan.problem.mask)},
              {"mesh", mesh},
              {"sequence_axes", plan.sequence_axes},
              {"schedule", name_of(plan.schedule)},
              {"layout", plan.layout},
              {"imbalance", plan.imbalance()},
              {"ranks", ranks}}
      .dump(1);
}

}  // namespace annulus::ring
