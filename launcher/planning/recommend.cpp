#include "launcher/planning/recommend.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/predicted_run.hpp>
#include <annulus/ring/recommend.hpp>

#include "launcher/options/option_table.hpp"
#include "launcher/planning/planned_case.hpp"
#include "launcher/report/cells.hpp"
#include "launcher/report/report.hpp"
#include "launcher/report/report_files.hpp"
#include "launcher/report/warnings.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/problem_setup.hpp"

namespace annulus::launcher {
namespace {

constexpr double kMiB = 1 << 20;

using ring::Recommendation;

// "dp=1,tp=2,sp=4 zigzag ring".
std::string name_of(const Recommendation& one) {
  std::string text = one.mesh;
  if (one.layout) text += fmt::format(" {}", annulus::name_of(*one.layout));
  if (one.variant) text += fmt::format(" {}", variant_text(*one.variant));
  return text;
}

// The candidates that tie with a recommendation; their mesh is left out if it is the same.
std::string ties_cell(const Recommendation& best, const std::vector<Recommendation>& all) {
  constexpr std::size_t kNamed = 2;
  std::vector<std::string> names;
  for (const Recommendation& one : all) {
    if (!one.ties || one.head_shards != best.head_shards) continue;
    const std::string name = name_of(one);
    names.push_back(one.mesh == best.mesh && one.mesh.size() < name.size()
                        ? name.substr(one.mesh.size() + 1)
                        : name);
  }
  if (names.empty()) return kNothing;
  const std::size_t more = names.size() - std::min(names.size(), kNamed);
  names.resize(names.size() - more);
  return fmt::format("{}{}", fmt::join(names, "; "), more > 0 ? fmt::format("; +{}", more) : "");
}

std::vector<Column> columns(bool of_all, bool backward) {
  std::vector<Column> all{
      {"mesh", "", 18},
      {"layout", "", 10},
      {"schedule", "", 11},
      {"split", "ranks", 5, 0, "ulysses degree of hybrid, inner size of double_ring"},
      {"time", "ms, predicted", 10, 0, "of the slowest rank"},
      {"projection", "ms, predicted", 10, 0,
       "of the all-reduce that an output projection needs where tp divides heads"},
      {"rate", "TFLOP/s/rank", 0, 1, "2 N (D + Dv) operations per visible pair, over time"},
      {"memory", "MiB/rank, most", 0, 0, "shards and buffers of the rank with most"},
      {"shards", "MiB/rank, most", 0, 3, "of query, key, value, output and the like"},
      {"buffers", "MiB/rank, most", 0, 4, "of transfers and partial results"},
      {"moved", "MiB, total", 10, 5, "received by all ranks"},
      {"across", "MiB, total", 10, 2, "the part of moved that comes from other nodes"}};
  if (backward) {
    const Column schedule{"backward", "", 11, 0, "the schedule of the backward pass"};
    const Column time{"backward time", "ms, predicted", 10, 0, "likewise"};
    all.insert(all.begin() + 5, {schedule, time});
  }
  if (of_all) {
    all.push_back({"why not", "", 10, 5, "why it is not recommended"});
  } else {
    all.push_back(
        {"as fast", "", 0, 6, "others that are less than 2 % slower and need more memory"});
  }
  return all;
}

Row row_of(const Recommendation& one, bool backward, std::string last) {
  const ring::PredictedRun& run = one.run;
  const auto known = [](bool is_known, std::string text) {
    return is_known ? std::move(text) : std::string(kNothing);
  };
  const bool simulated = run.seconds > 0;
  const auto mib = [](double bytes) { return mebibytes_cell(bytes, 1); };
  const auto memory = [&](double bytes) { return known(run.memory_bytes > 0, mib(bytes)); };
  const ring::ScheduleVariant variant = one.variant.value_or(ring::ScheduleVariant{});
  const int split = std::max(variant.ulysses_degree, variant.inner_size);
  Row row{one.mesh, cell_of(one.layout, [](LayoutKind layout) { return annulus::name_of(layout); }),
          cell_of(one.variant, [](const auto& v) { return ring::name_of(v.schedule); }),
          split > 0 ? std::to_string(split) : kNothing,
          known(simulated, predicted_cell(run.seconds))};
  if (backward) {
    row.push_back(cell_of(one.backward, [](const auto& v) { return variant_text(v); }));
    row.push_back(known(one.backward.has_value(), predicted_cell(one.backward_run.seconds)));
  }
  row.insert(row.end(), {known(one.projection > 0, predicted_cell(one.projection)),
                         known(simulated, fmt::format("{:.3g}", one.rate * 1e-12)),
                         memory(run.memory_bytes), memory(run.shard_bytes),
                         memory(run.buffer_bytes), known(simulated, mib(run.received_bytes)),
                         known(simulated, mib(run.across_bytes)), std::move(last)});
  return row;
}

// A word, quoted for the shell if need be.
std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain = "-_=+:,./%@";
  const bool plain = std::ranges::all_of(word, [&](char c) {
    return (std::isalnum(static_cast<unsigned char>(c)) != 0) ||
           kPlain.find(c) != std::string_view::npos;
  });
  if (plain && !word.empty()) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// The command that runs a recommendation: the given options that describe the problem, and the
// choices.
std::string command_of(const Recommendation& one, const Options& options) {
  constexpr std::array kChosen{
      "device",   "mesh",           "query-spec", "kv-spec",  "sequence-layout",
      "schedule", "ulysses-degree", "inner-size", "scaling",  "json",
      "csv",      "wide",           "legend",     "metadata", "config"};
  const int ranks = options.ranks;
  std::string command = fmt::format("mpirun -np {}", ranks);
  if (options.ranks_per_node > 0 && options.ranks_per_node < ranks) {
    command += fmt::format(" --map-by ppr:{}:node", options.ranks_per_node);
  }
  command += fmt::format(" annulus bench --mesh {}", one.mesh);
  if (one.layout) {
    command += fmt::format(" --sequence-layout {}", annulus::name_of(*one.layout));
    if (options.kv_sequence_layout != "auto" && !options.kv_sequence_layout.empty()) {
      command += "," + options.kv_sequence_layout;
    }
  }
  // Options name one schedule for both passes; left open, each pass takes its own.
  const bool same = !one.backward || *one.backward == *one.variant;
  if (same) command += fmt::format(" --schedule {}", ring::name_of(one.variant->schedule));
  if (same && one.variant->ulysses_degree > 0) {
    command += fmt::format(" --ulysses-degree {}", one.variant->ulysses_degree);
  }
  if (same && one.variant->inner_size > 0) {
    command += fmt::format(" --inner-size {}", one.variant->inner_size);
  }
  command += planned_place(options).is_host() ? " --device cpu" : " --device cuda";
  for (const auto& [name, value] : options.given_values) {
    const OptionEntry& entry = *find_option(name);
    const bool chosen = std::ranges::find(kChosen, name) != kChosen.end();
    if (chosen || !entry.belongs_to(Command::bench)) continue;
    command += " --" + name;
    if (!entry.is_flag() || value != "true") {
      command += (entry.is_flag() ? "=" : " ") + quoted(value);
    }
  }
  return command;
}

std::string why(const Recommendation& best, const std::vector<Recommendation>& all) {
  std::string text = fmt::format("predicted {} ms", predicted_cell(best.run.seconds));
  if (best.backward) {
    text += fmt::format(" forward by {} and {} ms backward by {}", variant_text(*best.variant),
                        predicted_cell(best.backward_run.seconds), variant_text(*best.backward));
  }
  if (best.projection > 0) {
    text +=
        fmt::format(" and {} ms for the sums of the projection", predicted_cell(best.projection));
  }
  text += fmt::format(", {:.1f} GiB per rank", best.run.memory_bytes / kMiB / 1024);
  if (best.run.received_bytes == 0) text += "; ranks send nothing to each other";
  std::vector<std::string> as_fast;
  for (const Recommendation& one : all) {
    if (!one.why_not.empty() || one.mesh == best.mesh) continue;
    const double factor = one.total() / best.total();
    if (factor <= ring::kTie) {
      as_fast.push_back(one.mesh);
      continue;
    }
    if (as_fast.empty()) {
      text += fmt::format("; the next, {}, takes {:.0f} % longer", one.mesh, (factor - 1) * 100);
    }
    break;
  }
  if (!as_fast.empty()) text += fmt::format("; as fast: {}", fmt::join(as_fast, " and "));
  return text;
}

std::string verdict(const std::vector<Recommendation>& all) {
  const auto refused = std::ranges::count_if(
      all, [](const Recommendation& one) { return one.why_not.starts_with("does not fit"); });
  return fmt::format("the best of {} for each size of tp{}",
                     counted(static_cast<std::int64_t>(all.size()), "candidate"),
                     refused > 0 ? fmt::format("; {} do not fit", refused) : "");
}

void add_meta(Report& report, const Options& options, const AttentionProblem& problem,
              const std::string& predictor, bool has_projection) {
  report.add_meta("options", options.given);
  report.add_meta("problem", problem_text(problem));
  report.add_meta("ranks", fmt::format("{} on {}", counted(options.ranks, "rank"),
                                       counted(std::max(1, options.nodes), "node")));
  report.add_meta(
      "memory", fmt::format("shards and buffers of one call, {}; parameters, other activations "
                            "and the optimizer's state are not counted",
                            options.memory_bytes > 0 ? fmt::format("at most {:.0f} MiB per rank",
                                                                   options.memory_bytes / kMiB)
                                                     : "without a limit (--memory 80G sets one)"));
  if (options.ranks > ring::kAllSimulated) {
    report.add_meta("simulated",
                    fmt::format("at most {} of {} ranks of each candidate, which stand for the "
                                "others; moved and across are estimated",
                                ring::kSampledRanks, options.ranks));
  }
  if (has_projection) {
    report.add_meta("projection",
                    "where tp divides heads, a model sums its output projection, [B,T,N*Dv], over "
                    "the ranks of tp; this is not part of attention, but it counts in the order");
  }
  report.add_meta("predicted by", predictor);
}

// Throws an error that says what would be needed.
void refuse(const Options& options, const std::vector<Recommendation>& candidates) {
  const Recommendation* least = nullptr;
  for (const Recommendation& one : candidates) {
    if (options.memory_bytes == 0 || one.run.memory_bytes == 0) continue;
    if (least == nullptr || one.run.memory_bytes < least->run.memory_bytes) least = &one;
  }
  if (least != nullptr) {
    const std::string& given = *options.given_value("memory");
    const bool has_unit = given.find_first_not_of("0123456789") != std::string::npos;
    throw ArgumentError("--memory", has_unit ? given : given + " bytes",
                        fmt::format("at least {:.0f} MiB per rank, which {} needs",
                                    std::ceil(least->run.memory_bytes / kMiB), name_of(*least)));
  }
  throw UserError(fmt::format("--recommend: none of {} can run on {}: {} {}",
                              counted(static_cast<std::int64_t>(candidates.size()), "candidate"),
                              counted(options.ranks, "rank"), name_of(candidates.front()),
                              candidates.front().why_not));
}

// The problem without its mesh; it has a layout only if the options name one.
ProblemSetup problem_of(const Options& options, const ring::CostModel& model) {
  const Options alone = on_mesh(options, fmt::format("dp=1,tp=1,{}=1", options.sequence_axis));
  ProblemSetup setup =
      set_up_problem(alone, *options.shape, options.dtype.value_or(DType::float32), /*ranks=*/0);
  setup.problem.transport = options.transport;
  setup.problem.cost_model = std::make_shared<ring::CostModel>(model);
  return setup;
}

ring::WantedRanks wanted_ranks(const Options& options) {
  ring::WantedRanks wanted{options.ranks, options.nodes, options.memory_bytes,
                           planned_place(options), options.sequence_axis};
  if (options.mesh) wanted.mesh = MeshShape::parse(*options.mesh, options.ranks);
  wanted.most_head_shards = options.most_head_shards;
  wanted.backward = options.backward.value_or(false);
  return wanted;
}

// Completes the number of nodes.
Options with_nodes(Options options) {
  if (options.ranks == 0) {
    throw ArgumentError("--ranks", "nothing",
                        "the number of ranks, or --nodes and --ranks-per-node");
  }
  const int each =
      options.ranks_per_node > 0 ? std::min(options.ranks_per_node, options.ranks) : options.ranks;
  if (options.ranks % each != 0) {
    throw ArgumentError("--ranks-per-node", std::to_string(each),
                        fmt::format("a divisor of {}", counted(options.ranks, "rank")));
  }
  options.nodes = options.ranks / each;
  return options;
}

}  // namespace

void recommend(const Options& given, const Registry& registry, std::ostream& out) {
  const Options options = with_nodes(given);
  const ring::CostModel model = cost_model_of(options, planned_place(options));
  const ProblemSetup setup = problem_of(options, model);
  const bool backward = options.backward.value_or(false);
  Report report("plan.recommend", planned_record(options, setup.problem), columns(true, backward),
                {options.wide, options.legend});
  Report table("plan.recommend", {}, columns(false, backward), {options.wide, options.legend});
  ReportFiles files(options.json, options.csv, report);
  const std::vector<Recommendation> all =
      ring::recommend(setup.problem, wanted_ranks(options), registry);
  const Recommendation& best = all.front();
  if (!best.why_not.empty()) refuse(options, all);
  print_warnings(setup.warnings);
  std::set<std::string> transports;
  bool has_projection = false;
  std::size_t recommended = 0;
  // Steps of decoding differ so little between meshes that one row is the answer.
  const bool decodes = setup.problem.shape.query_length == 1;
  for (const Recommendation& one : all) {
    report.add_row(row_of(one, backward, one.why_not.empty() ? kNothing : one.why_not));
    if (!one.why_not.empty() || (decodes && recommended > 0)) continue;
    ++recommended;
    transports.insert(one.transport);
    has_projection = has_projection || one.projection > 0;
    table.add_row(row_of(one, backward, ties_cell(one, all)));
  }
  for (Report* one : {&report, &table}) {
    add_assumed_device(*one, options);
    one->add_meta("run", command_of(best, options));
    one->add_meta("why", why(best, all));
    add_meta(*one, options, setup.problem, predictor_text(model, transports, options.nodes > 1),
             has_projection);
    one->set_verdict(verdict(all), true);
  }
  if (!files.replace_table()) table.write_table(out);
  files.write(report, out);
}

}  // namespace annulus::launcher
