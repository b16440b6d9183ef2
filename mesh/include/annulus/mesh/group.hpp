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
#include <annulus/mesh/transport_traits.hpp>

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

/// The purpose of an exchange, for traces and for the messages of timeouts.
struct ExchangeLabel {
  std::string what = "data";  ///< "key/value"
  int step = -1;              ///< step of the plan; −1 outside a plan
};

/// An exchange whose messages and buffers are known in advance, and that can be posted any number
/// of times: as a whole, or by offer(), take() and reclaim(), in this order, with other work
/// between. All calls are ordered by the stream; none allocates or blocks. Errors are as for
/// Group::exchange.
class PreparedExchange {
 public:
  virtual ~PreparedExchange() = default;
  PreparedExchange() = default;
  PreparedExchange(const PreparedExchange&) = delete;
  PreparedExchange& operator=(const PreparedExchange&) = delete;
  /// Does what Group::exchange does. Its parts may leave work that Stream::flush() hands over.
  void post(Stream& stream) {
    offer(stream);
    take(stream);
    reclaim(stream);
    stream.flush();
  }
  /// Declares the data ready to send: from now on, peers of a one-sided transport may fetch it.
  virtual void offer(Stream& /*stream*/) {}
  /// Receives, after the peers have offered; also sends if the transport is two-sided. Two ranks
  /// must take their common exchanges in the same order.
  virtual void take(Stream& stream) = 0;
  /// After this, the buffers of the sends may be reused.
  virtual void reclaim(Stream& /*stream*/) {}
};

/// Ranks that exchange data, along one mesh axis or a tuple of axes. control() coordinates them.
///
/// Exchanges are ordered by their stream and return at once. Buffers lie at place(), and must not
/// be touched until an event recorded after the call is complete. Every send needs a matching
/// receive; between two ranks, messages match in order of posting within one stream. A message to
/// oneself is received in the same exchange.
///
/// Errors: a wait beyond the watchdog's timeout throws TimeoutError, which names step, peer (by its
/// mesh rank) and bytes. A transport that fails, or a message of unexpected length, throws
/// LibraryError. After these errors, only control().abort() is defined. A peer outside the group,
/// or a message to oneself without its counterpart, throws InternalError at once.
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
  /// The mesh rank of rank `rank` of the group.
  [[nodiscard]] int mesh_rank(int rank) const { return control_->mesh_rank(rank); }
  [[nodiscard]] virtual Place place() const noexcept = 0;
  [[nodiscard]] virtual const TransportTraits& traits() const noexcept = 0;
  /// "self", "mpi".
  [[nodiscard]] std::string transport() const { return std::string(traits().name); }

  /// All sends and receives as one step. They may proceed concurrently and in any order.
  virtual void exchange(std::span<const Send> sends, std::span<const Receive> receives,
                        Stream& stream, ExchangeLabel label) = 0;
  /// Prepares an exchange. Collective over its ranks; may block until they have made the matching
  /// calls. Buffers from exchange_memory() are the fastest, and for some transports the only
  /// possible ones. The group must outlive the result.
  [[nodiscard]] virtual std::unique_ptr<PreparedExchange> prepare(std::vector<Send> sends,
                                                                  std::vector<Receive> receives,
                                                                  ExchangeLabel label);
  /// The pool for exchange buffers: the group's own if the transport must know its buffers, else
  /// `ordinary`.
  [[nodiscard]] virtual MemoryPool& exchange_memory(MemoryPool& ordinary) { return ordinary; }
  /// Throws LibraryError if the transport has noticed a failure. Never blocks. For threads that
  /// wait for posted work.
  virtual void check() {}
  /// Abandons posted work. Releases device work that waits for peers, which would otherwise block
  /// every call that frees memory. Recordings of the work must be destroyed first. Afterwards, data
  /// in flight is undefined on this rank and its peers, and only control().abort() may be called.
  virtual void give_up() noexcept {}

 protected:
  explicit Group(std::shared_ptr<Control> control) : control_(std::move(control)) {}

 private:
  std::shared_ptr<Control> control_;
};

/// A group of one rank, rank `mesh_rank` of its mesh, for host memory.
[[nodiscard]] std::unique_ptr<Group> make_self_group(int mesh_rank = 0);

}  // namespace annulus
