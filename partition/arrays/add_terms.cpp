#include "arrays/add_terms.hpp"

#include <cstddef>
#include <cstring>

#include <annulus/core/convert.hpp>
#include <annulus/core/host_stream.hpp>
#include <annulus/mesh/give_up_on_error.hpp>

namespace annulus {
namespace {

// Elements [begin, begin + count) of each term.
struct Part {
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

Part part_of(std::int64_t elements, int rank, int ranks) {
  const std::int64_t begin = elements * rank / ranks;
  return {begin, elements * (rank + 1) / ranks - begin};
}

template <class Wide, class Widen>
std::vector<Wide> total(const std::vector<std::vector<std::byte>>& terms, std::int64_t count,
                        std::size_t element, const Widen& widen) {
  std::vector<Wide> sums(static_cast<std::size_t>(count));
  std::vector<Wide> term(sums.size());
  const std::size_t bytes = sums.size() * element;
  bool first = true;
  for (const std::vector<std::byte>& of_rank : terms) {
    for (std::size_t at = 0; bytes > 0 && at < of_rank.size(); at += bytes) {
      widen(of_rank.data() + at, term.data());
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] = first ? term[i] : sums[i] + term[i];
      }
      first = false;
    }
  }
  return sums;
}

void wait_for(Group& group, HostStream& stream) {
  Waiting waiting;
  waiting.check = [&] { group.check(); };
  stream.synchronize(waiting);
}

}  // namespace

// Every rank sums a share of the elements and sends the result to the others.
void add_terms(Group& group, const Watchdog& watchdog, const std::vector<std::int64_t>& terms,
               const ConstTensorView& mine, const TensorView& sum) {
  const int ranks = group.size();
  const int self = group.rank();
  const DType dtype = sum.dtype();
  const std::size_t element = size_of(dtype);
  const std::int64_t elements = sum.elements();
  const auto* const source = static_cast<const std::byte*>(mine.data());
  auto* const result = static_cast<std::byte*>(sum.data());
  const Part own = part_of(elements, self, ranks);

  std::vector<std::vector<std::byte>> outgoing(terms.size());
  std::vector<std::vector<std::byte>> incoming(terms.size());
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    const Part part = part_of(elements, rank, ranks);
    for (std::int64_t term = 0; term < terms[static_cast<std::size_t>(self)]; ++term) {
      const std::byte* const first =
          source + static_cast<std::size_t>(term * elements + part.begin) * element;
      outgoing[at].insert(outgoing[at].end(), first,
                          first + static_cast<std::size_t>(part.count) * element);
    }
    if (rank == self) {
      incoming[at] = std::move(outgoing[at]);
      continue;
    }
    incoming[at].resize(static_cast<std::size_t>(terms[at] * own.count) * element);
    if (!outgoing[at].empty()) sends.push_back({rank, outgoing[at].data(), outgoing[at].size()});
    if (!incoming[at].empty()) receives.push_back({rank, incoming[at].data(), incoming[at].size()});
  }
  HostStream stream("sums", watchdog, nullptr);
  const GiveUpOnError guard(group);
  if (ranks > 1) {
    group.exchange(sends, receives, stream, {.what = "terms of a sum"});
    wait_for(group, stream);
  }

  std::byte* const own_sum = result + static_cast<std::size_t>(own.begin) * element;
  if (dtype == DType::float64) {
    const auto sums = total<double>(incoming, own.count, element, [&](const auto* from, auto* to) {
      std::memcpy(to, from, static_cast<std::size_t>(own.count) * element);
    });
    std::memcpy(own_sum, sums.data(), sums.size() * element);
  } else {
    const auto sums = total<float>(incoming, own.count, element, [&](const auto* from, auto* to) {
      to_float32(from, dtype, to, own.count);
    });
    from_float32(sums.data(), dtype, own_sum, own.count);
  }

  if (ranks == 1) return;
  sends.clear();
  receives.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    const Part part = part_of(elements, rank, ranks);
    if (rank == self) continue;
    if (own.count > 0) {
      sends.push_back({rank, own_sum, static_cast<std::size_t>(own.count) * element});
    }
    if (part.count > 0) {
      receives.push_back({rank, result + static_cast<std::size_t>(part.begin) * element,
                          static_cast<std::size_t>(part.count) * element});
    }
  }
  group.exchange(sends, receives, stream, {.what = "sums"});
  wait_for(group, stream);
}

}  // namespace annulus
