#include "launcher/pictures/svg.hpp"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Svg, WritesShapesShort) {
  Svg svg(200, 100.5);
  svg.rectangle(1, 2.25, 3.001, 4, "row");
  Svg::Rectangles many;
  many.add(0, 1, 10, 5);
  many.add(20.5, 1, 1.125, 5);
  svg.rectangles(many, "kernel");
  svg.rectangles(Svg::Rectangles(), "wait");
  svg.line(0, 0, 1, 1, "grid");
  const std::string text = svg.document("A picture", ".row{}");
  EXPECT_THAT(text, HasSubstr("viewBox=\"0 0 200 100.5\""));
  EXPECT_THAT(text, HasSubstr("<rect class=\"row\" x=\"1\" y=\"2.25\" width=\"3\" height=\"4\"/>"));
  EXPECT_THAT(text,
              HasSubstr("<path class=\"kernel\" d=\"M0 1h10v5h-10zM20.5 1h1.12v5h-1.12z\"/>"));
  EXPECT_THAT(text, Not(HasSubstr("wait")));
  EXPECT_THAT(text, HasSubstr("<title>A picture</title>"));
}

TEST(Svg, TextCannotBreakOut) {
  Svg svg(10, 10);
  svg.text(1, 2, "a < b & \"c\" > d", "middle");
  svg.upwards(3, 4, "<rank>");
  const std::string text = svg.document("<&>", "");
  EXPECT_THAT(text, HasSubstr(">a &lt; b &amp; &quot;c&quot; &gt; d</text>"));
  EXPECT_THAT(text, HasSubstr(">&lt;rank&gt;</text>"));
  EXPECT_THAT(text, HasSubstr("<title>&lt;&amp;&gt;</title>"));
}

}  // namespace
}  // namespace annulus::launcher
