#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <annulus/attention/implementation.hpp>

namespace annulus {

/// Who may compute a problem, and why the others may not.
struct Selection {
  /// In order of registration. Each block goes to the one that is predicted to be fastest of those
  /// that take it, the first of equals. Just one when it was named.
  std::vector<const Implementation*> candidates;
  /// (name, reason) of every implementation that cannot.
  std::vector<std::pair<std::string, std::string>> passed_over;
};

/// Whether this machine must be able to compute, or the plan is for another one.
enum class Presence : std::uint8_t { required, assumed };

/// The implementations by name. Names are case-sensitive.
class Registry {
 public:
  /// All implementations. One whose backend is not in this build is listed too; it
  /// refuses every problem with that reason.
  static Registry standard();

  /// For `auto` to choose from, as Selection says. Throws ArgumentError if a name is taken.
  void add(std::unique_ptr<Implementation> implementation);

  /// By name or alias. Throws ArgumentError listing the known names.
  [[nodiscard]] const Implementation& get(std::string_view name) const;
  /// Names in order of registration. The aliases of an implementation follow its name.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] const std::vector<std::unique_ptr<Implementation>>& implementations() const {
    return implementations_;
  }

  /// For "auto", all implementations that can run the problem at `place`. Otherwise the named one;
  /// throws UnsupportedError with its reason if it cannot. ANNULUS_FORCE_NATIVE=1 makes every name
  /// mean "native".
  [[nodiscard]] Selection select(std::string_view name, const AttentionProblem& problem,
                                 Place place, Presence presence = Presence::required) const;

 private:
  std::vector<std::unique_ptr<Implementation>> implementations_;
};

}  // namespace annulus
