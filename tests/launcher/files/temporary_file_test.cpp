// Files that appear complete under their name or not at all, whatever happens to their writers.
#include <algorithm>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/core/temporary_file.hpp>

#include "launcher/files/file_reference.hpp"
#include "tests/launcher/files/files_test_support.hpp"

namespace annulus::files {
namespace {

using Naming = TemporaryFile::Naming;
using Names = std::vector<std::string>;

class Temporary : public ::testing::Test {
 protected:
  [[nodiscard]] std::string file(std::string_view name) const { return scratch_.file(name); }
  [[nodiscard]] Names files() const {
    Names names;
    for (const auto& entry : std::filesystem::directory_iterator(scratch_.path())) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static void write(const TemporaryFile& file, std::string_view text) {
    write_at(file.descriptor(), "test", 0, std::as_bytes(std::span(text)));
  }

  test::ScratchDirectory scratch_;
};

class TemporaryOf : public Temporary, public ::testing::WithParamInterface<Naming> {};
INSTANTIATE_TEST_SUITE_P(Namings, TemporaryOf,
                         ::testing::Values(Naming::when_complete, Naming::at_once));

TEST_P(TemporaryOf, ReplacesTheTargetWhenComplete) {
  test::write_bytes(file("a.npy"), "older");
  {
    TemporaryFile temporary(file("a.npy"), GetParam());
    write(temporary, "new");
    EXPECT_EQ(test::read_bytes(file("a.npy")), "older");
    temporary.commit();
    EXPECT_EQ(test::read_bytes(file("a.npy")), "new");
  }
  EXPECT_EQ(files(), Names{"a.npy"});
}

TEST_P(TemporaryOf, OfTwoThatAreNewOneIsFirst) {
  {
    TemporaryFile first(file("a.npy"), GetParam());
    TemporaryFile second(file("a.npy"), GetParam());
    write(first, "first");
    write(second, "second");
    EXPECT_TRUE(first.commit_if_new());
    EXPECT_FALSE(second.commit_if_new());
  }
  EXPECT_EQ(test::read_bytes(file("a.npy")), "first");
  EXPECT_EQ(files(), Names{"a.npy"});
}

TEST_P(TemporaryOf, IsGoneWithoutCommit) {
  {
    const TemporaryFile temporary(file("a.npy"), GetParam());
    write(temporary, "half");
  }
  EXPECT_EQ(files(), Names{});
}

// The directory is opened before: a commit that runs out of descriptors would leave the file there
// and report a failure.
TEST_P(TemporaryOf, CommitsWithoutAFreeDescriptor) {
  TemporaryFile temporary(file("a.npy"), GetParam());
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit tight = before;
  tight.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  EXPECT_LT(::open("/dev/null", O_RDONLY), 0);
  EXPECT_NO_THROW(temporary.commit());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(files(), Names{"a.npy"});
}

TEST_P(TemporaryOf, WritesWhatALinkPointsTo) {
  std::filesystem::create_directory(file("folder"));
  for (const std::string target : {"folder/a.npy", "b.npy"}) {
    SCOPED_TRACE(target);
    std::filesystem::create_symlink(target, file("link.npy"));
    std::filesystem::create_symlink(file("link.npy"), file("links.npy"));
    TemporaryFile temporary(file("links.npy"), GetParam());
    write(temporary, "new");
    temporary.commit();
    EXPECT_TRUE(std::filesystem::is_symlink(file("link.npy")));
    EXPECT_EQ(test::read_bytes(file(target)), "new");
    std::filesystem::remove(file("link.npy"));
    std::filesystem::remove(file("links.npy"));
  }
  std::filesystem::create_symlink("circle.npy", file("circle.npy"));
  EXPECT_THROW(TemporaryFile(file("circle.npy"), GetParam()), FileError);
}

TEST_P(TemporaryOf, ANameThatCannotBeFailsBeforeTheWork) {
  EXPECT_THROW(TemporaryFile(file(std::string(300, 'n')), GetParam()), FileError);
  EXPECT_THROW(TemporaryFile(file("missing/a.npy"), GetParam()), FileError);
  std::filesystem::create_directory(file("folder"));
  EXPECT_THROW(TemporaryFile(file("folder"), GetParam()), FileError);
}

TEST_F(Temporary, HasNoNameWhereTheFileSystemCan) {
  TemporaryFile temporary(file("a.npy"));
  if (!temporary.path().empty()) GTEST_SKIP() << "no O_TMPFILE in " << scratch_.path();
  EXPECT_EQ(files(), Names{});
  write(temporary, "whole");
  temporary.give_name();
  EXPECT_EQ(files().size(), 1U);
  EXPECT_EQ(test::read_bytes(temporary.path()), "whole");
  temporary.commit();
  EXPECT_EQ(files(), Names{"a.npy"});
}

/// Leaves behind what a killed writer leaves.
void be_killed_while_writing(const std::string& target, Naming naming) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const TemporaryFile temporary(target, naming);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
}

TEST_F(Temporary, ThatOfAKilledWriterGoesWithTheNextRun) {
  be_killed_while_writing(file("a.npy"), Naming::at_once);
  be_killed_while_writing(file("b.npy"), Naming::at_once);
  ASSERT_EQ(files().size(), 2U);
  TemporaryFile(file("a.npy")).commit();
  ASSERT_EQ(files().size(), 2U);
  EXPECT_EQ(files()[0], "a.npy");
  EXPECT_TRUE(files()[1].starts_with("b.npy.")) << "of another target: " << files()[1];
}

TEST_F(Temporary, AKilledWriterLeavesNothingWhereTheFileSystemCan) {
  if (!TemporaryFile(file("a.npy")).path().empty()) GTEST_SKIP() << "no O_TMPFILE";
  be_killed_while_writing(file("a.npy"), Naming::when_complete);
  EXPECT_EQ(files(), Names{});
}

TEST_F(Temporary, ThatOfALivingWriterStays) {
  TemporaryFile first(file("a.npy"), Naming::at_once);
  TemporaryFile second(file("a.npy"), Naming::at_once);
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(files().size(), 2U);
  write(first, "first");
  write(second, "second");
  second.commit();
  first.commit();
  EXPECT_EQ(test::read_bytes(file("a.npy")), "first");
}

TEST_F(Temporary, FilesOfOtherNamesStay) {
  const Names others{"a.npy.1-.tmp",  "a.npy.1-0.tmp2", "a.npy.12.tmp", "a.npy.tmp",
                     "a.npy.x-0.tmp", "a.npyx.1-0.tmp", "b.npy.1-0.tmp"};
  for (const std::string& name : others) test::write_bytes(file(name), "");
  std::filesystem::create_symlink("b.npy.1-0.tmp", file("a.npy.1-0.tmp"));
  test::write_bytes(file("a.npy.2-0.tmp"), "");
  { const TemporaryFile temporary(file("a.npy")); }
  Names left = others;
  left.emplace_back("a.npy.1-0.tmp");  // a link is none of ours
  std::sort(left.begin(), left.end());
  EXPECT_EQ(files(), left);
}

TEST_F(Temporary, OtherProcessesOpenJustTheFileThatWasMeant) {
  TemporaryFile temporary(file("a.npy"), Naming::at_once);
  const FileReference reference = parse_reference(to_string(reference_to(temporary.descriptor())));
  write_at(open_through_proc(reference), "proc", 0, std::as_bytes(std::span("p", 1)));
  write_at(open_by_name(temporary.path(), reference), "name", 1, std::as_bytes(std::span("n", 1)));
  EXPECT_EQ(test::read_bytes(temporary.path()), "pn");

  FileReference elsewhere = reference;
  elsewhere.host += "x";
  EXPECT_FALSE(open_through_proc(elsewhere));
  FileReference other = reference;
  other.inode += 1;
  EXPECT_FALSE(open_through_proc(other));
  EXPECT_THROW(static_cast<void>(open_by_name(temporary.path(), other)), LibraryError);
  std::filesystem::create_symlink(temporary.path(), file("link"));
  EXPECT_THROW(static_cast<void>(open_by_name(file("link"), reference)), SystemError);
  EXPECT_THROW(static_cast<void>(open_by_name(file("missing"), reference)), SystemError);
}

}  // namespace
}  // namespace annulus::files
