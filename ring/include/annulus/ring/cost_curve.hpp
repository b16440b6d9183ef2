#pragma once

#include <vector>

namespace annulus::ring {

/// A quantity measured at some sizes, and linear between them.
class CostCurve {
 public:
  struct Point {
    double size = 0;
    double value = 0;
    bool operator==(const Point&) const = default;
  };

  /// Throws ArgumentError unless there is a point, sizes are not negative and rise from point to
  /// point, and values are positive and finite. `what` names the curve in the message.
  CostCurve(std::vector<Point> points, const char* what);
  /// The same value at every size.
  static CostCurve constant(double value);
  /// Seconds of a message: `latency` plus its bytes at `bytes_per_second`.
  static CostCurve transfer(double latency, double bytes_per_second);

  /// Below the first point and beyond the last one, the value is theirs.
  [[nodiscard]] double clamped(double size) const noexcept;
  /// Below the first point, the value is the first point's. Past the last point, the value goes on
  /// rising with the slope of the last segment, or with that from the first point to the last,
  /// whichever is steeper. If neither rises, it grows in proportion to the size. Thus noise makes
  /// no size free. A single point holds for every size.
  [[nodiscard]] double extended(double size) const noexcept;
  /// The first segment extended to size 0, but neither below 0 nor above the first value.
  [[nodiscard]] double at_zero() const noexcept;
  /// The same curve, but level where noise makes it fall: each value is the largest up to its size.
  [[nodiscard]] CostCurve rising() const;
  /// The same curve with every value multiplied. Throws ArgumentError as the constructor does.
  [[nodiscard]] CostCurve scaled(double factor) const;
  [[nodiscard]] const std::vector<Point>& points() const noexcept { return points_; }
  bool operator==(const CostCurve&) const = default;

 private:
  std::vector<Point> points_;
};

/// The smallest size from which `b` stays at or below `a` up to the end of the range that both
/// cover; −1 if there is none.
[[nodiscard]] double crossover(const CostCurve& a, const CostCurve& b);

}  // namespace annulus::ring
