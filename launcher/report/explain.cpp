#include "launcher/report/explain.hpp"

#include <string>

#include <fmt/format.h>

#include "launcher/options/option_values.hpp"

namespace annulus::launcher {

void explain(const Selection& selection, Report& report) {
  std::string candidates;
  for (const Implementation* candidate : selection.candidates) {
    candidates += (candidates.empty() ? "" : ", then ") + candidate->names().front();
  }
  report.add_meta("implementation chosen", candidates);
  for (const auto& [name, reason] : selection.passed_over) {
    report.add_meta("implementation passed over, " + name, reason);
  }
}

void explain(const ring::ScheduleChoice& choice, Report& report) {
  report.add_meta("schedule chosen", std::string(ring::name_of(choice.schedule)));
  for (const auto& other : choice.passed_over) {
    report.add_meta(fmt::format("schedule passed over, {}", ring::name_of(other.schedule)),
                    other.reason);
  }
}

void print_plan(const ring::Plan& plan, int ranks, std::ostream& out) {
  std::string text = ring::to_text(plan, ranks);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (const std::string_view line : split(text, '\n')) {
    out << '#' << (line.empty() ? "" : " ") << line << '\n';
  }
}

}  // namespace annulus::launcher
