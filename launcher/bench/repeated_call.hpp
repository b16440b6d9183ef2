#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <annulus/core/device.hpp>
#include <annulus/core/stream.hpp>

namespace annulus::launcher {

/// A call that is repeated for timing. A device records and replays the calls where it can, as in
/// runs.
class RepeatedCall {
 public:
  /// `submit(i)` submits the i-th of the calls. The references must outlive it.
  RepeatedCall(Device& device, Stream& stream, std::function<void(int i)> submit)
      : device_(device), stream_(stream), submit_(std::move(submit)) {}

  /// Makes this many calls and waits for their end. The first time also prepares later ones.
  void run(int calls) {
    const auto submit_all = [&] {
      for (int i = 0; i < calls; ++i) submit_(i);
    };
    if (warm_ && recorded_ != calls) {
      recording_ = device_.record(stream_, submit_all);
      recorded_ = calls;
    }
    if (warm_ && recording_) {
      recording_->submit(stream_);
    } else {
      submit_all();
    }
    warm_ = true;
    stream_.synchronize();
  }

 private:
  Device& device_;
  Stream& stream_;
  std::function<void(int i)> submit_;
  std::unique_ptr<Recording> recording_;
  int recorded_ = 0;
  bool warm_ = false;
};

}  // namespace annulus::launcher
