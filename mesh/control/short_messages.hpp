#pragma once

#include <string>

namespace annulus {

/// Short messages between the ranks of a communicator, without waiting.
class ShortMessages {
 public:
  virtual ~ShortMessages() = default;
  ShortMessages() = default;
  ShortMessages(const ShortMessages&) = delete;
  ShortMessages& operator=(const ShortMessages&) = delete;

  enum class Kind { question, answer };
  virtual void post(int to, Kind kind, const std::string& text) = 0;
  /// Takes a message that has arrived, if any, and its sender. Neither call blocks.
  [[nodiscard]] virtual bool take(Kind kind, int& from, std::string& text) = 0;
  /// The time in seconds; some time passes, in which messages may arrive.
  [[nodiscard]] virtual double now() const = 0;
  virtual void pause() = 0;
};

}  // namespace annulus
