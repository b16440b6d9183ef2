#include "launcher/pictures/timeline.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#include <fmt/format.h>

#include "launcher/pictures/axis.hpp"
#include "launcher/pictures/svg.hpp"

namespace annulus::launcher {
namespace {

constexpr double kWidth = 1000;  // of the time
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 58;
constexpr double kBottom = 62;
constexpr double kAllRows = 640;  // their total height, if that leaves rows a sensible height
constexpr double kLeastRow = 3;
constexpr double kMaximumRow = 44;
// The share of a row for computing; the rest is for messages, and for a gap if rows are high.
constexpr double kComputing = 0.6;
constexpr double kLeastLabel = 11;  // pixels between labels of ranks
// Rows with more spans are drawn pixel by pixel.
constexpr std::size_t kMaximumExact = 400;

enum Kind : std::uint8_t { kKernel, kOther, kWait, kTransfer, kKinds };
constexpr std::array<std::string_view, kKinds> kLooks{"kernel", "other", "wait", "transfer"};
constexpr std::array<std::string_view, kKinds> kNames{"kernels", "copies and reductions",
                                                      "waiting for messages", "messages moving"};

constexpr std::string_view kStyle =
    ".kernel{fill:#2b6cb0}.other{fill:#8fb8de}.wait{fill:#f2a33a}.transfer{fill:#4f9d69}"
    ".row{fill:#eef1f4}.grid{stroke:#c9d0d8;stroke-width:1}"
    ".label{font:12px sans-serif;fill:#333}.title{font:bold 14px sans-serif;fill:#111}\n";

Kind kind_of(const TraceSpan& span) {
  switch (span.label.category) {
    case TraceCategory::kernel:
      return kKernel;
    case TraceCategory::wait:
      return kWait;
    case TraceCategory::transfer:
      return kTransfer;
    default:
      return kOther;
  }
}

// The band of a rank's row for some kinds of spans.
class Band {
 public:
  Band(double y, double height, double end) : y_(y), height_(height), end_(end) {}

  void draw(const std::vector<const TraceSpan*>& spans,
            std::array<Svg::Rectangles, kKinds>& shapes) const {
    if (spans.size() <= kMaximumExact) {
      for (const TraceSpan* span : spans) {
        const double begin = x_of(static_cast<double>(span->begin_ns));
        add(shapes[kind_of(*span)], begin, x_of(static_cast<double>(span->end_ns)) - begin);
      }
      return;
    }
    constexpr auto kPixels = static_cast<std::size_t>(kWidth);
    std::vector<std::array<double, kKinds>> pixels(kPixels);
    for (const TraceSpan* span : spans) count(*span, pixels);
    std::size_t begin = 0;
    while (begin < kPixels) {
      const int kind = most_of(pixels[begin]);
      std::size_t end = begin + 1;
      while (end < kPixels && most_of(pixels[end]) == kind) ++end;
      if (kind < kKinds) {
        add(shapes[static_cast<std::size_t>(kind)], kLeft + static_cast<double>(begin),
            static_cast<double>(end - begin));
      }
      begin = end;
    }
  }

 private:
  [[nodiscard]] double x_of(double ns) const { return kLeft + kWidth * ns / end_; }

  void add(Svg::Rectangles& shapes, double x, double width) const {
    if (width > 0) shapes.add(x, y_, width, height_);
  }

  void count(const TraceSpan& span, std::vector<std::array<double, kKinds>>& pixels) const {
    const double begin = kWidth * static_cast<double>(span.begin_ns) / end_;
    const double end = kWidth * static_cast<double>(span.end_ns) / end_;
    for (auto pixel = static_cast<std::size_t>(begin);
         pixel < pixels.size() && static_cast<double>(pixel) < end; ++pixel) {
      const auto left = static_cast<double>(pixel);
      pixels[pixel][kind_of(span)] += std::min(end, left + 1) - std::max(begin, left);
    }
  }

  // kKinds if less than half of the pixel's time was spent on anything.
  static int most_of(const std::array<double, kKinds>& pixel) {
    const auto most = std::max_element(pixel.begin(), pixel.end());
    double all = 0;
    for (const double part : pixel) all += part;
    return all < 0.5 ? kKinds : static_cast<int>(most - pixel.begin());
  }

  double y_;
  double height_;
  double end_;  // ns at the right side
};

void draw_legend(Svg& svg) {
  double x = kLeft;
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    svg.rectangle(x, 34, 12, 12, kLooks[kind]);
    svg.text(x + 17, 44, kNames[kind]);
    x += 40 + 6.6 * static_cast<double>(kNames[kind].size());
  }
}

}  // namespace

std::vector<int> spread_ranks(int ranks, int most) {
  const int count = std::min(ranks, most);
  std::vector<int> chosen;
  for (int i = 0; i < count; ++i) {
    chosen.push_back(count == 1 ? 0
                                : static_cast<int>(std::int64_t{i} * (ranks - 1) / (count - 1)));
  }
  return chosen;
}

std::string timeline_picture(const std::vector<TimelineRow>& rows, const std::string& title,
                             const std::string& note) {
  std::int64_t last = 1;
  for (const TimelineRow& row : rows) {
    for (const TraceSpan& span : *row.spans) last = std::max(last, span.end_ns);
  }
  const auto end = static_cast<double>(last);
  const auto count = static_cast<double>(std::max<std::size_t>(rows.size(), 1));
  const double pitch = std::clamp(kAllRows / count, kLeastRow, kMaximumRow);
  const double gap = pitch >= 8 ? 2 : 0;
  const double bottom = kTop + pitch * count;
  Svg svg(kLeft + kWidth + kRight, bottom + kBottom);
  svg.text(kLeft, 20, title, "start", "title");
  draw_legend(svg);
  svg.rectangle(kLeft, kTop, kWidth, bottom - kTop, "row");

  std::array<Svg::Rectangles, kKinds> shapes;
  double labelled = -kLeastLabel;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double y = kTop + pitch * static_cast<double>(i);
    std::vector<const TraceSpan*> computing;
    std::vector<const TraceSpan*> moving;
    for (const TraceSpan& span : *rows[i].spans) {
      (kind_of(span) == kTransfer ? moving : computing).push_back(&span);
    }
    const double upper = (pitch - gap) * kComputing;
    Band(y, upper, end).draw(computing, shapes);
    Band(y + upper, pitch - gap - upper, end).draw(moving, shapes);
    const double middle = y + pitch / 2;
    if (middle - labelled < kLeastLabel) continue;
    svg.text(kLeft - 6, middle + 4, std::to_string(rows[i].rank), "end");
    labelled = middle;
  }
  for (std::size_t kind = 0; kind < kKinds; ++kind) svg.rectangles(shapes[kind], kLooks[kind]);

  svg.upwards(16, (kTop + bottom) / 2, "rank");
  const TimeUnit unit = time_unit(end * 1e-9);
  for (const double tick : linear_ticks(end * 1e-9 / unit.seconds)) {
    const double x = kLeft + kWidth * tick * unit.seconds / (end * 1e-9);
    svg.line(x, kTop, x, bottom + 4, "grid");
    svg.text(x, bottom + 18, fmt::format("{:g}", tick), "middle");
  }
  svg.text(kLeft + kWidth / 2, bottom + 36, fmt::format("time ({})", unit.name), "middle");
  svg.text(kLeft, bottom + 54, note);
  return svg.document(title, kStyle);
}

}  // namespace annulus::launcher
