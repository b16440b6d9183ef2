#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/core/dtype.hpp>
#include <annulus/core/watchdog.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/partition/sharding_rules.hpp>
#include <annulus/ring/tuning.hpp>

#include "launcher/options/model_config.hpp"

namespace annulus::launcher {

enum class Command : std::uint8_t { run, verify, bench, plan, info };

[[nodiscard]] std::string_view name_of(Command command) noexcept;

/// Sizes begin, begin · factor, … up to end, as given to --sweep.
struct SweepRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t factor = 2;
  bool operator==(const SweepRange&) const = default;
};

/// Keys visible to the left and to the right of the diagonal; −1 is unlimited.
struct WindowSize {
  std::int64_t left = -1;
  std::int64_t right = -1;
  bool operator==(const WindowSize&) const = default;
};

/// The position of the diagonal of causal, window and chunk: the offset, or S − T for bottom right.
struct CausalOffset {
  bool bottom_right = false;
  std::int64_t value = 0;
  bool top_left = false;  ///< by that name
  std::string file;       ///< one per batch; empty: none
  bool operator==(const CausalOffset&) const = default;
};

/// A size, or one per batch.
struct SizeOrFile {
  std::int64_t value = 0;
  std::string file;  ///< one per batch; empty: the value counts
  bool operator==(const SizeOrFile&) const = default;
};

/// One problem of the random generator (see draw_problem).
struct RandomCase {
  std::uint64_t seed = 0;
  int index = 0;
  bool operator==(const RandomCase&) const = default;
};

/// Every option of the program, parsed and checked one by one; problem_setup.hpp combines them.
/// Absent optionals were not given anywhere.
struct Options {
  Command command = Command::info;

  // Mesh and sharding.
  std::optional<std::string> mesh;  ///< "dp=2,sp=-1"; default: all ranks on sp
  std::optional<std::string> query_spec;
  std::optional<std::string> kv_spec;
  std::string sequence_layout = "auto";     ///< auto: see ring::default_layout
  std::string kv_sequence_layout = "auto";  ///< auto: as the queries'
  std::optional<std::int64_t> granule;
  std::string schedule = "auto";
  int ulysses_degree = 0;  ///< this and the next as in ring::PlanOptions
  int inner_size = 0;
  std::string implementation = "auto";
  std::optional<std::string> mode;
  ShardingRules rules;               ///< for the default specs
  std::string sequence_axis = "sp";  ///< see AttentionMetadata::rules()
  std::string rank_order = "node";   ///< or "mpirun"
  std::string device = "auto";
  Transport transport = Transport::automatic;  ///< between GPU ranks; if share_gpus, peer or
                                               ///< composite
  bool share_gpus = false;                     ///< several ranks may share a GPU
  ring::TuningPolicy tuning = ring::TuningPolicy::off;
  int threads = 0;  ///< 0: an equal share of the node's cores; see threads.hpp

  // Problem.
  std::optional<AttentionShape> shape;  ///< verify, bench, plan
  std::optional<DType> dtype;
  bool causal = false;
  std::optional<CausalOffset> causal_offset;
  std::optional<WindowSize> window;
  std::optional<SizeOrFile> prefix;
  std::optional<std::int64_t> sink_tokens;
  std::optional<std::int64_t> chunk;
  std::optional<BlockSize> block_size;
  std::optional<double> scale;
  std::optional<double> soft_cap;
  double dropout = 0;
  DType softmax_dtype = DType::float32;
  bool normalize_output = true;
  BiasPolicy bias_policy = BiasPolicy::combine;
  std::uint64_t seed = 0;
  bool bhtd = false;  ///< tensors in files are [B,N,T,D]

  // Files. Empty: not given. json and csv may be "-": standard output, in place of the table.
  std::string query, key, value, input, config, metadata, model_config;
  bool metadata_lenient = false;          ///< unknown keys of metadata are warnings
  std::optional<std::int64_t> layer;      ///< of model_config
  std::optional<ModelSizes> model_sizes;  ///< what model_config says that tensors have
  std::string query_segments, kv_segments, cu_seqlens, query_lengths, kv_lengths;
  std::string query_cu_seqlens, kv_cu_seqlens;
  std::string block_mask;  ///< or "random:DENSITY"
  std::string sinks;       ///< or "random:M"
  std::string bias;        ///< or "random:STDDEV"
  std::string mask;        ///< or "random:DENSITY"
  std::string output, lse, maximum, sum, weights, trace, json, csv;
  // Files of the backward pass, which is computed if grad_output is given.
  std::string grad_output, grad_lse, grad_query, grad_key, grad_value, grad_sinks, grad_bias;
  std::string forward_output, forward_lse;   ///< empty: the forward pass is computed
  std::optional<Reproducible> reproducible;  ///< --deterministic sets it too
  DType grad_wire = DType::float32;          ///< or bfloat16
  std::string cost_model;                    ///< file, for predictions
  std::string tuning_cache;                  ///< empty: ring::default_tuning_file()
  std::string build;                         ///< see ring::TuningOptions; no option

  // Running.
  double timeout = Watchdog::kDefault.count();  ///< seconds
  bool explain = false;
  bool wide = false;    ///< tables show all columns
  bool legend = false;  ///< tables explain their columns

  /// verify: gradients too; empty: for half of the random problems. bench: the backward pass too.
  /// plan: the backward pass instead.
  std::optional<bool> backward;

  // run
  int repeat = 1;        ///< calls
  bool dry_run = false;  ///< only says what the run would do
  // verify
  int random = 0;  ///< number of random problems
  std::optional<RandomCase> random_case;
  // bench
  int warmup = 2;
  double warm_seconds = 0;  ///< the least time of the warm-up calls
  int iterations = 10;
  bool once = false;  ///< measure the first call of each pass only
  /// T = S, growing from begin to end by factor; with hops: bytes; with calibrate: rows.
  std::optional<SweepRange> sequence_sweep;
  bool hops = false;      ///< time only ring hops
  std::string calibrate;  ///< file of the cost model to be measured
  // plan
  int show_ranks = 0;      ///< ranks whose steps are printed
  int ranks_per_node = 0;  ///< 0: not given
  bool simulate = false;
  double straggler_percent = 0;
  std::uint64_t straggler_seed = 0;
  bool recommend = false;
  int ranks = 0;             ///< 0: not given
  int nodes = 0;             ///< 0: not given
  int most_head_shards = 0;  ///< 0: not given
  double memory_bytes = 0;   ///< per rank; 0: no limit
  // plan and bench
  bool scaling = false;
  std::int64_t tokens_per_rank = 0;  ///< 0: not given

  /// The given options and their values, from all sources: "--causal=true --mesh=sp=4". Must be the
  /// same on every rank.
  std::string given;
  /// The same, by name.
  std::vector<std::pair<std::string, std::string>> given_values;
  /// Null if the option was not given.
  [[nodiscard]] const std::string* given_value(std::string_view name) const;
  /// The options of the command line, without dashes. Unlike options of environment and files, they
  /// must have an effect.
  std::set<std::string, std::less<>> named;
  /// Warnings for the user, one sentence each.
  std::vector<std::string> warnings;

  bool operator==(const Options&) const = default;
};

/// Parses the words after the program's name. A value comes from the first of these sources that
/// has it: the command line, --metadata, the environment (ANNULUS_CAUSAL_OFFSET for
/// --causal-offset, then ANNULUS_METADATA_*), the file that --config names, the default. File and
/// environment may serve several commands: options of other commands are ignored there, but are
/// errors on the command line.
///
/// Throws ArgumentError naming the option, its value and what was expected, and FileError for the
/// --config file. For help or the version, returns nothing and puts the text into `help`. Does not
/// communicate.
[[nodiscard]] std::optional<Options> parse_options(const std::vector<std::string>& words,
                                                   std::string& help);

}  // namespace annulus::launcher
