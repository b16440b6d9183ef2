#include "launcher/options/option_table.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/metadata.hpp>

#include "launcher/options/option_values.hpp"

namespace annulus::launcher {
namespace {

using Apply = OptionEntry::Apply;

// The limit of whole numbers that are stored in an int.
constexpr std::int64_t kMaximumInt = std::numeric_limits<int>::max();

/// `parse`(option, text) returns the field's value.
template <class Field, class Parse>
Apply parsed_into(Field Options::*field, Parse parse) {
  return [=](Options& options, const std::string& option, const std::string& text) {
    options.*field = parse(option, text);
  };
}

template <class Field>
Apply int_into(Field Options::*field, std::int64_t least, std::int64_t most = kMaximumInt) {
  using Number = std::conditional_t<std::is_same_v<Field, int>, int, std::int64_t>;
  return parsed_into(field, [=](const std::string& option, const std::string& text) {
    return static_cast<Number>(parse_integer(option, text, least, most));
  });
}

/// One of a few words; `value_of`(word) is the field's value.
template <class Field, class ValueOf = std::identity>
Apply choice_into(Field Options::*field, std::vector<std::string> choices, ValueOf value_of = {}) {
  return parsed_into(field, [=](const std::string& option, const std::string& text) {
    return value_of(parse_choice(option, text, choices));
  });
}

template <class Field>
Apply dtype_into(Field Options::*field, std::vector<DType> choices) {
  return parsed_into(field, [=](const std::string& option, const std::string& text) {
    return parse_dtype_choice(option, text, choices);
  });
}

void set_layouts(Options& options, const std::string& option, const std::string& text) {
  const auto parse = [&](std::string_view name) {
    return parse_choice(option, name, {"auto", "zigzag", "contiguous", "striped", "balanced"});
  };
  const std::vector<std::string_view> names = split(text, ',');
  if (names.size() > 2) {
    throw ArgumentError(option, fmt::format("'{}'", text),
                        "a layout, or two: for queries and for keys");
  }
  options.sequence_layout = parse(names.front());
  options.kv_sequence_layout = names.size() == 2 ? parse(names.back()) : "auto";
}

double parse_dropout(const std::string& option, const std::string& text) {
  const double probability = parse_number(option, text);
  if (probability < 0 || probability >= 1) {
    throw ArgumentError(option, fmt::format("'{}'", text), "a probability from 0 to below 1");
  }
  return probability;
}

std::int64_t parse_granule(const std::string& option, const std::string& text) {
  const std::int64_t granule = parse_size(option, text);
  if (granule > std::int64_t{1} << 40) {
    throw ArgumentError(option, fmt::format("'{}'", text), "a size up to 2^40");
  }
  return granule;
}

double parse_percent(const std::string& option, const std::string& text) {
  const double percent = parse_number(option, text);
  if (percent < 0 || percent > 1000) {
    throw ArgumentError(option, fmt::format("'{}'", text), "0 to 1000 percent");
  }
  return percent;
}

OptionUses drawn(OptionUses uses) {
  uses.drawn = true;
  return uses;
}

OptionUses with_hops(OptionUses uses) {
  uses.with_hops = true;
  return uses;
}

OptionUses without_calibrate(OptionUses uses) {
  uses.with_calibrate = false;
  return uses;
}

OptionUses writing(Writes what, OptionUses uses) {
  uses.writes = what;
  return uses;
}

class TableBuilder {
 public:
  void group(std::string title) { group_ = std::move(title); }

  void add(std::string name, std::string value, OptionUses uses, Apply apply, std::string help) {
    table_.push_back({group_, std::move(name), std::move(value), std::move(help), std::move(uses),
                      std::move(apply)});
  }

  template <class Field>
  void flag(std::string name, OptionUses uses, Field Options::*field, std::string help) {
    add(std::move(name), "", std::move(uses), parsed_into(field, parse_flag), std::move(help));
  }
  void file(std::string name, OptionUses uses, std::string Options::*field, std::string help) {
    add(std::move(name), "FILE", std::move(uses), parsed_into(field, parse_name), std::move(help));
  }
  void array(std::string name, OptionUses uses, std::string Options::*field, std::string help) {
    add(std::move(name), "FILE", std::move(uses), parsed_into(field, parse_array_name),
        std::move(help));
  }

  [[nodiscard]] std::vector<OptionEntry> take() { return std::move(table_); }

 private:
  std::string group_;
  std::vector<OptionEntry> table_;
};

const OptionUses kComputing{{Command::run, Command::verify, Command::bench}};
const OptionUses kPlanned{{Command::run, Command::verify, Command::bench, Command::plan}};
const OptionUses kShaped{{Command::verify, Command::bench, Command::plan}};
const OptionUses kOnRanks{{Command::run, Command::verify, Command::bench, Command::info}};
const OptionUses kAll{
    {Command::run, Command::verify, Command::bench, Command::plan, Command::info}};

void add_sharding(TableBuilder& table) {
  const std::vector<std::string_view> transports = transport_choices();
  table.group("Mesh and sharding");
  table.add("mesh", "AXES", with_hops(drawn(kPlanned)),
            parsed_into(&Options::mesh, [](const auto&, const auto& text) { return text; }),
            "named axes with sizes, the last one fastest: dp=1,sp=4,tp=1; one size may be -1 if "
            "the number of ranks is known (default: all ranks on sp)");
  table.add("query-spec", "SPEC", without_calibrate(drawn(kPlanned)),
            parsed_into(&Options::query_spec, parse_spec),
            "axes of each dimension of query and output, B,T,N,D: an axis, a+b for a tuple (a "
            "major), - for none (default: fsdp+dp,sp,tp,- without the axes that the mesh lacks)");
  table.add("kv-spec", "SPEC", without_calibrate(drawn(kPlanned)),
            parsed_into(&Options::kv_spec, parse_spec),
            "axes of each dimension of key and value, B,S,K,D, as in --query-spec");
  table.add("sequence-layout", "LAYOUTS", without_calibrate(drawn(kPlanned)), set_layouts,
            "auto, zigzag, contiguous, striped or balanced: how positions are distributed; or two "
            "layouts, for queries and for keys: zigzag,contiguous; balanced gives ranks equal work "
            "under the mask (default: auto, which takes the default layout unless another one is "
            "predicted to be more than 2 % faster; the default layout, which verify takes, is "
            "zigzag if causal and sharded, else contiguous, or balanced where packed documents, "
            "block masks or lengths make the work uneven)");
  table.add("granule", "N", without_calibrate(drawn(kPlanned)),
            parsed_into(&Options::granule, parse_granule),
            "chunks of a sequence are multiples of N positions; not with the layout striped "
            "(default: 1; balanced: 128, or less for short sequences)");
  table.add("schedule", "NAME", without_calibrate(drawn(kPlanned)),
            parsed_into(&Options::schedule, parse_schedule_name),
            "auto, local, ring, double_ring, allgather, ulysses, hybrid or pass_q: what is sent, "
            "and in which order (default: auto)");
  table.add("ulysses-degree", "N", without_calibrate(drawn(kPlanned)),
            int_into(&Options::ulysses_degree, 1),
            "ranks that exchange heads in the schedule hybrid; it divides the ranks along the "
            "sequence (default: with auto, the one that is predicted to be fastest; with hybrid, "
            "the size of the last of several sequence axes or, over a single axis, the largest "
            "common divisor of its size and K)");
  table.add("inner-size", "N", without_calibrate(drawn(kPlanned)),
            int_into(&Options::inner_size, 1),
            "ranks of an inner ring in the schedule double_ring; it divides the ranks along the "
            "sequence (default: the ranks of a node)");
  table.add("mode", "MODE", without_calibrate(drawn(kPlanned)),
            choice_into(&Options::mode, {"train", "prefill", "autoregressive", "insert"}),
            "train, prefill, autoregressive or insert: sets only the defaults of --query-spec and "
            "--kv-spec (default: autoregressive if T = 1, else train)");
  table.add("sharding-rules", "JSON", without_calibrate(drawn(kPlanned)),
            parsed_into(&Options::rules,
                        [](const auto& option, const auto& text) {
                          return parse_sharding_rules(text, option);
                        }),
            "the mesh axes of batch, query_length, kv_length, head, kv_head and head_dim, which "
            "the default specs follow; for all modes or by mode: {\"head\": {\"all\": \"tp\", "
            "\"train\": null}}");
  table.add("sequence-axis", "AXIS", with_hops(drawn(kPlanned)),
            parsed_into(&Options::sequence_axis, parse_name),
            "the mesh axis of query_length and kv_length where no rule names another, and the axis "
            "of the default --mesh (default: sp)");
  table.add(
      "impl", "NAME", kPlanned, parsed_into(&Options::implementation, parse_implementation_name),
      "auto, the name of a local kernel, ring (the schedule ring, any kernel) or "
      "autoregressive_decodeattn (T = 1, any kernel); annulus info lists all (default: auto)");
  table.add("rank-order", "ORDER", with_hops(kOnRanks),
            choice_into(&Options::rank_order, {"node", "mpirun"}),
            "node or mpirun: how ranks are numbered on the mesh; with node, the ranks of a node "
            "follow each other, so that the last axes lie inside nodes however mpirun or srun has "
            "distributed the ranks (default: node)");
  table.add("device", "DEVICE", with_hops(kPlanned),
            choice_into(&Options::device, {"auto", "cpu", "cuda", "gpu"},
                        [](const std::string& name) { return name == "gpu" ? "cuda" : name; }),
            "auto, cpu, or cuda (or gpu), one GPU per rank (default: auto: cuda if every rank has "
            "one, cpu if none has; for plan, which needs no devices: cpu)");
  table.file("cost-model", without_calibrate(kPlanned), &Options::cost_model,
             "cost model for predicted times and --schedule auto, as bench --calibrate writes it "
             "(default: figures of an H200, or of a CPU core)");
  table.add(
      "tuning", "POLICY", without_calibrate(kComputing),
      choice_into(&Options::tuning, {"off", "cached", "measure"}, ring::parse_tuning_policy),
      "off, cached or measure: how auto decides; off: by the cost model; cached: by earlier "
      "measurements, else the cost model; measure: by earlier measurements, else by new ones, kept "
      "in --tuning-cache; only off gives the same bits at any time (default: off)");
  table.file("tuning-cache", without_calibrate(kComputing), &Options::tuning_cache,
             "file for the measurements of --tuning, for later jobs (default: "
             "$XDG_CACHE_HOME/annulus/tuning-v1.json, else ~/.cache/annulus/tuning-v1.json)");
  table.add("ranks-per-node", "N", {{Command::plan}}, int_into(&Options::ranks_per_node, 1),
            "how many consecutive ranks share a node, for predictions (default: --ranks divided by "
            "--nodes; without --nodes, ranks with the same coordinate on the mesh axis named node "
            "share a node; without such an axis, all ranks do)");
  table.add("nodes", "N", {{Command::plan}}, int_into(&Options::nodes, 1, 65536),
            "how many nodes the ranks are on, instead of --ranks-per-node; both together give the "
            "number of ranks");
  table.add("transport", "NAME", with_hops(kPlanned),
            choice_into(&Options::transport, {transports.begin(), transports.end()},
                        annulus::parse_transport),
            "auto, composite, nccl or peer: what carries data between GPUs; peer: copy engines "
            "inside a node; composite: peer inside nodes, nccl between them (default: auto: peer "
            "where all GPUs can access each other, composite where some can, else nccl)");
  table.flag("share-gpus", with_hops(kComputing), &Options::share_gpus,
             "let several ranks share a GPU, with transport peer by default");
  table.add(
      "threads", "N", kPlanned, int_into(&Options::threads, 0, 4096),
      "CPU threads per rank; 0: an equal share of the node's cores, or for plan 1 (default: 0)");
}

void add_problem(TableBuilder& table) {
  table.group("Problem");
  table.add("shape", "SIZES", drawn(kShaped), parsed_into(&Options::shape, parse_shape),
            "B,T,S,N,K,D[,Dv]: batch, query length, key/value length, query heads, key/value "
            "heads, head dimensions; 4k is 4 * 1024, likewise M and G; 1e6 is a million");
  table.add("dtype", "DTYPE", drawn(kPlanned),
            dtype_into(&Options::dtype,
                       {DType::float32, DType::float16, DType::bfloat16, DType::float64}),
            "float32, float16, bfloat16 or float64, or fp32, fp16, bf16, fp64 for short; only "
            "vanilla computes float64, on CPUs (default: float32; for run: the files' dtype)");
  table.flag("causal", drawn(kPlanned), &Options::causal,
             "query i sees key j only if j <= i + offset");
  table.add("causal-offset", "N", drawn(kPlanned),
            parsed_into(&Options::causal_offset, parse_causal_offset),
            "the offset of --causal, --window and --chunk: a whole number, bottom-right for S - T, "
            "or a file with one per batch, int32 [B]; with --cu-seqlens-q, top-left or "
            "bottom-right aligns each document (default: 0)");
  table.add("window", "L[,R]", drawn(kPlanned), parsed_into(&Options::window, parse_window),
            "query i sees key j only if i + offset - L <= j <= i + offset + R; -1: no limit; one "
            "number is both L and R; 4k and 1e3 are sizes too; a model's sliding_window = W counts "
            "the row's own key, so it is --causal --window W-1 here (default: no limit)");
  table.add("prefix", "N", drawn(kPlanned), parsed_into(&Options::prefix, parse_size_or_file),
            "queries see all keys j < N despite --causal, --window and --chunk; or a file with one "
            "per batch, int32 [B] (default: 0)");
  table.add("sink-tokens", "N", drawn(kPlanned), parsed_into(&Options::sink_tokens, parse_size),
            "queries see the keys j < N that --causal shows, despite --window and --chunk "
            "(default: none)");
  table.add("chunk", "C", drawn(kPlanned), parsed_into(&Options::chunk, parse_size),
            "query i sees key j only if (i + offset) / C and j / C, rounded down, are equal "
            "(default: no chunks)");
  table.add("scale", "X", drawn(kPlanned), parsed_into(&Options::scale, parse_number),
            "factor on the product of query and key (default: 1/sqrt(D))");
  table.add("soft-cap", "X", drawn(kPlanned), parsed_into(&Options::soft_cap, parse_positive),
            "logits become X tanh(logit / X) (default: no cap)");
  table.add("dropout", "P", drawn(kPlanned), parsed_into(&Options::dropout, parse_dropout),
            "probability of dropping an attention weight; --seed and the weight's position decide "
            "whether it drops (default: 0)");
  table.add("softmax-dtype", "DTYPE", drawn(kPlanned),
            dtype_into(&Options::softmax_dtype, {DType::float32, DType::float64}),
            "dtype of the softmax's weights and sums: float32, or float64, which only vanilla has "
            "(default: float32)");
  table.add("normalize-output", "BOOL", drawn(kPlanned),
            parsed_into(&Options::normalize_output, parse_flag),
            "true or false: with false, the output is the sum of exp(logit - maximum) times value, "
            "not divided by the sum of the exponentials; --impl native or vanilla (default: true)");
  table.add("seed", "N", kPlanned, parsed_into(&Options::seed, parse_seed),
            "seed for dropout and random tensors (default: 0)");
}

void add_input(TableBuilder& table) {
  const OptionUses run{{Command::run}};
  table.group(
      "Input files (.npy, or .safetensors with tensors named like the options: q_segments for "
      "--q-segments; int64 is accepted as int32 if the values fit)");
  table.array("query", run, &Options::query, "query [B,T,N,D]");
  table.array("key", run, &Options::key, "key [B,S,K,D]");
  table.array("value", run, &Options::value, "value [B,S,K,Dv]");
  table.file("input", run, &Options::input,
             "one .safetensors file with tensors query, key and value; the options below, unless "
             "given, take their tensors from this file too, if it has them");
  table.add("layout", "ORDER", run,
            choice_into(&Options::bhtd, {"bthd", "bhtd"},
                        [](const std::string& order) { return order == "bhtd"; }),
            "order of dimensions in the files of query, key, value and output: bthd or bhtd "
            "(default: bthd)");
  table.array("q-segments", drawn(kPlanned), &Options::query_segments,
              "int32 [B,T]: the segments of the queries; a query sees the keys of its segment; -1 "
              "is padding");
  table.array("kv-segments", drawn(kPlanned), &Options::kv_segments,
              "int32 [B,S]: likewise, the segments of the keys");
  table.array("cu-seqlens", drawn(kPlanned), &Options::cu_seqlens,
              "int32 [documents + 1] from 0 to T = S: prefix sums of the lengths of the documents "
              "that are packed into the sequence, the same for every batch row");
  table.array("cu-seqlens-q", drawn(kPlanned), &Options::query_cu_seqlens,
              "int32 [documents + 1] from 0 to T: documents of the queries; each sees the document "
              "of the same number in --cu-seqlens-kv; positions then count inside the documents");
  table.array("cu-seqlens-kv", drawn(kPlanned), &Options::kv_cu_seqlens,
              "int32 [documents + 1] from 0 to S: documents of the keys");
  table.array("block-mask", drawn(kPlanned), &Options::block_mask,
              "bool or uint8, broadcastable to [B,N,T/Q,S/K] (rounded up): a query sees the keys "
              "of the blocks that are set; random:DENSITY draws blocks for each head");
  table.add("block-size", "Q[,K]", drawn(kPlanned),
            parsed_into(&Options::block_size, parse_block_size),
            fmt::format("queries and keys of a block (default: {},{})", BlockSize().query,
                        BlockSize().kv));
  table.array("q-lengths", drawn(kPlanned), &Options::query_lengths,
              "int32 [B]: queries at or past the length are padding");
  table.array("kv-lengths", drawn(kPlanned), &Options::kv_lengths,
              "int32 [B]: keys at or past the length are padding");
  table.array("sinks", drawn(kPlanned), &Options::sinks,
              "float32 [N,M] or [M]: M extra logits per head in the softmax's denominator; "
              "random:M draws them");
  table.array("mask", drawn(kPlanned), &Options::mask,
              "bool or uint8, broadcastable to [B,N,T,S]: a pair is visible where it is 1; "
              "random:DENSITY draws [B,1,T,S]");
  table.array("bias", drawn(kPlanned), &Options::bias,
              "float32, broadcastable to [B,N,T,S]: added to the logits after the soft cap; -inf "
              "hides a pair; random:STDDEV draws [1,N,T,S]");
  table.add("bias-policy", "NAME", drawn(kPlanned),
            choice_into(&Options::bias_policy, {"combine", "bias_wins", "bias_disables_causal"},
                        parse_bias_policy),
            "combine, bias_wins or bias_disables_causal: with a bias, all of the mask applies, "
            "none of it, or all but --causal (default: combine)");
}

void add_output(TableBuilder& table) {
  const OptionUses run{{Command::run}};
  table.group(
      "Output (an existing file is replaced once the new one is complete; naming an input file of "
      "the same command is an error)");
  table.file("output", writing(Writes::result, run), &Options::output,
             "output [B,T,N,Dv], .npy or .safetensors (tensor output)");
  table.file("lse", writing(Writes::result, run), &Options::lse,
             "log of the sum of exponentials, float32 [B,N,T] (tensor lse); may be the "
             ".safetensors file of --output");
  table.file("maximum", writing(Writes::result, run), &Options::maximum,
             "largest logit of each row, float32 [B,N,T] (tensor maximum), in place of --lse with "
             "--normalize-output false; may be the .safetensors file of --output");
  table.file("sum", writing(Writes::result, run), &Options::sum,
             "sum of exp(logit - maximum) of each row, likewise (tensor sum)");
  table.file("weights", writing(Writes::array, run), &Options::weights,
             "attention weights [B,N,T,S] (tensor weights), in the softmax's dtype; computed only "
             "by --impl vanilla, on CPUs");
  table.array(
      "grad-output", run, &Options::grad_output,
      "input: gradient of the loss with respect to the output, of its shape and dtype (tensor "
      "grad_output); with it, run computes the gradients of query, key and value too");
  table.array(
      "grad-lse", run, &Options::grad_lse,
      "input: gradient with respect to the LSE, float32 [B,N,T] (tensor grad_lse; default: 0)");
  table.array("forward-output", run, &Options::forward_output,
              "input: --output of an earlier run of the same problem (tensor output), together "
              "with --forward-lse and in place of --output; then only the gradients are computed");
  table.array("forward-lse", run, &Options::forward_lse, "input: --lse of that run (tensor lse)");
  table.file("grad-query", writing(Writes::gradient, run), &Options::grad_query,
             "gradient of the query, of its shape and dtype (tensor grad_query); gradients may "
             "share one .safetensors file");
  table.file("grad-key", writing(Writes::gradient, run), &Options::grad_key,
             "gradient of the key, likewise (tensor grad_key)");
  table.file("grad-value", writing(Writes::gradient, run), &Options::grad_value,
             "gradient of the value, likewise (tensor grad_value)");
  table.file("grad-sinks", writing(Writes::gradient, run), &Options::grad_sinks,
             "gradient of the sinks, float32, of their shape (tensor grad_sinks; needs --sinks)");
  table.file("grad-bias", writing(Writes::gradient, run), &Options::grad_bias,
             "gradient of the bias, float32, [B,N,T,S] with 1 where the bias is broadcast (tensor "
             "grad_bias; needs --bias)");
  table.add("deterministic", "", without_calibrate(kPlanned),
            parsed_into(&Options::reproducible,
                        [](const std::string& option, const std::string& text) {
                          return parse_flag(option, text) ? Reproducible::run : Reproducible::no;
                        }),
            "the same as --reproducible run, for gradients");
  table.add("reproducible", "no|run|world", without_calibrate(kPlanned),
            choice_into(&Options::reproducible, {"no", "run", "world"},
                        [](const std::string& name) {
                          if (name == "no") return Reproducible::no;
                          return name == "run" ? Reproducible::run : Reproducible::world;
                        }),
            "run: repeating the command repeats every bit; world: any number of ranks gives the "
            "same bits, too, which fewer schedules and kernels can do (default: run on CPUs, no on "
            "GPUs)");
  table.add("grad-wire", "DTYPE", without_calibrate(drawn(kPlanned)),
            dtype_into(&Options::grad_wire, {DType::float32, DType::bfloat16}),
            "dtype in which parts of gradients of keys and values go to their owners: float32, or "
            "bfloat16 for half types, which rounds each part once and halves the bytes; needs a "
            "schedule that sums no gradients along the way (default: float32)");
  table.file(
      "trace",
      writing(Writes::text, without_calibrate({{Command::run, Command::bench, Command::plan}})),
      &Options::trace,
      "timeline of every rank, as Chrome trace events (JSON), for Perfetto; with plan --simulate, "
      "up to 64 ranks; annulus_picture draws it");
  table.file("json", writing(Writes::report, with_hops(kAll)), &Options::json,
             "results as JSON; - is standard output, instead of the table");
  table.file("csv", writing(Writes::report, with_hops(kPlanned)), &Options::csv,
             "results as CSV, added to an existing file with the same columns; - is standard "
             "output, instead of the table");
  table.flag("wide", with_hops(kPlanned), &Options::wide,
             "show all columns of a table, not only as many as fit into 120 characters");
  table.flag("legend", with_hops(kPlanned), &Options::legend,
             "say what the columns of a table mean");
  table.flag("explain", without_calibrate(kPlanned), &Options::explain,
             "say why implementations and schedules were chosen or passed over");
}

void add_running(TableBuilder& table) {
  const Options defaults;
  table.group("Running");
  table.add("timeout", "SECONDS", with_hops(kOnRanks),
            parsed_into(&Options::timeout, parse_seconds),
            fmt::format("longest time that a rank waits for another one, at least 30 s while MPI "
                        "starts; 90s, 5m and 1h are times too (default: {})",
                        defaults.timeout));
  table.add("random", "N", {{Command::verify}}, int_into(&Options::random, 1),
            "verify N problems drawn at random from --seed");
  table.add("random-case", "SEED:INDEX", {{Command::verify}},
            parsed_into(&Options::random_case, parse_random_case),
            "repeat one problem that --random drew");
  table.flag(
      "backward", {{Command::verify, Command::bench, Command::plan}}, &Options::backward,
      "verify: compute and verify gradients too (default: for half of the problems of --random; "
      "--backward=false for none); bench: also time the backward pass, and both passes together, "
      "or with --calibrate measure its kernels; plan: plan the backward pass");
  table.add("repeat", "N", {{Command::run}}, int_into(&Options::repeat, 1),
            "compute N times and report the median, the fastest and the slowest call (default: 1)");
  table.flag(
      "dry-run", {{Command::run}}, &Options::dry_run,
      "check inputs, choices and outputs, say what would run, and compute and write nothing");
  table.add("warmup", "N", with_hops({{Command::bench}}), int_into(&Options::warmup, 0),
            fmt::format("calls before the timing starts (default: {})", defaults.warmup));
  table.add("warm-seconds", "SECONDS", without_calibrate({{Command::bench}}),
            parsed_into(&Options::warm_seconds, parse_seconds),
            "least duration of the calls before the timing starts, since a rested GPU is faster");
  table.add("iters", "N", with_hops({{Command::bench}}), int_into(&Options::iterations, 1),
            fmt::format("calls that are timed (default: {})", defaults.iterations));
  table.flag("once", without_calibrate({{Command::bench}}), &Options::once,
             "time only the first call of each pass, for problems that take minutes; memory and "
             "bytes are the same as with many calls, and the kernels alone are not timed");
  table.add("sweep", "BEGIN:END[:FACTOR]", with_hops({{Command::bench}}),
            parsed_into(&Options::sequence_sweep, parse_sweep),
            fmt::format("T = S from BEGIN to END, growing by FACTOR (default factor: {})",
                        SweepRange().factor));
  table.flag("hops", with_hops({{Command::bench}}), &Options::hops,
             "time the hops of a ring over all ranks instead, for each transport; --sweep gives "
             "bytes (default: 64k:256M:4)");
  table.file("calibrate", writing(Writes::text, {{Command::bench}}), &Options::calibrate,
             "measure a cost model for --cost-model instead: merges, reads, hops, and every kernel "
             "that computes the problem (heads of --shape, rows of --sweep); FILE keeps its "
             "entries of other dtypes, head dimensions and masks, and of the other pass");
  table.add(
      "show-ranks", "N", {{Command::run, Command::plan}}, int_into(&Options::show_ranks, 0),
      fmt::format(
          "print every step of the first N ranks; plan lists 32 ranks, or N if that is more; plan "
          "--simulate simulates all ranks of a large mesh if N is their number (default: {})",
          defaults.show_ranks));
  table.flag("simulate", {{Command::plan}}, &Options::simulate,
             "simulate the plan of all ranks, up to 4096, with shared links, overlapped transfers "
             "and slower ranks, and show what each rank does");
  table.add("straggler-percent", "X", {{Command::plan}},
            parsed_into(&Options::straggler_percent, parse_percent),
            "with --simulate: each rank computes longer by a random share between 0 and X % "
            "(default: 0)");
  table.add("straggler-seed", "N", {{Command::plan}},
            parsed_into(&Options::straggler_seed, parse_seed),
            "seed of the shares of --straggler-percent (default: 0)");
  table.flag(
      "recommend", {{Command::plan}}, &Options::recommend,
      "find out what to run: compare meshes, sequence layouts and schedules for the problem on "
      "--ranks ranks, or on one --mesh, by predicted time and memory, and print the command");
  table.add("ranks", "N", {{Command::plan}}, int_into(&Options::ranks, 1, 65536),
            "the number of ranks to plan for, with --scaling the largest one (default: the size of "
            "--mesh, or --nodes times --ranks-per-node)");
  table.add("max-tp", "N", {{Command::plan}}, int_into(&Options::most_head_shards, 1, 65536),
            "with --recommend: the largest number of ranks that share the heads, on the axis tp "
            "(default: no limit)");
  table.add("memory", "BYTES", {{Command::plan}},
            parsed_into(&Options::memory_bytes,
                        [](const auto& option, const auto& text) {
                          return static_cast<double>(parse_bytes(option, text));
                        }),
            "with --recommend: limit for a rank's shards and buffers, such as 80GB or 80GiB "
            "(default: no limit)");
  table.flag("scaling", {{Command::bench, Command::plan}}, &Options::scaling,
             "scaling over 1, 2, 4, ... ranks, with one problem (strong) and with a sequence that "
             "grows with the ranks (weak): predicted by plan up to --ranks, measured by bench on "
             "mpirun's ranks; annulus_picture draws it");
  table.add("tokens-per-rank", "N", {{Command::bench, Command::plan}},
            parsed_into(&Options::tokens_per_rank, parse_size),
            "with --scaling: S per rank in weak scaling, with T in proportion (default: S of "
            "--shape divided by the largest number of ranks)");
  table.file("config", with_hops(kAll), &Options::config,
             "options as lines name = value; command line, --metadata and environment override it");
  table.file("metadata", with_hops(kPlanned), &Options::metadata,
             "attention metadata as JSON, {\"softmax_scale\": 0.125, ...}; it overrides the "
             "environment and is overridden by the command line");
  table.flag("metadata-lenient", with_hops(kPlanned), &Options::metadata_lenient,
             "an unknown key of --metadata is a warning, not an error");
  table.file("model-config", kPlanned, &Options::model_config,
             "config.json of a Hugging Face model, which gives mask (causal, sliding window, "
             "chunks), scale and soft cap; where tensors are made, it also gives dtype and heads, "
             "so that a shape B,T,S is enough; the command line and --metadata override it");
  table.add("layer", "N", kPlanned, int_into(&Options::layer, 0),
            "layer of --model-config, counted from 0; needed if the model's layers differ");
}

std::vector<OptionEntry> make_table() {
  TableBuilder table;
  add_sharding(table);
  add_problem(table);
  add_input(table);
  add_output(table);
  add_running(table);
  return table.take();
}

}  // namespace

bool OptionEntry::belongs_to(Command command) const {
  return std::find(uses.commands.begin(), uses.commands.end(), command) != uses.commands.end();
}

const std::vector<OptionEntry>& option_table() {
  static const std::vector<OptionEntry> table = make_table();
  return table;
}

const OptionEntry* find_option(std::string_view name) {
  const std::vector<OptionEntry>& table = option_table();
  const auto found = std::find_if(table.begin(), table.end(),
                                  [&](const OptionEntry& entry) { return entry.name == name; });
  return found == table.end() ? nullptr : &*found;
}

}  // namespace annulus::launcher
