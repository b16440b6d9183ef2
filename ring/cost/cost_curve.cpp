#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/cost_curve.hpp>

namespace annulus::ring {
namespace {

using Point = CostCurve::Point;

double on_line(const Point& a, const Point& b, double size) {
  return a.value + (b.value - a.value) * (size - a.size) / (b.size - a.size);
}

}  // namespace

CostCurve::CostCurve(std::vector<Point> points, const char* what) : points_(std::move(points)) {
  if (points_.empty()) throw ArgumentError(what, "no point", "one or more");
  for (std::size_t i = 0; i < points_.size(); ++i) {
    const Point& point = points_[i];
    if (!std::isfinite(point.size) || point.size < 0 ||
        (i > 0 && point.size <= points_[i - 1].size)) {
      throw ArgumentError(what, fmt::format("size {} at point {}", point.size, i),
                          "sizes of 0 or more that rise from point to point");
    }
    if (!std::isfinite(point.value) || point.value <= 0) {
      throw ArgumentError(what, fmt::format("value {} at point {}", point.value, i),
                          "a positive finite number");
    }
  }
}

CostCurve CostCurve::constant(double value) {
  return {{{0, value}}, "constant curve"};
}

CostCurve CostCurve::transfer(double latency, double bytes_per_second) {
  constexpr double kBytes = 1 << 20;
  return {{{0, latency}, {kBytes, latency + kBytes / bytes_per_second}}, "transfer curve"};
}

CostCurve CostCurve::scaled(double factor) const {
  std::vector<Point> points = points_;
  for (Point& point : points) point.value *= factor;
  return {std::move(points), "scaled curve"};
}

double CostCurve::clamped(double size) const noexcept {
  return extended(std::min(size, points_.back().size));
}

double CostCurve::extended(double size) const noexcept {
  if (points_.size() == 1 || size <= points_.front().size) return points_.front().value;
  const auto above = std::upper_bound(points_.begin(), points_.end(), size,
                                      [](double s, const Point& point) { return s < point.size; });
  if (above != points_.end()) return on_line(*(above - 1), *above, size);
  const Point& last = points_.back();
  const double risen =
      std::max(on_line(*(points_.end() - 2), last, size), on_line(points_.front(), last, size));
  return risen > last.value ? risen : last.value * (size / last.size);
}

double CostCurve::at_zero() const noexcept {
  const Point& first = points_.front();
  if (points_.size() == 1) return first.value;
  return std::clamp(on_line(first, points_[1], 0), 0.0, first.value);
}

CostCurve CostCurve::rising() const {
  std::vector<Point> points = points_;
  for (std::size_t i = 1; i < points.size(); ++i) {
    points[i].value = std::max(points[i].value, points[i - 1].value);
  }
  return {std::move(points), "rising curve"};
}

double crossover(const CostCurve& a, const CostCurve& b) {
  const double begin = std::max(a.points().front().size, b.points().front().size);
  const double end = std::min(a.points().back().size, b.points().back().size);
  if (begin > end) return -1;
  // Between neighbouring sizes of the two point lists, both curves are straight.
  std::vector<double> sizes{begin, end};
  for (const CostCurve* curve : {&a, &b}) {
    for (const Point& point : curve->points()) {
      if (point.size > begin && point.size < end) sizes.push_back(point.size);
    }
  }
  std::sort(sizes.begin(), sizes.end());
  const auto lead = [&](double size) { return a.clamped(size) - b.clamped(size); };
  if (lead(end) < 0) return -1;
  for (std::size_t i = sizes.size() - 1; i > 0; --i) {
    const double here = lead(sizes[i]);
    const double before = lead(sizes[i - 1]);
    if (before >= 0) continue;
    return sizes[i] - here / (here - before) * (sizes[i] - sizes[i - 1]);
  }
  return begin;
}

}  // namespace annulus::ring
