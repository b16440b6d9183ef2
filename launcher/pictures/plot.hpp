#pragma once

#include <string>
#include <utility>
#include <vector>

namespace annulus::launcher {

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x, mostly powers of two, and y
  bool ideal = false;                             ///< thin and dashed, for comparison
};

/// One plot of a picture. Its x axis is logarithmic.
struct Panel {
  std::string title;
  std::string x_label;
  std::string y_label;
  bool logarithmic = false;  ///< the y axis, of positive values; else it begins at 0
  std::vector<Curve> curves;
};

/// Panels beside each other, as SVG. `title` goes above, `note` below.
[[nodiscard]] std::string plot_picture(const std::vector<Panel>& panels, const std::string& title,
                                       const std::string& note);

}  // namespace annulus::launcher
