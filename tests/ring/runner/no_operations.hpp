#pragma once

#include <cstdint>
#include <span>

#include <annulus/core/error.hpp>
#include <annulus/ring/local_operations.hpp>

namespace annulus::ring {

/// Refuses everything: for tests that override what they ask for.
class NoOperations : public LocalOperations {
 public:
  void combine(std::span<const PartialState> /*parts*/, const SoftmaxState& /*result*/,
               SoftmaxForm /*form*/, Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void sum(std::span<const ConstTensorView> /*parts*/, const TensorView& /*result*/,
           Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void delta(const ConstTensorView& /*output*/, const ConstTensorView& /*grad_output*/,
             const ConstTensorView& /*grad_lse*/, const TensorView& /*delta*/,
             Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void sink_gradient(const ConstTensorView& /*sinks*/, const ConstTensorView& /*lse*/,
                     const ConstTensorView& /*delta*/, const TensorView& /*grad_sinks*/,
                     Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void publish(std::int32_t /*value*/, std::int32_t* /*number*/,
               Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void sink_state(const ConstTensorView& /*sinks*/, const TensorView& /*logits*/,
                  const TensorView& /*lse*/, const TensorView& /*maximum*/,
                  Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
  void write(const CallArgumentWrite& /*write*/, Stream& /*stream*/) const override {
    throw InternalError("not asked for");
  }
};

}  // namespace annulus::ring
