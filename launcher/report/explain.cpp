#include "launcher/report/explain.hpp"

#include <algorithm>
#include <string>

#include <fmt/format.h>

#include <annulus/attention/modifiers.hpp>
#include <annulus/core/log.hpp>
#include <annulus/ring/predicted_run.hpp>

#include "launcher/options/option_values.hpp"

namespace annulus::launcher {
namespace {

// "sdpa or native", since each block has its own.
std::string candidates_text(const Selection& selection) {
  std::string text;
  for (const Implementation* candidate : selection.candidates) {
    text += (text.empty() ? "" : " or ") + candidate->names().front();
  }
  return text;
}

// Why the chosen variant was taken; each of the others has a line that says why it was not.
std::string why_chosen(const ring::ScheduleChoice& choice) {
  if (choice.passed_over.empty()) return "it was named";
  const auto priced = std::ranges::count_if(choice.passed_over,
                                            [](const auto& other) { return other.seconds > 0; });
  if (choice.seconds == 0) return "no other can run here and be of use";
  if (priced == 0) return "no other could be faster, or only tie with it; see the bounds below";
  return fmt::format("it is predicted to take {}, the best of {} simulated",
                     ring::milliseconds_text(choice.seconds), priced + 1);
}

}  // namespace

void Explanation::add(const ring::Decision& decision) {
  std::string made = fmt::format("{}: {}", ring::name_of(decision.by), decision.why);
  if (!decision.choice.is_open()) made += ": " + choice_text(decision.choice);
  add_line("choice made by", made);
  for (const ring::Decision::Passed& other : decision.passed) {
    add_line(fmt::format("choice not made by {}", ring::name_of(other.link)), other.reason);
  }
  for (const ring::TunedCandidate& one : decision.candidates) {
    add_line("candidate of the measurement, " + choice_text(one.choice),
             one.reason.empty() ? fmt::format("{:.4g} ms (predicted {:.4g} ms)", one.seconds * 1e3,
                                              one.predicted * 1e3)
                                : "passed over: " + one.reason);
  }
}

void Explanation::add(const ring::ScheduleChoice& choice) {
  add_line("schedule chosen", variant_text(choice));
  add_line("schedule chosen because", why_chosen(choice));
  for (const auto& other : choice.passed_over) {
    add_line("schedule passed over, " + variant_text(other), other.reason);
  }
}

void Explanation::add(const ring::Prices& prices) {
  for (const auto& [name, cost] : prices.kernels) add_line("rate of " + name, cost.source);
}

void Explanation::add(const Selection& selection, const ring::ScheduleChoice& choice,
                      const ring::Decision& decision, const ring::Prices& prices) {
  add(selection, choice);
  add(decision);
  add(prices);
}

void Explanation::add(const Selection& selection, const ring::ScheduleChoice& choice) {
  add_line("implementation chosen", candidates_text(selection));
  add(choice);
  for (const auto& [name, reason] : selection.passed_over) {
    add_line("implementation passed over, " + name, reason);
  }
}

void Explanation::add(const ring::ShardedAttention& pass) {
  add(pass.selection(), pass.schedule(), pass.decision(), pass.plan_input().prices);
}

void explain(const Attention& attention, const ring::ShardedAttention* backward, Report& report) {
  Explanation(report).add(attention.forward_pass());
  if (backward != nullptr) Explanation(report, "backward ").add(*backward);
}

void add_rounding(const ring::ShardedAttention& backward, Report& report) {
  if (!backward.adds_rounded_gradients()) return;
  report.add_meta("gradients", "parts of keys and values sent in bfloat16, each rounded once");
}

void add_price_of_order(const ring::ScheduleChoice& choice, std::string_view pass, Report& report,
                        const std::optional<MeasuredPrice>& measured) {
  if (!choice.unrestricted) return;
  const auto factor = [](double seconds, double without) {
    return without > 0 ? fmt::format(" (x {:.2f})", seconds / without) : std::string();
  };
  const double seconds = choice.unrestricted->seconds;
  std::string text =
      fmt::format("{} is predicted to take {:.4g} ms, and {} without it {:.4g} ms{}",
                  variant_text(choice), choice.seconds * 1e3, variant_text(*choice.unrestricted),
                  seconds * 1e3, factor(choice.seconds, seconds));
  if (measured) {
    text += fmt::format("; measured {:.4g} ms, and {:.4g} ms without it{}", measured->seconds * 1e3,
                        measured->unrestricted * 1e3,
                        factor(measured->seconds, measured->unrestricted));
  }
  report.add_meta(fmt::format("reproducible world, {}", pass), text);
}

void log_choices(const AttentionProblem& problem, const Attention& attention, const Mesh& mesh) {
  const int rank = mesh.rank();
  const ring::ShardedOperands& operands = attention.operands();
  log_debug("holds queries {} and keys {} of the sequence, {} kernel calls",
            to_string(operands.query.positions(rank, 1)),
            to_string(operands.key.positions(rank, 1)),
            attention.rank_plan().all<ring::Block>().size());
  const Selection selection = attention.selection();
  for (const auto& [name, reason] : selection.passed_over) {
    log_debug("implementation {} passed over: {}", name, reason);
  }
  const std::string implementations = attention.implementations_of_ranks();
  if (rank != 0) return;
  log_info("problem {} {}, {}", to_string(problem.shape), annulus::name_of(problem.dtype),
           mask_and_modifiers_text(problem));
  log_info("shards: query {}, key/value {}; {} of them along the sequence, {}",
           to_string(operands.query), to_string(operands.key), operands.key.shards(1),
           annulus::name_of(operands.key.distribution(1).layout()));
  const ring::Decision& decision = attention.decision();
  log_info("choice made by {}: {}", ring::name_of(decision.by), decision.why);
  const ring::ScheduleChoice& choice = attention.schedule();
  log_info("schedule {}", variant_text(choice));
  for (const auto& other : choice.passed_over) {
    log_info("schedule {} passed over: {}", variant_text(other), other.reason);
  }
  log_info("implementation {} (possible: {}), transport {}", implementations,
           candidates_text(selection), attention.transport());
}

void print_plan(const ring::Plan& plan, int ranks, std::ostream& out) {
  std::string text = ring::to_text(plan, ranks);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (const std::string_view line : split(text, '\n')) {
    out << '#' << (line.empty() ? "" : " ") << line << '\n';
  }
}

}  // namespace annulus::launcher
