// Ranks writing one file together: whole under its name, or not there at all.
#include <array>
#include <csignal>
#include <fcntl.h>
#include <memory>
#include <numeric>
#include <optional>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/launcher/files/files_test_support.hpp"
#include "tests/support/for_each_index.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::files {
namespace {

const Extents kShape{2, 37, 4, 3};

class Writer : public ::testing::Test {
 protected:
  void SetUp() override {
    const int ranks = test::session().size();
    mesh_ = std::make_unique<Mesh>(MeshShape({{"sp", ranks}}), test::session().world(),
                                   test::kWatchdog);
    if (rank() == 0) scratch_.emplace();
    directory_ = world().gather_text(rank() == 0 ? scratch_->path().string() : "").front();
  }
  void TearDown() override { world().barrier(); }

  Control& world() { return mesh_->world(); }
  [[nodiscard]] int rank() const { return mesh_->rank(); }
  [[nodiscard]] bool is_last() const { return rank() == mesh_->size() - 1; }

  // The files in the directory once all ranks are here.
  std::vector<std::string> files() {
    world().barrier();
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      names.push_back(entry.path().filename());
    }
    world().barrier();
    return names;
  }

  [[nodiscard]] std::vector<PositionRanges> index() const {
    std::vector<PositionRanges> index = whole(kShape);
    index[1] = SequenceLayout(LayoutKind::zigzag, kShape[1], mesh_->size()).positions(rank());
    return index;
  }

  void write_own(ArrayWriter& writer) const {
    const auto positions = index();
    const Extents local{kShape[0], positions[1].size(), kShape[2], kShape[3]};
    std::vector<std::int32_t> values;
    test::for_each_index(local, [&](const auto& at) {
      const std::int64_t t = positions[1].global(LocalPosition(at[1])).value();
      values.push_back(static_cast<std::int32_t>(
          ((at[0] * kShape[1] + t) * kShape[2] + at[2]) * kShape[3] + at[3]));
    });
    writer.write_slice(positions, {values.data(), DType::int32, local});
  }

  // A writer of a.npy that has written the rank's part.
  std::unique_ptr<ArrayWriter> written() {
    auto writer = std::make_unique<ArrayWriter>(world(), file("a.npy"),
                                                std::vector<ArraySpec>{{"", DType::int32, kShape}});
    write_own(*writer);
    return writer;
  }

  [[nodiscard]] std::string file(const std::string& name) const { return directory_ + "/" + name; }

  std::unique_ptr<Mesh> mesh_;
  std::optional<test::ScratchDirectory> scratch_;  // rank 0 only
  std::string directory_;
};

TEST_F(Writer, RanksWriteTheirSlices) {
  for (const char* name : {"a.npy", "a.safetensors"}) {
    SCOPED_TRACE(name);
    {
      ArrayWriter writer(world(), file(name), {{"x", DType::int32, kShape}});
      write_own(writer);
      EXPECT_LE(files().size(), 1U);  // a temporary name, if any
      EXPECT_FALSE(std::filesystem::exists(file(name)));
      writer.commit();
    }
    EXPECT_EQ(files(), std::vector<std::string>{name});
    std::vector<std::int32_t> expected(static_cast<std::size_t>(kShape.product()));
    std::iota(expected.begin(), expected.end(), 0);
    std::vector<std::int32_t> values(expected.size());
    ArrayFile(file(name), "x").read_slice(whole(kShape), {values.data(), DType::int32, kShape});
    EXPECT_EQ(values, expected);
    world().barrier();
    if (rank() == 0) std::filesystem::remove(file(name));
  }
}

// Another host name simulates another node, which knows nothing of the processes of this one.
TEST_F(Writer, RanksOfAnotherHostOpenTheFileByName) {
  if (mesh_->size() == 1) GTEST_SKIP() << "needs another rank";
  const bool moved = !is_last() || (::unshare(CLONE_NEWUTS) == 0 && ::sethostname("moon", 4) == 0);
  if (world().max(std::array{moved ? 0.0 : 1.0})[0] > 0) GTEST_SKIP() << "needs a UTS namespace";
  ArrayWriter writer(world(), file("a.npy"), {{"", DType::int32, kShape}});
  const std::vector<std::string> before = files();
  ASSERT_EQ(before.size(), 1U) << "a name that the other host can open";
  EXPECT_NE(before[0], "a.npy");
  write_own(writer);
  writer.commit();
  EXPECT_EQ(files(), std::vector<std::string>{"a.npy"});
  EXPECT_EQ(ArrayFile(file("a.npy")).shape(), kShape);
}

TEST_F(Writer, ALinkStaysAndItsTargetIsWritten) {
  if (rank() == 0) {
    test::write_bytes(file("target.npy"), "older");
    std::filesystem::create_symlink("target.npy", file("a.npy"));
  }
  world().barrier();
  written()->commit();
  EXPECT_EQ(files().size(), 2U);
  EXPECT_TRUE(std::filesystem::is_symlink(file("a.npy")));
  EXPECT_EQ(ArrayFile(file("target.npy")).shape(), kShape);
}

TEST_F(Writer, ReplacesAnOlderFileOnlyWhenComplete) {
  if (rank() == 0) test::write_bytes(file("a.npy"), "older");
  written().reset();
  world().barrier();
  EXPECT_EQ(test::read_bytes(file("a.npy")), "older");
  written()->commit();
  EXPECT_EQ(files(), std::vector<std::string>{"a.npy"});
  EXPECT_EQ(ArrayFile(file("a.npy")).shape(), kShape);
}

TEST_F(Writer, NothingRemainsWithoutCommit) {
  for (const bool complete : {false, true}) {
    {
      const auto writer = written();
      if (complete) writer->complete();
    }
    EXPECT_TRUE(files().empty());
  }
}

TEST_F(Writer, AFailureOfOneRankIsEverybodys) {
  ArrayWriter writer(world(), file("a.npy"), {{"", DType::int32, kShape}});
  std::int32_t value = 0;
  if (is_last()) {
    // A view that does not match its index.
    writer.write_slice(index(), {&value, DType::int32, {1, 1, 1, 1}});
  }
  write_own(writer);
  EXPECT_THROW(writer.commit(), LibraryError);
  EXPECT_TRUE(files().empty());
}

// A limit on the size of files simulates a full disk.
class FileLimit {
 public:
  explicit FileLimit(bool applies) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    struct rlimit tight = before_;
    if (applies) tight.rlim_cur = 130;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  }
  ~FileLimit() {
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0);
    std::signal(SIGXFSZ, handler_);
  }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  void (*handler_)(int);
  struct rlimit before_ {};
};

TEST_F(Writer, TakesItsSpaceAtOnce) {
  const FileLimit limit(rank() == 0);
  EXPECT_THAT(test::message_of<LibraryError>([&] {
                const ArrayWriter writer(world(), file("a.npy"), {{"", DType::int32, kShape}},
                                         "--output a.npy");
              }),
              ::testing::HasSubstr("--output a.npy: needs 3.594 KiB: File too large"));
  EXPECT_TRUE(files().empty());
}

TEST_F(Writer, SpaceTakenIsSpaceOnTheDisk) {
  test::ScratchDirectory scratch;
  constexpr std::int64_t kBytes = 1 << 20;
  const TemporaryFile temporary(scratch.file("a"));
  reserve(temporary.descriptor(), kBytes);
  struct stat status {};
  ASSERT_EQ(::fstat(temporary.descriptor().get(), &status), 0);
  EXPECT_EQ(status.st_size, kBytes);
  if (::fallocate(temporary.descriptor().get(), 0, 0, kBytes) != 0) {
    GTEST_SKIP() << "the file system of " << scratch.path() << " takes no space beforehand";
  }
  EXPECT_GE(status.st_blocks * 512, kBytes);
}

TEST_F(Writer, ACompleteFileStillLacksItsName) {
  const auto writer = written();
  writer->complete();
  EXPECT_EQ(files().size(), 1U);
  EXPECT_NE(files()[0], "a.npy");
  writer->commit();
  EXPECT_EQ(files(), std::vector<std::string>{"a.npy"});
  EXPECT_THROW(writer->commit(), LibraryError);
  EXPECT_THROW(writer->complete(), LibraryError);
}

TEST_F(Writer, AFullDiskIsASystemError) {
  ArrayWriter writer(world(), file("a.npy"), {{"", DType::int32, kShape}});
  {
    const FileLimit limit(is_last());
    write_own(writer);
  }
  EXPECT_THAT(test::message_of<LibraryError>([&] { writer.commit(); }),
              ::testing::HasSubstr("File too large"));
  EXPECT_TRUE(files().empty());
}

TEST_F(Writer, EveryEntryMustBeWrittenOnce) {
  {
    ArrayWriter writer(world(), file("few.npy"), {{"", DType::int32, kShape}});
    if (!is_last()) write_own(writer);
    EXPECT_THROW(writer.commit(), InternalError);
  }
  {
    ArrayWriter writer(world(), file("many.npy"), {{"", DType::int32, kShape}});
    write_own(writer);
    if (is_last()) write_own(writer);
    EXPECT_THROW(writer.commit(), InternalError);
  }
  EXPECT_TRUE(files().empty());
}

TEST_F(Writer, BadNamesAreTheUsersError) {
  if (rank() == 0) {
    ASSERT_EQ(::mkdir(file("taken.npy").c_str(), 0700), 0);
    ASSERT_EQ(::mkfifo(file("pipe.npy").c_str(), 0600), 0);
  }
  world().barrier();
  for (const std::string& name : {std::string("missing/a.npy"), std::string("taken.npy"),
                                  std::string("pipe.npy"), std::string(300, 'n')}) {
    EXPECT_THROW(ArrayWriter(world(), file(name), {{"", DType::int32, kShape}}), UserError) << name;
  }
  EXPECT_EQ(files().size(), 2U);
}

TEST_F(Writer, TwoTensorsOfOneNameAreRefused) {
  EXPECT_THROW(ArrayWriter(world(), file("a.safetensors"),
                           {{"x", DType::int32, {1}}, {"x", DType::int32, {1}}}),
               LibraryError);
  EXPECT_THROW(
      ArrayWriter(world(), file("a.npy"), {{"x", DType::int32, {1}}, {"y", DType::int32, {1}}}),
      LibraryError);
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace annulus::files
