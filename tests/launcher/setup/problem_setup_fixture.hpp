#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/error.hpp>

#include "launcher/setup/problem_setup.hpp"
#include "tests/launcher/files/files_test_support.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/scratch_directory.hpp"

namespace annulus::launcher {

using Ids = std::vector<std::int32_t>;

/// Options of a small problem, and a folder for the files that they name.
class ProblemSetupTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::string path(const std::string& name) const { return directory_.file(name); }

  /// Writes an array to a file and gives its path.
  std::string write_array(const std::string& name, const std::string& tensor, DType dtype,
                          const Extents& shape, const void* values) {
    test::write_array(path(name), tensor, dtype, shape, values);
    return path(name);
  }
  std::string write(const std::string& name, const std::string& tensor, const Extents& shape,
                    const Ids& values) {
    return write_array(name, tensor, DType::int32, shape, values.data());
  }
  std::string write(const std::string& name, const Extents& shape, const Ids& values) {
    return write(name, "", shape, values);
  }
  std::string write_bytes(const std::string& name, const Extents& shape,
                          const std::vector<std::uint8_t>& values) {
    return write_array(name, "", DType::uint8, shape, values.data());
  }
  std::string write_floats(const std::string& name, const std::string& tensor, const Extents& shape,
                           const std::vector<float>& values) {
    return write_array(name, tensor, DType::float32, shape, values.data());
  }

  [[nodiscard]] ProblemSetup set_up(int ranks = 4) const {
    return set_up_problem(options_, shape_, DType::float32, ranks);
  }
  [[nodiscard]] std::string error(int ranks = 4) const {
    return test::message_of<UserError>([&] { static_cast<void>(set_up(ranks)); });
  }
  /// True if query `row` sees key `column` of a batch.
  [[nodiscard]] static bool visible(const ProblemSetup& setup, std::int64_t batch, std::int64_t row,
                                    std::int64_t column) {
    return setup.problem.mask.visible(batch, 0, GlobalPosition(row), GlobalPosition(column));
  }

  test::ScratchDirectory directory_;
  Options options_;
  AttentionShape shape_{.batch = 2,
                        .query_length = 6,
                        .kv_length = 6,
                        .heads = 4,
                        .kv_heads = 2,
                        .head_dim = 8,
                        .value_dim = 8};
};

}  // namespace annulus::launcher
