#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/bootstrap.hpp>
#include <annulus/mesh/key_value_store.hpp>

#include "control/tree_control.hpp"
#include "store/store_board.hpp"
#include "store/store_group.hpp"
#include "store/store_messenger.hpp"

namespace annulus {

class StoreBootstrap final : public Bootstrap {
 public:
  StoreBootstrap(std::shared_ptr<KeyValueStore> store, int rank, int size)
      : store_(std::move(store)), prefix_(store_->prefix_of_mesh()), rank_(rank), size_(size) {}

  [[nodiscard]] std::shared_ptr<Heartbeats> connect(Watchdog::Seconds interval,
                                                    const Watchdog& /*watchdog*/) override {
    const std::string key = fmt::format("{}rank/{}", prefix_, rank_);
    if (store_->get(key, 0)) {
      throw LibraryError(fmt::format(
          "key-value store: {} is there before this mesh, from another group of ranks, an earlier "
          "job or "
          "another store object of this rank: give each group and job a prefix of its own, and one "
          "store object to all its meshes",
          key));
    }
    board_ =
        std::make_shared<StoreBoard>(store_, prefix_ + "rank/", rank_, size_, interval.count());
    return board_;
  }
  [[nodiscard]] std::shared_ptr<Control> control(const Watchdog& watchdog) override {
    std::vector<int> all(static_cast<std::size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    auto control = std::make_shared<TreeControl>(
        std::make_unique<StoreMessenger>(ranks(std::move(all), "all"), watchdog));
    control->barrier("start of the mesh");
    store_->remove_now();
    return control;
  }
  [[nodiscard]] std::unique_ptr<Group> group(std::vector<int> members, const std::string& axes,
                                             const Watchdog& watchdog) override {
    return make_store_group(ranks(std::move(members), "axes/" + axes), watchdog);
  }
  [[nodiscard]] std::string obstacle() const override { return store_obstacle(); }

 private:
  // Groups of one call share their prefix, and have no pair of ranks in common.
  [[nodiscard]] std::shared_ptr<const StoreRanks> ranks(std::vector<int> members,
                                                        const std::string& name) const {
    const auto own = std::ranges::find(members, rank_);
    const int rank = static_cast<int>(own - members.begin());
    const std::string prefix = fmt::format("{}{}/{}/", prefix_, name, members.front());
    return std::make_shared<const StoreRanks>(
        StoreRanks{store_, board_, prefix, std::move(members), rank});
  }

  std::shared_ptr<KeyValueStore> store_;
  std::string prefix_;
  int rank_;
  int size_;
  std::shared_ptr<StoreBoard> board_;
};

std::unique_ptr<Bootstrap> make_store_bootstrap(std::shared_ptr<KeyValueStore> store, int rank,
                                                int size) {
  if (store == nullptr) throw ArgumentError("store", "a null pointer", "a store");
  if (size < 1) throw ArgumentError("size", std::to_string(size), "1 or more ranks");
  if (rank < 0 || rank >= size) {
    throw ArgumentError("rank", std::to_string(rank), fmt::format("0 to {}", size - 1));
  }
  return std::make_unique<StoreBootstrap>(std::move(store), rank, size);
}

}  // namespace annulus
