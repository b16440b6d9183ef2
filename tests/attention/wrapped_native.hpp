#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/registry.hpp>

namespace annulus::test {

/// The native kernel, or another one of the CPU, under another name, with something around it.
class WrappedNative final : public Implementation {
 public:
  using Wrap = std::function<std::unique_ptr<Kernel>(std::unique_ptr<Kernel> native)>;

  /// Plans assume `speed` times the rate of the kernel. `device`: where it computes, if not where
  /// the wrapped one does; it must outlive the object.
  WrappedNative(std::string name, Wrap wrap, double speed = 1, std::string wrapped = "native",
                Device* device = nullptr)
      : names_{std::move(name)},
        wrap_(std::move(wrap)),
        speed_(speed),
        wrapped_(std::move(wrapped)),
        device_(device),
        declaration_(registry_.get(wrapped_).declares()) {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  /// Those of the wrapped one, to be changed before it is used.
  [[nodiscard]] Declaration& declaration() noexcept { return declaration_; }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return Capability::yes();
  }
  [[nodiscard]] Capability available(Place /*place*/) const override { return Capability::yes(); }
  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place place) const override {
    return speed_ * registry_.get(wrapped_).assumed_rate(problem, device_ ? Place::host() : place);
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    return wrap_(registry_.get(wrapped_).make_kernel(problem, device_ ? *device_ : device));
  }

 private:
  std::vector<std::string> names_;
  Wrap wrap_;
  double speed_;
  std::string wrapped_;
  Device* device_;
  Registry registry_ = Registry::standard();
  Declaration declaration_;
};

}  // namespace annulus::test
