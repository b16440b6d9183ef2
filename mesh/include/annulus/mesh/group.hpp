#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <annulus/core/memory.hpp>
#include <annulus/core/place.hpp>
#include <annulus/core/stream.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {

/// One outgoing message of an exchange.
struct Send {
  int peer = 0;  ///< rank in the group
  const void* data = nullptr;
  std::size_t bytes = 0;
};

/// One incoming message of an exchange.
struct Receive {
  int peer = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// What an exchange is for: shown by traces and by timeouts.
struct ExchangeLabel {
  std::string what = "data";  ///< "key/value"
  int step = -1;              ///< step of the plan; −1 outside a plan
};

/// An exchange whose messages and buffers are known beforehand, to be posted over and over: as a
/// whole, or in three parts, in this order, with other work between them. All are ordered by the
/// stream, take no memory and wait for nothing; errors are those of Group::exchange.
class PreparedExchange {
 public:
  virtual ~PreparedExchange() = default;
  PreparedExchange() = default;
  PreparedExchange(const PreparedExchange&) = delete;
  PreparedExchange& operator=(const PreparedExchange&) = delete;
  /// As Group::exchange.
  void post(Stream& stream) {
    offer(stream);
    take(stream);
    reclaim(stream);
  }
  /// The data to be sent are in place: peers that take by themselves may do so from now on.
  virtual void offer(Stream& /*stream*/) {}
  /// Receives, once the peers have offered; sends, where the transport needs both sides. Between
  /// two ranks, exchanges are taken in the same order.
  virtual void take(Stream& stream) = 0;
  /// After this the buffers of the sends are free again.
  virtual void reclaim(Stream& /*stream*/) {}
};

/// Ranks that exchange data: those along one mesh axis, or along a tuple of axes. To meet and agree
/// they have their control().
///
/// Exchanges are ordered by their stream: they return at once, and the buffers belong to the call
/// until an event recorded after it is complete. They are collective over the ranks that they name:
/// every send needs the matching receive, and between two ranks messages match in order of posting,
/// within one stream. A message to oneself must be received within the same exchange. Buffers must
/// lie where the group works (see place()).
///
/// Errors: waiting longer than the watchdog's timeout throws TimeoutError naming step, peer (its
/// rank in the mesh) and bytes; a transport that fails, or a message whose length is not the one
/// expected, throws LibraryError. After either, only control().abort() is defined. A peer that the
/// group lacks, or a message to oneself without its counterpart, throws InternalError at once.
class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] Control& control() noexcept { return *control_; }
  /// For another group of the same ranks.
  [[nodiscard]] const std::shared_ptr<Control>& shared_control() const noexcept { return control_; }
  [[nodiscard]] int rank() const noexcept { return control_->rank(); }
  [[nodiscard]] int size() const noexcept { return control_->size(); }
  /// What rank `rank` of the group is in the mesh.
  [[nodiscard]] int mesh_rank(int rank) const { return control_->mesh_rank(rank); }
  [[nodiscard]] virtual Place place() const noexcept = 0;
  [[nodiscard]] virtual const TransportTraits& traits() const noexcept = 0;
  /// "self", "mpi".
  [[nodiscard]] std::string transport() const { return std::string(traits().name); }
  [[nodiscard]] bool is_one_sided() const noexcept { return traits().one_sided; }

  /// All sends and receives as one step: they may proceed at once in any order.
  virtual void exchange(std::span<const Send> sends, std::span<const Receive> receives,
                        Stream& stream, ExchangeLabel label) = 0;
  /// Makes an exchange ready. Collective over the ranks that it names, like the exchange itself,
  /// and may block until they have made the matching calls. Buffers that come from
  /// exchange_memory() are the ones that travel fastest, or at all. The group must outlive the
  /// result.
  [[nodiscard]] virtual std::unique_ptr<PreparedExchange> prepare(std::vector<Send> sends,
                                                                  std::vector<Receive> receives,
                                                                  ExchangeLabel label);
  /// Where to take memory for the buffers of exchanges from: a pool of the group's own if the
  /// transport must know its buffers, else `ordinary`.
  [[nodiscard]] virtual MemoryPool& exchange_memory(MemoryPool& ordinary) { return ordinary; }
  /// Throws LibraryError if the transport has noticed a failure since; never blocks. For whoever
  /// waits for work that was posted here.
  virtual void check() {}
  /// For a rank that gives up on work that was posted here: lets go of what waits for peers on a
  /// device, which would otherwise block whoever frees memory. Recordings of it must be gone
  /// before. What is under way may end with anything, here and on peers to which it is passed on.
  /// Only control().abort() is defined afterwards.
  virtual void give_up() noexcept {}

 protected:
  explicit Group(std::shared_ptr<Control> control) : control_(std::move(control)) {}

 private:
  std::shared_ptr<Control> control_;
};

/// A group of one rank on the host: rank `mesh_rank` of its mesh.
[[nodiscard]] std::unique_ptr<Group> make_self_group(int mesh_rank = 0);

}  // namespace annulus
