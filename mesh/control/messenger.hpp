#pragma once

#include <span>
#include <string>
#include <string_view>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Texts from rank to rank of a group, for control calls. Between two ranks they arrive in order.
class Messenger {
 public:
  virtual ~Messenger() = default;
  Messenger() = default;
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual int mesh_rank(int rank) const = 0;
  /// "rank 1", for messages.
  [[nodiscard]] virtual std::string name_of(int rank) const = 0;

  /// For error messages: a purpose, and what the peer, or every rank, should do for it ("give 8
  /// B").
  struct Call {
    std::string_view what;
    std::string deed;
    bool by_all = true;
  };
  /// Sends a text to some ranks. Throws TimeoutError when one does not take it.
  virtual void send(std::string_view what, std::span<const int> to, const std::string& text) = 0;
  /// Throws TimeoutError, which names the missing rank and the call.
  [[nodiscard]] virtual std::string receive(const Call& call, int from) = 0;

  /// See Control::computing().
  [[nodiscard]] virtual Computing computing(double timeouts) const = 0;
  [[noreturn]] virtual void abort(int exit_code) noexcept = 0;
};

}  // namespace annulus
