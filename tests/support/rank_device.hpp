#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include <annulus/core/cuda.hpp>
#include <annulus/mesh/mesh.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {

/// The GPU of this rank of the test program: ranks that outnumber the GPUs of their node share
/// them. Null, with the reason, where there is none.
struct RankDevice {
  std::unique_ptr<Device> device;
  std::unique_ptr<CurrentDevice> current;  ///< it is, as long as this lives
  bool shared = false;                     ///< there are more ranks on the node than GPUs
  std::string missing;
};

/// Collective over the ranks of the program.
[[nodiscard]] inline RankDevice open_rank_device() {
  const Mesh everyone(MeshShape({{"ranks", test::size()}}), bootstrap(), kWatchdog);
  const Topology& topology = everyone.topology();
  if (std::string reason = cuda_unavailable_reason(); !reason.empty()) {
    return {nullptr, nullptr, false, std::move(reason)};
  }
  const int gpus = static_cast<int>(cuda_devices().size());
  const auto rank = static_cast<std::size_t>(test::rank());
  std::unique_ptr<Device> device = make_cuda_device(topology.local_rank_of_rank[rank] % gpus);
  std::unique_ptr<CurrentDevice> current = device->make_current();
  return {std::move(device), std::move(current),
          topology.ranks_on_node(topology.node_of_rank[rank]) > gpus, ""};
}

/// A fixture of tests that want this rank's GPU and are skipped where there is none. A fixture that
/// derives from it and has a SetUp() of its own calls this one first and returns if IsSkipped().
template <class Base = ::testing::Test>
class RankDeviceTest : public Base {
 public:
  static void SetUpTestSuite() { rank_ = open_rank_device(); }
  static void TearDownTestSuite() { rank_ = {}; }

 protected:
  void SetUp() override {
    Base::SetUp();
    if (!rank_.device) GTEST_SKIP() << rank_.missing;
  }
  [[nodiscard]] static Device& device() { return *rank_.device; }
  /// True if ranks share GPUs, so that NCCL is out of the question.
  [[nodiscard]] static bool shared_gpus() { return rank_.shared; }

 private:
  // One for all tests: a device outlives what other ranks have mapped of it.
  static inline RankDevice rank_;
};

}  // namespace annulus::test
