#include <algorithm>
#include <array>
#include <cstddef>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/give_up_on_error.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/reshard_plan.hpp>

namespace annulus {
namespace {

void check_view(const char* name, const ConstTensorView& view, const NamedSharding& sharding,
                int rank, Place place) {
  const Extents expected = sharding.local_shape(rank);
  if (!(view.shape() == expected)) {
    throw ArgumentError(
        name, "shape " + to_string(view.shape()),
        fmt::format("{}, this rank's part of {}", to_string(expected), to_string(sharding)));
  }
  if (view.place() != place) {
    throw ArgumentError(name, "memory of " + to_string(view.place()),
                        "memory of " + to_string(place) + ", the device of the call");
  }
}

// Throws if ranks have different arguments. Either all ranks pass a GPU or none does.
void check_agreed(Control& ranks, Place place, DType dtype, const NamedSharding& from,
                  const NamedSharding& to) {
  constexpr std::array kNames{"device", "dtype", "sharding of the source",
                              "sharding of the destination"};
  const auto lines = [](const std::string& text) {
    std::vector<std::string> all;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  };
  const std::string mine = fmt::format("{}\n{}\n{}\n{}", place.is_host() ? "a CPU" : "a GPU",
                                       name_of(dtype), to_string(from), to_string(to));
  const auto other = ranks.first_difference(mine, "arguments of a resharding");
  if (!other) return;
  const std::vector<std::string> given = lines(other->text);
  const std::vector<std::string> expected = lines(other->expected);
  const auto differ = std::ranges::mismatch(given, expected);
  const auto which = static_cast<std::size_t>(differ.in1 - given.begin());
  throw ArgumentError(kNames.at(which), fmt::format("{} on rank {}", given[which], other->rank),
                      fmt::format("{}, as on rank 0", expected[which]));
}

// The entries of `view` at begin, begin + step, … per dimension.
template <class View>
View window(const View& view, const Extents& shape, const Extents& begin, const Extents& step) {
  View origin = view;
  Extents strides = view.strides();
  for (int dim = 0; dim < view.rank(); ++dim) {
    origin = origin.slice(dim, begin[dim], shape[dim]);
    strides[dim] *= step[dim];
  }
  return View(origin.data(), view.dtype(), shape, strides, view.place());
}

ConstTensorView source_window(const ConstTensorView& source, const ReshardBox& box) {
  return window(source, box.shape, box.source_begin, box.source_step);
}

TensorView destination_window(const TensorView& destination, const ReshardBox& box) {
  return window(destination, box.shape, box.destination_begin, box.destination_step);
}

// Consumes a message buffer from its front.
class Cursor {
 public:
  Cursor(void* data, Place place) : next_(static_cast<std::byte*>(data)), place_(place) {}
  [[nodiscard]] std::byte* at() const noexcept { return next_; }
  TensorView take(DType dtype, const Extents& shape) {
    const TensorView view(next_, dtype, shape, place_);
    next_ += view.bytes();
    return view;
  }

 private:
  std::byte* next_;
  Place place_;
};

// Describes all messages, since a device does not say which messages have arrived.
std::string describe(const std::vector<Send>& sends, const std::vector<Receive>& receives) {
  const auto list = [](const auto& messages) {
    std::vector<int> peers;
    std::size_t bytes = 0;
    for (const auto& message : messages) {
      peers.push_back(message.peer);
      bytes += message.bytes;
    }
    return std::pair(bytes, fmt::format("{}", fmt::join(peers, ", ")));
  };
  const auto [in, from] = list(receives);
  const auto [out, to] = list(sends);
  return fmt::format(
      "resharding: waiting for {} bytes from ranks [{}], or for ranks [{}] to take {} bytes", in,
      from, to, out);
}

}  // namespace

void reshard(Mesh& mesh, Device& device, Stream& stream, const NamedSharding& from,
             const ConstTensorView& source, const NamedSharding& to,
             const TensorView& destination) {
  const int self = mesh.rank();
  const Place place = device.place();
  const DType dtype = source.dtype();
  const ReshardPlan plan = collectively(mesh.world(), [&] {
    if (!(from.mesh() == mesh.shape())) {
      throw ArgumentError("resharding", to_string(from), "the mesh " + to_string(mesh.shape()));
    }
    check_view("source", source, from, self, place);
    check_view("destination", destination, to, self, place);
    if (destination.dtype() != dtype) {
      throw ArgumentError("destination", std::string(name_of(destination.dtype())),
                          fmt::format("{}, as the source", name_of(dtype)));
    }
    return plan_reshard(from, to, self);
  });
  check_agreed(mesh.world(), place, dtype, from, to);
  Group& group = mesh.group(place);
  stream.synchronize();

  std::size_t outgoing = 0;
  std::size_t incoming = 0;
  const auto bytes_of = [&](const ReshardTransfer& transfer) {
    return static_cast<std::size_t>(transfer.elements()) * size_of(dtype);
  };
  for (const ReshardTransfer& transfer : plan.transfers) {
    if (transfer.source == transfer.destination) continue;
    (transfer.source == self ? outgoing : incoming) += bytes_of(transfer);
  }

  const auto [send_buffer, receive_buffer] = collectively(mesh.world(), [&] {
    MemoryPool& pool = group.exchange_memory(device.memory());
    Buffer sent = pool.allocate(outgoing, "messages of a resharding");
    return std::pair(std::move(sent), pool.allocate(incoming, "messages of a resharding"));
  });
  const GiveUpOnError guard(group);
  Cursor packed(send_buffer.data(), place);
  auto* arriving = static_cast<std::byte*>(receive_buffer.data());
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (const ReshardTransfer& transfer : plan.transfers) {
    if (transfer.source != self) {
      receives.push_back({transfer.source, arriving, bytes_of(transfer)});
      arriving += bytes_of(transfer);
      continue;
    }
    const bool stays = transfer.destination == self;
    if (!stays) sends.push_back({transfer.destination, packed.at(), bytes_of(transfer)});
    for (const ReshardBox& box : transfer.boxes) {
      device.copy(source_window(source, box),
                  stays ? destination_window(destination, box) : packed.take(dtype, box.shape),
                  stream);
    }
  }
  if (group.size() > 1) {
    group.exchange(sends, receives, stream, {.what = "resharding"});
    Waiting waiting;
    waiting.check = [&] { group.check(); };
    // Host streams name the awaited peer themselves.
    if (!place.is_host()) waiting.describe = [&] { return describe(sends, receives); };
    stream.synchronize(waiting);
  }

  Cursor unpacked(receive_buffer.data(), place);
  for (const ReshardTransfer& transfer : plan.transfers) {
    if (transfer.source == self) continue;
    for (const ReshardBox& box : transfer.boxes) {
      device.copy(unpacked.take(dtype, box.shape), destination_window(destination, box), stream);
    }
  }
  stream.synchronize();
}

}  // namespace annulus
