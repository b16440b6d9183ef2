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

  /// Plans assume `speed` times the rate of the native kernel.
  WrappedNative(std::string name, Wrap wrap, double speed = 1)
      : names_{std::move(name)}, wrap_(std::move(wrap)), speed_(speed) {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override {
    return native_.get("native").declares();
  }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return Capability::yes();
  }
  [[nodiscard]] Capability available(Place /*place*/) const override { return Capability::yes(); }
  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place place) const override {
    return speed_ * native_.get("native").assumed_rate(problem, place);
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return wrap_(native_.get("native").make_kernel(problem, device));
  }

 private:
  std::vector<std::string> names_;
  Wrap wrap_;
  double speed_;
  Registry native_ = Registry::standard();
};

}  // namespace annulus::test
