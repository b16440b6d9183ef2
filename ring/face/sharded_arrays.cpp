#include <memory>
#include <span>
#include <vector>

#include <annulus/core/device.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/reshard.hpp>
#include <annulus/partition/shard_map_call.hpp>
#include <annulus/ring/context.hpp>

namespace annulus {
namespace {

// Work on arrays has a stream of its own, which takes turns with the caller's.
struct ArrayStreams {
  ArrayStreams(Context& context, void* stream)
      : ours(context.device().make_stream("arrays", context.mesh().watchdog(), nullptr)) {
    const Place place = context.place();
    if (!place.is_host()) caller = make_foreign_cuda_stream(stream, place.device);
  }
  void after_caller() const {
    if (caller) caller->precede(*ours);
  }
  void before_caller() const {
    if (caller) caller->follow(*ours);
  }

  std::unique_ptr<Stream> ours;
  std::unique_ptr<ForeignStream> caller;  // null on the CPU
};

}  // namespace

std::vector<ShardedTensor> shard_map(Context& context, const ShardMap& map,
                                     const ShardedArguments& arguments, void* stream) {
  const auto call = context.calls().begin("shard_map");
  const ArrayStreams streams(context, stream);
  ShardMap ordered = map;
  ordered.body = [&](std::span<const ConstTensorView> shards) {
    streams.before_caller();
    std::vector<Tensor> results = map.body(shards);
    streams.after_caller();
    return results;
  };
  streams.after_caller();
  auto results = shard_map(context.mesh(), context.device(), *streams.ours, ordered, arguments);
  streams.before_caller();
  return results;
}

void reshard(Context& context, const NamedSharding& from, const ConstTensorView& source,
             const NamedSharding& to, const TensorView& destination, void* stream) {
  const auto call = context.calls().begin("reshard");
  const ArrayStreams streams(context, stream);
  streams.after_caller();
  reshard(context.mesh(), context.device(), *streams.ours, from, source, to, destination);
}

}  // namespace annulus
