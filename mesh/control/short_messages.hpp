#pragma once

#include <string>

namespace annulus {

/// Short messages that nobody waits for, between the ranks of a communicator.
class ShortMessages {
 public:
  virtual ~ShortMessages() = default;
  ShortMessages() = default;
  ShortMessages(const ShortMessages&) = delete;
  ShortMessages& operator=(const ShortMessages&) = delete;

  enum class Kind { question, answer };
  virtual void post(int to, Kind kind, const std::string& text) = 0;
  /// Takes one that has come, if any, and says from whom. Neither call blocks.
  [[nodiscard]] virtual bool take(Kind kind, int& from, std::string& text) = 0;
  /// Seconds, and a while in which messages may come.
  [[nodiscard]] virtual double now() const = 0;
  virtual void pause() = 0;
};

}  // namespace annulus
