// Handlers of XLA's foreign function interface, which programs compiled by JAX call. A call names
// its attention by a text: an address would be wrong once the object has ended, or, in a cache of
// compiled programs, in another process.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <xla/ffi/api/ffi.h>

#include <annulus/annulus.h>

extern "C" {
void annulus_jax_keep(const char* key, annulus_attention* attention, annulus_place place);
void annulus_jax_drop(const char* key);
void annulus_python_raise_later();  // of signals.cpp
}

namespace {

/// The number of the device that XLA computes on.
struct DeviceOrdinal {};

}  // namespace

template <>
struct xla::ffi::CtxDecoding<DeviceOrdinal> {
  using Type = std::int32_t;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    XLA_FFI_DeviceOrdinal_Get_Args arguments{};
    arguments.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
    arguments.ctx = context;
    if (XLA_FFI_Error* error = api->XLA_FFI_DeviceOrdinal_Get(&arguments)) {
      diagnostic.Emit("Failed to get the device: ") << internal::GetErrorMessage(api, error);
      internal::DestroyError(api, error);
      return std::nullopt;
    }
    return arguments.device_ordinal;
  }
};

namespace {

namespace ffi = xla::ffi;

struct Kept {
  annulus_attention* attention;
  annulus_place place;
};

// Also held during calls, so that no object ends while it is called.
std::mutex mutex;
std::unordered_map<std::string, Kept> kept;

constexpr auto kUnknownDtype = static_cast<annulus_dtype>(7);  // annulus_tensors_set() refuses it
constexpr std::int64_t kSeed =
    -1;  // in place of an operand, the seed: two halves of 32 bits, the lower first

ffi::Error error_of(annulus_status status) {
  if (status == ANNULUS_INTERRUPTED_ERROR) annulus_python_raise_later();
  const ffi::ErrorCode code = status == ANNULUS_UNSUPPORTED_ERROR ? ffi::ErrorCode::kUnimplemented
                              : status < ANNULUS_LIBRARY_ERROR    ? ffi::ErrorCode::kInvalidArgument
                                                                  : ffi::ErrorCode::kInternal;
  return {code, annulus_error_message()};
}

annulus_dtype dtype_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::PRED:
      return ANNULUS_BOOLEAN;
    case ffi::DataType::U8:
      return ANNULUS_UINT8;
    case ffi::DataType::S32:
      return ANNULUS_INT32;
    case ffi::DataType::F16:
      return ANNULUS_FLOAT16;
    case ffi::DataType::BF16:
      return ANNULUS_BFLOAT16;
    case ffi::DataType::F32:
      return ANNULUS_FLOAT32;
    case ffi::DataType::F64:
      return ANNULUS_FLOAT64;
    default:
      return kUnknownDtype;
  }
}

class Tensors {
 public:
  explicit Tensors(annulus_place place)
      : place_(place), status_(annulus_tensors_create(&handle_)) {}
  ~Tensors() { annulus_tensors_destroy(handle_); }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  void add(std::int64_t operand, const ffi::AnyBuffer& buffer) {
    if (status_ != ANNULUS_SUCCESS) return;
    if (operand == kSeed) {
      add_seed(buffer.untyped_data());
      return;
    }
    const auto shape = buffer.dimensions();
    status_ = annulus_tensors_set(handle_, static_cast<annulus_operand>(operand),
                                  buffer.untyped_data(), dtype_of(buffer.element_type()), place_,
                                  static_cast<int>(shape.size()), shape.begin(), nullptr);
  }
  [[nodiscard]] annulus_status status() const { return status_; }
  [[nodiscard]] const annulus_tensors* handle() const { return handle_; }

 private:
  void add_seed(const void* halves) {
    if (place_ != ANNULUS_HOST) {
      status_ = annulus_tensors_set_device_dropout_seed(handle_,
                                                        static_cast<const std::uint64_t*>(halves));
      return;
    }
    std::uint64_t seed = 0;
    std::memcpy(&seed, halves, sizeof(seed));
    status_ = annulus_tensors_set_dropout_seed(handle_, seed);
  }

  annulus_place place_;
  annulus_tensors* handle_ = nullptr;
  annulus_status status_;
};

// `operands` and `results` number the buffers. Each may be followed by a token of XLA.
ffi::Error call(void* stream, annulus_place device, std::string_view key, bool backward,
                ffi::Span<const std::int64_t> operands, ffi::Span<const std::int64_t> results,
                ffi::RemainingArgs arguments, ffi::RemainingRets returned) {
  const std::lock_guard lock(mutex);
  const auto found = kept.find(std::string(key));
  if (found == kept.end()) {
    return {
        ffi::ErrorCode::kFailedPrecondition,
        "annulus.jax: the mesh that this program was traced for was closed, or it was traced in "
        "another process: trace it again, for example after jax.clear_caches()"};
  }
  const auto [attention, place] = found->second;
  if (place != device) {
    return {ffi::ErrorCode::kInvalidArgument,
            "annulus.jax: got arrays on device " + std::to_string(device) +
                ", expected the mesh's device, " + std::to_string(place) +
                " (-1: the CPU): annulus.init(device=...), or jax.distributed.initialize(..., "
                "local_device_ids=...)"};
  }
  Tensors tensors(place);
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const auto buffer = arguments.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    tensors.add(operands[i], *buffer);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto buffer = returned.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    tensors.add(results[i], **buffer);
  }
  annulus_status status = tensors.status();
  if (status == ANNULUS_SUCCESS) {
    status = backward ? annulus_attention_backward(attention, tensors.handle(), 0, stream)
                      : annulus_attention_run(attention, tensors.handle(), stream);
  }
  return status == ANNULUS_SUCCESS ? ffi::Error::Success() : error_of(status);
}

ffi::Error call_on_cpu(std::string_view key, bool backward, ffi::Span<const std::int64_t> operands,
                       ffi::Span<const std::int64_t> results, ffi::RemainingArgs arguments,
                       ffi::RemainingRets returned) {
  return call(nullptr, ANNULUS_HOST, key, backward, operands, results, arguments, returned);
}

template <class Binding>
auto with_arguments(Binding binding) {
  return std::move(binding)
      .template Attr<std::string_view>("attention")
      .template Attr<bool>("backward")
      .template Attr<ffi::Span<const std::int64_t>>("operands")
      .template Attr<ffi::Span<const std::int64_t>>("results")
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace

void annulus_jax_keep(const char* key, annulus_attention* attention, annulus_place place) {
  const std::lock_guard lock(mutex);
  kept.insert_or_assign(key, Kept{attention, place});
}
void annulus_jax_drop(const char* key) {
  const std::lock_guard lock(mutex);
  kept.erase(key);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(annulus_jax_cpu, call_on_cpu, with_arguments(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    annulus_jax_cuda, call,
    with_arguments(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<DeviceOrdinal>()));
