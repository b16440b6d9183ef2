#include "launcher/report/report_files.hpp"

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

#include "launcher/report/interruption.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"

namespace annulus::launcher {
namespace {

using ::testing::HasSubstr;

Report report_of(const std::string& unit = "ms") {
  Report report("bench", {{"commit", "abc"}}, {{"shape", "B,T"}, {"time", unit}}, {});
  report.add_row({"1,16", "0.250"});
  return report;
}

class ReportFilesTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path(const std::string& name) const { return folder_.file(name); }
  [[nodiscard]] std::string content(const std::string& name) const {
    return test::read_bytes(path(name));
  }
  void write(const std::string& name, const std::string& text) const {
    test::write_bytes(path(name), text);
  }
  [[nodiscard]] std::ptrdiff_t files() const {
    const std::filesystem::directory_iterator begin(folder_.path());
    return std::distance(begin, std::filesystem::directory_iterator{});
  }
  void report_to(const std::string& json, const std::string& csv) {
    ReportFiles files(json, csv, report_of());
    files.write(report_of(), out_);
  }
  std::ostringstream out_;

 private:
  test::ScratchDirectory folder_;
};

// Kept rows of a long report remain, whatever happens next, and no row appears twice. An earlier
// report remains until the new one is complete.
TEST_F(ReportFilesTest, KeptRowsAreCompleteFiles) {
  Report report = report_of();
  write("a.json", "earlier");
  {
    ReportFiles files(path("a.json"), path("a.csv"), report);
    files.keep(report, out_);
    EXPECT_EQ(content("a.json"), "earlier");
    const auto json = nlohmann::json::parse(content("a.json.unfinished"));
    EXPECT_EQ(json["rows"].size(), 1U);
    EXPECT_EQ(json["verdict"]["text"], "unfinished after 1 row");
    EXPECT_EQ(json["verdict"]["passed"], false);
    EXPECT_EQ(content("a.csv"), report.csv_header() + "\r\n" + report.csv_rows());
    report.add_row({"1,32", "0.500"});
    files.keep(report, out_);
    report.set_verdict("OK", true);
    files.write(report, out_);
  }
  const auto json = nlohmann::json::parse(content("a.json"));
  EXPECT_EQ(json["rows"].size(), 2U);
  EXPECT_EQ(json["verdict"]["text"], "OK");
  EXPECT_EQ(content("a.csv"), report.csv_header() + "\r\n" + report.csv_rows());
  EXPECT_EQ(files(), 2);
  EXPECT_EQ(out_.str(), "");
}

TEST_F(ReportFilesTest, AnInterruptionSaysWhetherRowsAreKept) {
  const auto interrupted = [&](const std::string& json, const std::string& csv) {
    handle_interruptions(/*speaks=*/true);
    const Report report = report_of();
    ReportFiles files(json, csv, report);
    files.keep(report, out_);
    ::raise(SIGTERM);
  };
  const ::testing::KilledBySignal killed(SIGTERM);
  EXPECT_EXIT(interrupted("", path("a.csv")), killed, "by SIGTERM; finished rows are kept\n");
  EXPECT_EXIT(interrupted(path("a.json"), ""), killed, "rows are kept in .*a.json.unfinished\n");
  EXPECT_EXIT(interrupted("", ""), killed, "by SIGTERM; no unfinished file is left");
}

// The second one comes while the first one still waits for a reader of its text.
TEST_F(ReportFilesTest, OfTwoDifferentSignalsTheFirstHasTheLastWord) {
  const auto interrupted = [] {
    handle_interruptions(/*speaks=*/true);
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    ::dup2(pipe[1], STDOUT_FILENO);
    print_when_interrupted(std::string(1 << 20, 'x'));  // more than a pipe holds
    std::thread([pipe, first = ::pthread_self()] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ::pthread_kill(first, SIGTERM);
      for (std::array<char, 4096> read{}; ::read(pipe[0], read.data(), read.size()) > 0;) {
      }
    }).detach();
    ::raise(SIGINT);
  };
  EXPECT_EXIT(interrupted(), ::testing::KilledBySignal(SIGINT),
              "^annulus: interrupted by SIGINT; [^\n]*\n$");
}

TEST_F(ReportFilesTest, RowsOfCsvOnStandardOutputComeAtOnce) {
  Report report = report_of();
  ReportFiles files("", "-", report);
  files.keep(report, out_);
  EXPECT_EQ(out_.str(), report.csv_header() + "\r\n" + report.csv_rows());
  files.write(report, out_);
  EXPECT_EQ(out_.str(), report.csv_header() + "\r\n" + report.csv_rows());
}

TEST_F(ReportFilesTest, FilesAppearOnlyWhenWritten) {
  {
    const ReportFiles abandoned(path("a.json"), path("a.csv"), report_of());
    EXPECT_FALSE(std::filesystem::exists(path("a.json")));
    EXPECT_FALSE(std::filesystem::exists(path("a.csv")));
  }
  EXPECT_EQ(files(), 0) << "a temporary file was left behind";
  report_to(path("a.json"), path("a.csv"));
  EXPECT_EQ(out_.str(), "");
  EXPECT_EQ(nlohmann::json::parse(content("a.json")), report_of().to_json());
  EXPECT_EQ(content("a.csv"),
            "schema,commit,\"shape (B,T)\",time (ms)\r\nannulus.bench/2,abc,\"1,16\",0.250\r\n");
  EXPECT_EQ(files(), 2);
}

TEST_F(ReportFilesTest, DashIsTheOutput) {
  ReportFiles reports("-", "", report_of());
  EXPECT_TRUE(reports.replace_table());
  reports.write(report_of(), out_);
  EXPECT_EQ(nlohmann::json::parse(out_.str()), report_of().to_json());
  out_.str("");
  report_to("", "-");
  EXPECT_EQ(out_.str(), report_of().csv_header() + "\r\n" + report_of().csv_rows());
}

TEST_F(ReportFilesTest, AnImpossibleNameFailsAtOnce) {
  EXPECT_THROW(ReportFiles(path("missing/a.json"), "", report_of()), UserError);
  EXPECT_THROW(ReportFiles("", path("missing/a.csv"), report_of()), UserError);
  EXPECT_THROW(ReportFiles("", path("."), report_of()), UserError);
}

// A name that the system cannot even look up is the user's error.
TEST_F(ReportFilesTest, LinksInACircleAreAnImpossibleName) {
  std::filesystem::create_symlink("b.csv", path("a.csv"));
  std::filesystem::create_symlink("a.csv", path("b.csv"));
  EXPECT_THAT(
      test::message_of<UserError>([&] { const ReportFiles files("", path("a.csv"), report_of()); }),
      HasSubstr("--csv " + path("a.csv")));
}

TEST_F(ReportFilesTest, CsvRowsAreAddedToThoseOfTheSameColumns) {
  report_to("", path("a.csv"));
  const std::string once = content("a.csv");
  report_to("", path("a.csv"));
  EXPECT_EQ(content("a.csv"), once + report_of().csv_rows());
  EXPECT_EQ(files(), 1);
}

TEST_F(ReportFilesTest, AnEmptyCsvFileGetsAHeader) {
  write("a.csv", "");
  report_to("", path("a.csv"));
  EXPECT_EQ(content("a.csv"), report_of().csv_header() + "\r\n" + report_of().csv_rows());
}

TEST_F(ReportFilesTest, ACsvFileThatAnEditorSavedIsAddedTo) {
  const std::string edited = report_of().csv_header() + "\nold,row,1,2";
  write("a.csv", edited);
  report_to("", path("a.csv"));
  EXPECT_EQ(content("a.csv"), edited + "\r\n" + report_of().csv_rows());
}

TEST_F(ReportFilesTest, OtherColumnsAreRefusedBeforeTheWork) {
  report_to("", path("a.csv"));
  const std::string before = content("a.csv");
  EXPECT_THAT(test::message_of<UserError>(
                  [&] { const ReportFiles files("", path("a.csv"), report_of("s")); }),
              AllOf(HasSubstr("--csv " + path("a.csv")),
                    HasSubstr("column 4 is 'time (ms)', expected 'time (s)'")));
  write("b.csv", "schema,commit,shape\n");
  EXPECT_THROW(ReportFiles("", path("b.csv"), report_of()), UserError);
  write("c.csv", std::string(1 << 20, 'x'));
  EXPECT_THROW(ReportFiles("", path("c.csv"), report_of()), UserError);
  EXPECT_EQ(content("a.csv"), before);
}

// It appeared while this job worked.
TEST_F(ReportFilesTest, AFileOfAnotherJobIsNotReplaced) {
  ReportFiles files("", path("a.csv"), report_of());
  write("a.csv", report_of().csv_header() + "\r\ntheirs\r\n");
  files.write(report_of(), out_);
  EXPECT_EQ(content("a.csv"), report_of().csv_header() + "\r\ntheirs\r\n" + report_of().csv_rows());
}

}  // namespace
}  // namespace annulus::launcher
