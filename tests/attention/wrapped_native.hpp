#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>

namespace annulus::test {

/// The native kernel under another name, with something around it.
class WrappedNative final : public Implementation {
 public:
  using Wrap = std::function<std::unique_ptr<Kernel>(std::unique_ptr<Kernel> native)>;

  /// Plans assume `speed` times the rate of the kernel.
  WrappedNative(std::string name, Wrap wrap, double speed = 1)
      : names_{std::move(name)},
        wrap_(std::move(wrap)),
        speed_(speed),
        declaration_(native().declares()) {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  /// The declarations of the native kernel, to be changed before it is used.
  [[nodiscard]] Declaration& declaration() noexcept { return declaration_; }
  /// Its kernels see the problem as it is when they are made, whatever comes with a call.
  void keep_problem() noexcept { keeps_problem_ = true; }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return Capability::yes();
  }
  [[nodiscard]] Capability available(Place /*place*/) const override { return Capability::yes(); }
  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place place) const override {
    return speed_ * native().assumed_rate(problem, place);
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    if (!keeps_problem_) return wrap_(native().make_kernel(problem, device));
    kept_.push_back(std::make_unique<AttentionProblem>(problem));
    return wrap_(native().make_kernel(*kept_.back(), device));
  }

 private:
  [[nodiscard]] const Implementation& native() const { return registry_.get("native"); }

  Registry registry_ = Registry::standard();
  std::vector<std::string> names_;
  Wrap wrap_;
  double speed_;
  Declaration declaration_;
  bool keeps_problem_ = false;
  mutable std::vector<std::unique_ptr<AttentionProblem>> kept_;
};

/// Adds the native kernel under another name to a registry.
inline WrappedNative& add_native(
    Registry& registry, std::string name, double speed = 1,
    WrappedNative::Wrap wrap = [](std::unique_ptr<Kernel> native) { return native; }) {
  auto made = std::make_unique<WrappedNative>(std::move(name), std::move(wrap), speed);
  WrappedNative& added = *made;
  registry.add(std::move(made));
  return added;
}

}  // namespace annulus::test
