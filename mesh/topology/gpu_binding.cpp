#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/cuda.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/gpu_binding.hpp>

#include "topology/node_identity.hpp"

namespace annulus {
namespace {

/// The ranks of one node and the GPUs that they see.
class NodeBinding {
 public:
  explicit NodeBinding(const std::vector<const VisibleGpus*>& ranks)
      : ranks_(ranks), device_(ranks.size(), -1) {}

  /// Gives every rank its own device, if possible: the n-th rank takes the n-th device that it
  /// sees, unless others need it. Returns the first rank without a device, −1 if all have one.
  int give_each_one() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      std::set<std::string> tried;
      if (!place(rank, tried)) return static_cast<int>(rank);
    }
    return -1;
  }

  /// Each rank takes the device that the fewest earlier ranks have taken.
  void share_out() {
    std::map<std::string, int> users;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const std::vector<std::string>& seen = ranks_[rank]->identities;
      const auto best = std::min_element(
          seen.begin(), seen.end(),
          [&](const std::string& a, const std::string& b) { return users[a] < users[b]; });
      ++users[*best];
      device_[rank] = static_cast<int>(best - seen.begin());
    }
  }

  [[nodiscard]] int device(std::size_t rank) const { return device_[rank]; }
  [[nodiscard]] std::size_t devices() const {
    std::set<std::string> all;
    for (const VisibleGpus* rank : ranks_) {
      all.insert(rank->identities.begin(), rank->identities.end());
    }
    return all.size();
  }

 private:
  // Searches an augmenting path: the holder of a device that `rank` could use looks for another
  // one.
  bool place(std::size_t rank, std::set<std::string>& tried) {
    const std::vector<std::string>& seen = ranks_[rank]->identities;
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const std::size_t index = (rank + i) % seen.size();
      if (!tried.insert(seen[index]).second) continue;
      const auto holder = holders_.find(seen[index]);
      if (holder != holders_.end() && !place(holder->second, tried)) continue;
      holders_[seen[index]] = rank;
      device_[rank] = static_cast<int>(index);
      return true;
    }
    return false;
  }

  const std::vector<const VisibleGpus*>& ranks_;
  std::vector<int> device_;
  std::map<std::string, std::size_t> holders_;
};

std::string counted(std::size_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

VisibleGpus look() {
  VisibleGpus visible;
  visible.missing = cuda_unavailable_reason();
  visible.broken = cuda_is_broken();
  if (!visible.missing.empty()) return visible;
  for (const CudaDeviceInfo& device : cuda_devices()) {
    visible.identities.push_back(device.bus_id + ' ' + device.uuid);
  }
  return visible;
}

// One line that says if GPUs are broken, one with the reason for having none, then one per device.
std::string encoded(const VisibleGpus& visible) {
  std::string text = visible.broken ? "broken" : "";
  std::string missing = visible.missing;
  std::replace(missing.begin(), missing.end(), '\n', ' ');
  text += '\n' + missing;
  for (const std::string& identity : visible.identities) text += '\n' + identity;
  return text;
}

VisibleGpus decoded(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return {{lines.begin() + 2, lines.end()}, lines[1], !lines[0].empty()};
}

}  // namespace

GpuBinding bind_gpus(const Topology& topology, const std::vector<VisibleGpus>& visible,
                     bool share) {
  GpuBinding binding;
  const auto blind = std::find_if(visible.begin(), visible.end(),
                                  [](const VisibleGpus& rank) { return rank.identities.empty(); });
  binding.any = std::any_of(visible.begin(), visible.end(), [](const VisibleGpus& rank) {
    return !rank.identities.empty() || rank.broken;
  });
  if (blind != visible.end()) {
    const bool all = std::all_of(visible.begin(), visible.end(), [&](const VisibleGpus& rank) {
      return rank.identities.empty() && rank.missing == blind->missing;
    });
    binding.obstacle =
        all ? blind->missing : fmt::format("rank {}: {}", blind - visible.begin(), blind->missing);
    return binding;
  }
  binding.device_of_rank.resize(visible.size());
  for (int node = 0; node < topology.nodes(); ++node) {
    std::vector<std::size_t> numbers;
    std::vector<const VisibleGpus*> ranks;
    for (std::size_t rank = 0; rank < visible.size(); ++rank) {
      if (topology.node_of_rank[rank] != node) continue;
      numbers.push_back(rank);
      ranks.push_back(&visible[rank]);
    }
    NodeBinding on_node(ranks);
    if (share) {
      on_node.share_out();
    } else if (const int left_over = on_node.give_each_one(); left_over >= 0) {
      return {
          {},
          fmt::format("node {}: rank {} has no GPU of its own: {} on this node but {}; start one "
                      "rank per GPU or give --share-gpus",
                      topology.node_names[static_cast<std::size_t>(node)],
                      numbers[static_cast<std::size_t>(left_over)], counted(ranks.size(), "rank"),
                      counted(on_node.devices(), "visible GPU")),
          true};
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      binding.device_of_rank[numbers[i]] = on_node.device(i);
    }
  }
  return binding;
}

GpuBinding bind_gpus(Control& ranks, bool share) {
  const VisibleGpus mine = collectively(ranks, look);
  std::vector<VisibleGpus> visible;
  for (const std::string& text : ranks.gather_text(encoded(mine), "visible GPUs")) {
    visible.push_back(decoded(text));
  }
  return bind_gpus(Topology::of_machines(ranks), visible, share);
}

std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device) {
  return ranks_on_one_gpu(ranks, device, machine_identity());
}

std::optional<std::pair<int, int>> ranks_on_one_gpu(Control& ranks, int device,
                                                    const std::string& machine) {
  const std::string mine = collectively(ranks, [&] {
    return machine + ' ' + cuda_devices().at(static_cast<std::size_t>(device)).bus_id;
  });
  std::map<std::string, int> first;
  const std::vector<std::string> all = ranks.gather_text(mine, "GPUs of the ranks");
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto [found, is_new] = first.try_emplace(all[static_cast<std::size_t>(rank)], rank);
    if (!is_new) return std::pair(found->second, rank);
  }
  return std::nullopt;
}

}  // namespace annulus
