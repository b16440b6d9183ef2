#include "launcher/setup/problem_setup.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/integer_file.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/partition/named_sharding.hpp>
#include <annulus/partition/sharding_rules.hpp>
#include <annulus/ring/attention_weights.hpp>
#include <annulus/ring/metadata.hpp>
#include <annulus/ring/planner.hpp>

#include "launcher/options/as_option.hpp"
#include "launcher/options/option_values.hpp"
#include "launcher/setup/cost_model_option.hpp"
#include "launcher/setup/hints.hpp"
#include "launcher/setup/operand_files.hpp"
#include "launcher/setup/score_setup.hpp"

namespace annulus::launcher {
namespace {

using Ids = std::vector<std::int32_t>;

// The most random sinks per head.
constexpr std::int64_t kMaximumSinks = 4096;

/// Reads a whole array; `dimensions` is "[B, T]" for the message.
Ids read_integers(const OperandFile& file, const Extents& shape, const char* dimensions) {
  return as_option(file.shown, [&] {
    const files::IntegerFile integers(file.path, file.tensor);
    if (integers.shape() != shape) {
      throw FileError(file.path,
                      fmt::format("shape {}, expected {} = {}", to_string(integers.shape()),
                                  dimensions, to_string(shape)));
    }
    return integers.read();
  });
}

// Reads the ends of documents that fill a sequence of this length.
Ids read_cu_seqlens(const OperandFile& from, std::int64_t length) {
  return as_option(from.shown, [&] {
    const files::IntegerFile file(from.path, from.tensor);
    if (file.shape().rank() != 1) {
      throw FileError(from.path,
                      fmt::format("shape {}, expected [documents + 1]", to_string(file.shape())));
    }
    Ids cu_seqlens = file.read();
    static_cast<void>(
        segments_from_cu_seqlens(cu_seqlens, length, from.tensor.c_str()));  // checks them
    return cu_seqlens;
  });
}

// True if queries and keys have a file, false if neither has one. `what`: what the files hold.
bool are_given(const OperandFile& queries, const OperandFile& keys, const char* query_option,
               const char* kv_option, const char* what) {
  if (queries.empty() != keys.empty()) {
    throw ArgumentError(queries.empty() ? query_option : kv_option, "nothing",
                        fmt::format("{} of both sides, or of neither", what));
  }
  return !queries.empty();
}

// Sets one packing for every batch row.
void set_packing(Mask& mask, const OperandFile& file, const AttentionShape& shape) {
  if (shape.query_length != shape.kv_length) {
    throw ArgumentError("--cu-seqlens",
                        fmt::format("T = {} and S = {}", shape.query_length, shape.kv_length),
                        "T equal to S; use --cu-seqlens-q and --cu-seqlens-kv for two packings");
  }
  const Ids row =
      segments_from_cu_seqlens(read_cu_seqlens(file, shape.query_length), shape.query_length);
  Ids ids;
  ids.reserve(row.size() * static_cast<std::size_t>(shape.batch));
  for (std::int64_t b = 0; b < shape.batch; ++b) ids.insert(ids.end(), row.begin(), row.end());
  mask.set_segments(shape.batch, ids, ids);
}

// Sets packings of queries and of keys. Returns false if neither is given.
bool set_packings(Mask& mask, const OperandFiles& files, const Options& options,
                  const AttentionShape& shape) {
  const OperandFile queries = files.locate("--cu-seqlens-q", options.query_cu_seqlens);
  const OperandFile keys = files.locate("--cu-seqlens-kv", options.kv_cu_seqlens);
  if (!are_given(queries, keys, "--cu-seqlens-q", "--cu-seqlens-kv", "packings")) return false;
  Ids query = read_cu_seqlens(queries, shape.query_length);
  Ids kv = read_cu_seqlens(keys, shape.kv_length);
  const CausalOffset offset = options.causal_offset.value_or(CausalOffset{});
  std::optional<DocumentAlignment> alignment;
  if (offset.top_left) {
    alignment = DocumentAlignment::top_left;
  } else if (offset.bottom_right) {
    alignment = DocumentAlignment::bottom_right;
  } else if (mask.position_parts().limited()) {
    const std::string given = !options.causal_offset ? "nothing"
                              : offset.file.empty()  ? std::to_string(offset.value)
                                                     : offset.file;
    throw ArgumentError("--causal-offset", given,
                        "top-left or bottom-right: how --causal, --window and --chunk align each "
                        "document of --cu-seqlens-q with that of --cu-seqlens-kv");
  }
  as_option(keys.shown, [&] {
    mask.set_offset(0);
    mask.set_packings(shape.batch, std::move(query), std::move(kv), alignment);
  });
  return true;
}

void set_segments(Mask& mask, const OperandFiles& files, const Options& options,
                  const AttentionShape& shape) {
  const OperandFile queries = files.locate("--q-segments", options.query_segments);
  const OperandFile keys = files.locate("--kv-segments", options.kv_segments);
  const OperandFile packing = files.locate("--cu-seqlens", options.cu_seqlens);
  if (set_packings(mask, files, options, shape)) {
    if (!packing.empty() || !queries.empty() || !keys.empty()) {
      throw UserError(
          "--cu-seqlens-q: packs the sequences itself, so it cannot be given with --cu-seqlens, "
          "--q-segments and --kv-segments");
    }
    return;
  }
  if (!packing.empty()) {
    if (!queries.empty() || !keys.empty()) {
      throw UserError(
          "--cu-seqlens: makes segment ids itself, so it cannot be given with --q-segments and "
          "--kv-segments");
    }
    set_packing(mask, packing, shape);
    return;
  }
  if (!are_given(queries, keys, "--q-segments", "--kv-segments", "segment ids")) return;
  mask.set_segments(shape.batch,
                    read_integers(queries, {shape.batch, shape.query_length}, "[B, T]"),
                    read_integers(keys, {shape.batch, shape.kv_length}, "[B, S]"));
}

BlockMask read_blocks(const OperandFile& from, BlockSize size) {
  const files::ArrayFile file(from.path, from.tensor, {DType::boolean, DType::uint8});
  std::vector<std::uint8_t> entries(static_cast<std::size_t>(file.shape().product()));
  file.read_flags(files::whole(file.shape()), {entries.data(), file.dtype(), file.shape()});
  return BlockMask(file.shape(), size, entries);
}

void set_blocks(Mask& mask, const OperandFiles& files, const Options& options,
                const AttentionShape& shape) {
  const BlockSize size = options.block_size.value_or(BlockSize{});
  if (const char* const drawn = random_value(options.block_mask)) {
    const std::string shown = "--block-mask " + options.block_mask;
    const double density = parse_number(shown, drawn);
    mask.set_block_mask(as_option(shown, [&] {
      return BlockMask::random(shape.query_length, shape.kv_length, shape.heads, density,
                               options.seed, size);
    }));
    return;
  }
  const OperandFile file = files.locate("--block-mask", options.block_mask);
  if (!file.empty()) {
    as_option(file.shown, [&] {
      mask.set_block_mask(read_blocks(file, size));
      mask.validate(shape.batch, shape.heads, shape.query_length, shape.kv_length);
    });
  } else if (options.named.contains("block-size")) {
    throw ArgumentError("--block-mask", "nothing", "a mask of the blocks that --block-size sizes");
  }
}

Sinks read_sinks(const OperandFile& from) {
  const files::ArrayFile file(from.path, from.tensor, {DType::float32});
  std::vector<float> logits(static_cast<std::size_t>(file.shape().product()));
  file.read_slice(files::whole(file.shape()), {logits.data(), file.dtype(), file.shape()});
  return {file.shape(), std::move(logits)};
}

std::optional<Sinks> set_up_sinks(const OperandFiles& files, const Options& options,
                                  const AttentionShape& shape) {
  if (const char* const drawn = random_value(options.sinks)) {
    const std::string shown = "--sinks " + options.sinks;
    return Sinks::random(shape.heads, parse_integer(shown, drawn, 1, kMaximumSinks), options.seed);
  }
  const OperandFile file = files.locate("--sinks", options.sinks);
  if (file.empty()) return {};
  return as_option(file.shown, [&] {
    Sinks sinks = read_sinks(file);
    sinks.validate(shape.heads);
    return sinks;
  });
}

// Sets a number of all batches, or one for each batch from a file. `given`: the option's value, if
// it was given; otherwise the tensor may be in --input.
template <class Given, class SetOne, class SetAll>
void set_one_or_all(const char* option, const std::optional<Given>& given,
                    const OperandFiles& files, std::int64_t batch, const SetOne& set_one,
                    const SetAll& set_all) {
  const Given value = given.value_or(Given{});
  const bool by_file = !given || !value.file.empty();
  const OperandFile file = by_file ? files.locate(option, value.file) : OperandFile{};
  if (file.empty()) {
    as_option(option, [&] { set_one(value); });
    return;
  }
  Ids all = read_integers(file, {batch}, "[B]");
  as_option(file.shown, [&] { set_all(std::move(all)); });
}

Mask set_up_mask(const OperandFiles& files, const Options& options, const AttentionShape& shape) {
  Mask mask;
  mask.set_causal(options.causal);
  if (options.window) {
    as_option("--window", [&] { mask.set_window(options.window->left, options.window->right); });
  }
  if (options.sink_tokens) {
    as_option("--sink-tokens", [&] { mask.set_sink_tokens(*options.sink_tokens); });
  }
  if (options.chunk) as_option("--chunk", [&] { mask.set_chunk(*options.chunk); });
  if (mask.position_parts().limited()) {
    set_one_or_all(
        "--causal-offset", options.causal_offset, files, shape.batch,
        [&](const CausalOffset& offset) {
          mask.set_offset(offset.bottom_right ? shape.kv_length - shape.query_length
                                              : offset.value);
        },
        [&](Ids offsets) { mask.set_offsets(std::move(offsets)); });
  }
  set_one_or_all(
      "--prefix", options.prefix, files, shape.batch,
      [&](const SizeOrFile& prefix) { mask.set_prefix(prefix.value); },
      [&](Ids prefixes) { mask.set_prefixes(std::move(prefixes)); });
  set_segments(mask, files, options, shape);
  set_blocks(mask, files, options, shape);
  const auto set_lengths = [&](const char* option, const std::string& given, const auto& set) {
    const OperandFile file = files.locate(option, given);
    if (file.empty()) return;
    const Ids lengths = read_integers(file, {shape.batch}, "[B]");
    as_option(file.shown, [&] {
      set(lengths);
      mask.validate(shape.batch, shape.heads, shape.query_length, shape.kv_length);
    });
  };
  set_lengths("--q-lengths", options.query_lengths,
              [&](const Ids& lengths) { mask.set_query_lengths(lengths); });
  set_lengths("--kv-lengths", options.kv_lengths,
              [&](const Ids& lengths) { mask.set_kv_lengths(lengths); });
  return mask;
}

// Runs body() and makes its errors name the options that gave the fields of a problem.
template <class Body>
void named_by_options(const Options& options, const Body& body) {
  try {
    body();
  } catch (const ArgumentError& error) {
    const std::string& name = error.argument();
    const std::string option = name == "scale"                    ? "--scale"
                               : name == "soft cap"               ? "--soft-cap"
                               : name == "dropout"                ? "--dropout"
                               : name == "normalize_output"       ? "--normalize-output"
                               : name == "shape" && options.shape ? "--shape"
                                                                  : name;
    throw ArgumentError(option, error.value(), error.expected());
  }
}

// Errors that name options. The library would name fields, or reject every schedule in turn.
void check_gradients(const Options& options, DType dtype) {
  const bool drawn = options.random > 0 || options.random_case;  // not every problem has a gradient
  if (drawn || !(options.backward.value_or(false) || !options.grad_output.empty())) return;
  const char* const asked = options.grad_output.empty() ? "--backward" : "--grad-output";
  if (options.grad_wire != DType::float32 && size_of(dtype) > size_of(options.grad_wire)) {
    throw UserError(fmt::format(
        "--grad-wire {0}: gradients of {1} are not rounded to {0} for sending; it needs --dtype "
        "float16 or bfloat16",
        annulus::name_of(options.grad_wire), annulus::name_of(dtype)));
  }
  if (!options.normalize_output) {
    throw UserError(fmt::format(
        "--normalize-output false: an unnormalised output has no gradients; leave out {}", asked));
  }
  if (!options.weights.empty()) {
    throw UserError(
        fmt::format("--weights: attention weights have no gradients; leave out {}", asked));
  }
}

PartitionSpec given_spec(const std::string& text, const char* option, const MeshShape& mesh) {
  PartitionSpec spec = PartitionSpec::parse(text, option);
  try {
    static_cast<void>(mesh.size(spec.axes()));
  } catch (const UnknownAxisError& error) {
    throw UserError(fmt::format("{}: {}", option, error.what()));
  }
  return spec;
}

}  // namespace

MeshShape set_up_mesh(const Options& options, int ranks) {
  if (options.mesh) {
    MeshShape mesh = as_option("--mesh", [&] {
      try {
        return MeshShape::parse(*options.mesh, ranks);
      } catch (const ArgumentError& error) {
        throw ArgumentError(
            error.argument(), error.value(),
            error.expected() +
                (options.command == Command::plan ? std::string() : hint_of_ranks(options, ranks)));
      }
    });
    if (ranks == 0 && mesh.ranks() > kMaximumPlannedRanks) {
      throw ArgumentError("--mesh", fmt::format("{} ranks", mesh.ranks()),
                          fmt::format("a plan of at most {} ranks", kMaximumPlannedRanks));
    }
    return mesh;
  }
  if (ranks == 0) {
    throw ArgumentError("--mesh", "nothing",
                        "the axes and their sizes, such as dp=1,sp=4,tp=1, or --ranks for the "
                        "sequence axis alone");
  }
  return as_option("--sequence-axis", [&] { return MeshShape({{options.sequence_axis, ranks}}); });
}

Options on_mesh(Options options, std::string mesh) {
  options.mesh = std::move(mesh);
  options.query_spec.reset();
  options.kv_spec.reset();
  return options;
}

ProblemSetup set_up_problem(const Options& options, const AttentionShape& shape, DType dtype,
                            int ranks) {
  ProblemSetup setup;
  setup.mesh = set_up_mesh(options, ranks);
  setup.problem.shape = shape;
  setup.problem.dtype = dtype;
  setup.problem.scale = options.scale;
  setup.problem.soft_cap = options.soft_cap;
  setup.problem.softmax_dtype = options.softmax_dtype;
  setup.problem.weights = !options.weights.empty();
  setup.problem.normalize_output = options.normalize_output;
  if (options.dropout > 0) setup.problem.dropout.emplace(options.dropout, options.seed);
  setup.problem.bias_policy = options.bias_policy;
  setup.problem.implementation = options.implementation;
  setup.problem.schedule = options.schedule;
  setup.problem.reproducible = options.reproducible;
  setup.problem.backward.grad_wire = options.grad_wire;
  setup.problem.ulysses_degree = options.ulysses_degree;
  setup.problem.inner_size = options.inner_size;
  setup.problem.tuning = tuning_options(options);
  const auto check = [&] { named_by_options(options, [&] { setup.problem.validate(); }); };
  check();  // files are read only for a valid shape
  check_gradients(options, dtype);
  const OperandFiles files(options);
  setup.problem.mask = set_up_mask(files, options, shape);
  setup.problem.sinks = set_up_sinks(files, options, shape);
  check();
  setup.fills = set_up_scores(files, options, setup.problem);

  ring::LayoutOptions& layout = setup.problem;
  const auto given = [&](std::optional<PartitionSpec>& spec, const std::optional<std::string>& text,
                         const char* option) {
    if (text) spec = given_spec(*text, option, setup.mesh);
  };
  given(layout.query_spec, options.query_spec, "--query-spec");
  given(layout.kv_spec, options.kv_spec, "--kv-spec");
  if (options.mode) layout.mode = parse_attention_mode(*options.mode);
  if (options.sequence_layout != "auto") layout.layout = parse_layout(options.sequence_layout);
  if (options.kv_sequence_layout != "auto") {
    layout.kv_layout = parse_layout(options.kv_sequence_layout);
  }
  layout.granule = options.granule;
  AttentionMetadata metadata;
  metadata.sharding_rules = options.rules;
  metadata.sequence_axis_name = options.sequence_axis;
  layout.rules = metadata.rules();
  try {
    setup.layout = ring::default_layout(setup.problem, setup.mesh, layout);
  } catch (const UserError& error) {
    if (layout.rules.rules().empty()) throw;
    // The error names only the axis, so the wrong rule is the one that has this axis.
    std::string wrong = "--sharding-rules/--sequence-axis";
    for (const ShardingRule& rule : options.rules.rules()) {
      const bool has_it = std::ranges::any_of(rule.axes, [&](const std::string& axis) {
        const std::string quoted = "'" + axis + "'";
        return !setup.mesh.has_axis(axis) &&
               std::string(error.what()).find(quoted) != std::string::npos;
      });
      if (!has_it) continue;
      wrong = fmt::format("--sharding-rules, entry '{}{}'", annulus::name_of(rule.axis),
                          rule.mode ? fmt::format(".{}", annulus::name_of(*rule.mode)) : "");
      break;
    }
    throw UserError(fmt::format("{}: {}", wrong, error.what()));
  }
  setup.warnings = hints(options, shape, setup.mesh, setup.layout);
  return setup;
}

void set_layout(ProblemSetup& setup, ring::LayoutChoice choice) {
  setup.layout.sequence = choice.layout;
  setup.problem.layout = choice.layout;
  setup.why_layout = std::move(choice.why);
}

ProblemSetup settled_problem(const Options& options, const AttentionShape& shape, DType dtype,
                             Context& context) {
  Mesh& mesh = context.mesh();
  Control& world = mesh.world();
  ProblemSetup setup = collectively(world, [&] {
    const Computing computing = world.computing();
    return set_up_problem(options, shape, dtype, mesh.size());
  });
  collectively(world, [&] {
    check_choices(setup.problem, shard_operands(setup), context.registry(), context.place());
    setup.problem.cost_model =
        std::make_shared<ring::CostModel>(cost_model_of(options, context.place()));
  });
  set_layout(setup, ring::choose_layout(setup.problem, context));
  return setup;
}

std::string why_layout_text(const ProblemSetup& setup) {
  return fmt::format("{}: {}", ring::layout_text(setup.layout), setup.why_layout);
}

double visible_pairs(const AttentionProblem& problem) {
  const AttentionShape& s = problem.shape;
  return static_cast<double>(problem.mask
                                 .examine(0, s.batch, {GlobalPosition(0), s.query_length, 1},
                                          {GlobalPosition(0), s.kv_length, 1})
                                 .pairs);
}

ring::ShardedOperands shard_operands(const ProblemSetup& setup) {
  try {
    return ring::shard_operands(setup.problem, setup.mesh, setup.layout);
  } catch (const IndivisibleError& error) {
    const auto dim = static_cast<std::size_t>(error.dimension());
    const AttentionShape& shape = setup.problem.shape;
    const std::array query{shape.batch, shape.query_length, shape.heads, shape.head_dim};
    // Query is checked first, so an error that matches its dimension is about the query.
    const bool of_query =
        error.axes() == setup.layout.query[error.dimension()] && error.size() == query.at(dim);
    constexpr std::array kNames{"batch", "length", "heads", "head dimension"};
    throw UserError(fmt::format("--mesh/{}: {} of {}: {}", of_query ? "--query-spec" : "--kv-spec",
                                kNames.at(dim), of_query ? "query" : "key and value",
                                error.what()));
  } catch (const ArgumentError& error) {
    if (error.argument() == "sequence granule") {
      throw ArgumentError("--granule", error.value(), error.expected());
    }
    throw UserError(fmt::format("--mesh/--query-spec/--kv-spec: {}", error.what()));
  } catch (const UserError& error) {
    throw UserError(fmt::format("--mesh/--query-spec/--kv-spec: {}", error.what()));
  }
}

ring::TuningOptions tuning_options(const Options& options) {
  ring::TuningOptions tuning;
  tuning.policy = options.tuning;
  tuning.file = options.tuning_cache;
  tuning.build = options.build;
  if (!options.tuning_cache.empty()) tuning.shown = "--tuning-cache";
  return tuning;
}

void check_choices(const AttentionOptions& problem, const ring::ShardedOperands& operands,
                   const Registry& registry, Place place, Presence presence) {
  if (problem.schedule != "auto") {
    as_option("--schedule", [&] {  // errors name it
      ring::check_schedule(
          ring::make_plan_input(problem, operands, {}, place, ring::CostModel::for_place(place),
                                plan_options(problem, place)),
          problem.schedule);
    });
  }
  if (problem.implementation != "auto") {
    const Selection selection = as_option("--impl " + problem.implementation, [&] {
      return registry.select(problem.implementation, problem, place, presence);
    });
    as_option("--schedule", [&] { static_cast<void>(selection.schedule_for(problem.schedule)); });
  }
  if (problem.weights) {
    as_option("--weights", [&] { ring::check_weights_fit(problem, operands); });
  }
}

}  // namespace annulus::launcher
