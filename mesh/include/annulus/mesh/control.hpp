#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

/// How ranks come to terms: they meet, tell each other short texts and numbers, agree on errors
/// (agreement.hpp) and end together. Calls block and are collective over all the ranks, which make
/// them in the same order. The messages of a call grow with the logarithm of the number of ranks.
///
/// Errors: a rank that is missing longer than the watchdog's timeout makes the call throw
/// TimeoutError naming it; a transport that fails throws LibraryError. After either, only abort()
/// is defined.
class Control {
 public:
  virtual ~Control() = default;
  Control() = default;
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// What rank `rank` of these is in the mesh. Errors speak of ranks of the mesh.
  [[nodiscard]] virtual int mesh_rank(int rank) const = 0;

  /// Returns once all ranks have come here. A timeout calls it `what`.
  virtual void barrier(std::string_view what) = 0;
  void barrier() { barrier("barrier"); }
  /// Every rank's text, in order of rank, on every rank.
  [[nodiscard]] virtual std::vector<std::string> gather_text(const std::string& text) = 0;
  /// The same on rank 0 only: empty elsewhere. Other ranks do not wait for it.
  [[nodiscard]] virtual std::vector<std::string> collect_text(const std::string& text) = 0;
  /// Elementwise sum or maximum of a few numbers over the ranks, in an order that depends on their
  /// number alone: the same bits on every rank and every time. A NaN anywhere makes the maximum
  /// NaN. All ranks give equally many numbers; else InternalError.
  [[nodiscard]] virtual std::vector<double> sum(std::span<const double> values) = 0;
  [[nodiscard]] virtual std::vector<double> max(std::span<const double> values) = 0;
  /// Ends the job on every rank with `exit_code`. Does not return.
  [[noreturn]] virtual void abort(int exit_code) noexcept = 0;
};

}  // namespace annulus
