// The persistent cache: a file that many processes share.
#include "tuning/file.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "tests/ring/tuning/entries.hpp"
#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"
#include "tuning/text.hpp"

namespace annulus::ring {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TuningFileTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path(const std::string& name = "t.json") const {
    return folder_.file(name);
  }
  [[nodiscard]] CacheFile named(const std::string& name = "t.json") const { return {path(name)}; }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      found.push_back(entry.path().filename());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  test::ScratchDirectory folder_;
};

TEST_F(TuningFileTest, IsNotThereAtFirst) {
  const FileAnswer answer = find_in_file(named(), example_entry().key);
  EXPECT_FALSE(answer.entry);
  EXPECT_EQ(answer.reason, path() + " is not there");
  EXPECT_THAT(answer.warnings, IsEmpty());
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(TuningFileTest, KeepsEveryKeyAndTheLatestOfEach) {
  TuningEntry entry = example_entry();
  const CacheFile deep{path("a/b/t.json"), false};
  EXPECT_THAT(keep_in_file(deep, entry), IsEmpty());
  EXPECT_THAT(keep_in_file(deep, example_entry("B=2")), IsEmpty());
  entry.choice.schedule = "ring";
  EXPECT_THAT(keep_in_file(deep, entry), IsEmpty());
  EXPECT_EQ(find_in_file(deep, entry.key).entry, entry);
  EXPECT_EQ(find_in_file(deep, example_entry("B=2").key).entry, example_entry("B=2"));
  const FileAnswer other = find_in_file(deep, {{"shape", "B=3"}});
  EXPECT_FALSE(other.entry);
  EXPECT_THAT(other.reason, HasSubstr("has no entry for this problem"));
  EXPECT_EQ(std::distance(fs::directory_iterator(path("a/b")), fs::directory_iterator()), 2)
      << "the file and its lock";
}

// Only the default name is ours to make directories for.
TEST_F(TuningFileTest, NoDirectoryIsMadeForANameThatWasGiven) {
  CacheFile deep = named("a/t.json");
  deep.shown = "--tuning-cache";
  EXPECT_THAT(test::message_of<ArgumentError>([&] { check_is_cache(deep); }),
              AllOf(HasSubstr("--tuning-cache: got " + deep.path),
                    HasSubstr(path("a") + ", not an existing directory")));
  EXPECT_THAT(keep_in_file(deep, example_entry()),
              ElementsAre(HasSubstr("--tuning-cache " + deep.path)));
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(TuningFileTest, AnEmptyFileHasNoEntries) {
  test::write_bytes(path(), "");
  EXPECT_THAT(find_in_file(named(), example_entry().key).warnings, IsEmpty());
  EXPECT_THAT(keep_in_file(named(), example_entry()), IsEmpty());
  EXPECT_THAT(names(), ElementsAre("t.json", "t.json.lock"));
}

// Nothing is lost, and the names of earlier ones are not taken.
TEST_F(TuningFileTest, ABrokenCacheIsSetAside) {
  const std::string text = to_json({example_entry()});
  std::string typing_error = text;
  typing_error.replace(typing_error.find("\"ring\""), 6, "\"rnig\"");
  int number = 0;
  for (const std::string& bad : {text.substr(0, text.size() / 2), text.substr(0, 40), typing_error,
                                 std::string(R"({"schema": "annulus.tuning"})")}) {
    test::write_bytes(path(), bad);
    EXPECT_NO_THROW(check_is_cache(named()));
    const FileAnswer answer = find_in_file(named(), example_entry().key);
    EXPECT_FALSE(answer.entry);
    ASSERT_EQ(answer.warnings.size(), 1U);
    EXPECT_THAT(answer.warnings[0], HasSubstr(path()));
    EXPECT_EQ(test::read_bytes(path()), bad) << "reading changes nothing";
    const std::vector<std::string> warnings = keep_in_file(named(), example_entry());
    ASSERT_EQ(warnings.size(), 1U);
    const std::string aside = path() + ".broken-" + std::to_string(++number);
    EXPECT_THAT(warnings[0], HasSubstr(aside));
    EXPECT_EQ(test::read_bytes(aside), bad);
    EXPECT_EQ(find_in_file(named(), example_entry().key).entry, example_entry());
  }
}

// It may be anything: an input of the job, for instance.
TEST_F(TuningFileTest, AnotherFileThatWasNamedStays) {
  for (const std::string& other : {std::string("\x93NUMPY\x01"), std::string(R"({"dropout": 0.5})"),
                                   std::string(100, '\0'), std::string("{ nonsense")}) {
    test::write_bytes(path(), other);
    EXPECT_THAT(test::message_of<ArgumentError>([&] { check_is_cache(named()); }),
                AllOf(HasSubstr(path() + ", which holds no tuning cache"),
                      HasSubstr("expected a tuning cache, or the name of a new file")));
    EXPECT_THAT(keep_in_file(named(), example_entry()),
                ElementsAre(HasSubstr("holds no tuning cache and stays as it is")));
    EXPECT_EQ(test::read_bytes(path()), other);
    EXPECT_THAT(names(), ElementsAre("t.json", "t.json.lock"));
  }
  fs::remove(path());
  fs::create_directory(path());
  EXPECT_THAT(test::message_of<ArgumentError>([&] { check_is_cache(named()); }),
              HasSubstr("which is not a file"));
}

// Under the default name nothing else is to be expected.
TEST_F(TuningFileTest, WhateverHasTheDefaultNameIsSetAside) {
  test::write_bytes(path(), std::string(100, '\0'));
  const CacheFile defaults{path(), false};
  EXPECT_NO_THROW(check_is_cache(defaults));
  EXPECT_THAT(keep_in_file(defaults, example_entry()), ElementsAre(HasSubstr(".broken-1")));
  EXPECT_EQ(test::read_bytes(path() + ".broken-1"), std::string(100, '\0'));
  EXPECT_EQ(find_in_file(defaults, example_entry().key).entry, example_entry());
}

// Programs of two versions that are told the same name would set each other's aside for ever.
TEST_F(TuningFileTest, ACacheOfAnotherVersionStays) {
  const std::string ours = fmt::format("\"version\": {}", kTuningVersion);
  for (const int version : {kTuningVersion - 1, kTuningVersion + 1}) {
    std::string other = to_json({example_entry()});
    other.replace(other.find(ours), ours.size(), fmt::format("\"version\": {}", version));
    for (const bool is_named : {true, false}) {
      test::write_bytes(path(), other);
      const CacheFile file{path(), is_named};
      EXPECT_NO_THROW(check_is_cache(file));
      const FileAnswer answer = find_in_file(file, example_entry().key);
      EXPECT_FALSE(answer.entry);
      EXPECT_THAT(answer.warnings, ElementsAre(HasSubstr(fmt::format("version {}", version))));
      EXPECT_THAT(keep_in_file(file, example_entry()), ElementsAre(HasSubstr("another version")));
      EXPECT_EQ(test::read_bytes(path()), other);
    }
  }
}

TEST_F(TuningFileTest, TheOldestEntriesGo) {
  std::vector<TuningEntry> entries;
  for (std::size_t i = 0; i < kMaximumEntries; ++i) {
    entries.push_back(example_entry("B=" + std::to_string(i)));
  }
  test::write_bytes(path(), to_json(entries));
  EXPECT_THAT(keep_in_file(named(), entries[0]), IsEmpty());  // now it is the latest
  EXPECT_THAT(keep_in_file(named(), example_entry("one more")), IsEmpty());
  EXPECT_EQ(parse_tuning(test::read_bytes(path()), path()).size(), kMaximumEntries);
  EXPECT_FALSE(find_in_file(named(), entries[1].key).entry);
  EXPECT_TRUE(find_in_file(named(), entries[0].key).entry);
  EXPECT_TRUE(find_in_file(named(), entries[2].key).entry);
  EXPECT_TRUE(find_in_file(named(), example_entry("one more").key).entry);
}

// Another process that has the lock and does not give it back costs the entry, not the job.
TEST_F(TuningFileTest, AnEndlessLockIsAWarning) {
  const int lock = ::open((path() + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  const auto patience = std::chrono::milliseconds(20);
  EXPECT_THAT(keep_in_file(named(), example_entry(), patience),
              ElementsAre(HasSubstr(".lock has been locked by other processes for 0.02 s")));
  EXPECT_FALSE(fs::exists(path()));
  ::close(lock);
  EXPECT_THAT(keep_in_file(named(), example_entry(), patience), IsEmpty());
}

TEST_F(TuningFileTest, APlaceThatCannotBeWrittenIsAWarning) {
  test::write_bytes(path("file"), "");
  const CacheFile below_file{path("file/t.json"), false};
  EXPECT_NO_THROW(check_is_cache(below_file));
  EXPECT_THAT(keep_in_file(below_file, example_entry()), ElementsAre(HasSubstr(below_file.path)));
  EXPECT_THAT(find_in_file(below_file, {}).warnings, ElementsAre(HasSubstr(below_file.path)));
  // A directory stays what it is.
  fs::create_directory(path("directory"));
  EXPECT_THAT(keep_in_file(named("directory"), example_entry()),
              ElementsAre(HasSubstr("not a file")));
  EXPECT_THAT(find_in_file(named("directory"), {}).warnings, ElementsAre(HasSubstr("not a file")));
  EXPECT_TRUE(fs::is_directory(path("directory")));
}

TEST_F(TuningFileTest, ASymbolicLinkStaysOne) {
  fs::create_directory(path("elsewhere"));
  fs::create_symlink(path("elsewhere") + "/real.json", path());
  EXPECT_THAT(keep_in_file(named(), example_entry()), IsEmpty());
  EXPECT_TRUE(fs::is_symlink(path()));
  EXPECT_EQ(find_in_file(named("elsewhere/real.json"), example_entry().key).entry, example_entry());
}

// Eight processes at once lose no entry, and whoever reads meanwhile reads a whole file.
TEST_F(TuningFileTest, ProcessesDoNotDisturbEachOther) {
  constexpr int kProcesses = 8;
  constexpr int kEach = 6;
  constexpr std::chrono::minutes kPatience{2};
  const auto name = [](int process, int i) {
    return "process " + std::to_string(process) + ", entry " + std::to_string(i);
  };
  std::vector<pid_t> children;
  for (int process = 0; process < kProcesses; ++process) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      bool good = true;
      for (int i = 0; i < kEach; ++i) {
        // A slow disk is no failure.
        good = good && keep_in_file(named(), example_entry(name(process, i)), kPatience).empty();
        const FileAnswer mine = find_in_file(named(), example_entry(name(process, 0)).key);
        good = good && mine.entry && mine.warnings.empty();
      }
      ::_exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(parse_tuning(test::read_bytes(path()), path()).size(), std::size_t{kProcesses} * kEach);
  for (int process = 0; process < kProcesses; ++process) {
    for (int i = 0; i < kEach; ++i) {
      EXPECT_TRUE(find_in_file(named(), example_entry(name(process, i)).key).entry)
          << name(process, i);
    }
  }
  EXPECT_THAT(names(), ElementsAre("t.json", "t.json.lock"));
}

TEST(DefaultTuningFile, IsInTheCacheDirectory) {
  const char* const home = std::getenv("HOME");
  const std::string old_home = home == nullptr ? "" : home;
  {
    const test::EnvironmentVariable cache("XDG_CACHE_HOME", "/x");
    EXPECT_EQ(default_tuning_file(), "/x/annulus/tuning-v1.json");
  }
  {
    const test::EnvironmentVariable relative("XDG_CACHE_HOME", "x");
    const test::EnvironmentVariable my_home("HOME", "/home/me");
    EXPECT_EQ(default_tuning_file(), "/home/me/.cache/annulus/tuning-v1.json");
  }
  EXPECT_EQ(default_tuning_file(), "");  // the variables are gone
  ::setenv("HOME", old_home.c_str(), 1);
}

}  // namespace
}  // namespace annulus::ring
