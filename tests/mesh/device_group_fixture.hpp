#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/device.hpp>
#include <annulus/mesh/composite_group.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/mesh/nccl_group.hpp>
#include <annulus/mesh/peer_copy_group.hpp>

#include "tests/support/rank_device.hpp"

namespace annulus::test {

using Bytes = std::vector<unsigned char>;

/// `count` bytes, different for every `key`.
inline Bytes pattern(std::size_t count, std::uint32_t key) {
  Bytes bytes(count);
  std::uint32_t state = key * 2654435761U + 12345U;
  for (unsigned char& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<unsigned char>(state >> 24U);
  }
  return bytes;
}

/// All ranks of the program with a GPU each, or a share of one, and a group by the transport that
/// is the test's parameter; a skipped test where that cannot be.
class DeviceGroupTest : public ::testing::TestWithParam<Transport> {
 public:
  // Starting a transport takes long, so all tests share it.
  static void SetUpTestSuite() {
    state_ = std::make_unique<State>();
    state_->gpu = open_rank_device();
    if (!state_->gpu.device) return;
    state_->mesh =
        std::make_unique<Mesh>(MeshShape({{"sp", test::size()}}), bootstrap(), kWatchdog);
  }
  static void TearDownTestSuite() { state_.reset(); }

 protected:
  void SetUp() override {
    if (!state_->gpu.device) GTEST_SKIP() << state_->gpu.missing;
    if (GetParam() != Transport::peer) {
      if (nccl_versions().built == "not built") GTEST_SKIP() << "this build has no NCCL";
      if (state_->gpu.shared) GTEST_SKIP() << "NCCL needs a GPU for each of the ranks";
    }
    if (GetParam() != Transport::nccl) {
      if (!state_->obstacle) {
        state_->obstacle =
            std::make_unique<std::string>(peer_copy_reach(host(), device().place()).obstacle);
      }
      if (!state_->obstacle->empty()) GTEST_SKIP() << *state_->obstacle;
    }
    std::unique_ptr<Group>& group = state_->groups[GetParam()];
    if (!group) group = make_group();
    group_ = group.get();
    stream_ = device().make_stream("communication", kWatchdog, nullptr);
  }

  static Device& device() { return *state_->gpu.device; }
  static bool shared_gpus() { return state_->gpu.shared; }
  static Control& world() { return state_->mesh->world(); }
  static Group& host() { return state_->mesh->group(); }
  Group& group() { return *group_; }
  Stream& stream() { return *stream_; }
  [[nodiscard]] cudaStream_t raw_stream() const { return CudaStream::of(*stream_).raw(); }
  static int rank() { return test::rank(); }
  static int size() { return test::size(); }
  static int left() { return (rank() + size() - 1) % size(); }
  static int right() { return (rank() + 1) % size(); }

  Buffer allocate(std::size_t bytes) {
    return group().exchange_memory(device().memory()).allocate(bytes);
  }
  /// In order of the stream, which reads `bytes` before this returns.
  void upload(const Buffer& buffer, const Bytes& bytes) {
    copy(buffer.data(), bytes.data(), bytes.size());
  }
  /// Waits for the stream.
  Bytes download(const Buffer& buffer) {
    Bytes bytes(buffer.bytes());
    copy(bytes.data(), buffer.data(), bytes.size());
    stream().synchronize();
    return bytes;
  }
  template <class T>
  void upload_values(const Buffer& buffer, const std::vector<T>& values) {
    copy(buffer.data(), values.data(), values.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> download_values(const Buffer& buffer) {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    copy(values.data(), buffer.data(), values.size() * sizeof(T));
    stream().synchronize();
    return values;
  }

 private:
  struct State {
    RankDevice gpu;
    std::unique_ptr<Mesh> mesh;
    std::unique_ptr<std::string> obstacle;
    std::unique_ptr<NcclGroups> nccl;
    std::map<Transport, std::unique_ptr<Group>> groups;
  };

  // Directly rather than from the mesh, which needs none for one rank.
  static std::unique_ptr<Group> make_group() {
    const auto copies = [] { return make_peer_copy_group(host(), device().place(), kWatchdog); };
    if (GetParam() == Transport::peer) return copies();
    if (!state_->nccl) state_->nccl = make_nccl_groups(world(), device().place(), kWatchdog);
    std::unique_ptr<Group> nccl = state_->nccl->make(host());
    if (GetParam() == Transport::nccl) return nccl;
    return make_composite_group(host(), pretended_reach(), copies(), std::move(nccl), kWatchdog);
  }
  // Pairs of ranks, so that a ring goes both ways; two ranks are apart.
  static PeerReach pretended_reach() {
    PeerReach reach;
    for (int rank = 0; rank < size(); ++rank) {
      reach.clique_of_rank.push_back(size() == 2 ? rank : rank / 2);
    }
    return reach;
  }

  void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, raw_stream()), "copy of a test");
  }

  static inline std::unique_ptr<State> state_;
  Group* group_ = nullptr;
  std::unique_ptr<Stream> stream_;
};

}  // namespace annulus::test
