#include "launcher/report/report.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

Report sample() {
  Report report("bench", {{"shape", "", 4}, {"time", "ms", 6}, {"error", "", 8}});
  report.add_meta("mesh", "sp=4");
  report.add_row({"1,16", "0.250", "-"});
  report.add_row({"1,1048576", "12", "1.50e-07"});
  return report;
}

TEST(Report, TableHasMetaTwoHeaderRowsRowsAndVerdict) {
  Report report = sample();
  report.set_verdict("OK (2 of 2 within bounds)", true);
  std::ostringstream out;
  report.write_table(out);
  EXPECT_EQ(out.str(),
            "# mesh: sp=4\n"
            "#\n"
            "#     shape   time    error\n"
            "#             (ms)         \n"
            "       1,16  0.250        -\n"
            "  1,1048576     12 1.50e-07\n"
            "# Verdict: OK (2 of 2 within bounds)\n");
}

TEST(Report, ColumnsAreWideEnoughForNamesUnitsAndCells) {
  Report report("bench", {{"a long name", "", 1}, {"x", "a long unit", 1}, {"y", "µs", 0}});
  report.add_row({"1", "2", "µµµµµ"});
  std::ostringstream out;
  report.write_table(out);
  EXPECT_EQ(out.str(),
            "#\n"
            "# a long name             x     y\n"
            "#             (a long unit)  (µs)\n"
            "            1             2 µµµµµ\n");
}

TEST(Report, LongTimesAreShownInSeconds) {
  Report report("bench", {{"time", "ms, median", 1}, {"wait", "ms", 1}});
  report.add_row({"12345.678", "9999"});
  report.add_row({"-", "1"});
  std::ostringstream out;
  report.write_table(out);
  EXPECT_EQ(out.str(),
            "#\n"
            "#        time wait\n"
            "# (s, median) (ms)\n"
            "       12.346 9999\n"
            "            -    1\n");
  EXPECT_EQ(report.to_json()["rows"][0]["time"], 12345.678);
}

TEST(Report, CountedNounsAgree) {
  EXPECT_EQ(counted(1, "node"), "1 node");
  EXPECT_EQ(counted(0, "node"), "0 nodes");
  EXPECT_EQ(counted(2, "node"), "2 nodes");
}

TEST(Report, FollowingPrintsLineByLine) {
  Report report("verify", {{"index", "", 5}});
  report.add_meta("ranks", "2");
  std::ostringstream out;
  report.follow(out);
  EXPECT_EQ(out.str(), "# ranks: 2\n#\n# index\n#      \n");
  out.str("");
  report.add_row({"0"});
  EXPECT_EQ(out.str(), "      0\n");
  out.str("");
  report.add_meta("why", "because");
  report.add_meta("why", "because");
  EXPECT_EQ(out.str(), "# why: because\n");
  out.str("");
  report.set_verdict("FAILED", false);
  EXPECT_EQ(out.str(), "# Verdict: FAILED\n");
  EXPECT_FALSE(report.passed());
}

TEST(Report, RefusesARowOfTheWrongLength) {
  Report report = sample();
  EXPECT_THROW(report.add_row({"1"}), InternalError);
}

TEST(Report, JsonHasTypedCells) {
  Report report("verify", {{"text", "", 1}, {"whole", "ms", 1}, {"real", "", 1}});
  report.add_meta("mesh", "sp=4");
  report.add_row({"1,16", "17", "2.5e-07"});
  report.add_row({"-", "nan", "inf"});
  report.set_verdict("FAILED (1 of 2)", false);
  const nlohmann::json expected = {{"schema", "annulus.verify"},
                                   {"version", 1},
                                   {"meta", {{"mesh", "sp=4"}}},
                                   {"columns",
                                    {{{"name", "text"}, {"unit", ""}},
                                     {{"name", "whole"}, {"unit", "ms"}},
                                     {{"name", "real"}, {"unit", ""}}}},
                                   {"rows",
                                    {{{"text", "1,16"}, {"whole", 17}, {"real", 2.5e-07}},
                                     {{"text", nullptr}, {"whole", "nan"}, {"real", "inf"}}}},
                                   {"verdict", {{"passed", false}, {"text", "FAILED (1 of 2)"}}}};
  EXPECT_EQ(report.to_json(), expected);
  EXPECT_TRUE(report.to_json()["rows"][0]["whole"].is_number_integer());
  // What is printed reads back as the same.
  EXPECT_EQ(nlohmann::json::parse(report.to_json().dump()), expected);
}

TEST(Report, CsvNamesItsSchemaInEveryRowAndQuotesWhatNeedsIt) {
  Report report("bench", {{"shape", "", 1}, {"time", "ms", 1}, {"note", "", 1}});
  report.add_row({"1,16", "0.25", "say \"no\""});
  report.add_row({"2", "-", "plain"});
  std::ostringstream out;
  report.write_csv(out);
  EXPECT_EQ(out.str(),
            "schema,shape,time (ms),note\r\n"
            "annulus.bench/1,\"1,16\",0.25,\"say \"\"no\"\"\"\r\n"
            "annulus.bench/1,2,,plain\r\n");
}

class ReportFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("annulus_report_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] std::string content(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  [[nodiscard]] std::ptrdiff_t files() const {
    const std::filesystem::directory_iterator begin(folder_);
    return std::distance(begin, std::filesystem::directory_iterator{});
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(ReportFilesTest, FilesAppearOnlyWhenWritten) {
  std::ostringstream out;
  {
    const ReportFiles abandoned(path("a.json"), path("a.csv"));
    EXPECT_FALSE(std::filesystem::exists(path("a.json")));
  }
  EXPECT_EQ(files(), 0) << "a temporary file was left behind";
  ReportFiles reports(path("a.json"), path("a.csv"));
  EXPECT_FALSE(reports.replace_table());
  reports.write(sample(), out);
  EXPECT_EQ(out.str(), "");
  EXPECT_EQ(nlohmann::json::parse(content("a.json")), sample().to_json());
  std::ostringstream csv;
  sample().write_csv(csv);
  EXPECT_EQ(content("a.csv"), csv.str());
  EXPECT_EQ(files(), 2);
}

TEST_F(ReportFilesTest, DashIsTheOutput) {
  std::ostringstream out;
  ReportFiles reports("-", "");
  EXPECT_TRUE(reports.replace_table());
  reports.write(sample(), out);
  EXPECT_EQ(nlohmann::json::parse(out.str()), sample().to_json());
}

TEST_F(ReportFilesTest, AnImpossibleNameFailsAtOnce) {
  EXPECT_THROW(ReportFiles(path("missing/a.json"), ""), UserError);
  EXPECT_THROW(ReportFiles("", path(".")), UserError);
}

}  // namespace
}  // namespace annulus::launcher
