#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/key_value_store.hpp>

#include "face/c/handles.hpp"

namespace annulus::c {
namespace {

thread_local std::string reason;  // of a failed call of a store

/// A store of the caller.
class CallersStore final : public KeyValueStore {
 public:
  explicit CallersStore(const annulus_store_calls& calls) : calls_(calls) {}

  void set(const std::string& key, const std::string& value) override {
    check("set", key, calls_.set(calls_.user, key.c_str(), value.data(), value.size()));
  }
  [[nodiscard]] std::optional<std::string> get(const std::string& key, double seconds) override {
    thread_local std::string value;
    value.resize(kMaximumBytes);
    std::size_t bytes = 0;
    const int status =
        calls_.get(calls_.user, key.c_str(), seconds, value.data(), value.size(), &bytes);
    if (status == ANNULUS_STORE_NO_VALUE) return {};
    check("get", key, status);
    if (bytes > value.size()) {
      throw LibraryError(fmt::format("key-value store: get of {}: {} bytes in a buffer of {}", key,
                                     bytes, value.size()));
    }
    return value.substr(0, bytes);
  }
  void remove(const std::string& key) override {
    check("remove", key, calls_.remove(calls_.user, key.c_str()));
  }

 private:
  static void check(const char* call, const std::string& key, int status) {
    if (status == 0) return;
    const std::string why = std::exchange(reason, {});
    throw LibraryError(fmt::format("key-value store: {} of {}: {}", call, key,
                                   why.empty() ? fmt::format("error {}", status) : why));
  }

  annulus_store_calls calls_;
};

}  // namespace
}  // namespace annulus::c

using annulus::c::checked;
using annulus::c::guarded;

void annulus_store_set_error(const char* text) {
  try {
    annulus::c::reason = text != nullptr ? text : "";
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for it
  }
}

annulus_status annulus_store_create(const annulus_store_calls* calls, int rank, int size,
                                    annulus_store** store) {
  return guarded([&] {
    const annulus_store_calls& given = checked(calls, "calls");
    if (given.set == nullptr || given.get == nullptr || given.remove == nullptr) {
      throw annulus::ArgumentError("calls", "a null pointer", "set, get and remove");
    }
    checked(store, "store") =
        new annulus_store{std::make_shared<annulus::c::CallersStore>(given), rank, size};
  });
}
void annulus_store_destroy(annulus_store* store) {
  delete store;
}
