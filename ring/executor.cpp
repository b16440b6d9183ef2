#include <algorithm>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/ring/executor.hpp>

namespace annulus::ring {

Executor::Executor(AttentionProblem problem, RankPlan plan, const Selection& selection,
                   Group& group, Device& device, Watchdog watchdog, ExecutorOptions options)
    : problem_(std::move(problem)),
      plan_(std::move(plan)),
      group_(group),
      device_(device),
      options_(options),
      operations_(make_local_operations(device.place())),
      compute_stream_(device.make_stream("compute", watchdog, options.tracer)),
      communication_stream_(device.make_stream("communication", watchdog, options.tracer)) {
  allocate();
  choose_kernels(selection);
}

Executor::~Executor() = default;

void Executor::allocate() {
  const AttentionShape& local = plan_.local;
  MemoryPool& memory = device_.memory();
  if (problem_.dtype != DType::float32) {
    accumulator_ = Tensor(DType::float32,
                          {local.batch, local.query_length, local.heads, local.value_dim}, memory);
  }
  // On the CPU the LSE of the state is float64: in float32, rounding it at every merge would cost
  // more accuracy than all the rest. Devices compute half types, where it does not show.
  const DType lse_dtype = device_.place().is_host() ? DType::float64 : DType::float32;
  lse_ = Tensor(lse_dtype, {local.batch, local.heads, local.query_length}, memory);
  std::int64_t partial_rows = 0;
  std::int64_t partial_heads = 0;
  std::size_t most_sends = 0;
  std::size_t most_receives = 0;
  for (const Step& step : plan_.steps) {
    most_sends = std::max(most_sends, step.sends.size());
    most_receives = std::max(most_receives, step.receives.size());
    for (const Block& block : step.blocks) {
      if (!block.merge) continue;
      partial_rows = std::max(partial_rows, block.rows.count);
      partial_heads = std::max(partial_heads, block.heads.count);
    }
  }
  sends_.reserve(most_sends);
  receives_.reserve(most_receives);
  partial_output_ =
      Tensor(DType::float32, {local.batch, partial_rows, partial_heads, local.value_dim}, memory);
  partial_lse_ = Tensor(lse_dtype, {local.batch, partial_heads, partial_rows}, memory);

  // A slot holds a token's K for all batches and heads of the buffer, batch by batch with its V
  // behind it: [slot][batch][K heads · D | K heads · Dv].
  buffers_.resize(plan_.buffers.size());
  for (std::size_t i = 1; i < plan_.buffers.size(); ++i) {
    const KvBuffer& buffer = plan_.buffers[i];
    const std::int64_t heads = buffer.kv_heads.count;
    const std::int64_t keys = heads * local.head_dim;
    const std::int64_t record = keys + heads * local.value_dim;
    KvStorage& storage = buffers_[i];
    void* data = nullptr;
    if (buffer.reuses >= 0) {
      data = buffers_[static_cast<std::size_t>(buffer.reuses)].key.data();
    } else {
      storage.memory = Tensor(problem_.dtype, {buffer.slots, local.batch, record}, memory);
      data = storage.memory.view().data();
    }
    const TensorView records(data, problem_.dtype, {buffer.slots, local.batch, record},
                             device_.place());
    const auto part = [&](std::int64_t begin, std::int64_t dim) {
      return TensorView(records.address({0, 0, begin}), problem_.dtype,
                        {local.batch, buffer.slots, heads, dim},
                        {record, local.batch * record, dim, 1}, device_.place());
    };
    storage.key = part(0, local.head_dim);
    storage.value = part(keys, local.value_dim);
  }
}

void Executor::run(const LocalTensors& tensors) {
  const TraceScope call(options_.tracer, "call", {TraceCategory::call, "attention"});
  tensors_ = tensors;
  const bool rounds = problem_.dtype != DType::float32;
  state_ = {rounds ? accumulator_.view() : tensors.output, lse_.view()};
  if (!plan_.covers_all_rows()) operations_->reset(state_, *compute_stream_);
  pack();

  for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
    const Step& step = plan_.steps[s];
    const bool moves = !step.sends.empty() || !step.receives.empty();
    std::shared_ptr<Event> arrived;
    if (moves) {
      // What is received now takes the place of what the last step computed on.
      communication_stream_->wait(compute_stream_->record());
      post(step, static_cast<int>(s));
      arrived = communication_stream_->record();
    }
    for (const Block& block : step.blocks) compute(block, static_cast<int>(s));
    if (moves) {
      const TraceScope wait(options_.tracer, compute_stream_->name(),
                            {TraceCategory::wait, "transfer", static_cast<int>(s)});
      compute_stream_->wait(arrived);
    }
  }

  {
    const TraceScope scope(options_.tracer, compute_stream_->name(),
                           {TraceCategory::merge, "round"});
    if (rounds) operations_->round_output(state_, tensors.output, *compute_stream_);
    operations_->round_lse(state_, tensors.lse, *compute_stream_);
  }
  communication_stream_->synchronize();
  compute_stream_->synchronize();
}

void Executor::pack() {
  for (std::size_t i = 1; i < plan_.buffers.size(); ++i) {
    const KvBuffer& buffer = plan_.buffers[i];
    if (buffer.kind != BufferKind::packed) continue;
    const TraceScope scope(options_.tracer, compute_stream_->name(),
                           {TraceCategory::other, "pack"});
    const auto copy_part = [&](const ConstTensorView& from, const TensorView& to) {
      operations_->copy(from.slice(1, buffer.source.begin.value(), buffer.source.count)
                            .slice(2, buffer.kv_heads.begin, buffer.kv_heads.count),
                        to, *compute_stream_);
    };
    copy_part(tensors_.key, buffers_[i].key);
    copy_part(tensors_.value, buffers_[i].value);
  }
}

ConstTensorView Executor::key_of(int buffer) const {
  return buffer == 0 ? tensors_.key : buffers_[static_cast<std::size_t>(buffer)].key;
}

ConstTensorView Executor::value_of(int buffer) const {
  return buffer == 0 ? tensors_.value : buffers_[static_cast<std::size_t>(buffer)].value;
}

void* Executor::slot_address(const Transfer& transfer) const {
  const KvStorage& storage = buffers_[static_cast<std::size_t>(transfer.buffer)];
  return storage.key.address({0, transfer.slots.begin.value(), 0, 0});
}

void Executor::post(const Step& step, int index) {
  sends_.clear();
  receives_.clear();
  for (const Transfer& send : step.sends) {
    sends_.push_back({send.peer, slot_address(send), static_cast<std::size_t>(send.bytes)});
  }
  for (const Transfer& receive : step.receives) {
    receives_.push_back(
        {receive.peer, slot_address(receive), static_cast<std::size_t>(receive.bytes)});
  }
  group_.exchange(sends_, receives_, *communication_stream_,
                  {std::string(name_of(Payload::key_value)), index});
}

AttentionBlock Executor::call_of(const Block& block) const {
  const KvBuffer& buffer = plan_.buffers[static_cast<std::size_t>(block.buffer)];
  const std::int64_t ratio = plan_.local.heads_per_kv_head();
  const std::int64_t first_kv_head = block.heads.begin / ratio - buffer.kv_heads.begin;
  const std::int64_t kv_heads = block.heads.count / ratio;
  const auto columns = [&](const ConstTensorView& view) {
    return view.slice(1, block.slots.begin.value(), block.slots.count)
        .slice(2, first_kv_head, kv_heads);
  };
  return {tensors_.query.slice(1, block.rows.begin.value(), block.rows.count)
              .slice(2, block.heads.begin, block.heads.count),
          columns(key_of(block.buffer)),
          columns(value_of(block.buffer)),
          block.row_positions,
          block.column_positions,
          plan_.first_batch,
          plan_.first_head + block.heads.begin,
          block.full};
}

void Executor::choose_kernels(const Selection& selection) {
  // The addresses of the caller's tensors are not known yet, and do not matter here.
  const AttentionShape& local = plan_.local;
  const auto absent = [&](std::int64_t length, std::int64_t heads, std::int64_t dim) {
    return ConstTensorView(nullptr, problem_.dtype, {local.batch, length, heads, dim},
                           device_.place());
  };
  tensors_.query = absent(local.query_length, local.heads, local.head_dim);
  tensors_.key = absent(local.kv_length, local.kv_heads, local.head_dim);
  tensors_.value = absent(local.kv_length, local.kv_heads, local.value_dim);
  for (const Step& step : plan_.steps) {
    for (const Block& block : step.blocks) {
      const AttentionBlock call = call_of(block);
      const Implementation& chosen = selection.for_block(problem_, call);
      std::unique_ptr<Kernel>& kernel = kernels_[&chosen];
      if (!kernel) kernel = chosen.make_kernel(problem_, device_);
      kernel->prepare(call);
      implementations_[&block] = &chosen;
    }
  }
}

std::string Executor::implementations() const {
  std::string names;
  for (const auto& [implementation, kernel] : kernels_) {
    names += (names.empty() ? "" : "+") + implementation->names().front();
  }
  return names.empty() ? "none" : names;
}

void Executor::compute(const Block& block, int step) {
  const Implementation* implementation = implementations_.at(&block);
  const SoftmaxState rows = state_.rows(block.rows);
  const SoftmaxState target{rows.output.slice(2, block.heads.begin, block.heads.count),
                            rows.lse.slice(1, block.heads.begin, block.heads.count)};
  const SoftmaxState partial{partial_output_.view()
                                 .slice(1, 0, block.merge ? block.rows.count : 0)
                                 .slice(2, 0, block.merge ? block.heads.count : 0),
                             partial_lse_.view()
                                 .slice(1, 0, block.merge ? block.heads.count : 0)
                                 .slice(2, 0, block.merge ? block.rows.count : 0)};
  {
    const TraceScope scope(options_.tracer, compute_stream_->name(),
                           {TraceCategory::kernel, implementation->names().front(), step});
    kernels_.at(implementation)
        ->forward(call_of(block), block.merge ? partial : target,
                  {*compute_stream_, communication_stream_.get(), options_.threads});
  }
  if (!block.merge) return;
  const TraceScope scope(options_.tracer, compute_stream_->name(),
                         {TraceCategory::merge, "merge", step});
  operations_->merge(target, partial, *compute_stream_);
}

}  // namespace annulus::ring
