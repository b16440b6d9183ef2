// Lengths, offsets and the dropout seed that kernels of GPUs read when they run: one kernel and one
// recording for many calls, against the oracle and the CPU.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <annulus/attention/philox.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "tests/attention/cuda_run.hpp"
#include "tests/attention/problem_of.hpp"
#include "tests/attention/random_mask.hpp"
#include "tests/support/cuda_test.hpp"

namespace annulus::test {
namespace {

// The arguments of a call in the memory of a device, where they stay.
class DeviceArguments {
 public:
  DeviceArguments(const AttentionProblem& planned, Device& device)
      : planned_(planned),
        numbers_(DType::int32, {3, planned.shape.batch}, device.memory()),
        key_(DType::int32, {2}, device.memory()) {}

  // Sets the values of `called`. No kernel may be running.
  void set(const AttentionProblem& called) const {
    const Mask& mask = called.mask;
    const AttentionShape& shape = called.shape;
    upload(0, mask.query_lengths(), shape.query_length);
    upload(1, mask.kv_lengths(), shape.kv_length);
    upload(2, mask.offsets(), mask.offset());
    if (called.dropout) {
      const PhiloxKey key = philox_key(called.dropout->seed());
      copy_there(key_.view().data(), key.data(), sizeof(key));
    }
  }
  [[nodiscard]] CallArgumentArrays arrays() const {
    CallArgumentArrays arrays;
    if (planned_.call_arguments.lengths) {
      arrays.query_lengths = row(0);
      arrays.kv_lengths = row(1);
    }
    if (planned_.call_arguments.offsets) arrays.offsets = row(2);
    if (planned_.call_arguments.dropout_seed) {
      arrays.dropout_key = static_cast<const std::uint32_t*>(key_.view().data());
    }
    return arrays;
  }

 private:
  static void copy_there(void* to, const void* from, std::size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
    check_cuda(cudaDeviceSynchronize(), "upload");
  }
  [[nodiscard]] std::int32_t* row(std::int64_t index) const {
    return static_cast<std::int32_t*>(numbers_.view().data()) + index * numbers_.shape()[1];
  }
  void upload(std::int64_t index, std::vector<std::int32_t> numbers, std::int64_t otherwise) const {
    if (numbers.empty()) {
      numbers.assign(static_cast<std::size_t>(numbers_.shape()[1]),
                     static_cast<std::int32_t>(otherwise));
    }
    copy_there(row(index), numbers.data(), numbers.size() * sizeof(std::int32_t));
  }

  const AttentionProblem& planned_;
  Tensor numbers_;
  Tensor key_;
};

class CudaCallArguments : public CudaTest {
 protected:
  using Numbers = std::vector<std::int32_t>;

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    for (const char* const name : {"native", "flash_attn2", "blocksparse"}) {
      const Implementation& one = registry_.get(name);
      if (one.available(device_->place())) implementations_.push_back(&one);
    }
  }

  // The first call runs as it is; the second is recorded, and replayed for all others.
  void expect_right_calls(const Implementation& implementation, const AttentionProblem& planned,
                          const AttentionBlock& host_block,
                          const std::vector<AttentionProblem>& calls) {
    SCOPED_TRACE(implementation.names().front() + ", " + std::string(name_of(planned.dtype)) +
                 ", rows " + to_string(host_block.rows));
    Mirrors mirrors(*device_, *stream_);
    const DeviceArguments arguments(planned, *device_);
    AttentionBlock block = host_block;
    for (ConstTensorView* view : {&block.query, &block.key, &block.value}) {
      *view = mirrors.upload(*view);
    }
    block.call_arguments = arguments.arrays();
    Result result(host_block);
    const SoftmaxState state{mirrors.result(result.output.view()),
                             mirrors.result(result.lse.view())};
    AttentionProblem held = planned;  // its mask becomes that of each call, as in a runner
    const std::unique_ptr<Kernel> kernel = implementation.make_kernel(held, *device_);
    kernel->prepare(block, state);
    const auto forward = [&] { kernel->forward(block, state, {*stream_, nullptr, 1}); };
    std::unique_ptr<Recording> recording;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      SCOPED_TRACE("call " + std::to_string(i) + ", mask " + to_string(calls[i].mask));
      arguments.set(calls[i]);
      held.mask = calls[i].mask;
      check_cuda(cudaMemset(state.output.data(), 0xff, result.output.bytes()), "cudaMemset");
      check_cuda(cudaMemset(state.lse.data(), 0xff, result.lse.bytes()), "cudaMemset");
      check_cuda(cudaDeviceSynchronize(), "cudaMemset");
      if (i == 0) {
        forward();
      } else {
        if (!recording) recording = device_->record(*stream_, forward);
        ASSERT_NE(recording, nullptr);
        recording->submit(*stream_);
      }
      mirrors.download();
      expect_accurate(result, WholeAttention{calls[i], {}, {}, {}},
                      reference_of(calls[i], host_block));
    }
  }

  // By every implementation that takes the problem, whole and for a part of batches and heads.
  void expect_right_everywhere(AttentionProblem planned,
                               const std::vector<AttentionProblem>& calls) {
    planned.shape = kShape;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      planned.dtype = dtype;
      std::vector<AttentionProblem> of_dtype = calls;
      for (AttentionProblem& one : of_dtype) {
        one.shape = kShape;
        one.dtype = dtype;
        one.call_arguments = planned.call_arguments;
      }
      const WholeAttention whole = random_attention(random_, planned);
      int takers = 0;
      for (const Implementation* const implementation : implementations_) {
        if (!implementation->fits(planned, device_->place())) continue;
        ++takers;
        expect_right_calls(*implementation, planned, whole.block(), of_dtype);
        expect_right_calls(*implementation, planned, part_of_batch_and_heads(whole.block()),
                           of_dtype);
        // As a rank of several has them.
        const SequenceLayout layout(LayoutKind::zigzag, kShape.kv_length, 3);
        const PositionRanges columns = layout.positions(1);
        const Tensor key = gather(whole.key.view(), columns);
        const Tensor value = gather(whole.value.view(), columns);
        const AttentionBlock block{whole.query.view(), as_bthd(key), as_bthd(value), whole.rows(),
                                   columns};
        expect_right_calls(*implementation, planned, block, of_dtype);
      }
      EXPECT_GE(takers, 1);
    }
  }

  // True if flash kernels take the problem in bfloat16, or do not run on the device at all.
  [[nodiscard]] bool flash_takes(AttentionProblem problem) const {
    problem.shape = kShape;
    problem.dtype = DType::bfloat16;
    const Implementation& flash = registry_.get("flash_attn2");
    return !flash.available(device_->place()) ||
           static_cast<bool>(flash.fits(problem, device_->place()));
  }

  static constexpr AttentionShape kShape{3, 300, 421, 4, 2, 64, 64};
  Random random_{71};
  Registry registry_ = Registry::standard();
  std::vector<const Implementation*> implementations_;
};

TEST_F(CudaCallArguments, Lengths) {
  AttentionProblem planned;
  planned.call_arguments.lengths = true;
  for (const bool causal : {false, true}) {
    planned.mask.set_causal(causal);
    std::vector<AttentionProblem> calls(4, planned);
    calls[0].mask.set_kv_lengths({421, 128, 7});
    calls[1].mask.set_query_lengths({300, 129, 0});
    calls[1].mask.set_kv_lengths({0, 421, 420});
    calls[3].mask.set_kv_lengths({421, 421, 1});
    expect_right_everywhere(planned, calls);
  }
  EXPECT_TRUE(flash_takes(planned));
}

// Lengths below the planned ones.
TEST_F(CudaCallArguments, LengthsBesideOtherParts) {
  AttentionProblem planned;
  planned.call_arguments.lengths = true;
  planned.mask.set_window(70, 20);
  planned.mask.set_kv_lengths({421, 400, 300});
  planned.mask.set_segments(3, random_documents(random_, 3, 300),
                            random_documents(random_, 3, 421));
  planned.mask.set_block_mask(random_block_mask(random_, 3, 4, 300, 421, 128, 64));
  std::vector<AttentionProblem> calls(3, planned);
  calls[1].mask.set_kv_lengths({17, 399, 300});
  calls[2].mask.set_query_lengths({1, 300, 200});
  expect_right_everywhere(planned, calls);
}

TEST_F(CudaCallArguments, Offsets) {
  AttentionProblem planned;
  planned.call_arguments.offsets = true;
  const std::vector<Numbers> offsets{
      {0, 121, -200}, {5, 5, 5}, {2147483647, -2147483647, 0}, {420, -299, 1}};
  const auto calls = [&] {
    std::vector<AttentionProblem> all(offsets.size() + 1, planned);
    for (std::size_t i = 0; i < offsets.size(); ++i) all[i].mask.set_offsets(offsets[i]);
    return all;
  };
  planned.mask.set_causal(true);
  expect_right_everywhere(planned, calls());
  planned.mask.set_window(90, 10);
  planned.mask.set_sink_tokens(4);
  planned.mask.set_prefixes({0, 3, 130});
  expect_right_everywhere(planned, calls());
  planned.mask = {};
  planned.mask.set_chunk(100);
  expect_right_everywhere(planned, calls());
  EXPECT_TRUE(flash_takes(planned));
}

TEST_F(CudaCallArguments, Seeds) {
  AttentionProblem planned;
  planned.dropout.emplace(0.3, 8);
  planned.call_arguments.dropout_seed = true;
  std::vector<AttentionProblem> calls(4, planned);
  calls[0].dropout.emplace(0.3, 9);
  calls[1].dropout.emplace(0.3, 0xfeedfacecafebeefU);
  calls[2].dropout.emplace(0.3, std::uint64_t{1} << 32U);
  expect_right_everywhere(planned, calls);
  EXPECT_TRUE(flash_takes(planned));
}

TEST_F(CudaCallArguments, AllTogether) {
  AttentionProblem planned;
  planned.mask.set_causal(true);
  planned.soft_cap = 3;
  planned.dropout.emplace(0.3, 8);
  planned.call_arguments = {true, true, true};
  std::vector<AttentionProblem> calls(3, planned);
  calls[0].mask.set_kv_lengths({421, 128, 7});
  calls[1].mask.set_offsets({121, -9, 30});
  calls[1].dropout.emplace(0.3, 1);
  calls[2].mask.set_query_lengths({9, 300, 1});
  calls[2].mask.set_offsets({1, 2, 421});
  calls[2].dropout.emplace(0.3, 2);
  expect_right_everywhere(planned, calls);
}

// Few rows go to a kernel that shares out the keys. Here it does so when it runs. In the third call
// nothing is visible in any batch.
TEST_F(CudaCallArguments, LengthsOfFewRows) {
  AttentionProblem planned = half_problem({3, 1, 1000, 8, 2, 64, 64});
  planned.call_arguments.lengths = true;
  EXPECT_GT(registry_.get("flash_attn2").few_rows(planned).most, 0);
  const WholeAttention whole = random_attention(random_, planned);
  std::vector<AttentionProblem> calls(5, planned);
  calls[0].mask.set_kv_lengths({1, 500, 999});
  calls[1].mask.set_kv_lengths({2, 501, 1000});
  calls[2].mask.set_kv_lengths({0, 0, 0});
  calls[3].mask.set_kv_lengths({0, 64, 65});
  calls[4].mask.set_kv_lengths({1000, 1000, 1000});
  calls[4].mask.set_query_lengths({1, 0, 1});
  for (const Implementation* const implementation : implementations_) {
    expect_right_calls(*implementation, planned, whole.block(), calls);
  }
}

// Rows are appended to caches of different lengths, as in speculative decoding: each call moves the
// diagonal to the end of every cache. The second block holds the last keys of the first block.
TEST_F(CudaCallArguments, LengthsAndOffsetsOfFewRows) {
  for (const std::int64_t window : {-1, 40}) {
    AttentionProblem planned = causal_problem_of({40, 5, 700, 8, 2, 64, 64}, DType::float16, 695);
    if (window >= 0) planned.mask.set_window(window, -1);
    planned.call_arguments.lengths = true;
    planned.call_arguments.offsets = true;
    EXPECT_TRUE(registry_.get("flash_attn2").few_rows(planned).banded);
    const WholeAttention whole = random_attention(random_, planned);
    std::vector<AttentionProblem> calls(4, planned);
    for (std::size_t call = 0; call < calls.size(); ++call) {
      Numbers lengths, rows, offsets;
      for (std::int32_t b = 0; b < 40; ++b) {
        const std::int32_t length = call == 3 ? 700 : (b * 197 + static_cast<int>(call) * 61) % 701;
        lengths.push_back(length);
        rows.push_back((b + static_cast<int>(call)) % 6);
        offsets.push_back(length - rows.back());
      }
      calls[call].mask.set_kv_lengths(lengths);
      calls[call].mask.set_query_lengths(rows);
      calls[call].mask.set_offsets(offsets);
    }
    AttentionBlock later = whole.block();
    const std::int64_t first = 300;
    later.key = later.key.slice(1, first, 400);
    later.value = later.value.slice(1, first, 400);
    later.columns = later.columns.slice({LocalPosition(first), 400});
    const Implementation& flash = registry_.get("flash_attn2");
    if (!flash.available(device_->place())) GTEST_SKIP() << "needs compute capability 9.0";
    for (const AttentionBlock& block : {whole.block(), later}) {
      expect_right_calls(flash, planned, block, calls);
    }
  }
}

// Positions of every rank of a striped layout, one after the other, as a rank gathers them: a
// length hides keys of all of them.
TEST_F(CudaCallArguments, LengthsOfFewRowsAndStripedKeys) {
  AttentionProblem planned = half_problem({2, 2, 600, 8, 2, 64, 64});
  planned.call_arguments.lengths = true;
  const WholeAttention whole = random_attention(random_, planned);
  const PositionRanges columns({{GlobalPosition(0), 300, 2}, {GlobalPosition(1), 300, 2}});
  const Tensor key = gather(whole.key.view(), columns);
  const Tensor value = gather(whole.value.view(), columns);
  const AttentionBlock block{whole.query.view(), as_bthd(key), as_bthd(value), whole.rows(),
                             columns};
  std::vector<AttentionProblem> calls(2, planned);
  calls[0].mask.set_kv_lengths({100, 599});
  calls[1].mask.set_kv_lengths({1, 340});
  for (const Implementation* const implementation : implementations_) {
    expect_right_calls(*implementation, planned, block, calls);
  }
}

}  // namespace
}  // namespace annulus::test
