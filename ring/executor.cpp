#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/executor.hpp>
#include <annulus/ring/transfer_wait.hpp>

#include "overwriting_steps.hpp"

namespace annulus::ring {
namespace {

// Recordings that are kept: of so many sets of tensors that take turns.
constexpr std::size_t kReplays = 16;
// A block of so many operations takes a device a millisecond or more: to mark its end costs nothing
// beside that.
constexpr double kMarkedFlops = 1e12;

std::size_t aligned(std::size_t bytes) {
  return (bytes + MemoryPool::kAlignment - 1) / MemoryPool::kAlignment * MemoryPool::kAlignment;
}

std::size_t elements_of(const Extents& shape) {
  return static_cast<std::size_t>(shape.product());
}

void check_tensor(const char* name, const ConstTensorView& tensor,
                  const ConstTensorView& expected) {
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
  // Of [b,t,n,D]; an LSE [b,n,t] may lie as it likes.
  if (tensor.rank() == 4 && tensor.size(3) > 1 && tensor.stride(3) != 1) {
    throw ArgumentError(name, "strides " + to_string(tensor.strides()), "1 for the head dimension");
  }
}

// Whether kernels make no difference between them.
bool lie_alike(const ConstTensorView& a, const ConstTensorView& b) {
  constexpr std::uintptr_t kVector = 16;
  const auto misaligned = [&](const ConstTensorView& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data()) % kVector;
  };
  return a.strides() == b.strides() && misaligned(a) == misaligned(b);
}

}  // namespace

Executor::Executor(AttentionProblem problem, RankPlan plan, Selection selection, Group& group,
                   Device& device, const Watchdog& watchdog, ExecutorOptions options)
    : problem_(std::move(problem)),
      plan_(std::move(plan)),
      selection_(std::move(selection)),
      group_(group),
      device_(device),
      options_(options),
      // In float32, rounding the LSE of a partial result costs more accuracy than all the rest.
      // Kernels of devices for half types give float32, where that does not show.
      lse_dtype_(device.place().is_host() || problem_.dtype == DType::float32 ? DType::float64
                                                                              : DType::float32),
      operations_(make_local_operations(device.place())),
      compute_stream_(device.make_stream("compute", watchdog, options.tracer)),
      communication_stream_(device.make_stream("communication", watchdog, options.tracer, true)),
      exchanges_(plan_.steps.size()) {
  const AttentionShape& local = plan_.local;
  // Addresses are not known yet, and do not matter before the first call; contiguous is a guess.
  const auto absent = [&](DType dtype, const Extents& shape) {
    return TensorView(nullptr, dtype, shape, device_.place());
  };
  tensors_ = {
      absent(problem_.dtype, {local.batch, local.query_length, local.heads, local.head_dim}),
      absent(problem_.dtype, {local.batch, local.kv_length, local.kv_heads, local.head_dim}),
      absent(problem_.dtype, {local.batch, local.kv_length, local.kv_heads, local.value_dim}),
      absent(problem_.dtype, {local.batch, local.query_length, local.heads, local.value_dim}),
      absent(DType::float32, {local.batch, local.heads, local.query_length})};
  allocate_exchange();
  overwrites_ = overwriting_steps(plan_);
  find_long_blocks();
  set_up();
  ready_ = true;
}

Executor::~Executor() = default;

// All packed and receive buffers lie in one piece, which a transport registers or maps once. A slot
// holds a token's K for all batches and heads of the buffer, batch by batch with its V behind it:
// [slot][batch][K heads · D | K heads · Dv].
void Executor::allocate_exchange() {
  const AttentionShape& local = plan_.local;
  std::vector<std::size_t> offsets(plan_.buffers.size());
  std::size_t bytes = 0;
  for (std::size_t i = 1; i < plan_.buffers.size(); ++i) {
    const KvBuffer& buffer = plan_.buffers[i];
    if (buffer.reuses >= 0) {
      offsets[i] = offsets[static_cast<std::size_t>(buffer.reuses)];
      continue;
    }
    offsets[i] = bytes;
    bytes +=
        aligned(static_cast<std::size_t>(buffer.slots * plan_.slot_bytes(buffer, problem_.dtype)));
  }
  if (bytes > 0) exchange_ = group_.exchange_memory(device_.memory()).allocate(bytes);

  buffers_.resize(plan_.buffers.size());
  for (std::size_t i = 1; i < plan_.buffers.size(); ++i) {
    const KvBuffer& buffer = plan_.buffers[i];
    const std::int64_t heads = buffer.kv_heads.count;
    const std::int64_t keys = heads * local.head_dim;
    const std::int64_t record = keys + heads * local.value_dim;
    const TensorView records(static_cast<std::byte*>(exchange_.data()) + offsets[i], problem_.dtype,
                             {buffer.slots, local.batch, record}, device_.place());
    const auto part = [&](std::int64_t begin, std::int64_t dim) {
      return TensorView(records.address({0, 0, begin}), problem_.dtype,
                        {local.batch, buffer.slots, heads, dim},
                        {record, local.batch * record, dim, 1}, device_.place());
    };
    buffers_[i] = {part(0, local.head_dim), part(keys, local.value_dim)};
  }
}

void Executor::find_long_blocks() {
  std::uint32_t call = 0;
  for (const Step& step : plan_.steps) {
    marked_before_.push_back(marked_call_);
    for (const Block& block : step.blocks) {
      ++call;
      is_long_.push_back(plan_.flops(block) >= kMarkedFlops);
      if (is_long_.back()) marked_call_ = call;
    }
  }
}

// Some kernels refuse a block only when they are prepared for it, with the place of its result. The
// one that steps in may hand its results over in another dtype, and then all results may lie
// elsewhere: the choice starts over, without those that refused.
void Executor::set_up() {
  std::size_t blocks = 0;
  for (const Step& step : plan_.steps) blocks += step.blocks.size();
  std::vector<Selection> selections(blocks, selection_);
  kernels_.clear();  // what they keep is for tensors that lay otherwise
  do {
    choose_kernels(selections);
    plan_results();
  } while (!prepare_kernels(selections));
  std::erase_if(kernels_, [&](const auto& kernel) {
    return std::none_of(calls_.begin(), calls_.end(),
                        [&](const Call& call) { return call.implementation == kernel.first; });
  });
  explain(selections);
}

void Executor::choose_kernels(std::vector<Selection>& selections) {
  calls_.clear();
  for (const Step& step : plan_.steps) {
    for (const Block& block : step.blocks) {
      const Implementation& chosen =
          selections[calls_.size()].for_block(problem_, arguments_of(block));
      std::unique_ptr<Kernel>& kernel = kernels_[&chosen];
      if (!kernel) kernel = chosen.make_kernel(problem_, device_);
      calls_.push_back({&block, &chosen, kernel.get()});
    }
  }
}

void Executor::plan_results() {
  const AttentionShape& local = plan_.local;
  const bool host = device_.place().is_host();
  std::map<const Block*, DType> dtypes;
  std::int64_t heads = 0;
  std::size_t element = 0;
  for (const Call& call : calls_) {
    const DType dtype = dtypes[call.block] = call.kernel->output_dtype();
    heads = std::max(heads, call.block->heads.count);
    element = std::max(element, size_of(dtype));
  }
  MergeRules rules;
  rules.dtype_of = [&](const Block& block) { return dtypes.at(&block); };
  // Kernels of the CPU compute float32: half types are rounded once, at the end.
  rules.first_dtype = host ? DType::float32 : problem_.dtype;
  rules.first_is_output = rules.first_dtype == problem_.dtype && lse_dtype_ == DType::float32;
  if (!host) {
    // A result takes as much memory traffic alone as with others: combine as many as there is room.
    const std::size_t rows = elements_of({local.batch, local.query_length});
    const std::size_t values = rows * static_cast<std::size_t>(local.value_dim);
    const std::size_t most =
        std::max(static_cast<std::size_t>(kMergeBytes),
                 values * static_cast<std::size_t>(local.heads) * sizeof(float));
    const std::size_t each =
        std::max<std::size_t>(1, values * static_cast<std::size_t>(heads) * element);
    rules.slots = 1 + static_cast<int>(std::clamp<std::size_t>(
                          most / each, 1, static_cast<std::size_t>(rules.most_parts) - 1));
  }
  merges_ = plan_merges(plan_, rules);

  const LocalRange all{LocalPosition(0), local.query_length};
  slots_ = std::vector<SlotStorage>(
      static_cast<std::size_t>(std::max(merges_.slots, merges_.fold_slot + 1)));
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    SlotStorage& slot = slots_[static_cast<std::size_t>(merges_.blocks[i].slot)];
    const LocalRange rows = calls_[i].block->rows;
    if (slot.rows.count == 0) slot.rows = rows;
    const LocalPosition begin = std::min(slot.rows.begin, rows.begin);
    slot.rows = {begin, std::max(slot.rows.end(), rows.end()) - begin};
    slot.heads = merges_.group_heads;
  }
  if (merges_.fold_slot > 0) {
    slots_[static_cast<std::size_t>(merges_.fold_slot)] = {all, merges_.group_heads, {}, {}};
  }
  if (!slots_.empty()) slots_.front() = {all, local.heads, {}, {}};
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    SlotStorage& slot = slots_[i];
    const std::size_t rows = elements_of({local.batch, slot.rows.count, slot.heads});
    const bool output_is_first = i == 0 && rules.first_dtype == problem_.dtype;
    const bool folds = static_cast<int>(i) == merges_.fold_slot;
    const std::size_t size = i == 0 || folds ? sizeof(float) : element;
    if (!output_is_first) {
      slot.output =
          device_.memory().allocate(rows * static_cast<std::size_t>(local.value_dim) * size);
    }
    if (!(i == 0 && rules.first_is_output)) {
      slot.lse = device_.memory().allocate(rows * size_of(lse_dtype_));
    }
  }
}

// Whether none refused.
bool Executor::prepare_kernels(std::vector<Selection>& selections) {
  bool all = true;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const Block& block = *calls_[i].block;
    try {
      calls_[i].kernel->prepare(arguments_of(block),
                                results({merges_.blocks[i].slot, calls_[i].kernel->output_dtype(),
                                         block.rows, block.heads}));
    } catch (const UnsupportedError& refusal) {
      selections[i].pass_over(*calls_[i].implementation, refusal.what());
      all = false;
    }
  }
  return all;
}

// Who was passed over for some blocks only: for how many, and why for the first.
void Executor::explain(const std::vector<Selection>& selections) {
  struct Refusals {
    std::size_t blocks = 0;
    std::string reason;
  };
  std::map<std::string, Refusals> refusals;
  for (const Selection& selection : selections) {
    for (std::size_t i = selection_.passed_over.size(); i < selection.passed_over.size(); ++i) {
      const auto& [name, reason] = selection.passed_over[i];
      Refusals& known = refusals[name];
      if (known.blocks++ == 0) known.reason = reason;
    }
  }
  passed_over_.clear();
  for (const auto& [name, known] : refusals) {
    passed_over_.emplace_back(name, fmt::format("{} of {} blocks of rank {}: {}", known.blocks,
                                                selections.size(), plan_.rank, known.reason));
  }
}

void Executor::connect() {
  for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
    const Step& step = plan_.steps[s];
    if (step.sends.empty() && step.receives.empty()) continue;
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (const Transfer& send : step.sends) {
      sends.push_back({send.peer, slot_address(send), static_cast<std::size_t>(send.bytes)});
    }
    for (const Transfer& receive : step.receives) {
      receives.push_back(
          {receive.peer, slot_address(receive), static_cast<std::size_t>(receive.bytes)});
    }
    exchanges_[s] = group_.prepare(std::move(sends), std::move(receives),
                                   {std::string(name_of(Payload::key_value)), static_cast<int>(s)});
  }
}

void Executor::prepare(const LocalTensors& tensors) {
  check_tensor("query", tensors.query, tensors_.query);
  check_tensor("key", tensors.key, tensors_.key);
  check_tensor("value", tensors.value, tensors_.value);
  check_tensor("output", tensors.output, tensors_.output);
  check_tensor("LSE", tensors.lse, tensors_.lse);
  if (ready_ && lie_alike(tensors.query, tensors_.query) && lie_alike(tensors.key, tensors_.key) &&
      lie_alike(tensors.value, tensors_.value) && lie_alike(tensors.output, tensors_.output) &&
      lie_alike(tensors.lse, tensors_.lse)) {
    return;
  }
  ready_ = false;
  tensors_ = tensors;
  replays_.clear();  // they point into memory that is laid out anew
  set_up();
  ready_ = true;
}

void Executor::run(const LocalTensors& tensors) {
  const TraceScope call(options_.tracer, "call", {TraceCategory::call, "attention"});
  try {
    prepare(tensors);
    tensors_ = tensors;
    if (Recording* recording = replay_for(tensors)) {
      recording->submit(*compute_stream_);
    } else {
      submit();
    }
    wait_for_all();
  } catch (const UserError& error) {
    // Transfers may be under way: the other ranks do not know, and cannot agree any more.
    give_up();
    throw LibraryError(fmt::format("rank {}: {}", plan_.rank, error.what()));
  } catch (...) {
    give_up();
    throw;
  }
}

void Executor::give_up() noexcept {
  replays_.clear();  // NCCL would wait for what was recorded to go
  group_.give_up();
}

// A recording for these tensors, once they have been seen before.
Recording* Executor::replay_for(const LocalTensors& tensors) {
  const bool traced = options_.tracer != nullptr && options_.tracer->enabled();
  if (!options_.replay || traced || device_.place().is_host()) return nullptr;
  const auto known = std::find_if(replays_.begin(), replays_.end(),
                                  [&](const Replay& replay) { return replay.tensors == tensors; });
  if (known == replays_.end()) {
    // What is new runs as it is: kernels are loaded, and it may never come again.
    if (replays_.size() == kReplays) replays_.erase(replays_.begin());
    replays_.push_back({tensors, nullptr});
    return nullptr;
  }
  if (!known->recording) {
    known->recording = device_.record(*compute_stream_, [this] { submit(); });
  }
  return known->recording.get();
}

// A step's transfers are offered once those of the step before have been taken on both sides: so
// the hops of a ring do not read from one rank at a time, and a buffer that is forwarded is free
// again before the step after receives into it.
void Executor::submit() {
  if (marked_call_ > 0) compute_stream_->mark(0);
  communication_stream_->wait(compute_stream_->record());
  communication_stream_->mark(0);
  if (pack()) compute_stream_->wait(communication_stream_->record());
  std::size_t call = 0;
  PreparedExchange* last = nullptr;
  for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
    const Step& step = plan_.steps[s];
    std::shared_ptr<Event> arrived;
    if (exchanges_[s]) {
      if (last != nullptr) last->reclaim(*communication_stream_);
      last = exchanges_[s].get();
      last->offer(*communication_stream_);
      communication_stream_->mark(taking_mark(s));
      if (overwrites_[s]) communication_stream_->wait(compute_stream_->record());
      take(s);
      communication_stream_->mark(taken_mark(s));
      arrived = communication_stream_->record();
    }
    for (std::size_t b = 0; b < step.blocks.size(); ++b) compute(call++, static_cast<int>(s));
    if (arrived) {
      const StreamSpan wait(*compute_stream_,
                            {TraceCategory::wait, "transfer", static_cast<int>(s)});
      compute_stream_->wait(arrived);
    }
  }
  if (last != nullptr) last->reclaim(*communication_stream_);
  communication_stream_->mark(finished_mark(plan_));
  for (const Combination& combination : merges_.rest) combine(combination, -1);
  compute_stream_->wait(communication_stream_->record());
}

void Executor::take(std::size_t index) {
  const Step& step = plan_.steps[index];
  // The stream of a host notes every message itself.
  if (device_.place().is_host()) return exchanges_[index]->take(*communication_stream_);
  TraceLabel label{TraceCategory::transfer, std::string(name_of(Payload::key_value)),
                   static_cast<int>(index)};
  for (const Transfer& receive : step.receives) {
    label.peer = receive.peer;
    label.bytes = std::max<std::int64_t>(label.bytes, 0) + receive.bytes;
  }
  const StreamSpan span(*communication_stream_, std::move(label));
  exchanges_[index]->take(*communication_stream_);
}

void Executor::wait_for_all() {
  const Waiting waiting{[this] { group_.check(); }, [this] { return describe_wait(); },
                        [this] { return awaits_only_itself(); },
                        // A replayed call is work of the compute stream alone.
                        [this] {
                          return std::uint64_t{communication_stream_->marked()} << 32U |
                                 compute_stream_->marked();
                        }};
  communication_stream_->synchronize(waiting);
  compute_stream_->synchronize(waiting);
}

// Of a device, which can only say how far it has come: whether nothing but kernels of this rank is
// left, or some of them hold up what it receives.
bool Executor::awaits_only_itself() const {
  const std::uint32_t mark = communication_stream_->marked();
  if (mark == finished_mark(plan_)) return true;
  for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
    if (mark == taking_mark(s)) {
      return overwrites_[s] && compute_stream_->marked() < marked_before_[s];
    }
  }
  return false;
}

std::string Executor::describe_wait() const {
  const std::string transfers =
      describe_transfers(plan_, communication_stream_->marked(), group_.is_one_sided());
  return transfers.empty() ? fmt::format("waiting for {} to compute", to_string(device_.place()))
                           : transfers;
}

// Whether there was anything to pack. On a device nothing is computed beside it: kernels that take
// all multiprocessors would delay the first transfer by more than the packing takes.
bool Executor::pack() {
  bool any = false;
  for (std::size_t i = 1; i < plan_.buffers.size(); ++i) {
    const KvBuffer& buffer = plan_.buffers[i];
    if (buffer.kind != BufferKind::packed) continue;
    any = true;
    const StreamSpan span(*communication_stream_, {TraceCategory::other, "pack"});
    const auto copy_part = [&](const ConstTensorView& from, const TensorView& to) {
      operations_->copy(from.slice(1, buffer.source.begin.value(), buffer.source.count)
                            .slice(2, buffer.kv_heads.begin, buffer.kv_heads.count),
                        to, *communication_stream_);
    };
    copy_part(tensors_.key, buffers_[i].key);
    copy_part(tensors_.value, buffers_[i].value);
  }
  return any;
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

AttentionBlock Executor::arguments_of(const Block& block) const {
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

SoftmaxState Executor::results(const Part& part) const {
  const AttentionShape& local = plan_.local;
  const SlotStorage& slot = slots_[static_cast<std::size_t>(part.slot)];
  const TensorView outputs =
      slot.output.data() == nullptr
          ? tensors_.output
          : TensorView(slot.output.data(), part.dtype,
                       {local.batch, slot.rows.count, slot.heads, local.value_dim},
                       device_.place());
  const TensorView lses =
      slot.lse.data() == nullptr
          ? tensors_.lse
          : TensorView(slot.lse.data(), lse_dtype_, {local.batch, slot.heads, slot.rows.count},
                       device_.place());
  const std::int64_t row = part.rows.begin - slot.rows.begin;
  const std::int64_t head = part.slot == 0 ? part.heads.begin : 0;
  return {outputs.slice(1, row, part.rows.count).slice(2, head, part.heads.count),
          lses.slice(1, head, part.heads.count).slice(2, row, part.rows.count)};
}

std::string Executor::implementations() const {
  std::string names;
  std::set<const Implementation*> named;
  for (const Call& call : calls_) {
    if (!named.insert(call.implementation).second) continue;
    names += (names.empty() ? "" : "+") + call.implementation->names().front();
  }
  return names.empty() ? "none" : names;
}

std::vector<const Implementation*> Executor::block_implementations() const {
  std::vector<const Implementation*> result;
  for (const Call& call : calls_) result.push_back(call.implementation);
  return result;
}

std::size_t Executor::extra_bytes() const noexcept {
  std::size_t bytes = exchange_.bytes();
  for (const SlotStorage& slot : slots_) bytes += slot.output.bytes() + slot.lse.bytes();
  return bytes;
}

bool Executor::merges_rounded() const {
  const auto rounded = [](const Combination& combination) {
    return std::any_of(combination.parts.begin(), combination.parts.end(),
                       [](const Part& part) { return part.dtype != DType::float32; });
  };
  return std::any_of(merges_.blocks.begin(), merges_.blocks.end(), [&](const BlockMerge& merge) {
    return (merge.before && rounded(*merge.before)) || (merge.after && rounded(*merge.after));
  });
}

void Executor::compute(std::size_t index, int step) {
  const Call& call = calls_[index];
  const BlockMerge& merge = merges_.blocks[index];
  if (merge.before) combine(*merge.before, step);
  {
    const StreamSpan span(*compute_stream_,
                          {TraceCategory::kernel, call.implementation->names().front(), step});
    call.kernel->forward(
        arguments_of(*call.block),
        results({merge.slot, call.kernel->output_dtype(), call.block->rows, call.block->heads}),
        {*compute_stream_, communication_stream_.get(), options_.threads});
  }
  if (is_long_[index]) compute_stream_->mark(static_cast<std::uint32_t>(index) + 1);
  if (merge.after) combine(*merge.after, step);
}

void Executor::combine(const Combination& combination, int step) {
  const StreamSpan span(*compute_stream_, {TraceCategory::merge, "combine", step});
  std::array<PartialState, kMostParts> parts;
  std::size_t count = 0;
  for (const Part& part : combination.parts) {
    parts.at(count++) = {results(part), part.rows.begin.value(),
                         part.heads.begin - combination.heads.begin};
  }
  const HeadRange& heads = combination.heads;
  const SoftmaxState whole = combination.into == Combination::kOutput
                                 ? SoftmaxState{tensors_.output.slice(2, heads.begin, heads.count),
                                                tensors_.lse.slice(1, heads.begin, heads.count)}
                                 : results({combination.into,
                                            DType::float32,
                                            {LocalPosition(0), plan_.local.query_length},
                                            heads});
  operations_->combine(std::span(parts.data(), count), whole, *compute_stream_);
}

}  // namespace annulus::ring
