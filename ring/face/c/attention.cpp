#include <algorithm>
#include <string>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/core/one_at_a_time.hpp>
#include <annulus/mesh/agreement.hpp>
#include <annulus/mesh/mesh.hpp>
#include <annulus/ring/plan.hpp>
#include <annulus/ring/planner.hpp>

#include "face/c/handles.hpp"

using annulus::c::checked;
using annulus::c::guarded;

namespace annulus::c {
namespace {

TensorView view_of(const annulus_tensors& tensors, annulus_operand operand) {
  const auto found = tensors.views.find(operand);
  return found == tensors.views.end() ? TensorView() : found->second;
}

ring::CallValues call_values_of(const annulus_tensors& tensors) {
  return {view_of(tensors, ANNULUS_QUERY_LENGTHS),
          view_of(tensors, ANNULUS_KV_LENGTHS),
          view_of(tensors, ANNULUS_OFFSETS),
          tensors.dropout_seed,
          tensors.device_dropout_seed,
          view_of(tensors, ANNULUS_SINKS)};
}

ring::LocalTensors forward_views(const annulus_tensors& tensors) {
  const auto view = [&](annulus_operand operand) { return view_of(tensors, operand); };
  return {view(ANNULUS_QUERY), view(ANNULUS_KEY),     view(ANNULUS_VALUE),    view(ANNULUS_OUTPUT),
          view(ANNULUS_LSE),   view(ANNULUS_BIAS),    view(ANNULUS_MASK),     view(ANNULUS_MAXIMUM),
          view(ANNULUS_SUM),   view(ANNULUS_WEIGHTS), call_values_of(tensors)};
}

ring::BackwardLocalTensors backward_views(const annulus_tensors& tensors) {
  const auto view = [&](annulus_operand operand) { return view_of(tensors, operand); };
  return {view(ANNULUS_QUERY),      view(ANNULUS_KEY),        view(ANNULUS_VALUE),
          view(ANNULUS_OUTPUT),     view(ANNULUS_LSE),        view(ANNULUS_GRAD_OUTPUT),
          view(ANNULUS_GRAD_QUERY), view(ANNULUS_GRAD_KEY),   view(ANNULUS_GRAD_VALUE),
          view(ANNULUS_BIAS),       view(ANNULUS_MASK),       view(ANNULUS_GRAD_LSE),
          call_values_of(tensors),  view(ANNULUS_GRAD_SINKS), view(ANNULUS_GRAD_BIAS)};
}

const NamedSharding* sharding_of(const Attention& attention, annulus_operand operand) {
  const ring::ShardedOperands& operands = attention.operands();
  switch (operand) {
    case ANNULUS_QUERY:
    case ANNULUS_GRAD_QUERY:
      return &operands.query;
    case ANNULUS_KEY:
    case ANNULUS_GRAD_KEY:
      return &operands.key;
    case ANNULUS_VALUE:
    case ANNULUS_GRAD_VALUE:
      return &operands.value;
    case ANNULUS_OUTPUT:
    case ANNULUS_GRAD_OUTPUT:
      return &operands.output;
    case ANNULUS_LSE:
    case ANNULUS_MAXIMUM:
    case ANNULUS_SUM:
    case ANNULUS_GRAD_LSE:
      return &operands.lse;
    case ANNULUS_BIAS:
    case ANNULUS_GRAD_BIAS:
      return operands.bias ? &*operands.bias : nullptr;
    case ANNULUS_MASK:
      return operands.dense_mask ? &*operands.dense_mask : nullptr;
    default:
      return nullptr;
  }
}

Extents shape_of(const annulus_attention& attention, annulus_operand operand) {
  switch (operand) {
    case ANNULUS_SINKS:
    case ANNULUS_GRAD_SINKS:
      return attention.attention.sinks_shape();
    case ANNULUS_WEIGHTS:
      return attention.attention.weights_shape();
    default:
      break;
  }
  const NamedSharding* sharding = sharding_of(attention.attention, operand);
  return sharding != nullptr ? sharding->local_shape(attention.context.rank()) : Extents();
}

std::string explanation_of(const Attention& attention) {
  std::string text;
  const auto line = [&](const std::string& name, const std::string& what) {
    text += fmt::format("{}: {}\n", name, what);
  };
  const Selection selection = attention.selection();
  for (const Implementation* candidate : selection.candidates) {
    line("implementation that can compute it", candidate->names().front());
  }
  for (const auto& [name, reason] : selection.passed_over) {
    line("implementation passed over, " + name, reason);
  }
  const ring::Decision& decision = attention.decision();
  line("choice made by", fmt::format("{}: {}", ring::name_of(decision.by), decision.why));
  for (const auto& other : decision.passed) {
    line(fmt::format("choice not made by {}", ring::name_of(other.link)), other.reason);
  }
  const ring::ScheduleChoice& schedule = attention.schedule();
  line("schedule chosen", ring::variant_text(schedule));
  for (const auto& other : schedule.passed_over) {
    line("schedule passed over, " + ring::variant_text(other), other.reason);
  }
  for (const auto& [name, cost] : attention.plan_input().prices.kernels) {
    line("rate of " + name, cost.source);
  }
  line("transport", attention.transport());
  return text;
}

}  // namespace
}  // namespace annulus::c

annulus_status annulus_tensors_create(annulus_tensors** tensors) {
  return guarded([&] { checked(tensors, "tensors") = new annulus_tensors(); });
}
void annulus_tensors_destroy(annulus_tensors* tensors) {
  delete tensors;
}
annulus_status annulus_tensors_set(annulus_tensors* tensors, annulus_operand operand, void* data,
                                   annulus_dtype dtype, annulus_place place, int dimensions,
                                   const int64_t* shape, const int64_t* strides) {
  return guarded([&] {
    if (operand < ANNULUS_QUERY || operand > ANNULUS_GRAD_BIAS) {
      throw annulus::ArgumentError("operand", std::to_string(operand), "an annulus_operand");
    }
    const annulus::Extents sizes = annulus::c::extents_of_c("shape", dimensions, shape);
    const annulus::Extents steps = strides != nullptr
                                       ? annulus::c::extents_of_c("strides", dimensions, strides)
                                       : annulus::contiguous_strides(sizes);
    checked(tensors, "tensors")
        .views.insert_or_assign(
            operand, annulus::TensorView(data, annulus::c::dtype_of_c(dtype), sizes, steps,
                                         annulus::c::place_of_c(place)));
  });
}
annulus_status annulus_tensors_set_data(annulus_tensors* tensors, int count,
                                        const annulus_operand* operands, void* const* data) {
  return guarded([&] {
    auto& views = checked(tensors, "tensors").views;
    for (int i = 0; i < count; ++i) {
      const annulus_operand operand = (&checked(operands, "operands"))[i];
      const auto found = views.find(operand);
      if (found == views.end()) {
        throw annulus::ArgumentError("operand", std::to_string(operand), "one that was set before");
      }
      const annulus::TensorView& old = found->second;
      found->second = annulus::TensorView((&checked(data, "data"))[i], old.dtype(), old.shape(),
                                          old.strides(), old.place());
    }
  });
}
annulus_status annulus_tensors_set_dropout_seed(annulus_tensors* tensors, uint64_t seed) {
  return guarded([&] {
    checked(tensors, "tensors").dropout_seed = seed;
    tensors->device_dropout_seed = nullptr;
  });
}
annulus_status annulus_tensors_set_device_dropout_seed(annulus_tensors* tensors,
                                                       const uint64_t* seed) {
  return guarded([&] {
    checked(tensors, "tensors").device_dropout_seed = seed;
    tensors->dropout_seed.reset();
  });
}

annulus_status annulus_attention_create(annulus_context* context,
                                        const annulus_attention_options* options,
                                        annulus_attention** attention) {
  return guarded([&] {
    annulus::Context& ranks = checked(context, "context").context;
    const auto call = ranks.calls().begin("annulus_attention_create");
    const annulus::AttentionOptions resolved =
        annulus::collectively(ranks.mesh().world(), "options", [&] {
          checked(attention, "attention");
          return checked(options, "options").resolve(ranks.mesh().shape());
        });
    *attention = new annulus_attention{ranks, annulus::Attention(ranks, resolved), {}};
  });
}
void annulus_attention_destroy(annulus_attention* attention) {
  delete attention;
}

annulus_status annulus_attention_run(annulus_attention* attention, const annulus_tensors* tensors,
                                     void* stream) {
  return guarded([&] {
    checked(attention, "attention")
        .attention.run(annulus::c::forward_views(checked(tensors, "tensors")), stream);
  });
}
annulus_status annulus_attention_backward(annulus_attention* attention,
                                          const annulus_tensors* tensors, int accumulate,
                                          void* stream) {
  return guarded([&] {
    checked(attention, "attention")
        .attention.backward(annulus::c::backward_views(checked(tensors, "tensors")),
                            accumulate != 0, stream);
  });
}
annulus_status annulus_attention_wait(annulus_attention* attention) {
  return guarded([&] { checked(attention, "attention").attention.wait(); });
}

annulus_status annulus_attention_shape(const annulus_attention* attention, annulus_operand operand,
                                       int64_t shape[ANNULUS_MAXIMUM_DIMENSIONS], int* dimensions) {
  return guarded([&] {
    const annulus::Extents sizes = annulus::c::shape_of(checked(attention, "attention"), operand);
    checked(dimensions, "dimensions") = sizes.rank();
    std::copy(sizes.begin(), sizes.end(), &checked(shape, "shape"));
  });
}
annulus_status annulus_attention_positions(const annulus_attention* attention,
                                           annulus_operand operand, int rank, int dimension,
                                           int64_t* positions, int64_t capacity, int64_t* count) {
  return guarded([&] {
    const annulus::NamedSharding* sharding =
        annulus::c::sharding_of(checked(attention, "attention").attention, operand);
    if (sharding == nullptr) {
      throw annulus::ArgumentError("operand", std::to_string(operand),
                                   "an operand of the problem with positions");
    }
    annulus::c::write_positions(*sharding, rank, dimension, positions, capacity, count);
  });
}

annulus_status annulus_attention_plan_text(annulus_attention* attention, int ranks,
                                           const char** text) {
  return guarded([&] {
    auto& of = checked(attention, "attention");
    const annulus::ring::Plan plan =
        annulus::ring::make_plan(of.attention.plan_input(), of.attention.schedule().schedule);
    of.text = annulus::ring::to_text(plan, ranks);
    checked(text, "text") = of.text.c_str();
  });
}
annulus_status annulus_attention_explanation(annulus_attention* attention, const char** text) {
  return guarded([&] {
    auto& of = checked(attention, "attention");
    of.text = annulus::c::explanation_of(of.attention);
    checked(text, "text") = of.text.c_str();
  });
}
