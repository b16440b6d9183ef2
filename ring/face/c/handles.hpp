#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/annulus.h>
#include <annulus/core/tensor.hpp>
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>

/// The types behind the handles of annulus.h.

struct annulus_context_options {
  annulus::ContextOptions options;
};

struct annulus_store {
  std::shared_ptr<annulus::KeyValueStore> store;
  std::shared_ptr<std::atomic<double>> timeout;  // of a call of the store, in seconds
  int rank;
  int size;
};

struct annulus_context {
  annulus::Context context;
};

struct annulus_attention_options {
  using Step = std::function<void(annulus::AttentionOptions&)>;

  std::vector<Step> choices;  // applied first: the specs decide what a local shape means …
  std::vector<Step> parts;    // … and the shape decides what these mean
  annulus::AttentionShape shape;
  bool local = false;  // `shape` is a rank's local shape
  std::optional<std::int64_t> query_length;
  std::optional<std::int64_t> kv_length;
  std::optional<std::int64_t> kv_heads;

  /// Throws UserError for values that do not fit.
  [[nodiscard]] annulus::AttentionOptions resolve(const annulus::MeshShape& mesh) const;
};

struct annulus_tensors {
  std::map<annulus_operand, annulus::TensorView> views;
  std::optional<std::uint64_t> dropout_seed;
  const std::uint64_t* device_dropout_seed = nullptr;
};

struct annulus_attention {
  annulus::Context& context;
  annulus::Attention attention;
  std::string text;  // the last that was returned
};

namespace annulus::c {

/// Notes the error in flight for annulus_error_message(), and returns its status.
annulus_status note_error() noexcept;
void clear_error() noexcept;

/// The status of `body`, whatever it throws.
template <class Body>
annulus_status guarded(Body&& body) noexcept {
  clear_error();
  try {
    std::forward<Body>(body)();
    return ANNULUS_SUCCESS;
  } catch (...) {
    return note_error();
  }
}

/// Throws ArgumentError for a null pointer.
template <class T>
T& checked(T* pointer, const char* name) {
  if (pointer == nullptr) throw ArgumentError(name, "a null pointer", "an address");
  return *pointer;
}

/// Throws ArgumentError for an unknown dtype.
[[nodiscard]] DType dtype_of_c(annulus_dtype dtype);
[[nodiscard]] Place place_of_c(annulus_place place);
[[nodiscard]] Extents extents_of_c(const char* name, int dimensions, const std::int64_t* sizes);

/// Writes positions as annulus_context_positions() does.
void write_positions(const NamedSharding& sharding, int rank, int dimension,
                     std::int64_t* positions, std::int64_t capacity, std::int64_t* count);

}  // namespace annulus::c
