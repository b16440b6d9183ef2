#include <algorithm>
#include <array>
#include <cstddef>

#include <annulus/ring/plan.hpp>

namespace annulus::ring {

std::string_view name_of(Schedule schedule) noexcept {
  constexpr std::array<std::string_view, 3> kNames{"local", "ring", "allgather"};
  return kNames[static_cast<std::size_t>(schedule)];
}

std::string_view name_of(Payload /*payload*/) noexcept {
  return "key/value";
}

double RankPlan::work() const {
  double work = 0;
  for (const Step& step : steps) {
    for (const Block& block : step.blocks) {
      work += static_cast<double>(block.pairs) * static_cast<double>(block.heads.count);
    }
  }
  return work;
}

namespace {

std::int64_t total_bytes(const std::vector<Step>& steps, std::vector<Transfer> Step::*side) {
  std::int64_t bytes = 0;
  for (const Step& step : steps) {
    for (const Transfer& transfer : step.*side) bytes += transfer.bytes;
  }
  return bytes;
}

}  // namespace

double RankPlan::flops(const Block& block) const {
  return 2.0 * static_cast<double>(block.pairs) * static_cast<double>(block.heads.count) *
         static_cast<double>(local.head_dim + local.value_dim);
}

std::int64_t RankPlan::bytes_received() const {
  return total_bytes(steps, &Step::receives);
}
std::int64_t RankPlan::bytes_sent() const {
  return total_bytes(steps, &Step::sends);
}

int RankPlan::merges() const {
  std::ptrdiff_t merges = 0;
  for (const Step& step : steps) {
    merges += std::count_if(step.blocks.begin(), step.blocks.end(),
                            [](const Block& block) { return block.merge; });
  }
  return static_cast<int>(merges);
}

std::int64_t RankPlan::slot_bytes(const KvBuffer& buffer, DType dtype) const {
  return local.batch * buffer.kv_heads.count * (local.head_dim + local.value_dim) *
         static_cast<std::int64_t>(size_of(dtype));
}

std::int64_t RankPlan::buffer_bytes(DType dtype) const {
  std::int64_t bytes = 0;
  for (const KvBuffer& buffer : buffers) {
    if (buffer.kind == BufferKind::input || buffer.reuses >= 0) continue;
    bytes += buffer.slots * slot_bytes(buffer, dtype);
  }
  return bytes;
}

double Plan::imbalance() const {
  double most = 0;
  double total = 0;
  for (const RankPlan& rank : ranks) {
    most = std::max(most, rank.work());
    total += rank.work();
  }
  return total > 0 ? most * static_cast<double>(ranks.size()) / total - 1 : 0;
}

}  // namespace annulus::ring
