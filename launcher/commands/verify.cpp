#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/device.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/verification/random_problem.hpp>
#include <annulus/verification/verification.hpp>

#include "launcher/commands/commands.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/coverage.hpp"
#include "launcher/report/explain.hpp"
#include "launcher/report/interruption.hpp"
#include "launcher/report/progress.hpp"
#include "launcher/report/record.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/tally.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/hints.hpp"
#include "launcher/setup/open_context.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

// One problem of the run, as the table names it.
struct NamedCase {
  std::string index;
  MeshShape mesh;
  verification::ShardedCase sharded;
  std::string command;  // that repeats it
  bool may_be_refused = false;
  std::vector<std::string> warnings;
};

// Makes the problem one without float64, which is drawn only for vanilla.
void narrow(AttentionProblem& problem) {
  problem.softmax_dtype = DType::float32;
  if (problem.dtype == DType::float64) problem.dtype = DType::float32;
}

// The drawn backward pass, if it is to be computed. An implementation named for the forward pass
// computes it too if it can.
std::optional<verification::BackwardCase> backward_of(const verification::RandomProblem& drawn,
                                                      const AttentionProblem& problem,
                                                      const Options& options,
                                                      const Registry& registry, Place place) {
  if (!drawn.backward || !options.backward.value_or(drawn.draws_backward)) return {};
  verification::BackwardCase backward = *drawn.backward;
  // GPUs, and schedules that keep an order, compute gradients of only some problems.
  backward.may_be_refused = !place.is_host() || problem.in_global_order();
  if (problem.in_global_order()) backward.implementation = backward.schedule = "auto";
  if (options.implementation != "auto") {
    const bool can =
        place.is_host() &&
        static_cast<bool>(registry.get(options.implementation).fits_backward(problem, place));
    backward.implementation = can ? options.implementation : "auto";
  }
  return backward;
}

// Few schedules and implementations keep the order of additions, so drawn ones would mostly be
// refused.
void leave_order_open(verification::ShardedCase& drawn) {
  drawn.schedule = "auto";
  drawn.implementation = "auto";
  narrow(drawn.problem);
}

NamedCase random_case(const RandomCase& which, const Options& options, Context& context) {
  const Place place = context.place();
  const verification::RandomProblem drawn =
      verification::draw_problem(which.seed, which.index, context.size(), place.kind);
  NamedCase result;
  result.index = std::to_string(which.index);
  result.mesh = drawn.mesh;
  result.sharded = drawn;
  if (options.reproducible) {
    result.sharded.problem.reproducible = options.reproducible;
    result.may_be_refused = result.sharded.problem.in_global_order();
  }
  if (result.may_be_refused) leave_order_open(result.sharded);
  if (options.implementation != "auto") {
    // Few kernels for GPUs take every block, so others compute the blocks that the named one
    // refuses.
    if (place.is_host()) {
      result.sharded.implementation = options.implementation;
    } else {
      result.sharded.implementation = "auto";
      result.sharded.plan->preferred = options.implementation;
    }
    narrow(result.sharded.problem);
  }
  result.sharded.backward =
      backward_of(drawn, result.sharded.problem, options, context.registry(), place);
  result.sharded.transport = options.transport;
  result.sharded.tuning = tuning_options(options);
  result.command = drawn.command;
  if (options.backward) result.command += *options.backward ? " --backward" : " --backward=false";
  if (options.implementation != "auto") result.command += " --impl " + options.implementation;
  if (options.reproducible) {
    result.command += fmt::format(" --reproducible {}", annulus::name_of(*options.reproducible));
  }
  if (options.share_gpus) result.command += " --share-gpus";
  if (options.transport != Transport::automatic) {
    result.command += fmt::format(" --transport {}", annulus::name_of(options.transport));
  }
  return result;
}

// On GPUs, false if the named implementation cannot compute the problem, or gradients that were
// drawn or asked for.
bool suits(const NamedCase& drawn, const Options& options, Context& context) {
  const Place place = context.place();
  if (options.implementation == "auto" || place.is_host()) return true;
  const Implementation& named = context.registry().get(options.implementation);
  const AttentionProblem& problem = drawn.sharded.problem;
  if (!named.fits(problem, place)) return false;
  if (!drawn.sharded.backward) return !options.backward.value_or(false);
  return static_cast<bool>(named.fits_backward(problem, place));
}

NamedCase given_case(const Options& options, Context& context) {
  const int ranks = context.size();
  if (!options.shape) {
    throw ArgumentError("--shape", "nothing",
                        "B,T,S,N,K,D or B,T,S,N,K,D,Dv (or --random N for random problems)");
  }
  ProblemSetup setup =
      set_up_problem(options, *options.shape, options.dtype.value_or(DType::float32), ranks);
  check_choices(setup.problem, shard_operands(setup), context.registry(), context.place());
  NamedCase result;
  result.index = std::to_string(0);
  result.warnings = std::move(setup.warnings);
  result.mesh = std::move(setup.mesh);
  result.sharded.plan = plan_options(setup.problem, context.place());
  result.sharded.problem = setup.problem;
  result.sharded.fills = std::move(setup.fills);
  result.sharded.layout = std::move(setup.layout);
  result.sharded.schedule = options.schedule;
  result.sharded.implementation = options.implementation;
  result.sharded.transport = options.transport;
  result.sharded.tuning = tuning_options(options);
  result.sharded.seed = options.seed;
  if (options.backward.value_or(false)) {
    result.sharded.backward.emplace().grad_wire = options.grad_wire;
    ring::BackwardRequest& request = result.sharded.backward->request;
    request.grad_sinks = result.sharded.problem.sinks.has_value();
    request.grad_bias = result.sharded.problem.bias.has_value();
  }
  result.command = fmt::format("mpirun -np {} annulus verify {}", ranks, options.given);
  return result;
}

Report make_report(const CommandContext& context, const Mesh& mesh, Place place, int threads) {
  const Options& options = context.options;
  Report report(
      "verify", make_record(context, mesh, place, threads),
      {{"index", "", 5},
       {"shape", kShapeUnit, 19},
       {"dtype", "", 8},
       {"mesh", "", 24, 1},
       {"query", "spec", 12, 6},
       {"key/value", "spec", 12, 6},
       {"layout", "", 13, 5},
       {"schedule", "", 14},
       {"transport", "", 0, 6},
       {"impl", "", 6, 4},
       {"mask", "", 24, 4},
       {"scale", "", 7, 6},
       {"cap", "", 4, 6},
       {"sinks", "", 0, 6, "extra logits per head in the softmax's denominator"},
       {"dropout", "", 0, 6, "probability of dropping an attention weight"},
       {"bias", "", 0, 6, "shape of the bias, 1 where it is broadcast"},
       {"form", "", 0, 6, "unnormalised: the output is not divided by the softmax's denominator"},
       {"called", "", 0, 6, "values that come with the calls"},
       {"error", "", 8, 0, "relative Frobenius, over all ranks, against a float64 oracle"},
       {"bound", "", 8, 2, "that the error must not exceed"},
       {"row", "of bound", 8, 3, "largest error of an output row, as a share of the row's bound"},
       {"ratio", "unsharded", 11, 0, "to the error of the same implementation unsharded"},
       {"LSE error", "", 9, 3, "largest absolute error of the log-sum-exp"},
       {"backward", "schedule", 0, 3,
        "of the backward pass; + LSE with a gradient of the LSE, + sinks and + bias with theirs; "
        "sent in bfloat16: parts of other ranks were rounded on their way, which its bound allows"},
       {"backward impl", "", 0, 5, "that computed the gradients"},
       {"gradients", "of bound", 9, 0, "largest error of a gradient, as a share of its bound"},
       {"gradient ratio", "unsharded", 0, 4, "to the error of the same implementation unsharded"},
       {"verdict", "", 7},
       {"command", "", 0, 9, "that repeats just this problem"}},
      {options.wide, options.legend});
  report.add_meta("options", options.given);
  report.add_meta("ranks",
                  fmt::format("{} on {}, {}", mesh.size(), counted(mesh.topology().nodes(), "node"),
                              place.is_host() ? "cpu" : "cuda"));
  add_rank_order(report, context.session);
  return report;
}

std::string number_cell(const std::optional<double>& value) {
  return cell_of(value, [](double number) { return fmt::format("{}", number); });
}

// "lengths, sinks on the device".
std::string called_cell(const verification::ShardedCase& sharded) {
  const CallArguments& arguments = sharded.problem.call_arguments;
  if (!arguments.any() && !sharded.called.sinks) return kNothing;
  std::string cell = arguments.any() ? to_string(arguments) : "";
  if (sharded.called.sinks) cell += cell.empty() ? "sinks" : ", sinks";
  return cell + (sharded.called.in_device_memory ? " on the device" : "");
}

std::string ratio_cell(const std::optional<double>& ratio) {
  return cell_of(ratio, [](double number) { return fmt::format("{:.3f}", number); });
}

// "ring", or "auto:ring".
std::string schedule_cell(const std::string& asked, const ring::ScheduleChoice* chosen) {
  if (chosen == nullptr || asked != "auto") return asked;
  return fmt::format("{}:{}", asked, ring::name_of(chosen->schedule));
}

// Null if no gradients were computed.
const verification::GradientVerification* computed_gradients(
    const verification::Verification* found) {
  if (found == nullptr || !found->gradients || !found->gradients->refusal.empty()) return nullptr;
  return &*found->gradients;
}

// "ring + LSE + sinks + bias, added, sent in bfloat16".
std::string backward_cell(const verification::BackwardCase& backward,
                          const verification::Verification* found) {
  const verification::GradientVerification* const computed = computed_gradients(found);
  std::string cell = schedule_cell(backward.schedule.empty() ? "auto" : backward.schedule,
                                   computed == nullptr ? nullptr : &computed->schedule);
  if (backward.request.grad_lse) cell += " + LSE";
  if (backward.request.grad_sinks) cell += " + sinks";
  if (backward.request.grad_bias) cell += " + bias";
  if (backward.request.adds) cell += ", added";
  if (computed != nullptr && computed->adds_rounded) cell += ", sent in bfloat16";
  return cell;
}

// Adds the row of a problem: its results, or why it could not run.
void add_row(Report& report, const NamedCase& named, const verification::Verification* found,
             std::string_view verdict) {
  const AttentionProblem& problem = named.sharded.problem;
  const std::string schedule =
      schedule_cell(named.sharded.schedule, found == nullptr ? nullptr : &found->schedule);
  const auto measured = [&](const auto& text) {
    return found == nullptr ? std::string(kNothing) : text(*found);
  };
  const verification::GradientVerification* const computed = computed_gradients(found);
  const auto gradients = [&](const auto& text) {
    return computed == nullptr ? std::string(kNothing) : text(*computed);
  };
  report.add_row(
      {named.index,
       shape_cell(problem.shape),
       std::string(annulus::name_of(problem.dtype)),
       mesh_cell(named.mesh),
       to_string(named.sharded.layout.query),
       to_string(named.sharded.layout.kv),
       ring::layout_text(named.sharded.layout),
       schedule,
       measured([](const auto& v) { return v.transport; }),
       measured([](const auto& v) { return v.implementations; }),
       mask_cell(problem),
       number_cell(problem.scale),
       number_cell(problem.soft_cap),
       cell_of(problem.sinks, [](const Sinks& s) { return std::to_string(s.per_head()); }),
       cell_of(problem.dropout,
               [](const Dropout& d) { return fmt::format("{:.4g}", d.probability()); }),
       cell_of(problem.bias,
               [](const Extents& shape) { return fmt::format("{}", fmt::join(shape, ",")); }),
       problem.normalize_output ? kNothing : "unnormalised",
       called_cell(named.sharded),
       measured([](const auto& v) { return fmt::format("{:.2e}", v.sharded.output); }),
       measured([](const auto& v) { return fmt::format("{:.2e}", v.bound.output); }),
       measured([](const auto& v) { return fmt::format("{:.2f}", v.sharded.row_share); }),
       measured([](const auto& v) { return ratio_cell(v.ratio()); }),
       measured([](const auto& v) { return fmt::format("{:.2e}", v.sharded.lse); }),
       named.sharded.backward ? backward_cell(*named.sharded.backward, found) : kNothing,
       gradients([](const auto& v) { return v.implementations; }),
       gradients([](const auto& v) { return fmt::format("{:.3f}", v.share()); }),
       gradients([](const auto& v) { return ratio_cell(v.ratio()); }),
       std::string(verdict),
       named.command});
}

// Verifies one problem after another.
class Verifier {
 public:
  /// The references must outlive it. The device of `everyone` computes all problems.
  Verifier(const CommandContext& context, Context& everyone, Progress& progress, Report& report)
      : context_(context), everyone_(everyone), progress_(progress), report_(report) {}

  /// A problem that the user gave: errors are the user's.
  void verify_given(NamedCase named) {
    named.sharded.cost_model = cost_model();
    const auto show = [this](const char* what, double done, double total) {
      if (done == 0) progress_.begin(what, total);
      progress_.set_done(done);
    };
    const verification::Verification found =
        verification::verify_sharded(named.sharded, context_on(named.mesh), show);
    progress_.aside([&] {
      print_warnings(found.decision.warnings);
      const verification::GradientVerification* const gradients = computed_gradients(&found);
      std::vector<ring::Schedule> chosen{found.schedule.schedule};
      std::optional<bool> rounds;
      if (gradients != nullptr) {
        chosen.push_back(gradients->schedule.schedule);
        rounds = gradients->adds_rounded;
      }
      print_warnings(hints_of_choice(context_.options, chosen, rounds));
      add_price_of_order(found.schedule, "forward", report_);
      if (found.gradients) add_price_of_order(found.gradients->schedule, "backward", report_);
      if (context_.options.explain) {
        Explanation(report_).add(found.selection, found.schedule, found.decision, found.prices);
        if (gradients != nullptr) {
          Explanation(report_, "backward ")
              .add(gradients->selection, gradients->schedule, gradients->decision,
                   gradients->prices);
        }
      }
      add_result(named, found);
    });
  }

  /// A drawn problem is legal, so an error on all ranks counts as a failure like any other.
  void verify_drawn(NamedCase named) {
    named.sharded.cost_model = cost_model();
    const auto refused = [&](const Error& error) {
      // Errors that ranks agreed on have lost their type. Only reasons have these words; what the
      // option wants is said of every problem that has it.
      const std::string_view text = error.what();
      const bool allowed =
          named.may_be_refused && (text.find("reproducible world: ") != std::string_view::npos ||
                                   text.find("(reproducible world)") != std::string_view::npos);
      progress_.aside([&] {
        add_row(report_, named, nullptr, allowed ? "refused" : "FAILED");
        if (allowed) {
          add_refusal(named, "refused", error.what());
          tally_.add_unordered();
        } else {
          add_failure(named, error.what());
          tally_.add_refused();
        }
      });
    };
    try {
      const verification::Verification found =
          verification::verify_sharded(named.sharded, context_on(named.mesh));
      progress_.aside([&] {
        print_warnings(found.decision.warnings);
        add_result(named, found);
      });
      coverage_.add(named.sharded, ring::name_of(found.schedule.schedule));
      if (const auto* const gradients = computed_gradients(&found)) {
        coverage_.add_backward(ring::name_of(gradients->schedule.schedule), gradients->request);
      }
    } catch (const UserError& error) {
      refused(error);
    } catch (const AgreedFailure& error) {
      refused(error);
    }
    progress_.advance(1);
  }

  [[nodiscard]] const Tally& tally() const { return tally_; }
  [[nodiscard]] const Coverage& coverage() const { return coverage_; }

 private:
  // Making a mesh costs more than a small problem, so problems with the same mesh shape share one.
  Context& context_on(const MeshShape& shape) {
    std::unique_ptr<Context>& made = contexts_[to_string(shape)];
    if (!made) made = std::make_unique<Context>(context_.session.world(), shape, everyone_);
    return *made;
  }

  // The same for all problems.
  const ring::CostModel& cost_model() {
    if (!cost_model_) {
      cost_model_ = collectively(everyone_.mesh().world(), [&] {
        return cost_model_of(context_.options, everyone_.place());
      });
    }
    return *cost_model_;
  }

  void add_result(const NamedCase& named, const verification::Verification& found) {
    const std::string failure = found.failure();
    add_row(report_, named, &found, failure.empty() ? "OK" : "FAILED");
    if (!failure.empty()) add_failure(named, failure);
    if (found.gradients) add_refusal(named, "without gradients", found.gradients->refusal);
    tally_.add(found);
  }

  // Only for a single problem: many drawn ones are refused.
  void add_refusal(const NamedCase& named, const char* what, const std::string& why) {
    if (!context_.options.random_case || why.empty()) return;
    report_.add_meta(fmt::format("problem {} {}", named.index, what), why);
  }

  void add_failure(const NamedCase& named, const std::string& what) {
    report_.add_meta("problem " + named.index + " failed", what);
    report_.add_meta("problem " + named.index + " again", named.command);
  }

  const CommandContext& context_;
  Context& everyone_;
  Progress& progress_;
  Report& report_;
  std::map<std::string, std::unique_ptr<Context>> contexts_;
  std::optional<ring::CostModel> cost_model_;
  Tally tally_;
  Coverage coverage_;
};

}  // namespace

ExitCode verify_command(const CommandContext& context) {
  const Options& options = context.options;
  const int ranks = context.session.size();
  const bool random = options.random > 0 || options.random_case.has_value();
  // Drawn problems are small, so each rank has one thread by default.
  Options threaded = options;
  if (random) threaded.threads = std::max(1, options.threads);
  const std::unique_ptr<Context> opened = open_context(
      {context.session, threaded, context.out, context.commit}, MeshShape({{"ranks", ranks}}));
  Mesh& everyone = opened->mesh();

  // All errors in the input show before any work.
  std::optional<NamedCase> given;
  std::optional<ReportFiles> report_files;
  Report report = make_report(context, everyone, opened->place(), opened->threads());
  collectively(everyone.world(), [&] {
    if (!random) given = given_case(options, *opened);
    if (everyone.rank() == 0) report_files.emplace(options.json, options.csv, report);
  });
  if (report_files && !report_files->replace_table()) report.follow(context.out);

  Progress progress(everyone.rank() == 0 ? progress_terminal() : files::FileDescriptor());
  Verifier verifier(context, *opened, progress, report);
  if (given) {
    if (everyone.rank() == 0) print_warnings(given->warnings);
    begin_step("annulus verify was computing the given problem");
    verifier.verify_given(std::move(*given));
  } else if (options.random_case) {
    begin_step(fmt::format("annulus verify was computing problem {}", options.random_case->index));
    verifier.verify_drawn(random_case(*options.random_case, options, *opened));
  } else {
    progress.begin(counted(options.random, "problem"), options.random);
    // Draws cost little, so problems that the named implementation does not compute are passed
    // over.
    constexpr int kMaximumPassedOver = 1000;  // in a row
    int verified = 0;
    int drawn = 0;
    for (int in_a_row = 0; verified < options.random && in_a_row < kMaximumPassedOver; ++drawn) {
      NamedCase named = random_case({options.seed, drawn}, options, *opened);
      in_a_row = suits(named, options, *opened) ? 0 : in_a_row + 1;
      if (in_a_row > 0) continue;
      begin_step(
          fmt::format("annulus verify was computing problem {} of {}", verified, options.random));
      progress.go_on(fmt::format("problem {} of {} (--random-case {}:{})", verified + 1,
                                 options.random, options.seed, drawn));
      verifier.verify_drawn(std::move(named));
      ++verified;
    }
    if (verified < options.random) {
      throw UserError(fmt::format("--impl {}: computes only {} of {} drawn problems; expected {}",
                                  options.implementation, verified, drawn, options.random));
    }
    if (drawn > verified) {
      report.add_meta("passed over",
                      fmt::format("{} that {} does not compute",
                                  counted(drawn - verified, "problem"), options.implementation));
    }
  }
  progress.end();
  report.add_meta("computed by", verifier.tally().computed());
  report.add_meta("gradients computed by", verifier.tally().computed_gradients());
  if (options.random > 0) {
    for (const auto& [name, text] : verifier.coverage().lines()) report.add_meta(name, text);
  }
  report.set_verdict(verifier.tally().text(), verifier.tally().passed());
  collectively(everyone.world(), [&] {
    if (report_files) report_files->write(report, context.out);
  });
  return verifier.tally().passed() ? ExitCode::success : ExitCode::wrong_numbers;
}

}  // namespace annulus::launcher
