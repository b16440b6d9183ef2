#pragma once

#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Coordination of ranks: barriers, short texts and numbers, agreement on errors (agreement.hpp)
/// and the end of the job. Calls block and are collective over all ranks, which make them in the
/// same order. A rank sends and receives O(log P) messages per call.
///
/// Errors: throws TimeoutError, naming the missing rank and what it should give, if it does not
/// arrive within the watchdog's timeout, InternalError if a rank makes another call, and
/// LibraryError if the transport fails. After any of them, only abort() is defined.
class Control {
 public:
  virtual ~Control() = default;
  Control() = default;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// The mesh rank of rank `rank`. Error messages name mesh ranks.
  [[nodiscard]] virtual int mesh_rank(int rank) const = 0;

  /// Returns when all ranks have arrived. `what`, here and below, is the purpose of the call:
  /// errors name it, and calls for different purposes are different calls.
  virtual void barrier(std::string_view what) = 0;
  void barrier() { barrier("barrier"); }
  /// Every rank's text, in order of rank, on every rank.
  [[nodiscard]] virtual std::vector<std::string> gather_text(const std::string& text,
                                                             std::string_view what) = 0;
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text) {
    return gather_text(text, "gather_text");
  }
  /// The same on rank 0 only; empty on the others, which do not wait for it.
  [[nodiscard]] virtual std::vector<std::string> collect_text(const std::string& text,
                                                              std::string_view what) = 0;
  /// Elementwise sum or maximum of a few numbers over the ranks. The order of operations depends
  /// only on the number of ranks, so every rank gets the same bits every time. A NaN makes the
  /// maximum NaN. Throws InternalError if the ranks pass different counts.
  [[nodiscard]] virtual std::vector<double> sum(std::span<const double> values,
                                                std::string_view what) = 0;
  [[nodiscard]] virtual std::vector<double> max(std::span<const double> values,
                                                std::string_view what) = 0;
  [[nodiscard]] std::vector<double> sum(std::span<const double> values) {
    return sum(values, "sum");
  }
  [[nodiscard]] std::vector<double> max(std::span<const double> values) {
    return max(values, "max");
  }
  /// Gives signs of life to the ranks that wait for this one: see Watchdog::computing().
  [[nodiscard]] virtual Computing computing(double timeouts) const = 0;
  [[nodiscard]] Computing computing() const {
    return computing(std::numeric_limits<double>::infinity());
  }
  /// Ends the job on every rank with `exit_code`. Does not return.
  [[noreturn]] virtual void abort(int exit_code) noexcept = 0;
};

}  // namespace annulus
