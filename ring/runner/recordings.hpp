#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <annulus/core/stream.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::ring {

/// Recorded calls, by their tensors, so that layers which take turns each find their own.
class Recordings {
 public:
  /// `uniform`: all ranks must agree, without communicating, on which calls are recorded, so only
  /// the number of the call decides.
  explicit Recordings(bool uniform) : uniform_(uniform) {}

  /// The recording to submit for these tensors; null if the call must run unrecorded. `record`
  /// makes a recording, or null if the work cannot be recorded.
  [[nodiscard]] Recording* find(std::span<const TensorView> tensors,
                                const std::function<std::unique_ptr<Recording>()>& record);
  /// Forgets all recordings.
  void clear() noexcept;
  /// Forgets all recordings; the next call counts as the first. With uniform calls, on all ranks or
  /// none.
  void restart() noexcept;

 private:
  struct Entry {
    std::vector<TensorView> tensors;
    std::unique_ptr<Recording> recording;
    std::size_t used = 0;  // the call that used it last
  };
  [[nodiscard]] Entry* known(std::span<const TensorView> tensors);
  [[nodiscard]] Entry* add(std::span<const TensorView> tensors);

  bool uniform_;
  std::vector<Entry> entries_;
  std::size_t next_ = 0;  // probably the next one needed
  std::size_t calls_ = 0;
};

}  // namespace annulus::ring
