#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/core/watchdog.hpp>

namespace annulus {

/// Coordination of ranks: barriers, short texts and numbers, agreement on errors (agreement.hpp)
/// and the end of the job. Calls block and are collective over all ranks, which make them in the
/// same order. A rank exchanges O(log P) messages per call with O(log P) others; all ranks together
/// send O(P) messages.
///
/// Throws TimeoutError, naming the missing rank and what it should give, if a rank does not arrive
/// within the watchdog's timeout; InternalError if a rank makes another call; LibraryError if the
/// transport fails. After any of these errors, only abort() is defined.
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
  void barrier(std::string_view what = "barrier");
  /// Adds the text of later ranks to that of earlier ranks; must be associative. May throw
  /// InternalError, which all ranks then throw.
  using Merge = std::function<void(std::string& whole, const std::string& later)>;
  /// The texts of all ranks, merged in order of rank, on every rank. It is cheap if merged texts
  /// stay short.
  [[nodiscard]] std::string merge_text(std::string text, const Merge& merge, std::string_view what);
  /// The text of rank 0, on every rank; other ranks' texts are ignored.
  [[nodiscard]] std::string broadcast(std::string text, std::string_view what);
  /// The first text, in order of rank, that is not empty, on every rank; empty if all are.
  [[nodiscard]] std::string first_text(std::string text, std::string_view what);
  /// The different texts of all ranks, on every rank.
  [[nodiscard]] std::set<std::string> distinct_texts(const std::string& text,
                                                     std::string_view what);
  /// The first difference in a text that must be the same on all ranks.
  struct Difference {
    int rank;              ///< the first whose text differs from rank 0's
    std::string text;      ///< its text
    std::string expected;  ///< rank 0's
  };
  /// Compares hashes, and sends texts only if hashes differ.
  [[nodiscard]] std::optional<Difference> first_difference(const std::string& text,
                                                           std::string_view what);
  /// Every rank's text, in order of rank, on every rank. O(P) bytes per rank, except that equal
  /// texts of neighbours are sent once. Prefer one of the calls above.
  [[nodiscard]] std::vector<std::string> gather_text(const std::string& text,
                                                     std::string_view what = "gather_text");
  /// Every rank's text, on rank 0 only. The result is empty on the other ranks, which do not wait
  /// for rank 0.
  [[nodiscard]] std::vector<std::string> collect_text(const std::string& text,
                                                      std::string_view what);
  /// Elementwise sum or maximum of a few numbers over the ranks. The order of operations depends
  /// only on the number of ranks, so every rank gets the same bits every time. A NaN makes the
  /// maximum NaN. Throws InternalError if the ranks pass different counts.
  [[nodiscard]] std::vector<double> sum(std::span<const double> values,
                                        std::string_view what = "sum");
  [[nodiscard]] std::vector<double> max(std::span<const double> values,
                                        std::string_view what = "max");
  /// Sends heartbeats to ranks that wait for this one: see Watchdog::computing().
  [[nodiscard]] virtual Computing computing(double timeouts) const = 0;
  [[nodiscard]] Computing computing() const {
    return computing(std::numeric_limits<double>::infinity());
  }
  /// Ends the job on every rank with `exit_code`. Does not return.
  [[noreturn]] virtual void abort(int exit_code) noexcept = 0;

 protected:
  /// For error messages: a purpose, and what every rank should do for it ("give 8 B").
  struct Call {
    std::string_view what;
    std::string deed;
  };
  enum class Result { on_all, on_first };
  /// Every rank's part, merged in order of rank, on every rank or on rank 0; empty elsewhere.
  [[nodiscard]] virtual std::string combine(const Call& call, std::string part, const Merge& merge,
                                            Result where) = 0;

 private:
  [[nodiscard]] std::vector<std::string> gather(const std::string& text, std::string_view what,
                                                Result where);
  [[nodiscard]] std::vector<double> reduce(std::span<const double> values, std::string_view what,
                                           const std::function<double(double, double)>& combine);
};

}  // namespace annulus
