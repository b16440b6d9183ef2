#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>
#include <annulus/ring/prices.hpp>

namespace annulus::ring {
namespace {

using Classes = std::map<ProblemClass, KernelCost>;

// Seconds of a call that was not measured.
constexpr double kHostCall = 1e-6;
constexpr double kDeviceCall = 9e-6;

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

KernelCost price_of(const Implementation& candidate, const ProblemClass& wanted,
                    const CostModel& model, Place place) {
  // The rate of the whole rank; an assumed CPU rate is that of one thread.
  const auto rate_of = [&](const ProblemClass& problem) {
    return candidate.assumed_rate(problem, place) *
           (place.is_host() ? std::max(1, model.threads) : 1);
  };
  const double assumed = rate_of(wanted);
  const auto known = model.kernels.find(candidate.kernel_name());
  if (known != model.kernels.end() && !known->second.empty()) {
    const auto& [shape, cost] = *nearest(known->second, wanted);
    if (shape == wanted) {
      return {fmt::format("measured for {} ({})", to_string(shape), cost.source), cost.rate,
              cost.call_latency, Knowledge::measured};
    }
    const double factor = assumed / rate_of(shape);
    return {fmt::format("nearest measured class: {} ({}), times {:.2f} for {}", to_string(shape),
                        cost.source, factor, to_string(wanted)),
            cost.rate.scaled(factor), cost.call_latency, Knowledge::nearest};
  }
  return {fmt::format("assumed for {}", to_string(wanted)), CostCurve::constant(assumed),
          place.is_host() ? kHostCall : kDeviceCall, Knowledge::assumed};
}

}  // namespace

std::string Prices::knowledge() const {
  std::string text;
  for (const auto& [name, cost] : kernels) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, name_of(cost.knowledge));
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

void share_prices(Prices& prices, Control& ranks) {
  std::vector<double> highest;  // negated rates, since the lowest rate is wanted
  for (const auto& [name, cost] : prices.kernels) {
    highest.push_back(cost.call_latency);
    for (const CostCurve::Point& point : cost.rate.points()) highest.push_back(-point.value);
  }
  highest = ranks.max(highest, "prices of kernels");
  auto next = highest.begin();
  for (auto& [name, cost] : prices.kernels) {
    cost.call_latency = *next++;
    std::vector<CostCurve::Point> points = cost.rate.points();
    for (CostCurve::Point& point : points) point.value = -*next++;
    cost.rate = CostCurve(std::move(points), "rates of all ranks");
  }
}

}  // namespace annulus::ring
