#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/error.hpp>

namespace annulus {

/// Holds the names of an implementation that this build does not have, and says so.
class AbsentImplementation final : public Implementation {
 public:
  AbsentImplementation(std::vector<std::string> names, const UnsupportedError& reason)
      : names_(std::move(names)), error_(reason) {}

  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }
  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }
  [[nodiscard]] Capability accepts(const AttentionProblem& /*problem*/,
                                   Place /*place*/) const override {
    return Capability::no(error_.what());
  }
  [[nodiscard]] Capability available(Place /*place*/) const override {
    return Capability::no(error_.what());
  }
  [[nodiscard]] double assumed_rate(const AttentionProblem& /*problem*/,
                                    Place /*place*/) const override {
    throw error_;
  }
  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& /*problem*/,
                                                    Device& /*device*/) const override {
    throw error_;
  }

 private:
  std::vector<std::string> names_;
  Declaration declaration_{.features = FeatureSet::all()};
  UnsupportedError error_;
};

}  // namespace annulus
