#include "native/native.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/core/division.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/parallel.hpp>

#include "cuda/native_cuda.hpp"
#include "native/backward.hpp"
#include "native/block_checks.hpp"
#include "native/single_threaded_blas.hpp"
#include "native/tile_gradients.hpp"
#include "native/tile_kernel.hpp"

namespace annulus {
namespace {

// The part of the keys that the dense mask shows to a row, which stands for the rows near it.
double shown_part(const AttentionBlock& block, std::int64_t batch, std::int64_t row) {
  if (!block.scores.mask) return 1;
  const ConstTensorView& mask = *block.scores.mask;
  const std::int64_t keys = mask.size(3);
  if (keys == 0) return 1;
  const std::int64_t different = mask.stride(3) == 0 ? 1 : keys;
  const auto* const entries = static_cast<const std::uint8_t*>(mask.address({batch, 0, row, 0}));
  const std::int64_t hidden = std::count(entries, entries + different, 0);
  return 1 - static_cast<double>(hidden) / static_cast<double>(different);
}

// Heaviest first, so that threads which take them in turn finish together. For the same reason the
// last quarter of the work comes in tiles of half the length, unless that is less than `least`. No
// tile crosses the edge of a query block, nor, where bits are not to depend on the shards, a
// multiple of the length.
std::vector<RowTile> row_tiles(const AttentionProblem& problem, const AttentionBlock& block,
                               std::int64_t length, std::int64_t least) {
  std::vector<std::pair<double, RowTile>> weighted;
  double total = 0;
  const std::optional<BlockMask>& blocks = problem.mask.block_mask();
  for (std::int64_t batch = 0; batch < block.query.size(0); ++batch) {
    std::int64_t before = 0;
    for (const PositionRange& range : block.rows.ranges()) {
      std::int64_t end = 0;
      for (std::int64_t begin = 0; begin < range.length; begin = end) {
        const std::int64_t most =
            problem.in_global_order() ? length - range.at(begin).value() % length : length;
        end = std::min(begin + most, range.length);
        if (blocks) end = std::min(end, range.count_below(blocks->end_of_rows(range.at(begin))));
        const PositionRange rows = range.slice(begin, end - begin);
        std::int64_t pairs = rows.length * block.columns.size();
        if (!block.unmasked) {
          pairs = 0;
          for (const PositionRange& columns : block.columns.ranges()) {
            pairs += problem.mask.examine(block.first_batch + batch, 1, rows, columns).pairs;
          }
        }
        const std::int64_t row = before + begin;
        const double weight =
            static_cast<double>(pairs) * shown_part(block, batch, row + rows.length / 2);
        weighted.push_back({weight, {batch, LocalPosition(row), rows}});
        total += weight;
      }
      before += range.length;
    }
  }
  std::stable_sort(weighted.begin(), weighted.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<RowTile> tiles;
  tiles.reserve(weighted.size());
  double done = 0;
  for (const auto& [weight, tile] : weighted) {
    done += weight;
    const std::int64_t rows = tile.rows.length;
    const std::int64_t half = done > 0.75 * total && rows >= 2 * least ? (rows + 1) / 2 : rows;
    for (std::int64_t begin = 0; begin < rows; begin += half) {
      tiles.push_back(
          {tile.batch, tile.begin + begin, tile.rows.slice(begin, std::min(half, rows - begin))});
    }
  }
  return tiles;
}

// The query rows of a tile, at most `most`. A block with few batches and heads gets shorter tiles,
// so that many threads have work. The number of threads is not considered, because results must not
// depend on it.
std::int64_t tile_length(std::int64_t most, std::int64_t rows, std::int64_t batches_and_heads) {
  constexpr std::int64_t kTasks = 64;
  std::int64_t length = std::max<std::int64_t>(1, most);
  while (length >= 2 * kLeastRows && ceil_divide(rows, length) * batches_and_heads < kTasks) {
    length /= 2;
  }
  return length;
}

class NativeKernel final : public Kernel {
 public:
  NativeKernel(const AttentionProblem& problem, MatrixPath path, MemoryPool& memory)
      : problem_(problem), path_(path), memory_(memory) {}

  void forward(const AttentionBlock& block, const SoftmaxState& result,
               const ExecutionContext& context) override {
    check_forward(problem_, block, result);
    context.stream.synchronize();  // the stream's earlier work comes first

    // Heads that see different blocks have tiles of their own, and so have all where other heads of
    // the group may be on another rank: what is multiplied together decides on bits.
    const bool global_order = problem_.in_global_order();
    const std::int64_t most_rows = most_tile_rows(path_);
    const std::vector<HeadTile> heads =
        head_tiles(block.query.size(2), block.key.size(2),
                   global_order || problem_.mask.depends_on_head() ? 1 : most_rows);
    const std::int64_t stacked = heads.front().count;
    const std::int64_t length =
        global_order ? kLeastRows
                     : tile_length(most_rows / stacked, block.query.size(1),
                                   block.query.size(0) * static_cast<std::int64_t>(heads.size()));
    const std::vector<RowTile> rows =
        row_tiles(problem_, block, length, global_order ? length : kLeastRows / stacked);
    const auto head_count = static_cast<std::int64_t>(heads.size());
    const std::int64_t tasks = static_cast<std::int64_t>(rows.size()) * head_count;
    if (tasks == 0) return;

    const int workers = static_cast<int>(std::clamp<std::int64_t>(context.threads, 1, tasks));
    const std::int64_t max_rows = std::min(length, block.rows.size()) * stacked;
    std::vector<TileKernel> kernels;
    kernels.reserve(static_cast<std::size_t>(workers));
    for (int i = 0; i < workers; ++i) {
      kernels.emplace_back(problem_, block, result, max_rows, path_, memory_);
    }
    // Host streams belong to the calling thread, which is worker 0.
    const std::function<void()> progress = [&] {
      if (context.background != nullptr) context.background->progress();
    };
    const std::function<void()> nothing = [] {};
    const SingleThreadedBlas single_threaded_blas(path_ == MatrixPath::sgemm ? workers : 0);
    parallel_for(
        tasks, workers,
        [&](std::int64_t task, int worker) {
          kernels[static_cast<std::size_t>(worker)].run(
              rows[static_cast<std::size_t>(task / head_count)],
              heads[static_cast<std::size_t>(task % head_count)], worker == 0 ? progress : nothing);
        },
        progress);
  }

  void backward(const BackwardBlock& block, const Gradients& gradients,
                const ExecutionContext& context) override {
    add_native_gradients(problem_, block, gradients, context, path_, memory_);
  }

 private:
  const AttentionProblem& problem_;
  const MatrixPath path_;
  MemoryPool& memory_;  // for workspace
};

// Operations per second of a core while the others work too, S = 8192 (backward 4096), and what
// masks leave of them (benchmarks/NOTES.md, "16 cores of their own" and "The native backward pass
// by AMX"; without AMX, "The CPU kernel and AMX").
double core_rate(const ProblemClass& problem) {
  struct Rates {
    double at_64 = 55e9;
    double at_128 = 55e9;
  };
  // Without AMX, operations of the backward pass take as long as the forward pass's
  // (benchmarks/NOTES.md, "Gradients beside PyTorch and JAX").
  Rates rates;
  if (best_matrix_path(problem.dtype) == MatrixPath::amx) {
    const bool backward = problem.pass == Pass::backward;
    switch (problem.dtype) {
      case DType::float32:
        rates = backward ? Rates{45e9, 53e9} : Rates{80e9, 91e9};
        break;
      case DType::float16:
        rates = backward ? Rates{66e9, 78e9} : Rates{102e9, 122e9};
        break;
      default:
        rates = backward ? Rates{114e9, 118e9} : Rates{188e9, 270e9};
    }
  }
  constexpr std::array kLeft{1.0, 1.0, 0.75, 0.75, 0.7};  // by MaskKind
  constexpr double kSoftCap = 0.8;
  // Below D = 64 the time is that of the softmax; beyond 128 the rate grows no more.
  const double dim = static_cast<double>(problem.head_dim + problem.value_dim) / 2;
  const double plain = dim < 64 ? rates.at_64 * dim / 64
                                : std::lerp(rates.at_64, rates.at_128, std::min(dim / 64 - 1, 1.0));
  return plain * kLeft[static_cast<std::size_t>(problem.mask)] * (problem.soft_cap ? kSoftCap : 1);
}

class NativeImplementation final : public Implementation {
 public:
  [[nodiscard]] const std::vector<std::string>& names() const noexcept override { return names_; }

  [[nodiscard]] const Declaration& declares() const noexcept override { return declaration_; }

  [[nodiscard]] Capability accepts(const AttentionProblem& problem, Place place) const override {
    switch (problem.dtype) {
      case DType::float16:
      case DType::bfloat16:
      case DType::float32:
        break;
      default:
        return Capability::no("computes float16, bfloat16 and float32, not " +
                              std::string(name_of(problem.dtype)));
    }
    if (!place.is_host() && problem.in_global_order()) {
      return Capability::no("gives the same bits on any number of ranks only on CPUs");
    }
    // A device compares positions with arrays of int32 numbers.
    const std::int64_t longest = std::max(problem.shape.query_length, problem.shape.kv_length);
    if (!place.is_host() && problem.call_arguments.change_visibility() &&
        longest > std::numeric_limits<std::int32_t>::max()) {
      return Capability::no("reads " + to_string(problem.call_arguments) +
                            " as call arguments of sequences below 2^31 on devices");
    }
    // A device keeps a row's query and sum in shared memory, for several rows at once.
    constexpr std::int64_t kMaximumDims = 4096;
    if (!place.is_host() && problem.shape.head_dim + problem.shape.value_dim > kMaximumDims) {
      return Capability::no(fmt::format(
          "head dimensions that add up to more than {} do not fit on the device", kMaximumDims));
    }
    return Capability::yes();
  }

  [[nodiscard]] Capability available(Place place) const override {
    return place.is_host() ? Capability::yes() : native_cuda_available(place);
  }

  [[nodiscard]] double assumed_rate(const ProblemClass& problem, Place place) const override {
    // Each gradient's kernel computes its pairs again: 8 products instead of 5 (not measured).
    constexpr double kOnH200 = 0.85e12;
    if (!place.is_host()) return problem.pass == Pass::backward ? kOnH200 * 5 / 8 : kOnH200;
    return core_rate(problem);
  }

  [[nodiscard]] std::unique_ptr<Kernel> make_kernel(const AttentionProblem& problem,
                                                    Device& device) const override {
    if (!device.place().is_host()) return make_native_cuda_kernel(problem, device);
    return make_native_kernel(problem, best_matrix_path(problem.dtype), device.memory());
  }

 private:
  std::vector<std::string> names_{"native"};
  Declaration declaration_{
      .features = FeatureSet::all() | FeatureSet::call_arguments(),
      .backward =
          BackwardDeclaration{
              .features = FeatureSet::positions() | FeatureSet::call_arguments() |
                          FeatureSet{Feature::segments, Feature::lengths, Feature::block_mask,
                                     Feature::soft_cap, Feature::dropout, Feature::bias,
                                     Feature::dense_mask},
              .reproducible_columns = kGradientColumns},
      .reproducible_rows = kLeastRows};
};

}  // namespace

std::unique_ptr<Kernel> make_native_kernel(const AttentionProblem& problem, MatrixPath path,
                                           MemoryPool& memory) {
  return std::make_unique<NativeKernel>(problem, path, memory);
}

std::unique_ptr<Implementation> make_native_implementation() {
  return std::make_unique<NativeImplementation>();
}

}  // namespace annulus
