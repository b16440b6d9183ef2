// A transformer block that learns, with its sequences sharded: attention with its projections and
// an MLP, each behind an RMS norm and beside a residual connection, trained by plain SGD. Every
// token is to name the first token of its sequence, which only attention can tell it. The losses of
// 1, 2, 4 and 8 ranks agree to rounding; with the argument "world" they agree to the last bit.
//
//     mpirun -np 4 ./train_block world
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <annulus/annulus.hpp>

namespace {

using annulus::ConstTensorView;
using annulus::DType;
using annulus::LocalPosition;
using annulus::PartitionSpec;
using annulus::ShardedTensor;
using annulus::Tensor;

constexpr std::int64_t kBatch = 16;
constexpr std::int64_t kLength = 128;
constexpr std::int64_t kTile = 16;  // tokens of a sequence whose gradients are one term of a sum
constexpr std::int64_t kTokens = 8;
constexpr std::int64_t kHeads = 8;
constexpr std::int64_t kWidth = 32;  // of all heads together
constexpr std::int64_t kHidden = 64;
constexpr int kSteps = 80;
constexpr float kRate = 0.1F;

/// A matrix [in, out] among the weights, all of which lie in one array.
struct Linear {
  std::int64_t begin, in, out;

  /// y += x W, of one token.
  void apply(const float* weights, const float* x, float* y) const {
    for (std::int64_t i = 0; i < in; ++i) {
      for (std::int64_t o = 0; o < out; ++o) y[o] += x[i] * weights[begin + i * out + o];
    }
  }
  /// dW += xᵀ dy and dx += dy Wᵀ.
  void differentiate(const float* weights, const float* x, const float* dy, float* d_weights,
                     float* dx) const {
    for (std::int64_t i = 0; i < in; ++i) {
      float sum = 0;
      for (std::int64_t o = 0; o < out; ++o) {
        d_weights[begin + i * out + o] += x[i] * dy[o];
        sum += dy[o] * weights[begin + i * out + o];
      }
      dx[i] += sum;
    }
  }
  [[nodiscard]] constexpr std::int64_t end() const { return begin + in * out; }
};

constexpr Linear kEmbedding{0, kTokens + 1, kWidth};  // its last row marks the first token
constexpr Linear kQuery{kEmbedding.end(), kWidth, kWidth};
constexpr Linear kKey{kQuery.end(), kWidth, kWidth};
constexpr Linear kValue{kKey.end(), kWidth, kWidth};
constexpr Linear kOutput{kValue.end(), kWidth, kWidth};
constexpr Linear kUp{kOutput.end(), kWidth, kHidden};
constexpr Linear kDown{kUp.end(), kHidden, kWidth};
constexpr Linear kNames{kDown.end(), kWidth, kTokens};
constexpr std::int64_t kWeights = kNames.end();

/// Numbers that look random, the same on every rank.
std::uint32_t hash(std::uint32_t x) {
  for (const std::uint32_t factor : {0x7feb352dU, 0x846ca68bU}) x = (x ^ (x >> 16U)) * factor;
  return x ^ (x >> 16U);
}
std::int64_t token_at(int step, std::int64_t sequence, std::int64_t position) {
  return hash(static_cast<std::uint32_t>((step * kBatch + sequence) * kLength + position)) %
         kTokens;
}

/// y = x / rms(x), of one token.
float norm(const float* x, float* y) {
  float squares = 1e-6F;
  for (std::int64_t i = 0; i < kWidth; ++i) squares += x[i] * x[i] / kWidth;
  const float factor = 1 / std::sqrt(squares);
  for (std::int64_t i = 0; i < kWidth; ++i) y[i] = x[i] * factor;
  return factor;
}
/// dx += the gradient of norm(), from its result, its factor and dy.
void differentiate_norm(const float* y, float factor, const float* dy, float* dx) {
  float mean = 0;
  for (std::int64_t i = 0; i < kWidth; ++i) mean += y[i] * dy[i] / kWidth;
  for (std::int64_t i = 0; i < kWidth; ++i) dx[i] += factor * (dy[i] - y[i] * mean);
}

/// A number for each feature of each token of this rank, [batch, token, width].
struct Activations {
  Activations(std::int64_t tokens, std::int64_t features)
      : width(features), values(static_cast<std::size_t>(kBatch * tokens * features)) {}
  float* operator[](std::int64_t token) { return values.data() + token * width; }
  std::int64_t width;
  std::vector<float> values;
};

class Block {
 public:
  Block(annulus::Context& context, annulus::Attention& attention)
      : memory_(context.memory()), attention_(attention) {}

  /// The loss and its gradient by the weights, one term of each for every tile of the rank's
  /// tokens: [tiles] and [tiles, kWeights].
  std::vector<Tensor> differentiate(const ConstTensorView& weights, int step) {
    const float* const w = weights.as<float>();
    const annulus::PositionRanges positions = attention_.query_positions();
    const std::int64_t length = positions.size();
    const auto activations = [&](std::int64_t width) { return Activations(length, width); };
    std::vector<Tensor> terms;
    terms.emplace_back(DType::float32, annulus::Extents{length / kTile}, memory_);
    terms.emplace_back(DType::float32, annulus::Extents{length / kTile, kWeights}, memory_);
    for (Tensor& term : terms) term.fill_zero();
    // Tile by tile, and in a tile sequence by sequence: an order that no sharding changes.
    const auto each_token = [&](const auto& visit) {
      for (std::int64_t tile = 0; tile < length / kTile; ++tile) {
        for (std::int64_t row = 0; row < kBatch * kTile; ++row) {
          const std::int64_t sequence = row / kTile;
          const std::int64_t local = tile * kTile + row % kTile;
          visit(sequence * length + local, sequence, positions.global(LocalPosition(local)).value(),
                terms[0].view().as<float>() + tile, terms[1].view().as<float>() + tile * kWeights);
        }
      }
    };

    Activations x = activations(kWidth), q = x, k = x, v = x, attended = x, middle = x, y = x;
    Activations normed = x, normed_middle = x, hidden = activations(kHidden);
    Activations factors = activations(2);
    std::vector<float> lse(static_cast<std::size_t>(attention_.lse_shape().product()));
    each_token([&](std::int64_t t, std::int64_t sequence, std::int64_t position, auto...) {
      const float* const row = w + token_at(step, sequence, position) * kWidth;
      std::copy_n(row, kWidth, x[t]);
      for (std::int64_t i = 0; i < kWidth && position == 0; ++i) x[t][i] += w[kTokens * kWidth + i];
      factors[t][0] = norm(x[t], normed[t]);
      kQuery.apply(w, normed[t], q[t]);
      kKey.apply(w, normed[t], k[t]);
      kValue.apply(w, normed[t], v[t]);
    });
    attention_.run({q[0], k[0], v[0], attended[0], lse.data()});

    // The rest of the block for each token, there and back again.
    Activations d_middle = activations(kWidth), d_attended = d_middle;
    each_token([&](std::int64_t t, std::int64_t sequence, std::int64_t /*position*/, float* loss,
                   float* dw) {
      std::copy_n(x[t], kWidth, middle[t]);
      kOutput.apply(w, attended[t], middle[t]);
      factors[t][1] = norm(middle[t], normed_middle[t]);
      kUp.apply(w, normed_middle[t], hidden[t]);
      std::array<float, kHidden> active{}, d_hidden{};
      for (std::int64_t i = 0; i < kHidden; ++i) active[i] = std::max(hidden[t][i], 0.0F);
      std::copy_n(middle[t], kWidth, y[t]);
      kDown.apply(w, active.data(), y[t]);
      std::array<float, kTokens> logits{};
      kNames.apply(w, y[t], logits.data());

      const std::int64_t target = token_at(step, sequence, 0);
      float sum = 0;
      for (const float logit : logits) sum += std::exp(logit);
      *loss += (std::log(sum) - logits[target]) / (kBatch * kLength);
      std::array<float, kTokens> d_logits{};
      for (std::int64_t i = 0; i < kTokens; ++i) {
        d_logits[i] = (std::exp(logits[i]) / sum - (i == target ? 1 : 0)) / (kBatch * kLength);
      }

      std::array<float, kWidth> d_normed{};
      kNames.differentiate(w, y[t], d_logits.data(), dw, d_middle[t]);
      kDown.differentiate(w, active.data(), d_middle[t], dw, d_hidden.data());
      for (std::int64_t i = 0; i < kHidden; ++i) d_hidden[i] *= hidden[t][i] > 0 ? 1.0F : 0.0F;
      kUp.differentiate(w, normed_middle[t], d_hidden.data(), dw, d_normed.data());
      differentiate_norm(normed_middle[t], factors[t][1], d_normed.data(), d_middle[t]);
      kOutput.differentiate(w, attended[t], d_middle[t], dw, d_attended[t]);
    });
    Activations dq = activations(kWidth), dk = dq, dv = dq;
    attention_.backward(
        {q[0], k[0], v[0], attended[0], lse.data(), d_attended[0], dq[0], dk[0], dv[0]});
    each_token([&](std::int64_t t, std::int64_t sequence, std::int64_t position, float* /*loss*/,
                   float* dw) {
      std::array<float, kWidth> d_normed{};
      kQuery.differentiate(w, normed[t], dq[t], dw, d_normed.data());
      kKey.differentiate(w, normed[t], dk[t], dw, d_normed.data());
      kValue.differentiate(w, normed[t], dv[t], dw, d_normed.data());
      differentiate_norm(normed[t], factors[t][0], d_normed.data(), d_middle[t]);
      for (std::int64_t i = 0; i < kWidth; ++i) {
        dw[token_at(step, sequence, position) * kWidth + i] += d_middle[t][i];
        if (position == 0) dw[kTokens * kWidth + i] += d_middle[t][i];
      }
    });
    return terms;
  }

 private:
  annulus::MemoryPool& memory_;
  annulus::Attention& attention_;
};

/// Returns whether the loss has fallen.
bool train(MPI_Comm communicator, bool same_bits_on_any_ranks) {
  // All ranks on the axis sp.
  annulus::Context context(communicator, {.place = annulus::Place::host()});
  annulus::AttentionOptions options;
  options.shape = {kBatch, kLength, kLength, kHeads, kHeads, kWidth / kHeads, kWidth / kHeads};
  options.mask.set_causal(true);
  options.layout = annulus::LayoutKind::contiguous;  // so that tiles are in order of rank
  options.granule = kTile;
  if (same_bits_on_any_ranks) options.reproducible = annulus::Reproducible::world;
  annulus::Attention attention(context, options);
  Block block(context, attention);

  const annulus::NamedSharding replicated(context.mesh_shape(), PartitionSpec(), {kWeights});
  ShardedTensor weights(replicated, context.rank(), DType::float32, context.memory());
  float* const w = weights.local().as<float>();
  for (std::int64_t i = 0; i < kWeights; ++i) {
    w[i] =
        static_cast<float>(hash(static_cast<std::uint32_t>(i + 1)) % 2001) / 1000.0F * 0.3F - 0.3F;
  }
  int step = 0;
  // Every rank has all weights and uses them for tokens of its own, so the gradient is a sum over
  // the ranks. Each tile has a term, and as terms are added in one order, the sum has the same bits
  // on any number of ranks. So has the loss.
  annulus::ShardSpec sum{PartitionSpec()};
  sum.summed = {"sp"};
  sum.stacked = true;
  const annulus::ShardMap gradients{
      .body = [&](auto shards) { return block.differentiate(shards[0], step); },
      .in_specs = {PartitionSpec()},
      .out_specs = {sum, sum}};
  float first = 0, last = 0;
  for (; step < kSteps; ++step) {
    const std::vector<ShardedTensor> results = shard_map(context, gradients, {weights});
    last = results[0].local().template at<float>({});
    if (step == 0) first = last;
    const float* const dw = results[1].local().as<float>();
    for (std::int64_t i = 0; i < kWeights; ++i) w[i] -= kRate * dw[i];
    if (context.rank() == 0) std::printf("step %2d: loss %.6f (%a)\n", step, last, last);
  }
  return last < first / 2;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const bool world = argc == 2 && std::string_view(argv[1]) == "world";
  if (argc > 1 && !world) {
    std::fprintf(stderr, "usage: mpirun -np RANKS train_block [world]\n");
    MPI_Finalize();
    return 2;
  }
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &communicator);
  const bool fell = train(communicator, world);
  MPI_Comm_free(&communicator);
  MPI_Finalize();
  return fell ? 0 : 1;
}
