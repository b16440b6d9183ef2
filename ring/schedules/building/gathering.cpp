#include "schedules/building/gathering.hpp"

#include <algorithm>
#include <cstddef>

namespace annulus::ring {
namespace {

struct Chunk {
  int member;
  LocalPosition begin;
  PositionRange positions;
};

}  // namespace

Gathering::Gathering(const std::vector<PositionRanges>& shards) : messages_(shards.size()) {
  std::vector<Chunk> chunks;
  bool few = true;
  for (std::size_t member = 0; member < shards.size(); ++member) {
    LocalPosition begin;
    for (const PositionRange& range : shards[member].ranges()) {
      chunks.push_back({static_cast<int>(member), begin, range});
      begin = begin + range.length;
    }
    few = few && shards[member].ranges().size() <= KvNeeds::kMaximumMessages;
  }
  if (few) {
    std::stable_sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) {
      return a.positions.start < b.positions.start;
    });
  }
  std::vector<PositionRange> positions;
  std::int64_t at = 0;
  int last = -1;  // the member of the chunk before
  for (const Chunk& chunk : chunks) {
    const std::int64_t length = chunk.positions.length;
    std::vector<Message>& messages = messages_[static_cast<std::size_t>(chunk.member)];
    if (last == chunk.member && messages.back().tokens.end() == chunk.begin) {
      messages.back().tokens.count += length;
    } else {
      messages.push_back({{chunk.begin, length}, at});
    }
    last = chunk.member;
    at += length;
    // Chunks that continue each other are one range, for kernels that want straight blocks.
    if (!positions.empty() && positions.back().stride == chunk.positions.stride &&
        positions.back().at(positions.back().length) == chunk.positions.start) {
      positions.back().length += length;
    } else {
      positions.push_back(chunk.positions);
    }
  }
  positions_ = PositionRanges(std::move(positions));
  for (std::vector<Message>& messages : messages_) {
    std::ranges::sort(messages, {}, [](const Message& message) { return message.tokens.begin; });
  }
}

std::vector<LocalRange> Gathering::tokens(int member) const {
  std::vector<LocalRange> runs;
  for (const Message& message : messages(member)) runs.push_back(message.tokens);
  return runs;
}

std::vector<LocalRange> Gathering::placed(int member) const {
  std::vector<LocalRange> runs;
  for (const Message& message : messages(member)) runs.push_back(message.placed());
  return runs;
}

Gathering gathering_of(const RankContext& context, std::span<const int> ranks,
                       PositionRanges HeldSequence::*sequence) {
  std::vector<PositionRanges> shards;
  for (const int rank : ranks) {
    shards.push_back(held_by(context.input.operands, rank).*sequence);
  }
  return Gathering(shards);
}

}  // namespace annulus::ring
