#include <string>
#include <utility>

#include <annulus/attention/implementation.hpp>
#include <annulus/core/error.hpp>

namespace annulus {
namespace {

// Names the features of a problem that `honoured` lacks; empty if there are none.
std::string lacking_text(const AttentionProblem& problem, const FeatureSet& honoured) {
  std::string lacking;
  for (const Feature feature : features_of(problem).missing_in(honoured)) {
    lacking += (lacking.empty() ? "does not honour " : ", ") + std::string(name_of(feature));
  }
  return lacking;
}

// Adds to why a problem is not honoured, if it is not, that its bits would depend on the ranks.
std::string with_reproducibility(const AttentionProblem& problem, const Declaration& declares,
                                 std::string lacking) {
  if (!problem.in_global_order() || declares.reproducible_rows > 0) return lacking;
  return lacking + (lacking.empty() ? "" : "; ") +
         "its bits depend on how the problem is sharded (reproducible world)";
}

}  // namespace

void Kernel::backward(const BackwardBlock& /*block*/, const Gradients& /*gradients*/,
                      const ExecutionContext& /*context*/) {
  throw InternalError("a kernel without gradients was asked for some");
}

Capability Implementation::fits(const AttentionProblem& problem, Place place) const {
  const std::string lacking =
      with_reproducibility(problem, declares(), lacking_text(problem, declares().features));
  return lacking.empty() ? accepts(problem, place) : Capability::no(lacking);
}

Capability Implementation::fits_backward(const AttentionProblem& problem, Place place) const {
  const std::optional<BackwardDeclaration>& backward = declares().backward;
  if (!backward) return Capability::no("computes no gradients");
  std::string lacking = lacking_text(problem, backward->features);
  if (!lacking.empty()) lacking += " in the backward pass";
  lacking = with_reproducibility(problem, declares(), std::move(lacking));
  return lacking.empty() ? accepts_backward(problem, place) : Capability::no(lacking);
}

Capability Implementation::capability(const AttentionProblem& problem, Place place) const {
  const Capability fit = fits(problem, place);
  return fit ? available(place) : fit;
}

}  // namespace annulus
