#pragma once

#include <map>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <annulus/verification/verification.hpp>

#include "tests/support/host_context.hpp"

namespace annulus::ring {

/// Tests of cases that all ranks compute, on CPUs, and verify against the oracle. Each runs twice
/// and must repeat every bit.
class VerifiedOnHost : public ::testing::Test {
 protected:
  static int ranks() { return test::session().size(); }

  Context& context(const MeshShape& shape) {
    std::unique_ptr<Context>& context = contexts_[to_string(shape)];
    if (!context) context = std::make_unique<Context>(test::session().world(), shape, everyone_);
    return *context;
  }

  /// The same on every rank.
  [[nodiscard]] std::string failure(const verification::ShardedCase& one, const MeshShape& shape) {
    return verify_sharded(one, context(shape)).failure();
  }

 private:
  Context everyone_{test::session().world(), test::on_host()};
  std::map<std::string, std::unique_ptr<Context>> contexts_;
};

}  // namespace annulus::ring
