#include "runner/tensor_checks.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

#include <fmt/format.h>

#include <annulus/core/error.hpp>

namespace annulus::ring {
namespace {

void check(const std::string& name, const TensorView& tensor, const TensorView& expected) {
  if (!(tensor.shape() == expected.shape())) {
    throw ArgumentError(name, "shape " + to_string(tensor.shape()), to_string(expected.shape()));
  }
  if (tensor.dtype() != expected.dtype()) {
    throw ArgumentError(name, std::string(annulus::name_of(tensor.dtype())),
                        std::string(annulus::name_of(expected.dtype())));
  }
  if (!(tensor.place() == expected.place())) {
    throw ArgumentError(name, "memory of " + to_string(tensor.place()),
                        to_string(expected.place()));
  }
  if (tensor.data() == nullptr && tensor.elements() > 0) {
    throw ArgumentError(name, "a null pointer", "memory for " + to_string(tensor.shape()));
  }
  // The innermost stride of [b,t,n,D] and [b,n,t,S] is 1; an LSE [b,n,t] may have any strides.
  if (tensor.rank() == 4 && tensor.size(3) > 1 && tensor.stride(3) != 1) {
    throw ArgumentError(name, "strides " + to_string(tensor.strides()), "1 for the last dimension");
  }
}

bool is_result(Content content) {
  return content == Content::output || content == Content::lse || content == Content::maximum ||
         content == Content::sum || is_gradient(content);
}

// Refuses results whose elements share memory, as after expand(): they would overwrite each other.
void check_apart(const std::string& name, const TensorView& tensor) {
  if (has_nested_strides(tensor.shape(), tensor.strides())) return;
  throw ArgumentError(name, "strides " + to_string(tensor.strides()),
                      "memory of its own for every element of " + to_string(tensor.shape()));
}

}  // namespace

void check_tensors(const RankPlan& plan, std::span<const TensorView> expected,
                   std::span<const TensorView> tensors) {
  std::size_t i = 0;
  for (const ring::Buffer& buffer : plan.buffers) {
    if (buffer.kind != BufferKind::caller) continue;
    const Content content = buffer.contents.front();
    const std::string name(ring::name_of(content));
    check(name, tensors[i], expected[i]);
    if (is_result(content)) check_apart(name, tensors[i]);
    ++i;
  }
}

bool lie_alike(const TensorView& a, const TensorView& b) {
  constexpr std::uintptr_t kVector = 16;
  const auto misaligned = [](const TensorView& tensor) {
    // An LSE may have any alignment: kernels access one number of it at a time.
    constexpr int kLseRank = 3;
    return tensor.rank() == kLseRank ? 0
                                     : reinterpret_cast<std::uintptr_t>(tensor.data()) % kVector;
  };
  return a.strides() == b.strides() && misaligned(a) == misaligned(b);
}

}  // namespace annulus::ring
