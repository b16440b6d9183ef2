#pragma once

#include <string>
#include <string_view>

namespace annulus::launcher {

/// A drawing, as SVG text. Lengths are pixels; y grows downwards. Classes and a style sheet define
/// the look.
class Svg {
 public:
  Svg(double width, double height) : width_(width), height_(height) {}

  void rectangle(double x, double y, double width, double height, std::string_view look);
  /// Any number of rectangles of one look, as one element.
  class Rectangles {
   public:
    void add(double x, double y, double width, double height);
    [[nodiscard]] const std::string& path() const noexcept { return path_; }

   private:
    std::string path_;
  };
  void rectangles(const Rectangles& rectangles, std::string_view look);
  void line(double x1, double y1, double x2, double y2, std::string_view look);
  /// "x,y x,y …"
  void polyline(std::string_view points, std::string_view look);
  void circle(double x, double y, double radius, std::string_view look);
  /// `anchor`: start, middle or end, the part of the text that lies at x.
  void text(double x, double y, std::string_view text, std::string_view anchor = "start",
            std::string_view look = "label");
  /// Text rotated to read upwards, with its middle at (x, y).
  void upwards(double x, double y, std::string_view text);

  /// The whole document. `style` is CSS; `title` describes the drawing in words.
  [[nodiscard]] std::string document(std::string_view title, std::string_view style) const;

 private:
  double width_;
  double height_;
  std::string body_;
};

}  // namespace annulus::launcher
