#include "launcher/report/report.hpp"

#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

namespace annulus::launcher {
namespace {

const Record kRecord{{"commit", "1234567"}, {"ranks", 4}};

Report sample() {
  Report report("bench", {}, {{"shape", "", 4}, {"time", "ms", 6}, {"error", "", 8}}, {});
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

TEST(Report, CountedNounsAgree) {
  EXPECT_EQ(counted(1, "node"), "1 node");
  EXPECT_EQ(counted(0, "node"), "0 nodes");
  EXPECT_EQ(counted(2, "node"), "2 nodes");
}

TEST(Report, FollowingPrintsLineByLine) {
  Report report("verify", kRecord, {{"index", "", 5}, {"rate", "GFLOP/s"}}, {});
  report.add_meta("ranks", "2");
  std::ostringstream out;
  report.follow(out);
  EXPECT_EQ(out.str(), "# ranks: 2\n");
  out.str("");
  // The first row settles widths and units.
  report.add_row({"0", "2000.00"});
  EXPECT_EQ(out.str(),
            "#\n# index      rate\n#       (TFLOP/s)\n"
            "      0      2.00\n");
  out.str("");
  report.add_meta("why", "because");
  report.add_meta("why", "because");
  EXPECT_EQ(out.str(), "# why: because\n");
  out.str("");
  report.add_row({"1", "5.00"});
  EXPECT_EQ(out.str(), "      1      0.01\n");
  out.str("");
  report.set_verdict("FAILED", false);
  EXPECT_EQ(out.str(), "# Verdict: FAILED\n");
  EXPECT_FALSE(report.passed());
}

// The header comes before the first row, and no row changes it.
TEST(Report, FollowingByATypicalRowHasItsColumns) {
  Report report("bench", {}, {{"shape", "", 3}, {"rate", "GFLOP/s"}}, {});
  std::ostringstream out;
  report.follow(out, Row{"1,4096", "2000.00"});
  const std::string header = "#\n#  shape      rate\n#        (TFLOP/s)\n";
  EXPECT_EQ(out.str(), header);
  report.add_row({"1,8", "5.00"});
  report.add_row({"1,4096", "70000.00"});
  EXPECT_EQ(out.str(), header + "     1,8      0.01\n  1,4096     70.00\n");
  EXPECT_EQ(report.rows(), 2U);
  EXPECT_EQ(report.csv_rows(1), "annulus.bench/2,\"1,4096\",70000.00\r\n");
  EXPECT_EQ(report.csv_rows(2), "");
}

TEST(Report, FollowingWithoutRowsHasAHeader) {
  Report report("verify", {}, {{"index", "", 5}}, {});
  std::ostringstream out;
  report.follow(out);
  report.set_verdict("OK", true);
  EXPECT_EQ(out.str(), "#\n# index\n#      \n# Verdict: OK\n");
}

TEST(Report, AnOutputThatCannotBeWrittenIsAnError) {
  Report report("verify", {}, {{"index", "", 5}}, {});
  std::ostringstream out;
  report.follow(out);
  out.setstate(std::ios::badbit);
  EXPECT_THROW(report.add_row({"0"}), LibraryError);
}

TEST(Report, RefusesARowOfTheWrongLength) {
  Report report = sample();
  EXPECT_THROW(report.add_row({"1"}), InternalError);
}

TEST(Report, JsonHasTypedCellsAndRowsThatStandAlone) {
  Report report("verify", kRecord,
                {{"text", "", 1}, {"whole", "ms", 1, 0, "a number"}, {"real", "", 1}}, {});
  report.add_meta("mesh", "sp=4");
  report.add_row({"1,16", "17", "2.5e-07"});
  report.add_row({"-", "nan", "inf"});
  report.set_verdict("FAILED (1 of 2)", false);
  const nlohmann::json expected = {
      {"schema", "annulus.verify"},
      {"version", 2},
      {"meta", {{"mesh", "sp=4"}}},
      {"columns",
       {{{"name", "commit"}, {"unit", ""}, {"meaning", ""}},
        {{"name", "ranks"}, {"unit", ""}, {"meaning", ""}},
        {{"name", "text"}, {"unit", ""}, {"meaning", ""}},
        {{"name", "whole"}, {"unit", "ms"}, {"meaning", "a number"}},
        {{"name", "real"}, {"unit", ""}, {"meaning", ""}}}},
      {"rows",
       // A commit of digits is no number.
       {{{"commit", "1234567"}, {"ranks", 4}, {"text", "1,16"}, {"whole", 17}, {"real", 2.5e-07}},
        {{"commit", "1234567"},
         {"ranks", 4},
         {"text", nullptr},
         {"whole", "nan"},
         {"real", "inf"}}}},
      {"verdict", {{"passed", false}, {"text", "FAILED (1 of 2)"}}}};
  EXPECT_EQ(report.to_json(), expected);
  EXPECT_TRUE(report.to_json()["rows"][0]["whole"].is_number_integer());
  // The printed text reads back as the same.
  EXPECT_EQ(nlohmann::json::parse(report.to_json().dump()), expected);
}

TEST(Report, CsvNamesSchemaAndRecordInEveryRowAndQuotesWhatNeedsIt) {
  Report report("bench", kRecord, {{"shape", "", 1}, {"time", "ms", 1}, {"note", "", 1}}, {});
  report.add_row({"1,16", "12345.25", "say \"no\""});
  report.add_row({"2", "-", "plain"});
  EXPECT_EQ(report.csv_header(), "schema,commit,ranks,shape,time (ms),note");
  EXPECT_EQ(report.csv_rows(),
            "annulus.bench/2,1234567,4,\"1,16\",12345.25,\"say \"\"no\"\"\"\r\n"
            "annulus.bench/2,1234567,4,2,,plain\r\n");
}

}  // namespace
}  // namespace annulus::launcher
