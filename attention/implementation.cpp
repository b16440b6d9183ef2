#include <string>

#include <annulus/attention/implementation.hpp>

namespace annulus {

Capability Implementation::fits(const AttentionProblem& problem, Place place) const {
  std::string lacking;
  for (const Feature feature : features_of(problem).missing_in(declares().features)) {
    lacking += (lacking.empty() ? "does not honour " : ", ") + std::string(name_of(feature));
  }
  if (!lacking.empty()) return Capability::no(lacking);
  return accepts(problem, place);
}

Capability Implementation::capability(const AttentionProblem& problem, Place place) const {
  const Capability fit = fits(problem, place);
  return fit ? available(place) : fit;
}

}  // namespace annulus
