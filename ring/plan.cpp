#include <algorithm>
#include <array>
#include <cstddef>
#include <map>

#include <fmt/format.h>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/division.hpp>
#include <annulus/ring/plan.hpp>

namespace annulus::ring {

std::string_view name_of(Schedule schedule) noexcept {
  constexpr std::array<std::string_view, 7> kNames{"local",   "ring",   "double_ring", "allgather",
                                                   "ulysses", "hybrid", "pass_q"};
  return kNames[static_cast<std::size_t>(schedule)];
}

std::string variant_text(const ScheduleVariant& variant) {
  std::string text(name_of(variant.schedule));
  if (variant.ulysses_degree != 0) {
    text += fmt::format(" (ulysses degree {})", variant.ulysses_degree);
  }
  if (variant.inner_size != 0) text += fmt::format(" (inner size {})", variant.inner_size);
  return text;
}

std::string_view name_of(Content content) noexcept {
  constexpr std::array<std::string_view, 17> kNames{
      "query",       "key",        "value",    "output",     "LSE",      "delta",
      "grad output", "grad query", "grad key", "grad value", "bias",     "mask",
      "maximum",     "sum",        "grad LSE", "grad sinks", "grad bias"};
  return kNames[static_cast<std::size_t>(content)];
}

bool has_query_heads(Content content) noexcept {
  return content != Content::key && content != Content::value && content != Content::grad_key &&
         content != Content::grad_value;
}

bool is_gradient(Content content) noexcept {
  return content == Content::grad_query || content == Content::grad_key ||
         content == Content::grad_value || content == Content::grad_sinks ||
         content == Content::grad_bias;
}

std::string_view name_of(Reduction reduction) noexcept {
  return reduction == Reduction::softmax ? "softmax" : "sum";
}

Region RankPlan::whole(int buffer) const {
  const Buffer& held = this->buffer(buffer);
  return {buffer, held.tokens, held.heads, batches(held)};
}

int RankPlan::memory_of(int buffer) const {
  while (this->buffer(buffer).reuses >= 0) buffer = this->buffer(buffer).reuses;
  return buffer;
}

HeadRange RankPlan::kv_heads_of(HeadRange heads) const {
  const std::int64_t ratio = local.heads_per_kv_head();
  const std::int64_t begin = heads.begin / ratio;
  return {begin, ceil_divide(heads.end(), ratio) - begin};
}

std::int64_t RankPlan::width(const Buffer& buffer, Content content) const {
  switch (content) {
    case Content::query:
    case Content::key:
    case Content::grad_query:
    case Content::grad_key:
      return local.head_dim;
    case Content::value:
    case Content::output:
    case Content::grad_output:
    case Content::grad_value:
      return local.value_dim;
    case Content::lse:
    case Content::delta:
    case Content::maximum:
    case Content::sum:
    case Content::grad_lse:
      return 1;
    case Content::grad_sinks:
      return sinks_per_head;
    case Content::bias:
    case Content::dense_mask:
    case Content::grad_bias:
      break;
  }
  const Extents* const scores = this->scores(content);
  if (scores == nullptr) return 0;
  return buffer.columns && (*scores)[3] != 1 ? buffer.columns->size() : (*scores)[3];
}

int RankPlan::caller_buffer(Content content) const {
  // The caller's buffers come first. There may be thousands of others.
  for (std::size_t i = 0; i < buffers.size() && buffers[i].kind == BufferKind::caller; ++i) {
    if (buffers[i].contents.front() == content) return static_cast<int>(i);
  }
  return -1;
}

const Extents* RankPlan::scores(Content content) const {
  if ((content == Content::bias || content == Content::grad_bias) && bias) return &*bias;
  if (content == Content::dense_mask && dense_mask) return &*dense_mask;
  return nullptr;
}

BatchRange RankPlan::batches(const Buffer& buffer) const {
  if (buffer.contents.front() == Content::grad_sinks) return {0, 1};
  const Extents* const scores = this->scores(buffer.contents.front());
  return {0, scores == nullptr ? local.batch : (*scores)[0]};
}

// A dimension of size 1 of a bias or a mask is broadcast.
Region RankPlan::scores_of(const Tile& block, int buffer) const {
  const Buffer& held = this->buffer(buffer);
  const BatchRange batches = this->batches(held);
  return {buffer, held.tokens.count == 1 ? held.tokens : block.rows,
          held.heads.count == 1 ? held.heads : block.heads,
          batches.count == 1 ? batches : block.batches};
}

std::int64_t RankPlan::token_bytes(const Buffer& buffer) const {
  std::int64_t numbers = 0;
  for (const Content content : buffer.contents) numbers += width(buffer, content);
  return batches(buffer).count * buffer.heads.count * numbers *
         static_cast<std::int64_t>(size_of(buffer.dtype));
}

std::vector<const Tile*> RankPlan::tiles() const {
  std::vector<const Tile*> found;
  for (const Task& task : tasks) {
    if (const auto* forward = std::get_if<Block>(&task.work)) found.push_back(forward);
    if (const auto* backward = std::get_if<BackwardBlock>(&task.work)) found.push_back(backward);
  }
  return found;
}

namespace {

double pairs_of_heads(const Tile& tile) {
  return static_cast<double>(tile.pairs) * static_cast<double>(tile.heads.count);
}

}  // namespace

double RankPlan::work() const {
  double work = 0;
  for (const Tile* tile : tiles()) work += pairs_of_heads(*tile);
  return work;
}

double RankPlan::flops(const Block& block) const {
  return 2.0 * pairs_of_heads(block) * static_cast<double>(local.head_dim + local.value_dim);
}

double RankPlan::backward_flops(const Tile& block) const {
  std::int64_t dims = local.head_dim + local.value_dim;
  if (block.gradients.rows) dims += local.head_dim;
  if (block.gradients.columns) dims += local.head_dim + local.value_dim;
  return 2.0 * pairs_of_heads(block) * static_cast<double>(dims);
}

namespace {

std::int64_t total_bytes(const RankPlan& plan, std::vector<Transfer> Exchange::*side) {
  std::int64_t bytes = 0;
  for (const Exchange* exchange : plan.all<Exchange>()) {
    for (const Transfer& transfer : exchange->*side) bytes += transfer.bytes;
  }
  return bytes;
}

}  // namespace

std::int64_t RankPlan::bytes_received() const {
  return total_bytes(*this, &Exchange::receives);
}
std::int64_t RankPlan::bytes_sent() const {
  return total_bytes(*this, &Exchange::sends);
}

std::int64_t RankPlan::buffer_bytes(BufferKind kind) const {
  std::map<int, std::int64_t> memory;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].kind != kind) continue;
    std::int64_t& bytes = memory[memory_of(static_cast<int>(i))];
    bytes = std::max(bytes, buffers[i].tokens.count * token_bytes(buffers[i]));
  }
  std::int64_t total = 0;
  for (const auto& [buffer, bytes] : memory) total += bytes;
  return total;
}

bool RankPlan::reduces_rounded() const {
  const std::vector<const Reduce*> reductions = all<Reduce>();
  return std::any_of(reductions.begin(), reductions.end(), [&](const Reduce* reduce) {
    if (reduce->reduction == Reduction::sum) return false;
    return std::any_of(reduce->parts.begin(), reduce->parts.end(), [&](const Result& part) {
      const DType dtype = buffer(part.output.buffer).dtype;
      return dtype != partial_dtype(dtype);
    });
  });
}

bool RankPlan::adds_rounded_gradients() const {
  const std::vector<const Reduce*> reductions = all<Reduce>();
  return std::any_of(reductions.begin(), reductions.end(), [&](const Reduce* reduce) {
    if (reduce->reduction != Reduction::sum || reduce->parts.size() < 2) return false;
    return std::any_of(reduce->parts.begin(), reduce->parts.end(), [&](const Result& part) {
      const Buffer& held = buffer(part.output.buffer);
      return held.kind == BufferKind::exchange && held.dtype != partial_dtype(held.dtype);
    });
  });
}

double Plan::imbalance() const {
  return mean_work > 0 ? most_work / mean_work - 1 : 0;
}

bool Plan::is_sample() const {
  return static_cast<int>(ranks.size()) < mesh.ranks();
}

}  // namespace annulus::ring
