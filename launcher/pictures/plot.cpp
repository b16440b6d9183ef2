#include "launcher/pictures/plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "launcher/pictures/axis.hpp"
#include "launcher/pictures/svg.hpp"

namespace annulus::launcher {
namespace {

constexpr double kWidth = 420;  // of a panel's curves
constexpr double kHeight = 300;
constexpr double kLeft = 76;  // of a panel
constexpr double kRight = 24;
constexpr double kTop = 62;
constexpr double kBottom = 86;
constexpr std::size_t kLooks = 4;

constexpr std::string_view kStyle =
    ".c0{stroke:#2b6cb0}.c1{stroke:#d9772b}.c2{stroke:#4f9d69}.c3{stroke:#8a5fb0}"
    ".curve{fill:none;stroke-width:2}.ideal{stroke-width:1.2;stroke-dasharray:5 4}"
    ".dot{fill:#fff;stroke-width:2}.frame{stroke:#333;stroke-width:1}"
    ".grid{stroke:#dfe4e9;stroke-width:1}.label{font:12px sans-serif;fill:#333}"
    ".title{font:bold 14px sans-serif;fill:#111}\n";

// Maps values of an axis to positions from 0 to 1.
class Axis {
 public:
  Axis(double least, double most, bool logarithmic)
      : least_(least), most_(most), logarithmic_(logarithmic) {}

  [[nodiscard]] double place(double value) const {
    if (least_ == most_) return 0.5;
    if (!logarithmic_) return (value - least_) / (most_ - least_);
    return std::log(value / least_) / std::log(most_ / least_);
  }

 private:
  double least_;
  double most_;
  bool logarithmic_;
};

struct Range {
  double least = std::numeric_limits<double>::infinity();
  double most = -std::numeric_limits<double>::infinity();
  void take(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

class PanelDrawing {
 public:
  PanelDrawing(Svg& svg, const Panel& panel, double left)
      : svg_(svg), panel_(panel), left_(left), x_(x_axis(panel)), y_(y_axis(panel)) {}

  void draw() {
    svg_.text(left_ + kWidth / 2, kTop - 12, panel_.title, "middle");
    draw_grid();
    svg_.line(left_, kTop, left_, kTop + kHeight, "frame");
    svg_.line(left_, kTop + kHeight, left_ + kWidth, kTop + kHeight, "frame");
    svg_.text(left_ + kWidth / 2, kTop + kHeight + 38, panel_.x_label, "middle");
    svg_.upwards(left_ - 54, kTop + kHeight / 2, panel_.y_label);
    for (std::size_t i = 0; i < panel_.curves.size(); ++i) draw_curve(panel_.curves[i], i);
  }

 private:
  static Axis x_axis(const Panel& panel) {
    Range range;
    for (const Curve& curve : panel.curves) {
      for (const auto& [x, y] : curve.points) range.take(x);
    }
    return {range.least, range.most, true};
  }

  Axis y_axis(const Panel& panel) {
    for (const Curve& curve : panel.curves) {
      for (const auto& [x, y] : curve.points) values_.take(y);
    }
    if (panel.logarithmic) {
      values_ = {values_.least / 1.3, values_.most * 1.3};
    } else {
      values_ = {0, values_.most > 0 ? values_.most * 1.08 : 1};
    }
    return {values_.least, values_.most, panel.logarithmic};
  }

  [[nodiscard]] double x_of(double value) const { return left_ + kWidth * x_.place(value); }
  [[nodiscard]] double y_of(double value) const { return kTop + kHeight * (1 - y_.place(value)); }

  void draw_grid() {
    const std::vector<double> ticks = panel_.logarithmic
                                          ? logarithmic_ticks(values_.least, values_.most)
                                          : linear_ticks(values_.most);
    for (const double tick : ticks) {
      svg_.line(left_, y_of(tick), left_ + kWidth, y_of(tick), "grid");
      svg_.text(left_ - 7, y_of(tick) + 4, fmt::format("{:g}", tick), "end");
    }
    std::vector<double> shown;
    for (const Curve& curve : panel_.curves) {
      for (const auto& [x, y] : curve.points) shown.push_back(x);
    }
    std::sort(shown.begin(), shown.end());
    shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
    for (const double x : shown) {
      svg_.line(x_of(x), kTop, x_of(x), kTop + kHeight, "grid");
      svg_.text(x_of(x), kTop + kHeight + 18, fmt::format("{:g}", x), "middle");
    }
  }

  void draw_curve(const Curve& curve, std::size_t index) {
    const std::string look = fmt::format("c{}", index % kLooks);
    std::string points;
    for (const auto& [x, y] : curve.points) {
      points += fmt::format("{}{:.1f},{:.1f}", points.empty() ? "" : " ", x_of(x), y_of(y));
    }
    svg_.polyline(points, (curve.ideal ? "curve ideal " : "curve ") + look);
    if (!curve.ideal) {
      for (const auto& [x, y] : curve.points) svg_.circle(x_of(x), y_of(y), 3, "dot " + look);
    }
    const double y = kTop + kHeight + 58;
    const double x =
        left_ + kWidth * static_cast<double>(index) / static_cast<double>(panel_.curves.size());
    svg_.line(x, y - 4, x + 18, y - 4, (curve.ideal ? "curve ideal " : "curve ") + look);
    svg_.text(x + 23, y, curve.name);
  }

  Svg& svg_;
  const Panel& panel_;
  double left_;
  Range values_;
  Axis x_;
  Axis y_;
};

}  // namespace

std::string plot_picture(const std::vector<Panel>& panels, const std::string& title,
                         const std::string& note) {
  const double pitch = kLeft + kWidth + kRight;
  Svg svg(pitch * static_cast<double>(panels.size()), kTop + kHeight + kBottom);
  svg.text(kLeft, 20, title, "start", "title");
  for (std::size_t i = 0; i < panels.size(); ++i) {
    PanelDrawing(svg, panels[i], kLeft + pitch * static_cast<double>(i)).draw();
  }
  svg.text(kLeft, kTop + kHeight + 78, note);
  return svg.document(title, kStyle);
}

}  // namespace annulus::launcher
