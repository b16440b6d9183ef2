// Every implementation against the oracle: masks, modifiers, shapes and parts.
#include <algorithm>
#include <cstring>
#include <vector>

#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/non_finite.hpp"
#include "tests/attention/score_cases.hpp"
#include "tests/attention/suite/backend.hpp"

namespace annulus::test {
namespace {

class Forward : public BackendTest {
 protected:
  /// Tensors of some rows and columns, stored head by head, and scores by position or by column.
  struct Part {
    Part(const WholeAttention& whole, const PositionRanges& rows, const PositionRanges& columns,
         bool by_column)
        : query(gather(whole.query.view(), rows)),
          key(gather(whole.key.view(), columns)),
          value(gather(whole.value.view(), columns)),
          block{as_bthd(query), as_bthd(key), as_bthd(value), rows, columns} {
      const AttentionProblem& problem = whole.problem;
      if (problem.bias) bias = gather_rows(whole.bias, rows);
      if (problem.dense_mask) mask = gather_rows(whole.mask, rows);
      if (by_column && problem.bias) bias = gather_keys(bias, columns);
      if (by_column && problem.dense_mask) mask = gather_keys(mask, columns);
      const AttentionShape& s = problem.shape;
      const Extents shape{s.batch, s.heads, rows.size(), s.kv_length};
      block.scores = by_column ? scores_by_column(bias, mask, shape, columns)
                               : broadcast_scores(bias.view(), mask.view(), shape);
    }
    Tensor query, key, value;
    Tensor bias = {}, mask = {};
    AttentionBlock block;
  };

  /// Bias, dense mask and dropout, if it takes them. They may be broadcast over rows and keys.
  void add_modifiers(AttentionProblem& problem, bool broadcasts = false) const {
    const AttentionShape& s = problem.shape;
    AttentionProblem modified = problem;
    modified.bias = Extents{1, s.heads, broadcasts ? 1 : s.query_length, s.kv_length};
    modified.dense_mask = Extents{s.batch, 1, s.query_length, broadcasts ? 1 : s.kv_length};
    modified.dropout.emplace(0.2, 9);
    if (implementation().fits(modified, device_->place())) problem = modified;
  }

  /// See test::in_parts().
  [[nodiscard]] Result in_parts(const WholeAttention& whole,
                                const std::vector<std::pair<std::int64_t, std::int64_t>>& parts,
                                std::optional<DType> last = {}) {
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(whole.problem, *device_);
    return test::in_parts(*device_, *stream_, whole, parts, last,
                          [&](const AttentionBlock& block, const SoftmaxState& result) {
                            kernel->prepare(block, result);
                            kernel->forward(block, result, {*stream_, nullptr, 1});
                          });
  }
  /// One kernel computes all shards of the rows with all shards of the columns; merged they are the
  /// whole.
  void expect_shards_merge(const WholeAttention& whole, const OracleOutput& truth,
                           const SequenceLayout& row_layout, const SequenceLayout& column_layout,
                           int ranks) {
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(whole.problem, *device_);
    const Result together(whole.block(), DType::float64);
    for (int r = 0; r < ranks; ++r) {
      const PositionRanges rows = row_layout.positions(r);
      std::vector<Result> results;
      for (int c = 0; c < ranks; ++c) {
        const Part part(whole, rows, column_layout.positions(c), (r + c) % 2 == 1);
        ASSERT_EQ(implementation().takes(whole.problem, geometry_of(part.block)).reason(), "");
        results.push_back(run(*kernel, part.block, DType::float64));
      }
      const Result& merged = results.front();
      std::vector<PartialState> states;
      for (const Result& result : results) states.push_back({result.state(), 0, 0});
      combine(states, merged.state());
      for (std::int64_t i = 0; i < rows.size(); ++i) {
        const std::int64_t to = rows.global(LocalPosition(i)).value();
        copy(merged.output.view().slice(1, i, 1), together.output.view().slice(1, to, 1));
        copy(merged.lse.view().slice(2, i, 1), together.lse.view().slice(2, to, 1));
      }
    }
    test::expect_accurate(together, whole, truth);
  }
};

TEST_P(Forward, EveryMask) {
  Random random(51);
  for (const bool blocks : {false, true}) {
    if (backend().blocks == (blocks ? Blocks::never : Blocks::always)) continue;
    const std::int64_t block = std::min<std::int64_t>(128, backend().columns / 2);
    std::size_t i = 0;
    std::vector<std::vector<MaskKind>> all = blocks ? kinds_beside_blocks() : all_combinations();
    if (blocks) {
      for (const MaskKind kind : kPositionKinds) {
        for (const MaskKind other : {MaskKind::causal, MaskKind::window, MaskKind::segments}) {
          all.push_back({kind, other});
        }
      }
    }
    for (const std::vector<MaskKind>& kinds : all) {
      AttentionProblem problem = problem_of(i);
      const AttentionShape& s = problem.shape;
      problem.mask = random_mask(random, kinds, 2, s.query_length, s.kv_length);
      if (blocks) {
        problem.mask.set_block_mask(
            i % 4 < 2
                ? random_block_mask(random, 2, 4, s.query_length, s.kv_length, largest_block())
                : BlockMask::random(s.query_length, s.kv_length, 4, 0.5, i, {block, block}));
      }
      if (i % 5 == 0) problem.soft_cap = 3.0;
      if (i % 7 == 0 && problem.dtype == DType::float32) problem.scale = -0.2;
      ++i;
      expect_accurate(random, problem);
    }
  }
}

TEST_P(Forward, DropoutUnderEveryMask) {
  Random random(52);
  std::size_t i = 0;
  for (const std::vector<MaskKind>& kinds : all_combinations()) {
    // Every pair of kinds of a group, but only a third of the combinations of three kinds.
    if (kinds.size() > 2 && i++ % 3 != 0) continue;
    AttentionProblem problem = problem_of(i);
    const AttentionShape& s = problem.shape;
    problem.mask = random_mask(random, kinds, 2, s.query_length, s.kv_length);
    add_blocks(random, problem);
    problem.dropout.emplace(i % 4 == 0 ? 0.7 : 0.1, (std::uint64_t{3} << 40U) + 5);
    if (i % 5 == 0) problem.soft_cap = 3.0;
    ASSERT_TRUE(choose_dtype(problem, i++));
    expect_accurate(random, problem);
  }
}

// Windows whose first columns lie at all distances from a multiple of 32.
TEST_P(Forward, DropoutFromAnyPosition) {
  Random random(53);
  for (std::int64_t left = 90; left < 122; ++left) {
    const auto i = static_cast<std::size_t>(left);
    AttentionProblem problem = problem_of(i, 130, 130);
    problem.mask.set_window(left, 0);
    add_blocks(random, problem);
    problem.dropout.emplace(0.3, i);
    ASSERT_TRUE(choose_dtype(problem, i));
    expect_accurate(random, problem);
  }
}

// Full and broadcast, alone and together, beside other masks; hidden entries of the bias are not
// finite.
TEST_P(Forward, BiasAndDenseMask) {
  Random random(54);
  const std::vector<std::vector<MaskKind>> masks = mask_combinations();
  std::size_t i = 0;
  int spoilt = 0;
  for (int round = 0; round < 3; ++round) {
    // Rows of scores that begin at multiples of 64 entries, and others.
    const std::int64_t columns =
        round == 1 ? (backend().columns + 63) / 64 * 64 : backend().columns;
    const std::int64_t rows = std::min<std::int64_t>(backend().rows, 131);
    for (const Extents& shape : score_shapes(2, 4, rows, columns)) {
      AttentionProblem problem = problem_of(i, rows, columns);
      problem.mask = random_mask(random, masks.at(i * 5 % masks.size()), 2, rows, columns);
      add_blocks(random, problem);
      if (round != 1) problem.bias = shape;
      if (round != 0) problem.dense_mask = round == 1 ? shape : Extents{2, 1, rows, columns};
      if (i % 5 == 0) problem.soft_cap = 2;
      if (i % 5 == 1) problem.dropout.emplace(0.3, 7);
      ASSERT_TRUE(choose_dtype(problem, i++));
      const WholeAttention whole = random_attention(random, problem);
      spoilt += spoil_hidden_bias(whole);
      expect_accurate(whole);
    }
  }
  EXPECT_GT(spoilt, 500);
}

TEST_P(Forward, Shapes) {
  Random random(55);
  for (const AttentionShape& shape : backend().shapes) {
    for (const DType dtype : backend().dtypes) {
      AttentionProblem problem = test::problem_of(shape, dtype);
      add_blocks(random, problem);
      expect_accurate(random, problem);
      problem.mask.set_causal(true);
      expect_accurate(random, problem);
      problem.mask.set_offset(shape.kv_length - shape.query_length);  // rows may see nothing
      problem.soft_cap = 20.0;
      expect_accurate(random, problem);
    }
  }
}

TEST_P(Forward, ScalesAndSoftCaps) {
  Random random(56);
  std::size_t i = 0;
  for (const double scale : {-0.3, 0.0, 0.125, 0.3}) {
    for (const double cap : {0.0, 0.5, 2.0, 50.0}) {
      for (const DType dtype : backend().dtypes) {
        AttentionProblem problem = problem_of(i++, 40, backend().columns);
        problem.dtype = dtype;
        problem.scale = scale;
        if (cap > 0) problem.soft_cap = cap;
        problem.mask.set_window(50, 400);
        add_blocks(random, problem);
        // The flash kernels of half types take the maximum of a row before they scale it, so they
        // need a positive scale.
        const bool refused = backend().on_gpu && backend().name != "native" && scale <= 0 &&
                             cap == 0 && dtype != DType::float32;
        ASSERT_NE(static_cast<bool>(implementation().fits(problem, device_->place())), refused);
        if (!refused) expect_accurate(random, problem);
      }
    }
  }
}

// docs/semantics.md §6: parts of any layout, whatever hides their pairs, add up to the whole.
TEST_P(Forward, ShardsMergeIntoTheWhole) {
  constexpr int kRanks = 3;
  const std::int64_t length = std::min<std::int64_t>(4 * backend().columns, 643);
  using enum LayoutKind;
  Random random(57);
  std::size_t i = 0;
  for (const std::vector<MaskKind>& kinds :
       std::vector<std::vector<MaskKind>>{{},
                                          {MaskKind::causal},
                                          {MaskKind::window, MaskKind::causal},
                                          {MaskKind::causal, MaskKind::documents},
                                          {MaskKind::causal, MaskKind::segments},
                                          {MaskKind::offset, MaskKind::kv_lengths},
                                          {MaskKind::left_window, MaskKind::query_lengths},
                                          {MaskKind::offsets, MaskKind::sink_tokens},
                                          {MaskKind::prefixes, MaskKind::chunk},
                                          {MaskKind::packings, MaskKind::left_window}}) {
    for (const bool modified : {false, true}) {
      AttentionProblem problem = problem_of(i, length, length);
      problem.mask = random_mask(random, kinds, 2, length, length);
      add_blocks(random, problem);
      if (modified) add_modifiers(problem, i / 2 % 2 == 1);
      ASSERT_TRUE(choose_dtype(problem, i++));
      SCOPED_TRACE(describe(problem));
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      for (const auto& [rows, columns] : {std::pair{contiguous, contiguous},
                                          {zigzag, zigzag},
                                          {striped, striped},
                                          {striped, zigzag},
                                          {contiguous, striped}}) {
        expect_shards_merge(whole, truth, SequenceLayout(rows, length, kRanks),
                            SequenceLayout(columns, length, kRanks), kRanks);
      }
    }
  }
}

// One kernel computes parts of the batch and of the heads, as a ring by heads has it do.
TEST_P(Forward, PartsOfTheBatchAndOfTheHeads) {
  Random random(58);
  for (std::size_t i = 0; i < 24; ++i) {
    AttentionProblem problem = problem_of(i, 70, 190);
    problem.shape.batch = 3;
    problem.mask = random_mask(random, {MaskKind::segments, MaskKind::kv_lengths}, 3, 70, 190);
    if (i % 2 == 0) problem.mask = {};
    if (backend().blocks != Blocks::never) {
      problem.mask.set_block_mask(BlockMask::random(70, 190, 4, 0.7, 1, {16, 16}));
    }
    if (i % 4 < 2) add_modifiers(problem);
    const WholeAttention whole = random_attention(random, problem);
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    for (const bool part : {true, false, true}) {
      const AttentionBlock block = part ? part_of_batch_and_heads(whole.block()) : whole.block();
      test::expect_accurate(
          run(*kernel, block), whole,
          oracle_attention(problem, block.query, block.key, block.value, block.rows,
                           block.first_batch, block.first_head, 0, block.scores));
    }
  }
}

// Blocks without masked pairs still have a bias, a dense mask and dropout.
TEST_P(Forward, UnmaskedBlocksSkipTheMask) {
  Random random(59);
  for (std::size_t i = 0; i < 12; ++i) {
    AttentionProblem problem = problem_of(i, 150, 260);
    if (i % 2 == 0) add_modifiers(problem);
    const WholeAttention whole = random_attention(random, problem);
    AttentionBlock block = whole.block();
    block.unmasked = true;
    if (backend().skips_masks) problem.mask.set_query_lengths({0, 0});  // would hide everything
    const std::unique_ptr<Kernel> kernel = implementation().make_kernel(problem, *device_);
    test::expect_accurate(run(*kernel, block), whole, whole.oracle());
  }
}

// Tensors stored head by head.
TEST_P(Forward, StridesDoNotMatter) {
  Random random(60);
  for (std::size_t i = 0; i < 12; ++i) {
    AttentionProblem problem = problem_of(i, 100, 300);
    problem.mask.set_causal(true);
    problem.mask.set_offset(200);
    const WholeAttention whole = random_attention(random, problem);
    const Part other(whole, whole.rows(), whole.columns(), false);
    for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
      EXPECT_TRUE(run(*kernel, other.block) == run(*kernel, whole.block())) << describe(problem);
    }
  }
}

TEST_P(Forward, RunsRepeatEveryBit) {
  Random random(61);
  for (std::size_t i = 0; i < 12; ++i) {
    AttentionProblem problem = problem_of(i, 200, 700);
    problem.mask = random_mask(random, {MaskKind::causal, MaskKind::documents}, 2, 200, 700);
    add_blocks(random, problem);
    if (i % 3 == 0) add_modifiers(problem);
    const WholeAttention whole = random_attention(random, problem);
    for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
      const Result first = run(*kernel, whole.block());
      for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_TRUE(run(*kernel, whole.block()) == first) << describe(problem);
      }
    }
  }
}

// The last of several parts may round.
TEST_P(Forward, ContinuesAState) {
  const Declaration& declares = implementation().declares();
  if (!declares.continues_state) GTEST_SKIP() << backend().name << " continues no state";
  Random random(62);
  std::size_t i = 0;
  for (const std::vector<MaskKind>& kinds :
       {std::vector<MaskKind>{}, std::vector{MaskKind::causal},
        std::vector{MaskKind::window, MaskKind::documents},
        std::vector{MaskKind::query_lengths, MaskKind::kv_lengths}}) {
    for (int variant = 0; variant < 12; ++variant) {
      AttentionProblem problem = problem_of(i++, 300, 500);
      problem.mask = random_mask(random, kinds, 2, 300, 500);
      add_blocks(random, problem);
      if (variant % 4 == 3) add_modifiers(problem);
      SCOPED_TRACE(describe(problem));
      const WholeAttention whole = random_attention(random, problem);
      const OracleOutput truth = whole.oracle();
      const bool rounds = variant % 2 == 1 && declares.results == ResultForm::either;
      const Result result = in_parts(whole, {{300, 200}, {0, 0}, {0, 170}, {170, 130}},
                                     rounds ? std::optional(problem.dtype) : std::nullopt);
      test::expect_accurate(result, whole, truth);
      const Result at_once = run(*kernels(problem).front(), whole.block());
      EXPECT_LE(error_of(result, problem.dtype, truth).output,
                sharded_error_factor(2 * 300 * 4) * error_of(at_once, problem.dtype, truth).output);
    }
  }
  for (const DType dtype : backend().dtypes) {
    expect_weightless_shown(
        in_parts(weightless_attention(dtype, 64), {{0, 100}, {100, 300}, {400, 200}}));
  }
}

// Logits that are whole numbers are not rounded, so the largest must be exact.
TEST_P(Forward, HandsOverTheLargestLogits) {
  if (!hands_over_maxima()) GTEST_SKIP() << backend().name << " knows no largest logit";
  Random random(67);
  std::size_t i = 0;
  for (const bool exact : {false, true}) {
    for (const bool in_tens : {false, true}) {  // more ranges than one launch takes
      AttentionProblem problem = problem_of(i++, 40, 900);
      problem.mask.set_causal(true);
      problem.mask.set_offset(-3);
      problem.mask.set_kv_lengths({900, 20});
      if (exact) {
        problem.dtype = DType::float32;
        problem.scale = 1;
      } else {
        problem.dropout.emplace(0.3, 2);
      }
      const WholeAttention whole = random_attention(random, problem);
      for (const Tensor* tensor : {&whole.query, &whole.key}) {
        for (std::int64_t j = 0; exact && j < tensor->shape().product(); ++j) {
          tensor->view().as<float>()[j] = static_cast<float>(draw(random, -6, 6));
        }
      }
      const OracleOutput truth = whole.oracle();
      AttentionBlock block = whole.block();
      if (in_tens) block.columns = tens(900);
      for (const std::unique_ptr<Kernel>& kernel : kernels(problem)) {
        const Tensor maximum(DType::float32, {2, 4, 40}, test_memory());
        std::memset(maximum.view().data(), 0xff, maximum.bytes());
        const Result result =
            result_on(*device_, *stream_, *kernel, DType::float32, block, DType::float64, &maximum);
        test::expect_accurate(result, whole, truth);
        for (std::size_t row = 0; row < truth.maximum.size(); ++row) {
          const float got = maximum.view().as<float>()[row];
          if (got == truth.maximum[row]) continue;  // −∞ too
          ASSERT_NEAR(got, truth.maximum[row], exact ? 0 : 1e-5) << row;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Suite, Forward, ::testing::ValuesIn(backends()), name_of_backend);

}  // namespace
}  // namespace annulus::test
