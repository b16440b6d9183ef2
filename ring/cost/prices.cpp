#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/error.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {
namespace {

using Classes = std::map<ProblemClass, KernelCost>;

// Seconds of a call that was not measured.
constexpr double kHostCall = 1e-6;
constexpr double kDeviceCall = 9e-6;

// Kernels whose assumed rates differ by more than this factor use different units of the device.
constexpr double kAlike = 4;

// The smaller the distance, the more a class's figures say about the wanted class.
auto distance(const ProblemClass& other, const ProblemClass& wanted) {
  const auto dims = [](const ProblemClass& c) { return c.head_dim + c.value_dim; };
  const int dtype = other.dtype == wanted.dtype                     ? 0
                    : size_of(other.dtype) == size_of(wanted.dtype) ? 1
                                                                    : 2;
  return std::tuple(dtype, other.pass != wanted.pass, std::abs(dims(other) - dims(wanted)),
                    std::abs(static_cast<int>(other.mask) - static_cast<int>(wanted.mask)),
                    other.soft_cap != wanted.soft_cap);
}

// Returns end() if none was measured.
Classes::const_iterator nearest(const Classes& measured, const ProblemClass& wanted) {
  return std::min_element(measured.begin(), measured.end(), [&](const auto& a, const auto& b) {
    return distance(a.first, wanted) < distance(b.first, wanted);
  });
}

// The ratio of another kernel's measured rate to its assumed rate, which says how fast the device
// is.
struct Comparison {
  std::string source;
  double factor = 1;
};

// Compares by the nearest class of any kernel with a similar assumed rate; of several, the most
// similar. None if nothing was measured.
std::optional<Comparison> compare(const ProblemClass& wanted, double assumed,
                                  const CostModel& model, Place place) {
  static const Registry registry = Registry::standard();
  std::optional<Comparison> best;
  std::pair<decltype(distance(wanted, wanted)), double> least;
  for (const auto& [name, classes] : model.kernels) {
    // Implementations that a program has added have no assumed rate.
    if (std::ranges::find(registry.names(), name) == registry.names().end()) continue;
    const auto near = nearest(classes, wanted);
    if (near == classes.end()) continue;
    const auto& [shape, cost] = *near;
    const double expected = registry.get(name).assumed_rate(shape, place);
    const double difference = std::abs(std::log(expected / assumed));
    const std::pair how_far(distance(shape, wanted), difference);
    if (difference > std::log(kAlike) || (best && !(how_far < least))) continue;
    least = how_far;
    best = {fmt::format("{} was measured for {}", name, to_string(shape)),
            cost.rate.points().back().value / expected};
  }
  return best;
}

KernelCost price_of(const Implementation& candidate, const ProblemClass& wanted,
                    const CostModel& model, Place place) {
  const double assumed = candidate.assumed_rate(wanted, place);
  const double call = place.is_host() ? kHostCall : kDeviceCall;
  const auto known = model.kernels.find(candidate.kernel_name());
  if (known != model.kernels.end() && !known->second.empty()) {
    const auto& [shape, cost] = *nearest(known->second, wanted);
    if (shape == wanted) {
      return {fmt::format("measured for {} ({})", to_string(shape), cost.source), cost.rate,
              cost.call_latency, Knowledge::measured};
    }
    const double factor = assumed / candidate.assumed_rate(shape, place);
    return {fmt::format("nearest measured class: {} ({}), times {:.2f} for {}", to_string(shape),
                        cost.source, factor, to_string(wanted)),
            cost.rate.scaled(factor), cost.call_latency, Knowledge::nearest};
  }
  const std::string source = fmt::format("assumed for {}", to_string(wanted));
  if (const auto other = compare(wanted, assumed, model, place)) {
    return {fmt::format("{}, times {:.2f}, as {}", source, other->factor, other->source),
            CostCurve::constant(assumed * other->factor), call, Knowledge::assumed};
  }
  return {source, CostCurve::constant(assumed), call, Knowledge::assumed};
}

}  // namespace

std::string Prices::knowledge() const {
  std::string text;
  for (const auto& [name, cost] : kernels) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, name_of(cost.knowledge));
  }
  return text;
}

std::string Prices::to_text() const {
  std::string text = fmt::format("{}\nnodes {}", to_json(model), fmt::join(node_of_rank, ","));
  for (const auto& [name, cost] : kernels) {
    const FewRows& few = cost.few_rows;
    text += fmt::format("\n{}: {}, {} s, tiles of {} rows, {}few rows {} {} {} {} {} {}", name,
                        cost.source, cost.call_latency, cost.row_tile,
                        cost.joins_query_heads ? "joined heads, " : "", few.most, few.always,
                        few.tiles, few.columns, few.rate, few.banded);
    for (const CostCurve::Point& point : cost.rate.points()) {
      text += fmt::format(", {}: {}", point.size, point.value);
    }
  }
  return text;
}

const KernelCost& Prices::kernel(const std::string& implementation) const {
  const auto found = kernels.find(implementation);
  if (found == kernels.end()) {
    throw InternalError(fmt::format("prices lack implementation '{}'", implementation));
  }
  return found->second;
}

Prices make_prices(CostModel model, const AttentionProblem& problem,
                   const std::vector<const Implementation*>& candidates, Place place, Pass pass) {
  model.check_place(place);
  const ProblemClass wanted = class_of(problem, pass);
  Prices prices{std::move(model), {}, {}};
  for (const Implementation* candidate : candidates) {
    KernelCost price = price_of(*candidate, wanted, prices.model, place);
    const Declaration& declares = candidate->declares();
    price.row_tile = declares.row_tile;
    price.joins_query_heads = declares.backward && declares.backward->joins_query_heads;
    price.few_rows = candidate->few_rows(problem);
    prices.kernels.emplace(candidate->names().front(), std::move(price));
  }
  return prices;
}

}  // namespace annulus::ring
