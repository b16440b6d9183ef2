#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <annulus/attention/attention_weights.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/first_error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/attention_weights.hpp>
#include <annulus/ring/sharded_attention.hpp>

#include "face/backward_calls.hpp"
#include "face/sharded_options.hpp"
#include "tuning/parameters.hpp"

namespace annulus {
namespace {

// The rank's part of the bias that init_bias makes; empty if it is not called.
Tensor initial_bias(const AttentionOptions& options, const ring::ShardedOperands& operands,
                    Context& context) {
  if (!makes_bias(options)) return {};
  if (!options.init_bias->fill) {
    throw ArgumentError("init_bias", "no function", "one that fills the bias");
  }
  const int rank = context.rank();
  Device& device = context.device();
  Tensor part(DType::float32, operands.bias->local_shape(rank), device.staging());
  const std::vector<PositionRanges> index = operands.bias->index(rank);
  options.init_bias->fill(part.view(), index);
  if (device.place().is_host()) return part;
  const auto current = device.make_current();
  Tensor moved(part.dtype(), part.shape(), device.memory());
  const auto stream = device.make_stream("copies", context.mesh().watchdog(), nullptr);
  device.copy(part.view(), moved.view(), *stream);
  stream->synchronize();
  return moved;
}

ring::ShardedOperands operands_of(const AttentionOptions& options, const MeshShape& mesh) {
  const AttentionProblem problem = problem_of(options);
  problem.validate();
  // The policy cannot apply to values of a call.
  if (problem.bias && options.bias_policy != BiasPolicy::combine &&
      options.call_arguments.change_visibility()) {
    throw ArgumentError("call arguments", to_string(options.call_arguments),
                        "no lengths or offsets under a bias policy other than combine");
  }
  return ring::shard_operands(problem, mesh, ring::default_layout(problem, mesh, options));
}

}  // namespace

class Attention::Impl {
 public:
  Impl(Context& context, const AttentionOptions& options)
      : context_(context),
        problem_(problem_of(options)),
        operands_(collectively(context.mesh().world(), "options",
                               [&] { return operands_of(options, context.mesh().shape()); })),
        policy_(options.bias_policy),
        drops_mask_(options.dense_mask && !operands_.dense_mask),
        bias_(collectively(context.mesh().world(), "init_bias",
                           [&] {
                             const Computing filling = context.mesh().world().computing();
                             return initial_bias(options, operands_, context);
                           })),
        sharded_(problem_, operands_, context.mesh(), context.registry(), context.device(),
                 sharded_options(options, context)),
        backward_(context, operands_, backward_options(options, context)) {
    if (!problem_.weights) return;
    collectively(context.mesh().world(), "weights",
                 [&] { ring::check_weights_fit(problem_, operands_); });
  }

  [[nodiscard]] Extents shape(const NamedSharding& sharding) const {
    return sharding.local_shape(context_.rank());
  }
  [[nodiscard]] Extents sinks_shape() const {
    if (!problem_.sinks) return {};
    const std::int64_t per_head = problem_.sinks->per_head();
    if (problem_.sinks->shape().rank() == 1) return {per_head};
    return {shape(operands_.query)[2], per_head};
  }
  [[nodiscard]] PositionRanges positions(const NamedSharding& sharding) const {
    return sharding.positions(context_.rank(), 1);
  }

  void run(ring::LocalTensors tensors, void* stream) {
    if (context_.place().is_host()) return run_and_wait(std::move(tensors));
    ForeignStream& caller = caller_of(stream, sharded_.is_prepared());
    make_ready(tensors);
    sharded_.submit(tensors, &caller);
    add_weights(tensors);
  }

  // Makes `stream` the caller's stream.
  ForeignStream& look_at(void* stream) {
    if (!caller_ || raw_caller_ != stream) {
      caller_ = make_foreign_cuda_stream(stream, context_.place().device);
      raw_caller_ = stream;
    }
    return *caller_;
  }

  void run_and_wait(ring::LocalTensors tensors) {
    make_ready(tensors);
    sharded_.run(tensors);
    add_weights(tensors);
  }

  // The caller's stream. Only a later call may be captured.
  ForeignStream& caller_of(void* stream, bool prepared) {
    ForeignStream& caller = look_at(stream);
    if (!prepared && caller.is_captured()) {
      throw UnsupportedError(
          "a first call cannot be captured into a CUDA graph: run or prepare attention once "
          "before");
    }
    return caller;
  }

  static ring::BackwardRequest request_of(const ring::BackwardLocalTensors& tensors,
                                          bool accumulate) {
    return {tensors.grad_lse.rank() > 0, accumulate, tensors.grad_sinks.rank() > 0,
            tensors.grad_bias.rank() > 0};
  }

  void backward(ring::BackwardLocalTensors tensors, bool accumulate, void* stream) {
    if (context_.place().is_host()) return backward_and_wait(std::move(tensors), accumulate);
    const ring::BackwardRequest request = request_of(tensors, accumulate);
    const ring::ShardedAttention* const known = backward_.planned(request);
    ForeignStream& caller = caller_of(stream, known != nullptr && known->is_prepared());
    ready_backward(request, tensors).submit(tensors, &caller);
  }

  void backward_and_wait(ring::BackwardLocalTensors tensors, bool accumulate) {
    const ring::BackwardRequest request = request_of(tensors, accumulate);
    ready_backward(request, tensors).run(tensors);
  }

  ring::ShardedAttention& prepare_backward(const ring::BackwardRequest& request) {
    return backward_.of(sharded_.problem(), sharded_.mask(), request);
  }
  [[nodiscard]] ring::ShardedAttention* backward_pass(
      const ring::BackwardRequest& request) const noexcept {
    return backward_.planned(request);
  }

  // Ranks that ask for different gradients would plan, or call, different passes.
  void check_same_request(const ring::BackwardRequest& request) {
    const auto other = context_.mesh().world().first_difference(ring::request_text(request),
                                                                "gradients to be computed");
    if (!other) return;
    throw ArgumentError(fmt::format("gradients on rank {}", other->rank), other->text,
                        "what rank 0 asks for: " + other->expected);
  }

  // Ranks agree on what is asked for, and on errors of the first call, as in the forward pass.
  ring::ShardedAttention& ready_backward(const ring::BackwardRequest& request,
                                         ring::BackwardLocalTensors& tensors) {
    const ring::ShardedAttention* const known = backward_.planned(request);
    if (known == nullptr || !known->is_prepared()) check_same_request(request);
    ring::ShardedAttention& pass = prepare_backward(request);
    if (pass.is_prepared()) {
      alone([&] { add_initial_bias(tensors.bias); });
    } else {
      collectively(context_.mesh().world(), "tensors of the call",
                   [&] { add_initial_bias(tensors.bias); });
    }
    return pass;
  }

  [[nodiscard]] ring::BackwardLocalTensors views(const BackwardTensors& tensors) const {
    return {view(tensors.query, operands_.query),
            view(tensors.key, operands_.key),
            view(tensors.value, operands_.value),
            view(tensors.output, operands_.output),
            row_view<const void>(tensors.lse, true),
            view(tensors.grad_output, operands_.output),
            view(tensors.grad_query, operands_.query),
            view(tensors.grad_key, operands_.key),
            view(tensors.grad_value, operands_.value),
            bias_view(tensors.bias),
            mask_view(tensors.mask),
            row_view<const void>(tensors.grad_lse, false),
            tensors.call_values,
            gradient_view(tensors.grad_sinks, problem_.sinks ? sinks_shape() : Extents{0}),
            gradient_view(tensors.grad_bias, operands_.bias ? shape(*operands_.bias) : Extents{0})};
  }

  void wait() {
    FirstError error;
    error.of([&] { sharded_.wait(); });
    error.of([&] { backward_.wait(); });
    error.rethrow();
  }

  void make_ready(ring::LocalTensors& tensors) {
    if (!sharded_.is_prepared()) prepare(tensors);
    alone([&] { complete(tensors); });
  }

  void prepare(ring::LocalTensors tensors) {
    collectively(context_.mesh().world(), "tensors of the call", [&] { complete(tensors); });
    sharded_.prepare(tensors);
  }

  // In a later call, other ranks may have begun to send, so the ranks cannot agree on an error.
  template <class Body>
  void alone(const Body& body) const {
    try {
      body();
    } catch (const UserError& error) {
      throw LibraryError(fmt::format("rank {}: {}", context_.rank(), error.what()));
    }
  }

  // Checks that the results are the ones that the options ask for. The ranks agree on errors of the
  // first call, as for the other tensors.
  void check_results(const AttentionTensors& tensors) {
    const auto check_one = [](const char* name, const void* data, bool wanted, const Extents& shape,
                              const char* what) {
      if (!wanted && data != nullptr) {
        throw ArgumentError(name, "memory",
                            fmt::format("none: the options do not ask for {}", what));
      }
      if (wanted && data == nullptr && shape.product() > 0) {
        throw ArgumentError(name, "a null pointer",
                            fmt::format("memory: the options ask for {}", what));
      }
    };
    const auto check = [&] {
      const bool unnormalised = !problem_.normalize_output;
      const Extents rows = shape(operands_.lse);
      check_one("weights", tensors.weights, problem_.weights,
                problem_.weights ? weights_shape() : Extents(), "weights");
      check_one("maximum", tensors.maximum, unnormalised, rows, "an unnormalised output");
      check_one("sum", tensors.sum, unnormalised, rows, "an unnormalised output");
      if (unnormalised && tensors.lse != nullptr) {
        throw ArgumentError("lse", "memory",
                            "none with normalize_output = false: the LSE is maximum + log(sum)");
      }
    };
    if (sharded_.is_prepared()) return alone(check);
    collectively(context_.mesh().world(), "tensors of the call", check);
  }

  // Computes the weights, which the plan does not.
  void add_weights(const ring::LocalTensors& tensors) {
    if (!problem_.weights || tensors.weights.rank() == 0) return;
    ring::compute_weights(sharded_.problem_of(tensors.call_values), operands_, context_.mesh(),
                          context_.device(), tensors, tensors.weights, context_.threads());
  }

  [[nodiscard]] Extents weights_shape() const {
    return shape(ring::weights_sharding(problem_, operands_));
  }
  [[nodiscard]] DType weights_dtype() const { return annulus::weights_dtype(problem_); }

  [[nodiscard]] AttentionOutput make_output(bool with_lse, void* stream) {
    MemoryPool& memory = memory_for_results(stream);
    AttentionOutput output{Tensor(problem_.dtype, shape(operands_.output), memory)};
    const auto make_row_result = [&](std::optional<Tensor>& tensor) {
      tensor.emplace(DType::float32, shape(operands_.lse), memory);
    };
    if (!problem_.normalize_output) {
      make_row_result(output.maximum);
      make_row_result(output.sum);
    } else if (with_lse) {
      make_row_result(output.lse);
    }
    if (problem_.weights) output.weights.emplace(weights_dtype(), weights_shape(), memory);
    return output;
  }

  // The order of a stream does not tell when a captured call runs. Its results live as long as the
  // graph, so they need no pool that is ordered by the stream.
  [[nodiscard]] MemoryPool& memory_for_results(void* stream) {
    Device& device = context_.device();
    if (context_.place().is_host() || look_at(stream).is_captured()) return device.memory();
    return device.memory_of(*caller_);
  }

  [[nodiscard]] ring::LocalTensors views(const AttentionTensors& tensors) const {
    return {view(tensors.query, operands_.query),
            view(tensors.key, operands_.key),
            view(tensors.value, operands_.value),
            view(tensors.output, operands_.output),
            row_view<void>(tensors.lse, problem_.normalize_output),
            bias_view(tensors.bias),
            mask_view(tensors.mask),
            row_view<void>(tensors.maximum, !problem_.normalize_output),
            row_view<void>(tensors.sum, !problem_.normalize_output),
            problem_.weights
                ? TensorView(tensors.weights, weights_dtype(), weights_shape(), context_.place())
                : TensorView(),
            tensors.call_values};
  }

  // The policy applies to later masks too.
  void set_mask(const Mask& mask, ring::NextSchedule next) {
    const Mask applied = operands_.bias ? mask_beside_bias(policy_, mask) : mask;
    if (sharded_.set_values(applied)) return backward_.set_values(applied);
    collectively(context_.mesh().world(), "end of earlier calls", [&] { wait(); });
    sharded_.set_mask(applied, next);
    backward_.drop(next);
  }

  [[nodiscard]] Context& context() const noexcept { return context_; }
  // True if a graph of the caller holds calls.
  [[nodiscard]] bool is_captured() { return sharded_.is_captured() || backward_.is_captured(); }
  [[nodiscard]] OneAtATime::Call begin_call(const char* name) const {
    return context_.calls().begin(name);
  }
  [[nodiscard]] const ring::ShardedOperands& operands() const noexcept { return operands_; }
  [[nodiscard]] ring::ShardedAttention& sharded() noexcept { return sharded_; }

 private:
  template <class Void>
  [[nodiscard]] BasicTensorView<Void> view(Void* data, const NamedSharding& sharding) const {
    return {data, problem_.dtype, shape(sharding), context_.place()};
  }

  // LSE, maximum or sum, or a gradient of the LSE.
  template <class Void>
  [[nodiscard]] BasicTensorView<Void> row_view(Void* data, bool wanted) const {
    if (data == nullptr && !wanted) return {};
    return {data, DType::float32, shape(operands_.lse), context_.place()};
  }

  // A gradient of sinks or of a bias. If the problem lacks the input, the shape is [0]: the call is
  // refused when the pass is planned.
  [[nodiscard]] TensorView gradient_view(float* data, const Extents& shape) const {
    if (data == nullptr) return {};
    return {data, DType::float32, shape, context_.place()};
  }

  [[nodiscard]] ConstTensorView bias_view(const void* data) const {
    return scores_view(data, DType::float32, operands_.bias, bias_.shape().rank() > 0);
  }
  [[nodiscard]] ConstTensorView mask_view(const void* data) const {
    return scores_view(data, DType::boolean, operands_.dense_mask, drops_mask_);
  }

  // An empty view means no tensor. A later check refuses a tensor that the problem does not have,
  // except a mask that the policy ignores.
  [[nodiscard]] ConstTensorView scores_view(const void* data, DType dtype,
                                            const std::optional<NamedSharding>& sharding,
                                            bool given_elsewhere) const {
    if (data == nullptr && (!sharding || given_elsewhere)) return {};
    if (!sharding) return given_elsewhere ? ConstTensorView() : ConstTensorView(data, dtype, {0});
    return {data, dtype, shape(*sharding), context_.place()};
  }

  // The bias of init_bias.
  void add_initial_bias(ConstTensorView& bias) const {
    if (bias_.shape().rank() == 0) return;
    if (bias.rank() > 0) {
      throw ArgumentError("bias", "a tensor", "none: init_bias has made the bias");
    }
    bias = bias_.view();
  }

  // Adds the bias of init_bias, and memory for an LSE that the caller did not ask for.
  void complete(ring::LocalTensors& tensors) {
    add_initial_bias(tensors.bias);
    if (tensors.lse.data() != nullptr || !problem_.normalize_output) return;
    if (lse_.shape().rank() == 0) {
      lse_ = Tensor(DType::float32, shape(operands_.lse), context_.device().memory());
    }
    tensors.lse = lse_.view();
  }

  Context& context_;
  AttentionProblem problem_;  // with the first mask
  ring::ShardedOperands operands_;
  Tensor lse_;
  BiasPolicy policy_;
  bool drops_mask_;                        // the policy ignores a dense mask
  Tensor bias_;                            // made by init_bias
  std::unique_ptr<ForeignStream> caller_;  // the stream that the caller passed to the last call
  void* raw_caller_ = nullptr;
  ring::ShardedAttention sharded_;
  BackwardCalls backward_;
};

Attention::Attention(Context& context, const AttentionOptions& options)
    : impl_([&] {
        const auto call = context.calls().begin("Attention::Attention");
        return std::make_unique<Impl>(context, options);
      }()) {}
Attention::Attention(Context& context, const AttentionProblem& problem)
    : Attention(context, AttentionOptions{problem, {}, {}}) {}
Attention::~Attention() {
  // A graph needs everything in the object: kernels, memory, exchanges, a bias of its own. But the
  // caller may free his tensors, so calls under way end first.
  Context& context = impl_->context();
  try {
    impl_->wait();
  } catch (...) {
    // The next call of the context reports the error.
  }
  context.keep([kept = std::shared_ptr<Impl>(std::move(impl_))] { return kept->is_captured(); });
}

Extents Attention::query_shape() const {
  return impl_->shape(impl_->operands().query);
}
Extents Attention::key_shape() const {
  return impl_->shape(impl_->operands().key);
}
Extents Attention::value_shape() const {
  return impl_->shape(impl_->operands().value);
}
Extents Attention::output_shape() const {
  return impl_->shape(impl_->operands().output);
}
Extents Attention::lse_shape() const {
  return impl_->shape(impl_->operands().lse);
}
Extents Attention::bias_shape() const {
  const auto& bias = impl_->operands().bias;
  return bias ? impl_->shape(*bias) : Extents();
}
Extents Attention::mask_shape() const {
  const auto& mask = impl_->operands().dense_mask;
  return mask ? impl_->shape(*mask) : Extents();
}
PositionRanges Attention::query_positions() const {
  return impl_->positions(impl_->operands().query);
}
PositionRanges Attention::key_positions() const {
  return impl_->positions(impl_->operands().key);
}

Extents Attention::sinks_shape() const {
  return impl_->sinks_shape();
}
Extents Attention::weights_shape() const {
  return impl_->weights_shape();
}
DType Attention::weights_dtype() const {
  return impl_->weights_dtype();
}

void Attention::run(const AttentionTensors& tensors, void* stream) {
  const auto call = impl_->begin_call("Attention::run");
  impl_->check_results(tensors);
  impl_->run(impl_->views(tensors), stream);
}
AttentionOutput Attention::compute(const AttentionTensors& inputs, bool with_lse, void* stream) {
  const auto call = impl_->begin_call("Attention::compute");
  AttentionOutput output = impl_->make_output(with_lse, stream);
  AttentionTensors tensors = inputs;
  tensors.output = output.outputs.view().data();
  const auto row_result = [](const std::optional<Tensor>& tensor) {
    return tensor ? tensor->view().as<float>() : nullptr;
  };
  tensors.lse = row_result(output.lse);
  tensors.maximum = row_result(output.maximum);
  tensors.sum = row_result(output.sum);
  tensors.weights = output.weights ? output.weights->view().data() : nullptr;
  run(tensors, stream);
  return output;
}
void Attention::run(const ring::LocalTensors& tensors, void* stream) {
  const auto call = impl_->begin_call("Attention::run");
  impl_->run(tensors, stream);
}
void Attention::run_and_wait(const ring::LocalTensors& tensors) {
  const auto call = impl_->begin_call("Attention::run_and_wait");
  impl_->run_and_wait(tensors);
}
void Attention::prepare(const ring::LocalTensors& tensors) {
  const auto call = impl_->begin_call("Attention::prepare");
  impl_->prepare(tensors);
}
void Attention::backward(const BackwardTensors& tensors, void* stream) {
  const auto call = impl_->begin_call("Attention::backward");
  impl_->backward(impl_->views(tensors), tensors.accumulate, stream);
}
void Attention::backward(const ring::BackwardLocalTensors& tensors, bool accumulate, void* stream) {
  const auto call = impl_->begin_call("Attention::backward");
  impl_->backward(tensors, accumulate, stream);
}
void Attention::backward_and_wait(const ring::BackwardLocalTensors& tensors, bool accumulate) {
  const auto call = impl_->begin_call("Attention::backward_and_wait");
  impl_->backward_and_wait(tensors, accumulate);
}
void Attention::prepare_backward(const ring::BackwardRequest& request) {
  const auto call = impl_->begin_call("Attention::prepare_backward");
  impl_->prepare_backward(request);
}
ring::BackwardLocalTensors Attention::backward_views(const BackwardTensors& tensors) const {
  return impl_->views(tensors);
}
ring::ShardedAttention& Attention::forward_pass() const noexcept {
  return impl_->sharded();
}
ring::ShardedAttention* Attention::backward_pass(
    const ring::BackwardRequest& request) const noexcept {
  return impl_->backward_pass(request);
}
void Attention::set_mask(const Mask& mask, ring::NextSchedule next) {
  const auto call = impl_->begin_call("Attention::set_mask");
  impl_->set_mask(mask, next);
}
void Attention::wait() {
  const auto call = impl_->begin_call("Attention::wait");
  impl_->wait();
}
ring::LocalTensors Attention::views(const AttentionTensors& tensors) const {
  return impl_->views(tensors);
}
const ring::ShardedOperands& Attention::operands() const noexcept {
  return impl_->operands();
}
const ring::RankPlan& Attention::rank_plan() const noexcept {
  return impl_->sharded().rank_plan();
}
const ring::PlanInput& Attention::plan_input() const noexcept {
  return impl_->sharded().plan_input();
}
const ring::ScheduleChoice& Attention::schedule() const noexcept {
  return impl_->sharded().schedule();
}
const ring::Decision& Attention::decision() const noexcept {
  return impl_->sharded().decision();
}
Selection Attention::selection() const {
  return impl_->sharded().selection();
}
std::vector<std::pair<std::string, std::string>> Attention::passed_over() const {
  return selection().passed_over;
}
std::string Attention::implementations_of_ranks() const {
  const auto call = impl_->begin_call("Attention::implementations_of_ranks");
  return impl_->sharded().implementations_of_ranks();
}
const std::string& Attention::transport() const noexcept {
  return impl_->sharded().transport();
}
std::size_t Attention::extra_bytes() const {
  return impl_->sharded().extra_bytes();
}
std::size_t Attention::replays() const {
  return impl_->sharded().replays();
}
bool Attention::reduces_rounded() const {
  return impl_->sharded().reduces_rounded();
}

ring::PlanOptions plan_options(const ring::Choice& choice, Place place) {
  return ring::with_parameters(ring::PlanOptions::for_place(place), choice);
}

}  // namespace annulus
