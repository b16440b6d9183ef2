#include "launcher/pictures/svg.hpp"

#include <iterator>

#include <fmt/format.h>

namespace annulus::launcher {
namespace {

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

// A hundredth of a pixel is enough; whole numbers need no fraction.
std::string length(double value) {
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

}  // namespace

void Svg::rectangle(double x, double y, double width, double height, std::string_view look) {
  body_ += fmt::format("<rect class=\"{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>\n", look,
                       length(x), length(y), length(width), length(height));
}

void Svg::Rectangles::add(double x, double y, double width, double height) {
  fmt::format_to(std::back_inserter(path_), "M{} {}h{}v{}h-{}z", length(x), length(y),
                 length(width), length(height), length(width));
}

void Svg::rectangles(const Rectangles& rectangles, std::string_view look) {
  if (rectangles.path().empty()) return;
  body_ += fmt::format("<path class=\"{}\" d=\"{}\"/>\n", look, rectangles.path());
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view look) {
  body_ += fmt::format("<line class=\"{}\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>\n", look,
                       length(x1), length(y1), length(x2), length(y2));
}

void Svg::polyline(std::string_view points, std::string_view look) {
  body_ += fmt::format("<polyline class=\"{}\" points=\"{}\"/>\n", look, points);
}

void Svg::circle(double x, double y, double radius, std::string_view look) {
  body_ += fmt::format("<circle class=\"{}\" cx=\"{}\" cy=\"{}\" r=\"{}\"/>\n", look, length(x),
                       length(y), length(radius));
}

void Svg::text(double x, double y, std::string_view text, std::string_view anchor,
               std::string_view look) {
  body_ += fmt::format("<text class=\"{}\" x=\"{}\" y=\"{}\" text-anchor=\"{}\">{}</text>\n", look,
                       length(x), length(y), anchor, escaped(text));
}

void Svg::upwards(double x, double y, std::string_view text) {
  body_ += fmt::format(
      "<text class=\"label\" transform=\"translate({} {}) rotate(-90)\" "
      "text-anchor=\"middle\">{}</text>\n",
      length(x), length(y), escaped(text));
}

std::string Svg::document(std::string_view title, std::string_view style) const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\">\n<title>{2}</title>\n<style>\n{3}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{4}</svg>\n",
      length(width_), length(height_), escaped(title), style, body_);
}

}  // namespace annulus::launcher
