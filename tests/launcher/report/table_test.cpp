#include "launcher/report/table.hpp"

#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace annulus::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string table(const std::vector<Column>& columns, const std::vector<Row>& rows,
                  TableStyle style = {}) {
  const TableLayout layout(columns, rows, style);
  std::ostringstream out;
  layout.write_header(out);
  for (const Row& row : rows) layout.write_row(out, row);
  return out.str();
}

std::size_t widest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t width = 0;
  for (std::string line; std::getline(lines, line);) width = std::max(width, line.size());
  return width;
}

TEST(Table, ColumnsAreWideEnoughForNamesUnitsAndCells) {
  EXPECT_EQ(table({{"a long name", "", 1}, {"x", "a long unit", 1}, {"y", "µs", 0}},
                  {{"1", "2", "µµµµµ"}}),
            "#\n"
            "# a long name             x     y\n"
            "#             (a long unit)  (µs)\n"
            "            1             2 µµµµµ\n");
}

TEST(Table, LongTimesAreShownInSeconds) {
  EXPECT_EQ(table({{"time", "ms, median"}, {"wait", "ms"}}, {{"12345.678", "9999"}, {"-", "1"}}),
            "#\n"
            "#        time wait\n"
            "# (s, median) (ms)\n"
            "       12.346 9999\n"
            "            -    1\n");
}

// Rates of one column have one unit, so that they can be compared at sight.
TEST(Table, RatesScaleTogether) {
  const std::vector<Column> columns{
      {"rate", "GFLOP/s/rank"}, {"local", "GFLOP/s/rank"}, {"work", "GFLOP"}};
  const std::string large = table(columns, {{"588123.45", "999.00", "9999.000"}});
  EXPECT_THAT(large, HasSubstr("(TFLOP/s/rank) (TFLOP/s/rank)  (GFLOP)"));
  EXPECT_THAT(large, HasSubstr("        588.12           1.00 9999.000"));
  EXPECT_THAT(table(columns, {{"999.99", "12.00", "1"}}), HasSubstr("(GFLOP/s/rank)"));
}

TEST(Table, MemoryScales) {
  EXPECT_EQ(table({{"memory", "MiB/rank"}}, {{"20480.0"}}),
            "#\n#     memory\n# (GiB/rank)\n       20.00\n");
}

TEST(Table, SizesAreShortened) {
  EXPECT_THAT(table({{"shape", "B,T,S,N,K,D,Dv"}}, {{"1,131072,3145728,64,8,128,1000"}}),
              HasSubstr(" 1,128k,3M,64,8,128,1000\n"));
}

TEST(Table, ColumnsLeaveUntilItFits) {
  const std::string wide(40, 'x');
  const std::vector<Column> columns{{"stays", "", 30},
                                    {"second", "", 30, 2},
                                    {"first", "", 30, 3},
                                    {"third", "", 30, 1},
                                    {"also first", "", 30, 3}};
  const std::vector<Row> rows{{"1", "2", "3", "4", wide}};
  const std::string narrow = table(columns, rows);
  EXPECT_LE(widest_line(narrow), static_cast<std::size_t>(TableStyle::kWidth));
  EXPECT_THAT(narrow, HasSubstr("# only with --wide: first, also first\n"));
  EXPECT_THAT(narrow, HasSubstr(" second "));
  EXPECT_THAT(narrow, Not(HasSubstr(wide)));
  const std::string all = table(columns, rows, {.wide = true});
  EXPECT_THAT(all, HasSubstr(wide));
  EXPECT_THAT(all, Not(HasSubstr("--wide")));
}

TEST(Table, WhatMustStayStays) {
  const std::string wide(200, 'x');
  EXPECT_THAT(table({{"a", "", 0}, {"b", "", 0, 1}}, {{wide, "2"}}), HasSubstr(wide));
}

TEST(Table, TheLegendExplainsTheColumnsThatAreShown) {
  const std::vector<Column> columns{{"time", "ms", 0, 0, "of a call"},
                                    {"index", "", 0},
                                    {"hidden", "", 130, 1, "of no interest"}};
  const std::vector<Row> rows{{"1", "2", "3"}};
  EXPECT_THAT(table(columns, rows), Not(HasSubstr("of a call")));
  const std::string explained = table(columns, rows, {.legend = true});
  EXPECT_THAT(explained, HasSubstr("# time: of a call\n"));
  EXPECT_THAT(explained, Not(HasSubstr("of no interest")));
  EXPECT_THAT(explained, Not(HasSubstr("# index: ")));
  EXPECT_THAT(table(columns, rows, {.wide = true, .legend = true}), HasSubstr("of no interest"));
}

}  // namespace
}  // namespace annulus::launcher
