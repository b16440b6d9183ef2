#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/os.h>

#include <annulus/attention/registry.hpp>
#include <annulus/core/convert.hpp>
#include <annulus/core/cuda.hpp>
#include <annulus/core/cuda_stream.hpp>
#include <annulus/core/error.hpp>
#include <annulus/partition/sequence_layout.hpp>

#include "flash/flash_attention.hpp"

// How annulus_micro_flash takes its times; micro_flash.cpp says of what.
namespace annulus {

inline constexpr int kBlock = 128;

struct Case {
  std::string name;
  AttentionProblem problem;
  PositionRanges rows, columns;
  DType output = DType::bfloat16;
  bool continues_state = false;
  // For backward passes:
  bool repeats_bits = false;
  bool wants_bias = false;       ///< the bias's gradient
  const char* kernel = nullptr;  ///< null: the flash kernel
};

struct Measured {
  std::string name;
  std::string kernel;
  double milliseconds = 0;
  double teraflops = 0;  // on visible pairs
};

inline Tensor random_tensor(DType dtype, const Extents& shape, Device& device, unsigned seed) {
  // A million normal numbers again and again: the products are as busy as with fresh ones.
  constexpr std::int64_t kPeriod = 1 << 20;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(kPeriod);
  for (float& value : values) value = normal(random);
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> bytes(kPeriod * size);
  from_float32(values.data(), dtype, bytes.data(), kPeriod);
  Tensor tensor(dtype, shape, device.memory());
  auto* to = static_cast<std::byte*>(tensor.view().data());
  for (std::int64_t begin = 0; begin < shape.product(); begin += kPeriod) {
    const std::int64_t count = std::min(kPeriod, shape.product() - begin);
    check_cuda(cudaMemcpy(to + static_cast<std::size_t>(begin) * size, bytes.data(),
                          static_cast<std::size_t>(count) * size, cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return tensor;
}

template <class Time>
Time median(std::vector<Time> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline double visible_pairs(const Case& one) {
  double pairs = 0;
  for (const PositionRange& rows : one.rows.ranges()) {
    for (const PositionRange& columns : one.columns.ranges()) {
      pairs += static_cast<double>(
          one.problem.mask.examine(0, one.problem.shape.batch, rows, columns).pairs);
    }
  }
  return pairs;
}

/// Measures cases on GPU 0 in rounds, prints a row for each, and keeps them for write().
class Bench {
 public:
  Bench()
      : device_(make_cuda_device(0)),
        stream_(device_->make_stream("bench", Watchdog(Watchdog::Seconds(60)), nullptr)),
        registry_(Registry::standard()) {}

  [[nodiscard]] Capability can(const char* name, const Case& one) const {
    return registry_.get(name).capability(one.problem, device_->place());
  }

  // Times all of them by turns. The implementation `beside`, if any, computes the cases too that it
  // can.
  std::vector<Measured> measure(const std::vector<Case>& cases, const char* beside) {
    std::vector<std::unique_ptr<Prepared>> prepared;
    std::vector<std::function<void()>> calls;
    std::vector<Measured> results;
    for (const Case& one : cases) {
      prepared.push_back(prepare(one));
      Prepared& p = *prepared.back();
      if (beside != nullptr && can(beside, one)) {
        p.kernel = registry_.get(beside).make_kernel(p.problem, *device_);
        p.kernel->prepare(p.block, p.result);
        calls.emplace_back([&p, this] {
          p.kernel->forward(p.block, p.result, {*stream_, nullptr, 1});
        });
        results.push_back({one.name, beside});
      }
      calls.emplace_back([&p, this] { p.flash->run(p.block, p.result, *stream_); });
      results.push_back({one.name, one.problem.mask.block_mask() ? "blocksparse" : "flash_attn2"});
    }
    const std::vector<double> times = medians_by_turns(calls);
    std::size_t of_case = 0;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (i > 0 && results[i].name != results[i - 1].name) ++of_case;
      const Case& one = cases[of_case];
      results[i].milliseconds = times[i];
      results[i].teraflops =
          forward_flops(one.problem.shape, visible_pairs(one)) / results[i].milliseconds * 1e-9;
      fmt::print("{:36} {:12} {:9.3f} ms {:7.1f} TFLOP/s\n", results[i].name, results[i].kernel,
                 results[i].milliseconds, results[i].teraflops);
    }
    all_.insert(all_.end(), results.begin(), results.end());
    return results;
  }

  // Gradients of all operands, added in float32: of all cases by turns.
  std::vector<Measured> measure_backward(const std::vector<Case>& cases) {
    struct Operands {
      std::unique_ptr<Prepared> forward;
      Tensor grad_output, delta, grad_query, grad_key, grad_value, grad_bias;
      BackwardBlock block;
      Gradients gradients;
    };
    std::vector<std::unique_ptr<Operands>> all;
    std::vector<std::function<void()>> calls;
    for (const Case& one : cases) {
      all.push_back(std::make_unique<Operands>());
      Operands& o = *all.back();
      o.forward = prepare(one);
      Prepared& p = *o.forward;
      o.grad_output = random_tensor(p.problem.dtype, p.output.shape(), *device_, 4);
      o.delta = random_tensor(DType::float32, p.lse.shape(), *device_, 5);
      o.grad_query = random_tensor(DType::float32, p.query.shape(), *device_, 6);
      o.grad_key = random_tensor(DType::float32, p.key.shape(), *device_, 7);
      o.grad_value = random_tensor(DType::float32, p.value.shape(), *device_, 8);
      o.block = {p.query.view(), p.key.view(),   p.value.view(), o.grad_output.view(),
                 p.lse.view(),   o.delta.view(), one.rows,       one.columns};
      o.block.unmasked = p.block.unmasked;
      o.block.scores = p.block.scores;
      o.block.repeats_bits = one.repeats_bits;
      o.gradients = {o.grad_query.view(), o.grad_key.view(), o.grad_value.view()};
      if (one.wants_bias) {
        o.grad_bias = random_tensor(DType::float32, p.bias.shape(), *device_, 10);
        const ConstTensorView view = *p.block.scores.bias;
        o.gradients.bias =
            TensorView(o.grad_bias.view().data(), view.dtype(), view.shape(), view.strides());
      }
      const bool blocks = p.problem.mask.block_mask().has_value();
      const char* const name = one.kernel != nullptr ? one.kernel
                               : blocks              ? "blocksparse"
                                                     : "flash_attn2";
      p.kernel = registry_.get(name).make_kernel(p.problem, *device_);
      p.kernel->prepare_backward(o.block, o.gradients);
      calls.emplace_back([&o, this] {
        o.forward->kernel->backward(o.block, o.gradients, {*stream_, nullptr, 1});
      });
    }
    const std::vector<double> times = medians_by_turns(calls);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const Case& one = cases[i];
      const AttentionShape& s = one.problem.shape;
      const double flops = forward_flops(s, visible_pairs(one)) *
                           static_cast<double>(3 * s.head_dim + 2 * s.value_dim) /
                           static_cast<double>(s.head_dim + s.value_dim);
      all_.push_back({one.name, one.kernel != nullptr ? one.kernel : "flash_attn2", times[i],
                      flops / times[i] * 1e-9});
      fmt::print("{:52} {:12} {:9.3f} ms {:7.1f} TFLOP/s\n", one.name, all_.back().kernel, times[i],
                 all_.back().teraflops);
    }
    return {all_.end() - static_cast<std::ptrdiff_t>(cases.size()), all_.end()};
  }

  // From here on, calls are measured on a GPU that has computed the same for a while, in one round,
  // rather than on one that has rested.
  void set_warm() { warm_ = true; }

  // The median time of each call, in milliseconds.
  std::vector<double> medians_by_turns(const std::vector<std::function<void()>>& calls) {
    std::vector<std::vector<double>> times(calls.size());
    for (const auto& call : calls) time(call, 1);
    for (int round = 0; round < (warm_ ? 1 : kRounds); ++round) {
      for (std::size_t i = 0; i < calls.size(); ++i) {
        if (warm_) {
          warm_up(calls[i]);
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(kRest));
        }
        times[i].push_back(time(calls[i], kCalls));
      }
    }
    std::vector<double> medians;
    for (std::vector<double>& of_call : times) medians.push_back(median(std::move(of_call)));
    return medians;
  }

  void warm_up(const std::function<void()>& call) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kWarm);
    while (std::chrono::steady_clock::now() < end) time(call, kCalls);
  }

  // The median device time of `count` calls, in milliseconds.
  double time(const std::function<void()>& call, int count) {
    cudaStream_t raw = CudaStream::of(*stream_).raw();
    std::vector<cudaEvent_t> events(static_cast<std::size_t>(count) + 1);
    for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "cudaEventCreate");
    check_cuda(cudaEventRecord(events[0], raw), "cudaEventRecord");
    for (std::size_t i = 1; i < events.size(); ++i) {
      call();
      check_cuda(cudaEventRecord(events[i], raw), "cudaEventRecord");
    }
    stream_->synchronize();
    std::vector<float> times;
    for (std::size_t i = 1; i < events.size(); ++i) {
      times.emplace_back();
      check_cuda(cudaEventElapsedTime(&times.back(), events[i - 1], events[i]),
                 "cudaEventElapsedTime");
    }
    for (cudaEvent_t event : events) check_cuda(cudaEventDestroy(event), "cudaEventDestroy");
    return median(std::move(times));
  }

  // Records a measurement without a FLOP rate.
  void add(std::string name, std::string kernel, double milliseconds) {
    fmt::print("{:36} {:12} {:9.4f} ms\n", name, kernel, milliseconds);
    all_.push_back({std::move(name), std::move(kernel), milliseconds});
  }

  [[nodiscard]] Device& device() { return *device_; }
  [[nodiscard]] cudaStream_t stream() { return CudaStream::of(*stream_).raw(); }

  void write(const char* path) const {
    auto file = fmt::output_file(path);
    file.print("[\n");
    for (const Measured& one : all_) {
      file.print(
          "  {{\"case\": \"{}\", \"kernel\": \"{}\", \"ms\": {:.4f}, \"tflops\": {:.1f}}}{}\n",
          one.name, one.kernel, one.milliseconds, one.teraflops, &one == &all_.back() ? "" : ",");
    }
    file.print("]\n");
  }

 private:
  static constexpr int kRounds = 5;
  static constexpr int kCalls = 5;
  static constexpr int kRest = 100;  // milliseconds
  static constexpr int kWarm = 400;  // likewise

  struct Prepared {
    AttentionProblem problem;
    Tensor query, key, value, output, lse, bias, mask;
    AttentionBlock block;
    SoftmaxState result;
    std::unique_ptr<flash::FlashAttention> flash;
    std::unique_ptr<Kernel> kernel;
  };

  [[nodiscard]] static ScoreTensors scores_of(const Tensor& bias, const Tensor& mask,
                                              const Case& one) {
    const AttentionShape& s = one.problem.shape;
    return broadcast_scores(one.problem.bias ? bias.view() : TensorView(),
                            one.problem.dense_mask ? mask.view() : TensorView(),
                            {s.batch, s.heads, one.rows.size(), s.kv_length});
  }

  [[nodiscard]] std::unique_ptr<Prepared> prepare(const Case& one) const {
    auto p = std::make_unique<Prepared>();
    p->problem = one.problem;
    const AttentionShape& s = one.problem.shape;
    p->query = random_tensor(one.problem.dtype, {s.batch, one.rows.size(), s.heads, s.head_dim},
                             *device_, 1);
    p->key = random_tensor(one.problem.dtype, {s.batch, one.columns.size(), s.kv_heads, s.head_dim},
                           *device_, 2);
    p->value = random_tensor(one.problem.dtype,
                             {s.batch, one.columns.size(), s.kv_heads, s.value_dim}, *device_, 3);
    p->output =
        Tensor(one.output, {s.batch, one.rows.size(), s.heads, s.value_dim}, device_->memory());
    p->lse = Tensor(DType::float32, {s.batch, s.heads, one.rows.size()}, device_->memory());
    p->block = {p->query.view(), p->key.view(), p->value.view(), one.rows, one.columns};
    if (one.problem.bias) p->bias = random_tensor(DType::float32, *one.problem.bias, *device_, 9);
    if (one.problem.dense_mask) {
      const Extents& shape = *one.problem.dense_mask;
      p->mask = Tensor(DType::boolean, shape, device_->memory());
      // Hides nothing, but the kernels do not know it.
      check_cuda(cudaMemset(p->mask.view().data(), 1, p->mask.bytes()), "cudaMemset");
    }
    p->block.scores = scores_of(p->bias, p->mask, one);
    p->block.unmasked =
        visible_pairs(one) == static_cast<double>(s.batch * one.rows.size() * one.columns.size());
    p->result = {p->output.view(), p->lse.view()};
    p->flash = std::make_unique<flash::FlashAttention>(p->problem, *device_);
    p->flash->prepare(p->block);
    p->flash->run(p->block, p->result, *stream_);
    if (one.continues_state) p->block.state = p->result;
    return p;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  Registry registry_;
  std::vector<Measured> all_;
  bool warm_ = false;
};

inline Case make_case(std::string name, const AttentionShape& shape, bool causal) {
  Case one{std::move(name),
           {},
           PositionRanges::all(shape.query_length),
           PositionRanges::all(shape.kv_length)};
  one.problem.shape = shape;
  one.problem.dtype = DType::bfloat16;
  one.problem.mask.set_causal(causal);
  return one;
}

/// Cases of one shape, whose names begin alike.
struct Cases {
  Case& add(const std::string& name) {
    return all.emplace_back(make_case(prefix + name, shape, causal));
  }
  Mask& add_mask(const std::string& name) { return add(name).problem.mask; }

  std::string prefix;
  AttentionShape shape;
  bool causal = true;
  std::vector<Case> all = {};
};

inline std::vector<std::int32_t> documents(std::int64_t length, int count, bool even) {
  std::mt19937 random(7);
  std::vector<std::int32_t> ends;
  for (int i = 1; i < count; ++i) {
    ends.push_back(static_cast<std::int32_t>(
        even ? length * i / count
             : std::uniform_int_distribution<std::int64_t>(1, length - 1)(random)));
  }
  ends.push_back(0);
  ends.push_back(static_cast<std::int32_t>(length));
  std::sort(ends.begin(), ends.end());
  return segments_from_cu_seqlens(ends, length);
}

}  // namespace annulus
