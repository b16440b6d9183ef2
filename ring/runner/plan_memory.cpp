#include "runner/plan_memory.hpp"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>

namespace annulus::ring {
namespace {

std::size_t aligned(std::size_t bytes) {
  return (bytes + MemoryPool::kAlignment - 1) / MemoryPool::kAlignment * MemoryPool::kAlignment;
}

bool by_heads(Content content) {
  return content == Content::lse || content == Content::delta || content == Content::maximum ||
         content == Content::sum || content == Content::grad_lse;
}

bool is_scores(Content content) {
  return content == Content::bias || content == Content::dense_mask ||
         content == Content::grad_bias;
}

// The dimension of tokens in a view of this content.
int token_dim(Content content) {
  return by_heads(content) || is_scores(content) ? 2 : 1;
}
int head_dim(Content content) {
  return 3 - token_dim(content);
}

// The entries for `keys` of a bias or a mask over all keys.
ConstTensorView keys_of(const ConstTensorView& scores, const PositionRange& keys) {
  const std::int64_t span = (keys.length - 1) * keys.stride + 1;
  const ConstTensorView all = scores.slice(3, keys.start.value(), span);
  Extents shape = all.shape();
  Extents strides = all.strides();
  shape[3] = keys.length;
  strides[3] *= keys.stride;
  return {all.data(), all.dtype(), shape, strides, all.place()};
}

}  // namespace

PlanMemory::PlanMemory(const RankPlan& plan, std::span<Group* const> groups, Device& device)
    : plan_(plan),
      place_(device.place()),
      data_(plan.buffers.size()),
      caller_index_(plan.buffers.size()) {
  std::size_t callers = 0;
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    if (plan.buffers[i].kind == BufferKind::caller) caller_index_[i] = callers++;
  }
  caller_ = expected();
  allocate(groups, device);
}

void PlanMemory::allocate(std::span<Group* const> groups, Device& device) {
  // Group and bytes, by the first buffer of a chain.
  std::map<int, std::size_t> group_of;
  for (const Exchange* exchange : plan_.all<Exchange>()) {
    for (const auto* side : {&exchange->sends, &exchange->receives}) {
      for (const Transfer& transfer : *side) {
        const auto group = static_cast<std::size_t>(exchange->group);
        const int memory = plan_.memory_of(transfer.buffer);
        if (group_of.try_emplace(memory, group).first->second != group) {
          throw InternalError("two groups exchange the same memory");
        }
      }
    }
  }
  std::map<int, std::size_t> bytes_of;
  for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
    const Buffer& buffer = plan_.buffers[i];
    if (buffer.kind == BufferKind::caller) continue;
    std::size_t& bytes = bytes_of[plan_.memory_of(static_cast<int>(i))];
    bytes =
        std::max(bytes, static_cast<std::size_t>(buffer.tokens.count * plan_.token_bytes(buffer)));
  }
  std::vector<CallMemory::Request> requests;
  for (Group* group : groups) requests.push_back({group->exchange_memory(device.memory()), 0});
  requests.push_back({device.memory(), 0});  // one for all buffers that are not exchanged
  std::vector<std::map<std::size_t, int>> pieces(requests.size());  // the largest come last
  std::map<int, std::size_t> offsets;
  const auto index_of = [&](int memory) {
    const auto group = group_of.find(memory);
    return group == group_of.end() ? groups.size() : group->second;
  };
  for (const auto& [memory, bytes] : bytes_of) {
    const std::size_t index = index_of(memory);
    std::size_t& total = requests[index].bytes;
    offsets[memory] = total;
    total += aligned(bytes);
    pieces[index].emplace(bytes, memory);
  }
  try {
    memory_ = device.call_memory().take(requests);
  } catch (const LibraryError& error) {
    std::string text;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (pieces[i].empty()) continue;
      const Buffer& largest = plan_.buffer(pieces[i].rbegin()->second);
      const Content content = largest.contents.front();
      text += fmt::format("{}{} {}, of which the largest holds {} {} of {}",
                          text.empty() ? "" : "; ", human_bytes(requests[i].bytes),
                          i < groups.size() ? "to exchange" : "of partial results",
                          ring::name_of(content), to_string(shape_of(largest, content)),
                          annulus::name_of(largest.dtype));
    }
    throw LibraryError(fmt::format("buffers of the plan ({}): {}", text, error.what()));
  }
  for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
    if (plan_.buffers[i].kind == BufferKind::caller) continue;
    const int memory = plan_.memory_of(static_cast<int>(i));
    auto* const begin = static_cast<std::byte*>(memory_[index_of(memory)]->data());
    data_[i] = begin == nullptr ? nullptr : begin + offsets.at(memory);
  }
}

Extents PlanMemory::shape_of(const Buffer& buffer, Content content) const {
  const std::int64_t batches = plan_.batches(buffer).count;
  if (by_heads(content)) return {batches, buffer.heads.count, buffer.tokens.count};
  const std::int64_t width = plan_.width(buffer, content);
  if (is_scores(content)) return {batches, buffer.heads.count, buffer.tokens.count, width};
  return {batches, buffer.tokens.count, buffer.heads.count, width};
}

std::vector<TensorView> PlanMemory::expected() const {
  std::vector<TensorView> tensors;
  for (const Buffer& buffer : plan_.buffers) {
    if (buffer.kind != BufferKind::caller) continue;
    tensors.emplace_back(nullptr, buffer.dtype, shape_of(buffer, buffer.contents.front()), place_);
  }
  return tensors;
}

// [token][batch][contents, one after the other, each heads · width].
TensorView PlanMemory::in_records(const Buffer& buffer, void* data, Content content) const {
  std::int64_t record = 0;
  std::int64_t before = 0;
  for (const Content one : buffer.contents) {
    if (one == content) before = record;
    record += buffer.heads.count * plan_.width(buffer, one);
  }
  // Computed as a number, as in TensorView, since there may be no memory yet.
  auto* const begin =
      reinterpret_cast<void*>(reinterpret_cast<std::intptr_t>(data) +
                              before * static_cast<std::int64_t>(size_of(buffer.dtype)));
  const std::int64_t token = plan_.batches(buffer).count * record;
  const std::int64_t width = plan_.width(buffer, content);
  const Extents strides = by_heads(content)    ? Extents{record, 1, token}
                          : is_scores(content) ? Extents{record, width, token, 1}
                                               : Extents{record, token, width, 1};
  return {begin, buffer.dtype, shape_of(buffer, content), strides, place_};
}

TensorView PlanMemory::whole(int buffer, Content content) const {
  const auto index = static_cast<std::size_t>(buffer);
  const Buffer& description = plan_.buffers[index];
  switch (description.kind) {
    case BufferKind::caller:
      return caller_[caller_index_[index]];
    case BufferKind::exchange:
      return in_records(description, data_[index], content);
    case BufferKind::local:
      break;
  }
  return {data_[index], description.dtype, shape_of(description, content), place_};
}

TensorView PlanMemory::view(const Region& region, Content content) const {
  if (region.buffer < 0) return {};
  const Buffer& buffer = plan_.buffer(region.buffer);
  return whole(region.buffer, content)
      .slice(0, region.batches.begin, region.batches.count)
      .slice(token_dim(content), region.tokens.begin - buffer.tokens.begin, region.tokens.count)
      .slice(head_dim(content), region.heads.begin - buffer.heads.begin, region.heads.count);
}

void PlanMemory::add_copies(const Copy& copy, std::vector<TensorCopy>& copies) const {
  const ConstTensorView from = view(copy.source(), copy.content);
  const TensorView to = view(copy.to, copy.content);
  const auto& keys = plan_.buffer(copy.to.buffer).columns;
  // A bias or a mask [b,n,t,S] is cut to the keys of its rows, unless it is broadcast along them.
  if (!keys || plan_.buffer(copy.from).columns || from.size(3) == 1) {
    copies.push_back({from, to});
    return;
  }
  std::int64_t key = 0;
  for (const PositionRange& range : keys->ranges()) {
    if (range.length == 0) continue;
    copies.push_back({keys_of(from, range), to.slice(3, key, range.length)});
    key += range.length;
  }
}

SoftmaxState PlanMemory::state(const Result& result) const {
  const auto of_rows = [&](int buffer, Content content) {
    return view(result.output.in(buffer), content);
  };
  return {view(result.output, Content::output), of_rows(result.lse, Content::lse),
          of_rows(result.maximum, Content::maximum)};
}

ScoreTensors PlanMemory::scores(const Tile& block, std::int64_t kv_length) const {
  bool by_column = false;
  const auto part = [&](int buffer) -> ConstTensorView {
    if (buffer < 0) return {};
    const Buffer& held = plan_.buffer(buffer);
    const ConstTensorView all = view(plan_.scores_of(block, buffer), held.contents.front());
    if (!held.columns) return all;
    by_column = true;
    if (all.size(3) == 1) return all;
    return all.slice(3, block.columns.begin - plan_.buffer(block.key).tokens.begin,
                     block.columns.count);
  };
  const ConstTensorView bias = part(block.bias);
  const ConstTensorView mask = part(block.dense_mask);
  ScoreTensors scores = broadcast_scores(bias, mask,
                                         {block.batches.count, block.heads.count, block.rows.count,
                                          by_column ? block.columns.count : kv_length});
  scores.by_column = by_column;
  return scores;
}

void* PlanMemory::address(int buffer, LocalRange tokens) const {
  const Buffer& description = plan_.buffer(buffer);
  return static_cast<std::byte*>(data_[static_cast<std::size_t>(buffer)]) +
         (tokens.begin - description.tokens.begin) * plan_.token_bytes(description);
}

std::size_t PlanMemory::bytes() const noexcept {
  std::size_t bytes = 0;
  for (const CallMemory::Piece& piece : memory_) bytes += piece->bytes();
  return bytes;
}

}  // namespace annulus::ring
