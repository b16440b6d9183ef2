#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/device.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/shard_map_call.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {
namespace {

// Work on arrays has a stream of its own, which takes turns with the caller's.
class ArrayStreams {
 public:
  // Our stream begins after the caller's present work. `call` is for messages.
  ArrayStreams(Context& context, void* stream, const char* call) {
    const Place place = context.place();
    if (!place.is_host()) {
      caller_ = make_foreign_cuda_stream(stream, place.device);
      // The host waits for these calls' work, which a capture would never execute. Refused before
      // anything else is made: making it could spoil the capture.
      if (caller_->is_captured()) {
        throw UnsupportedError(
            fmt::format("{} cannot be captured into a CUDA graph: the host waits for it", call));
      }
    }
    ours_ = context.device().make_stream("arrays", context.mesh().watchdog(), nullptr);
    after_caller();
  }

  [[nodiscard]] Stream& ours() const { return *ours_; }
  void after_caller() const {
    if (caller_) caller_->precede(*ours_);
  }
  void before_caller() const {
    if (caller_) caller_->follow(*ours_);
  }

 private:
  std::unique_ptr<Stream> ours_;
  std::unique_ptr<ForeignStream> caller_;  // null on the CPU
};

// Setting up fails on one rank alone, such as one whose stream is captured, so ranks agree on it.
ArrayStreams make_streams(Context& context, void* stream, const char* call) {
  return collectively(context.mesh().world(), call,
                      [&] { return ArrayStreams(context, stream, call); });
}

// Our stream follows what the body has submitted to the caller's, also if the body throws, so that
// the wait for our stream after the body is a wait for that too.
std::vector<Tensor> run_in_order(const ShardBody& body, std::span<const ConstTensorView> shards,
                                 const ArrayStreams& streams) {
  streams.before_caller();
  std::vector<Tensor> results;
  try {
    results = body(shards);
  } catch (...) {
    try {
      streams.after_caller();
    } catch (...) {
      // The body's own error says more.
    }
    throw;
  }
  streams.after_caller();
  return results;
}

}  // namespace

std::vector<ShardedTensor> shard_map(Context& context, const ShardMap& map,
                                     const ShardedArguments& arguments, void* stream) {
  const auto call = context.calls().begin("shard_map");
  const ArrayStreams streams = make_streams(context, stream, "shard_map");
  ShardMap ordered = map;
  ordered.body = [&](std::span<const ConstTensorView> shards) {
    return run_in_order(map.body, shards, streams);
  };
  auto results = shard_map(context.mesh(), context.device(), streams.ours(), ordered, arguments);
  streams.before_caller();
  return results;
}

void reshard(Context& context, const NamedSharding& from, const ConstTensorView& source,
             const NamedSharding& to, const TensorView& destination, void* stream) {
  const auto call = context.calls().begin("reshard");
  const ArrayStreams streams = make_streams(context, stream, "reshard");
  reshard(context.mesh(), context.device(), streams.ours(), from, source, to, destination);
}

}  // namespace annulus
