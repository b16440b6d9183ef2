// Attention of torch without Python between the call and the library, for query, key, value and
// sinks: an operator with an autograd node for eager calls, and the kernels of the operators that
// compiled code calls. annulus/torch.py loads them if they were built for the version of torch in
// use; otherwise Python does the same.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/custom_class.h>
#include <torch/library.h>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <annulus/annulus.h>

namespace {

using at::Tensor;

/// An attention object of Python; null once Python has closed it. Autograd nodes may outlive it, so
/// these few bytes are never freed.
struct Object {
  std::atomic<annulus_attention*> attention;
  std::atomic<std::int64_t> nodes = 0;  // nodes whose backward pass may still run
  std::atomic<std::int64_t> calls = 0;  // under way: Python waits for them before it frees anything
};

Object& object_of(std::int64_t object) {
  return *reinterpret_cast<Object*>(object);
}
std::int64_t open_object(std::int64_t attention) {
  return reinterpret_cast<std::int64_t>(
      new Object{reinterpret_cast<annulus_attention*>(attention)});
}
std::int64_t calls_of(std::int64_t object) {
  return object_of(object).calls;
}
/// The number of autograd nodes and calls that still need the object. Calls are counted first, as a
/// call may leave a node.
std::int64_t uses_of(std::int64_t object) {
  const std::int64_t calls = object_of(object).calls;
  return calls + object_of(object).nodes;
}

/// Counts an autograd node while it lives.
struct Use : torch::CustomClassHolder {
  explicit Use(Object& used) : object(used) { ++object.nodes; }
  ~Use() override { --object.nodes; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  Object& object;
};

constexpr std::int64_t kClosed = -1;

/// Raises the Python exception for a status of the library, or for kClosed.
[[noreturn]] void raise_status(std::int64_t status) {
  static const auto raise_error = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("annulus::raise_error", "")
                                      .typed<void(std::int64_t)>();
  raise_error.call(status);
  TORCH_CHECK(false, "annulus: status ", status);
}

void check(annulus_status status) {
  if (status != ANNULUS_SUCCESS) raise_status(status);
}

/// A call under way, of an object or of none. The object is not closed while the call lasts.
class Call {
 public:
  explicit Call(Object* object) : object_(object), outer_(innermost_) {
    if (object_ != nullptr) ++object_->calls;
    innermost_ = this;
  }
  ~Call() {
    innermost_ = outer_;
    if (object_ != nullptr) --object_->calls;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  [[nodiscard]] bool has_object() const { return object_ != nullptr; }
  [[nodiscard]] annulus_attention* attention() const {
    annulus_attention* attention = object_->attention;
    if (attention == nullptr) raise_status(kClosed);
    return attention;
  }

  /// True within a call of the object on this thread, as in a signal handler of Python.
  [[nodiscard]] static bool is_within(const Object& object) {
    const Call* call = innermost_;
    while (call != nullptr && call->object_ != &object) call = call->outer_;
    return call != nullptr;
  }

 private:
  static thread_local const Call* innermost_;

  Object* object_;
  const Call* outer_;
};

thread_local const Call* Call::innermost_ = nullptr;

annulus_dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return ANNULUS_FLOAT16;
    case at::kBFloat16:
      return ANNULUS_BFLOAT16;
    case at::kFloat:
      return ANNULUS_FLOAT32;
    case at::kDouble:
      return ANNULUS_FLOAT64;
    default:
      TORCH_CHECK_TYPE(false, "dtype ", tensor.scalar_type(),
                       ": expected float16, bfloat16, float32 or float64");
  }
}

/// The operands of one call.
class Operands {
 public:
  Operands() { check(annulus_tensors_create(&tensors_)); }
  ~Operands() { annulus_tensors_destroy(tensors_); }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  void set(annulus_operand operand, const Tensor& tensor) {
    check(annulus_tensors_set(tensors_, operand, tensor.data_ptr(), dtype_of(tensor),
                              tensor.is_cpu() ? ANNULUS_HOST : tensor.device().index(),
                              static_cast<int>(tensor.dim()), tensor.sizes().data(),
                              tensor.strides().data()));
  }
  [[nodiscard]] const annulus_tensors* get() const { return tensors_; }

 private:
  annulus_tensors* tensors_ = nullptr;
};

void* stream_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return nullptr;
  const c10::Device device = tensor.device();
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

/// The library needs a last dimension that is contiguous.
Tensor dense(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

/// Sinks [n] (one per head) or [n,M] as [n,M].
Tensor rows(const Tensor& sinks) {
  return sinks.dim() == 1 ? sinks.unsqueeze(1) : sinks;
}

std::tuple<Tensor, Tensor> run(const Call& call, const Tensor& query, const Tensor& key,
                               const Tensor& value, const std::optional<Tensor>& sinks) {
  const auto sizes = query.sizes();
  Tensor output = at::empty({sizes[0], sizes[1], sizes[2], value.size(3)}, query.options());
  Tensor lse = at::empty({sizes[0], sizes[2], sizes[1]}, query.options().dtype(at::kFloat));
  const Tensor q = dense(query);
  const Tensor k = dense(key);
  const Tensor v = dense(value);
  Operands operands;
  operands.set(ANNULUS_QUERY, q);
  operands.set(ANNULUS_KEY, k);
  operands.set(ANNULUS_VALUE, v);
  operands.set(ANNULUS_OUTPUT, output);
  operands.set(ANNULUS_LSE, lse);
  if (sinks) operands.set(ANNULUS_SINKS, rows(*sinks));
  check(annulus_attention_run(call.attention(), operands.get(), stream_of(query)));
  return {std::move(output), std::move(lse)};
}

class Attention : public torch::autograd::Function<Attention> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const Tensor& query, const Tensor& key,
                                                const Tensor& value,
                                                const std::optional<Tensor>& sinks,
                                                std::int64_t object) {
    auto use = c10::make_intrusive<Use>(object_of(object));
    auto [output, lse] = run(Call(&object_of(object)), query, key, value, sinks);
    context->set_materialize_grads(false);
    context->save_for_backward({query, key, value, output, lse, sinks.value_or(Tensor())});
    context->saved_data["use"] = at::IValue::make_capsule(std::move(use));
    return {std::move(output), std::move(lse)};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto use = context->saved_data["use"].toCapsule();
    const Call call(&static_cast<const Use&>(*use).object);
    torch::autograd::variable_list found =
        differentiate(call, saved, gradients[0], gradients[1],
                      saved[5].defined() && context->needs_input_grad(3));
    if (at::GradMode::is_enabled()) {  // gradients of the gradients may be asked for
      // Torch attaches the error only to tensors that require a gradient.
      for (Tensor& gradient : found) {
        if (gradient.defined()) gradient.requires_grad_();
      }
      found = torch::autograd::DelayedError("annulus: attention has no second derivative",
                                            static_cast<std::int64_t>(found.size()))
                  .apply(std::move(found));
    }
    found.emplace_back();
    return found;
  }

  static torch::autograd::variable_list differentiate(const Call& call,
                                                      const torch::autograd::variable_list& saved,
                                                      const Tensor& grad_output,
                                                      const Tensor& grad_lse, bool sinks_too) {
    const at::NoGradGuard no_grad;
    const Tensor grad = grad_output.defined() ? dense(grad_output) : at::zeros_like(saved[3]);
    const Tensor q = dense(saved[0]);
    const Tensor k = dense(saved[1]);
    const Tensor v = dense(saved[2]);
    torch::autograd::variable_list found;
    for (int i = 0; i < 3; ++i) found.push_back(at::empty(saved[i].sizes(), saved[i].options()));
    found.push_back(sinks_too ? at::empty(saved[5].sizes(), saved[5].options()) : Tensor());
    Operands operands;
    operands.set(ANNULUS_QUERY, q);
    operands.set(ANNULUS_KEY, k);
    operands.set(ANNULUS_VALUE, v);
    operands.set(ANNULUS_OUTPUT, saved[3]);
    operands.set(ANNULUS_LSE, saved[4]);
    operands.set(ANNULUS_GRAD_OUTPUT, grad);
    if (grad_lse.defined()) operands.set(ANNULUS_GRAD_LSE, grad_lse);
    operands.set(ANNULUS_GRAD_QUERY, found[0]);
    operands.set(ANNULUS_GRAD_KEY, found[1]);
    operands.set(ANNULUS_GRAD_VALUE, found[2]);
    if (saved[5].defined()) operands.set(ANNULUS_SINKS, rows(saved[5]));
    if (sinks_too) operands.set(ANNULUS_GRAD_SINKS, rows(found[3]));
    check(annulus_attention_backward(call.attention(), operands.get(), 0, stream_of(grad)));
    return found;
  }
};

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& sinks, std::int64_t object) {
  auto found = Attention::apply(query, key, value, sinks, object);
  return {std::move(found[0]), std::move(found[1])};
}

// ---- The operators of compiled code, which name an attention object by its mesh and options -----

/// The parameters of annulus::attention and annulus::attention_backward. Both have the same ones
/// from the query to the value, from the sinks to the offset, and at the end.
struct Arguments {
  [[nodiscard]] const Tensor& tensor(std::size_t index) const { return all[index].toTensor(); }
  [[nodiscard]] std::optional<Tensor> optional(std::size_t index) const {
    return all[index].toOptional<Tensor>();
  }
  /// Only Python can pass on operands after the sinks.
  [[nodiscard]] bool only_sinks() const {
    for (std::size_t i = sinks + 1; i < sinks + kExtras; ++i) {
      if (!all[i].isNone()) return false;
    }
    return true;
  }
  /// Calls with the same key have the same attention object.
  [[nodiscard]] std::string key() const {
    std::string key = all[count - 2].toStringRef();
    key += '\0';
    key += all[count - 1].toStringRef();
    for (const std::size_t index : {query, query + 1, query + 2, sinks}) {
      key += '\0';
      if (all[index].isNone()) continue;
      const Tensor& operand = tensor(index);
      key += static_cast<char>(operand.scalar_type());
      const auto sizes = operand.sizes();
      key.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(sizes[0]));
    }
    return key;
  }

  static constexpr std::size_t kExtras = 8;  // sinks to offset
  const c10::IValue* all;
  std::size_t count, query, sinks;
};

Arguments of_attention(const torch::jit::Stack& stack) {
  return {&stack.back() - 12, 13, 0, 3};
}
Arguments of_backward(const torch::jit::Stack& stack) {
  return {&stack.back() - 18, 19, 2, 7};
}

/// The attention objects that Python found for earlier calls.
class Known {
 public:
  /// The call has no object if Python must first find or make the object.
  [[nodiscard]] Call call(const Arguments& arguments) {
    if (!arguments.only_sinks()) return Call(nullptr);
    const std::string key = arguments.key();
    const std::scoped_lock lock(mutex_);  // the call is counted before its object can be forgotten
    const auto found = objects_.find(key);
    return Call(found == objects_.end() ? nullptr : found->second);
  }
  void set(const Arguments& arguments, Object& object) {
    const std::scoped_lock lock(mutex_);
    if (object.attention != nullptr) objects_[arguments.key()] = &object;
  }
  void forget(const Object& object) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(objects_, [&](const auto& entry) { return entry.second == &object; });
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, Object*> objects_;
};

Known& known() {
  static Known known;
  return known;
}

/// Compiled code then asks Python for the object again.
void forget(std::int64_t object) {
  known().forget(object_of(object));
}

/// Calls that begin later raise an error. Those under way go on.
void close_object(std::int64_t object) {
  object_of(object).attention = nullptr;
  forget(object);
}

bool is_within(std::int64_t object) {
  return Call::is_within(object_of(object));
}

/// Calls the Python function that takes the same arguments as the operator.
void call_python(const c10::OperatorHandle& operation, const char* suffix,
                 torch::jit::Stack* stack) {
  const std::string name = operation.operator_name().name + suffix;
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").callBoxed(stack);
}

void attention_kernel(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const Arguments arguments = of_attention(*stack);
  const Call call = known().call(arguments);
  if (!call.has_object()) return call_python(operation, "_in_python", stack);
  auto [output, lse] = run(call, arguments.tensor(0), arguments.tensor(1), arguments.tensor(2),
                           arguments.optional(3));
  torch::jit::drop(*stack, arguments.count);
  torch::jit::push(*stack, std::move(output), std::move(lse));
}

void backward_kernel(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const Arguments arguments = of_backward(*stack);
  const Call call = known().call(arguments);
  if (!call.has_object()) return call_python(operation, "_in_python", stack);
  const auto tensor = [&](std::size_t index) {
    return arguments.optional(index).value_or(Tensor());
  };
  const bool grad_sinks = arguments.all[15].toBool();
  auto found = Attention::differentiate(
      call, {tensor(2), tensor(3), tensor(4), tensor(5), tensor(6), tensor(7)}, tensor(0),
      tensor(1), grad_sinks);
  if (!grad_sinks) found.pop_back();
  torch::jit::drop(*stack, arguments.count);
  torch::jit::push(*stack, std::move(found));
}

/// Leaves autograd nodes to Python: compiled code needs none here.
void autograd_kernel(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  const std::size_t count = operation.schema().arguments().size();
  bool has_node = false;
  for (const c10::IValue& argument : torch::jit::last(*stack, count)) {
    if (!argument.isTensor()) continue;
    const Tensor& tensor = argument.toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor._fw_grad(0).defined(),
        "annulus: attention has no forward-mode derivatives (torch.func.jvp)");
    has_node = has_node || (at::GradMode::is_enabled() && tensor.requires_grad());
  }
  if (has_node) return call_python(operation, "_with_node", stack);
  const at::AutoDispatchBelowADInplaceOrView guard;
  operation.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

/// Remembers the object for calls of annulus::attention with these arguments.
void remember(const Tensor& query, const Tensor& key, const Tensor& value,
              const std::optional<Tensor>& sinks, std::string mesh, std::string options,
              std::int64_t object) {
  torch::jit::Stack stack = {query, key, value, sinks};
  stack.resize(11);
  stack.emplace_back(std::move(mesh));
  stack.emplace_back(std::move(options));
  known().set(of_attention(stack), object_of(object));
}

void implement(torch::Library& library) {
  library.impl("attention", torch::CppFunction::makeFromBoxedFunction<&attention_kernel>());
  library.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&backward_kernel>());
}

}  // namespace

TORCH_LIBRARY(annulus_calls, library) {
  // `object`: the value that open() returned for the address of an attention object.
  library.def("open(int attention) -> int", open_object);
  library.def("close(int object) -> ()", close_object);
  library.def("calls(int object) -> int", calls_of);
  library.def("uses(int object) -> int", uses_of);
  library.def("is_within(int object) -> bool", is_within);
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int object)"
      " -> (Tensor, Tensor)",
      attention);
  library.def(
      "remember(Tensor query, Tensor key, Tensor value, Tensor? sinks, str mesh, str options,"
      " int object) -> ()",
      remember);
  library.def("forget(int object) -> ()", forget);
}

// annulus/torch.py defines these operators.
TORCH_LIBRARY_IMPL(annulus, CPU, library) {
  implement(library);
}
TORCH_LIBRARY_IMPL(annulus, CUDA, library) {
  implement(library);
}
TORCH_LIBRARY_IMPL(annulus, Autograd, library) {
  library.impl("attention", torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
  library.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&autograd_kernel>());
}
