#pragma once

#include <utility>

namespace annulus {

/// Move-only owner of a C handle. All communicators, file descriptors and device handles are held
/// by it.
///
/// `Traits` describes the handle:
///
///     struct Traits {
///       using Raw = int;                          // the C type
///       static Raw null() noexcept;               // the value that owns nothing
///       static void release(Raw raw) noexcept;    // called once, never with null()
///     };
template <class Traits>
class Handle {
 public:
  using Raw = typename Traits::Raw;

  Handle() noexcept = default;
  explicit Handle(Raw raw) noexcept : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(other.release()) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { reset(); }

  [[nodiscard]] Raw get() const noexcept { return raw_; }
  explicit operator bool() const noexcept { return raw_ != Traits::null(); }

  /// Gives up ownership without releasing.
  [[nodiscard]] Raw release() noexcept { return std::exchange(raw_, Traits::null()); }

  void reset(Raw raw = Traits::null()) noexcept {
    const Raw old = std::exchange(raw_, raw);
    if (old != Traits::null()) Traits::release(old);
  }

 private:
  Raw raw_ = Traits::null();
};

}  // namespace annulus
