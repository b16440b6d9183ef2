#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/awaiting_calls.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/runner.hpp>

#include "call_values.hpp"
#include "runner/arrivals.hpp"
#include "runner/block_arguments.hpp"
#include "runner/call_arrays.hpp"
#include "runner/plan_memory.hpp"
#include "runner/recordings.hpp"
#include "runner/sink_states.hpp"
#include "runner/tensor_checks.hpp"
#include "runner/transfer_wait.hpp"

namespace annulus::ring {
namespace {

// A block of this many operations takes a device at least a millisecond, so marking its end costs
// nothing in comparison.
constexpr double kMarkedFlops = 1e12;

bool wants_uniform_calls(const std::vector<Group*>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const Group* group) { return group->traits().uniform_calls; });
}

}  // namespace

class Runner::Impl {
 public:
  Impl(const AttentionProblem& problem, RankPlan plan,
       std::span<const Implementation* const> implementations, std::vector<Group*> groups,
       Device& device, const Watchdog& watchdog, RunnerOptions options)
      : problem_(problem),
        plan_(std::move(plan)),
        implementations_(implementations.begin(), implementations.end()),
        groups_(std::move(groups)),
        device_(device),
        options_(options),
        operations_(make_local_operations(device.place())),
        memory_(plan_, groups_, device),
        arrivals_(plan_, device.memory()),
        kernels_(implementations_.size()),
        done_(plan_.tasks.size()),
        computing_(device.make_stream("compute", watchdog, options.tracer)),
        arrays_(problem, plan_.global({0, plan_.local.batch}), device, *computing_),
        arguments_(plan_, memory_, arrivals_, arrays_.arrays(), problem.shape.kv_length),
        recordings_(wants_uniform_calls(groups_)) {
    for (const ring::Buffer& buffer : plan_.buffers) {
      if (buffer.kind == BufferKind::caller) contents_.push_back(buffer.contents.front());
    }
    if (problem.sinks) sinks_.emplace(problem, plan_, device, *operations_, *computing_);
    // A host stream advances only while a thread waits for it, so a rank that waits for one group
    // would block ranks of other groups. So on the host all groups share a stream, in the order of
    // the plan.
    const bool shares = device.place().is_host();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const std::string name =
          groups_.size() == 1 || shares ? "communication" : fmt::format("communication {}", g);
      queues_.push_back({groups_[g],
                         shares && g > 0 ? queues_.front().stream
                                         : std::shared_ptr<Stream>(device.make_stream(
                                               name, watchdog, options.tracer, true)),
                         exchanges_of(plan_, static_cast<int>(g)),
                         {},
                         {},
                         {}});
      queues_.back().prepared.resize(queues_.back().tasks.size());
      queues_.back().reclaimed.resize(queues_.back().tasks.size());
      queues_.back().released.resize(queues_.back().tasks.size());
    }
    number_tasks();
    if (options_.watch != nullptr && !queues_.empty() && !device.place().is_host()) {
      for (Queue& queue : queues_) queue.stream->mark(finished_mark(queue.tasks.size()));
      watched_.emplace(*options_.watch, calls());
    }
  }

  // Waits, since calls under way still use memory that goes back to the pool.
  ~Impl() {
    if (gave_up_) return;
    try {
      wait_for_calls();
    } catch (...) {
      // A failure is reported to callers that wait for results.
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void connect() {
    for (Queue& queue : queues_) {
      for (std::size_t e = 0; e < queue.tasks.size(); ++e) {
        const Task& task = plan_.tasks[queue.tasks[e]];
        const auto& exchange = std::get<Exchange>(task.work);
        std::vector<Send> sends;
        std::vector<Receive> receives;
        for (const Transfer& send : exchange.sends) {
          sends.push_back({send.peer, memory_.address(send.buffer, send.tokens),
                           static_cast<std::size_t>(send.bytes)});
        }
        for (const Transfer& receive : exchange.receives) {
          receives.push_back({receive.peer, memory_.address(receive.buffer, receive.tokens),
                              static_cast<std::size_t>(receive.bytes)});
        }
        queue.prepared[e] = queue.group->prepare(std::move(sends), std::move(receives),
                                                 {contents_of(plan_, exchange), task.step});
      }
    }
  }

  [[nodiscard]] std::vector<CallTensor> expected() const {
    std::vector<CallTensor> named;
    for (const TensorView& tensor : memory_.expected()) {
      named.push_back({contents_[named.size()], tensor});
    }
    return named;
  }

  void check(CallTensors tensors) const {
    check_tensors(plan_, memory_.expected(), ordered(tensors));
  }

  [[nodiscard]] bool is_ready_for(CallTensors tensors) const {
    return lies_as_before(ordered(tensors));
  }

  std::vector<Refusal> prepare(CallTensors tensors) {
    std::vector<Refusal> refusals = make_ready(ordered(tensors));
    recordings_.restart();
    return refusals;
  }

  void set_values(const CallValues& values, const AttentionProblem& planned, const Mask& mask) {
    apply_values(values, planned, mask, plan_.global({0, plan_.local.batch}), plan_.local.heads,
                 device_.place(), problem_);
    values_ = values;
  }

  void submit(CallTensors named, ForeignStream* caller) {
    const auto current = device_.make_current();
    const std::vector<TensorView> tensors = ordered(named);
    const bool captured = caller != nullptr && caller->is_captured();
    if (captured && !lies_as_before(tensors)) {
      throw UnsupportedError(
          "tensors with other strides than before cannot be captured into a CUDA graph: call once "
          "with them before");
    }
    if (captured && arrivals_.any()) {
      throw UnsupportedError(
          "attention whose kernels wait for other ranks cannot be captured into a CUDA graph; "
          "schedules other than allgather can");
    }
    try {
      check_watch();
      for (Group* group : groups_) group->check();
      check_tensors(plan_, memory_.expected(), tensors);
      if (!lies_as_before(tensors)) {
        if (const std::vector<Refusal> refusals = make_ready(tensors); !refusals.empty()) {
          throw UnsupportedError(fmt::format("tensors that were not prepared for: {}: {}",
                                             refusals.front().implementation,
                                             refusals.front().reason));
        }
      }
      memory_.bind(tensors);
      if (captured) graphs_.push_back(caller->captured_graph());
      begin_call(caller);
      if (Recording* recording = captured ? nullptr : recording_for(tensors)) {
        recording->submit(*computing_);
        ++replays_;
      } else {
        submit_tasks();
      }
      device_.end_call(*computing_, caller);
    } catch (const UserError& error) {
      // Transfers may be under way. The other ranks do not know of the failure and cannot agree any
      // more.
      give_up();
      throw LibraryError(fmt::format("rank {}: {}", plan_.rank, error.what()));
    } catch (...) {
      give_up();
      throw;
    }
  }

  void rehearse(CallTensors tensors) {
    const auto current = device_.make_current();
    memory_.bind(ordered(tensors));
    rehearsing_ = true;
    std::exception_ptr failure;
    try {
      begin_call(nullptr);
      submit_tasks();
      device_.end_call(*computing_, nullptr);
    } catch (...) {
      failure = std::current_exception();
      for (Queue& queue : queues_) queue.stream->mark(finished_mark(queue.tasks.size()));
    }
    rehearsing_ = false;
    try {
      wait_for_streams();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    if (failure) std::rethrow_exception(failure);
  }

  void wait() {
    wait_for_calls();
    try {
      arrays_.check();
    } catch (const ArgumentError& error) {
      throw UserError(fmt::format("rank {}: {}", plan_.rank, error.what()));
    }
  }

  void wait_for_calls() {
    try {
      std::optional<CallWatch::Pause> pause;
      if (watched_) pause.emplace(*watched_);
      device_.await_calls(*computing_);
      wait_for_streams();
      check_watch();
    } catch (...) {
      give_up();
      check_watch();
      throw;
    }
  }

  [[nodiscard]] bool is_captured() {
    const auto gone = [](const std::weak_ptr<void>& graph) { return graph.expired(); };
    std::erase_if(graphs_, gone);
    std::erase_if(retired_,
                  [&](const Retired& one) { return std::ranges::all_of(one.graphs, gone); });
    return !graphs_.empty() || !retired_.empty();
  }

  [[nodiscard]] const RankPlan& plan() const noexcept { return plan_; }
  [[nodiscard]] std::size_t extra_bytes() const noexcept { return memory_.bytes(); }
  [[nodiscard]] std::size_t replays() const noexcept { return replays_; }

 private:
  // The tensors in the order of the plan's buffers.
  [[nodiscard]] std::vector<TensorView> ordered(CallTensors tensors) const {
    std::vector<TensorView> views;
    views.reserve(contents_.size());
    for (const Content content : contents_) {
      const auto found = std::ranges::find(tensors, content, &CallTensor::content);
      if (found == tensors.end()) {
        throw InternalError(fmt::format("the call lacks a tensor for {}", ring::name_of(content)));
      }
      views.push_back(found->view);
    }
    if (tensors.size() != contents_.size()) {
      throw InternalError(
          fmt::format("{} tensors for a plan of {}", tensors.size(), contents_.size()));
    }
    return views;
  }

  [[nodiscard]] bool lies_as_before(std::span<const TensorView> tensors) const {
    return ready_ && std::ranges::equal(tensors, memory_.bound(), lie_alike);
  }

  // Throws the watch's error: streams that it has released end as if all were well, or with the
  // transport's error.
  void check_watch() const {
    if (options_.watch != nullptr) options_.watch->check();
  }

  // The progress of the streams. A replayed call is work of the compute stream alone.
  [[nodiscard]] std::uint64_t marks() const {
    std::uint64_t marks = computing_->marked();
    for (const Queue& queue : queues_) marks = marks << 20U ^ queue.stream->marked();
    return marks;
  }

  // A call has begun once a queue has left the end mark of the previous call.
  [[nodiscard]] bool exchanges_are_under_way() const {
    return std::any_of(queues_.begin(), queues_.end(), [](const Queue& queue) {
      return queue.stream->marked() != finished_mark(queue.tasks.size());
    });
  }

  [[nodiscard]] CallWatch::Calls calls() {
    return {[this] { return exchanges_are_under_way(); }, [this] { return marks(); },
            [this] { return awaits_only_itself(); }, [this] { return describe_wait(); },
            [this] {
              for (Group* group : groups_) group->give_up();
            }};
  }

  void wait_for_streams() {
    const Waiting waiting{[this] {
                            for (Group* group : groups_) group->check();
                          },
                          [this] { return describe_wait(); },
                          [this] { return awaits_only_itself(); }, [this] { return marks(); }};
    for (Queue& queue : queues_) queue.stream->synchronize(waiting);
    computing_->synchronize(waiting);
  }

  // Kernels keep state for tensors of other strides, and recordings point to it. Both are dropped
  // once no call uses them.
  std::vector<Refusal> make_ready(std::span<const TensorView> tensors) {
    const auto current = device_.make_current();
    wait_for_calls();
    ready_ = false;
    recordings_.clear();
    retire_kernels();
    kernels_.resize(implementations_.size());
    memory_.bind({tensors.begin(), tensors.end()});
    std::vector<Refusal> refusals;
    const auto prepare = [&](const Tile& block, bool rounding, const auto& make) {
      try {
        make(kernel_of(block));
      } catch (const UnsupportedError& refusal) {
        refusals.push_back({name_of(block), block.row_positions, block.column_positions,
                            plan_.global(block.batches), block.heads.count, block.full,
                            refusal.what(), rounding});
      }
    };
    for (std::size_t index = 0; index < plan_.tasks.size(); ++index) {
      const Task& task = plan_.tasks[index];
      if (const auto* block = std::get_if<Block>(&task.work)) {
        prepare(*block, is_rounded_at_once(*block), [&](Kernel& kernel) {
          kernel.prepare(arguments_.of(index, *block), memory_.state(block->result));
        });
      } else if (const auto* backward = std::get_if<BackwardBlock>(&task.work)) {
        prepare(*backward, false, [&](Kernel& kernel) {
          kernel.prepare_backward(arguments_.of(*backward), arguments_.gradients_of(*backward));
        });
      }
    }
    ready_ = refusals.empty();
    return refusals;
  }

  // Keeps kernels that the caller's graphs still use.
  void retire_kernels() {
    if (is_captured() && !graphs_.empty()) {
      retired_.push_back({std::move(kernels_), std::exchange(graphs_, {})});
    }
    kernels_.clear();
  }

  // True if a kernel that could also write float32 writes rounded results into the caller's output.
  [[nodiscard]] bool is_rounded_at_once(const Block& block) const {
    return implementation_of(block).declares().results == ResultForm::either &&
           plan_.buffer(block.result.output.buffer).kind == BufferKind::caller;
  }

  // The exchanges of one group, in their order.
  struct Queue {
    Group* group;
    std::shared_ptr<Stream> stream;
    std::vector<std::size_t> tasks;
    std::vector<std::unique_ptr<PreparedExchange>> prepared;
    // By exchange, of the call being submitted.
    std::vector<bool> reclaimed;
    std::vector<std::shared_ptr<Event>> released;
  };

  // Finds out which tasks others wait for, the position of each exchange in its queue, and which
  // blocks are long.
  void number_tasks() {
    awaited_.resize(plan_.tasks.size());
    awaited_release_.resize(plan_.tasks.size());
    ordinal_.resize(plan_.tasks.size());
    marked_through_.resize(plan_.tasks.size());
    for (const Queue& queue : queues_) {
      for (std::size_t e = 0; e < queue.tasks.size(); ++e) ordinal_[queue.tasks[e]] = e;
    }
    std::uint32_t marks = 0;
    for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
      const Task& task = plan_.tasks[t];
      const auto* exchange = std::get_if<Exchange>(&task.work);
      const auto await = [&](const std::vector<Dependency>& dependencies) {
        for (const Dependency& dependency : dependencies) {
          const auto awaited = static_cast<std::size_t>(dependency.task);
          if (dependency.stage == Stage::done) {
            awaited_[awaited] = true;
          } else if (exchange == nullptr || exchange->group != group_of(awaited)) {
            awaited_release_[awaited] = true;
          }
        }
      };
      await(task.after);
      if (exchange != nullptr) await(exchange->receive_after);
      const auto* block = std::get_if<Block>(&task.work);
      if (block != nullptr && plan_.flops(*block) >= kMarkedFlops) ++marks;
      marked_through_[t] = marks;
    }
    marks_ = marks > 0;
  }

  [[nodiscard]] Recording* recording_for(std::span<const TensorView> tensors) {
    const bool traced = options_.tracer != nullptr && options_.tracer->enabled();
    if (!options_.replay || traced || device_.place().is_host()) return nullptr;
    // A waiting kernel depends on transfers that run at the same time. In a recording, its branch
    // may run before theirs.
    if (arrivals_.any()) return nullptr;
    return recordings_.find(
        tensors, [this] { return device_.record(*computing_, [this] { submit_tasks(); }); });
  }

  // Call values are written outside of recordings, so that recordings serve all values. A graph of
  // the caller writes them in every launch, since other calls may have changed them.
  void begin_call(ForeignStream* caller) {
    device_.begin_call(*computing_, caller);
    arrays_.write(problem_, values_, *operations_, *computing_);
    if (!sinks_) return;
    const bool captured = caller != nullptr && caller->is_captured();
    sinks_->set(values_.sinks, captured, *operations_, *computing_);
  }

  void submit_tasks() {
    if (marks_) computing_->mark(0);
    std::unique_lock<std::mutex> turn;
    if (arrivals_.any()) {
      AwaitingCalls& others = device_.awaiting_calls();
      turn = std::unique_lock(others.mutex);
      if (others.last) computing_->wait(others.last);
      arrivals_.begin(*operations_, *computing_);
      if (rehearsing_) announce_all();
    }
    for (Queue& queue : queues_) {
      queue.reclaimed.assign(queue.tasks.size(), rehearsing_);
      queue.stream->wait(computing_->record());
      queue.stream->mark(0);
    }
    for (std::size_t t = 0; t < plan_.tasks.size();) {
      if (std::holds_alternative<Copy>(plan_.tasks[t].work)) {
        t = submit_copies(t);
      } else {
        std::visit([&](const auto& work) { submit(t, work); }, plan_.tasks[t].work);
        ++t;
      }
    }
    for (Queue& queue : queues_) {
      for (std::size_t e = 0; e < queue.tasks.size(); ++e) reclaim(queue, e);
      queue.stream->mark(finished_mark(queue.tasks.size()));
      computing_->wait(queue.stream->record());
    }
    if (arrivals_.any()) device_.awaiting_calls().last = computing_->record();
  }

  // Announces before any kernel runs, so that none is left waiting if a later one fails.
  void announce_all() {
    for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
      if (!std::holds_alternative<Exchange>(plan_.tasks[t].work)) continue;
      arrivals_.announce(t, *operations_, *computing_);
    }
  }

  void submit(std::size_t index, const Exchange& exchange) {
    Queue& queue = queues_[static_cast<std::size_t>(exchange.group)];
    const std::size_t e = ordinal_[index];
    if (rehearsing_) {
      if (awaited_[index]) done_[index] = queue.stream->record();
      if (awaited_release_[index]) queue.released[e] = queue.stream->record();
      return;
    }
    wait_for(*queue.stream, plan_.tasks[index].after);
    queue.prepared[e]->offer(*queue.stream);
    queue.stream->mark(taking_mark(e));
    wait_for(*queue.stream, exchange.receive_after);
    take(queue, e, plan_.tasks[index].step, exchange);
    queue.stream->mark(taken_mark(e));
    arrivals_.announce(index, *operations_, *queue.stream);
    if (awaited_[index]) done_[index] = queue.stream->record();
  }

  // Releases the memory that an exchange has sent, once.
  void reclaim(Queue& queue, std::size_t e) {
    if (queue.reclaimed[e]) return;
    queue.reclaimed[e] = true;
    queue.prepared[e]->reclaim(*queue.stream);
    if (awaited_release_[queue.tasks[e]]) queue.released[e] = queue.stream->record();
  }

  void take(Queue& queue, std::size_t e, int step, const Exchange& exchange) {
    // A host stream traces every message itself.
    if (device_.place().is_host()) return queue.prepared[e]->take(*queue.stream);
    TraceLabel label{TraceCategory::transfer, contents_of(plan_, exchange), step};
    const std::vector<int>& ranks = plan_.groups[static_cast<std::size_t>(exchange.group)].ranks;
    const auto add = [&](const std::vector<Transfer>& transfers, bool incoming) {
      for (const Transfer& transfer : transfers) {
        label.messages.push_back(
            {ranks[static_cast<std::size_t>(transfer.peer)], transfer.bytes, incoming});
      }
    };
    add(exchange.receives, true);
    add(exchange.sends, false);
    const StreamSpan span(*queue.stream, std::move(label));
    queue.prepared[e]->take(*queue.stream);
  }

  // Submits a copy, together with the copies that follow it without waiting for anything. Returns
  // the task after them.
  std::size_t submit_copies(std::size_t first) {
    begin(first);
    std::size_t next = first;
    {
      const StreamSpan span(*computing_, {TraceCategory::other, "copy", plan_.tasks[first].step});
      std::vector<TensorCopy> copies;
      do {
        memory_.add_copies(std::get<Copy>(plan_.tasks[next].work), copies);
        ++next;
      } while (next < plan_.tasks.size() && plan_.tasks[next].after.empty() &&
               std::holds_alternative<Copy>(plan_.tasks[next].work));
      device_.copy(copies, *computing_);
    }
    for (std::size_t index = first; index < next; ++index) end(index);
    return next;
  }
  void submit(std::size_t index, const Copy& /*copy*/) { submit_copies(index); }

  void submit(std::size_t index, const Block& block) {
    begin(index);
    {
      const StreamSpan span(*computing_,
                            {TraceCategory::kernel, name_of(block), plan_.tasks[index].step});
      kernel_of(block).forward(arguments_.of(index, block), memory_.state(block.result),
                               {*computing_, background(), options_.threads});
    }
    if (plan_.flops(block) >= kMarkedFlops) computing_->mark(marked_through_[index]);
    end(index);
  }

  void submit(std::size_t index, const Reduce& reduce) {
    begin(index);
    const StreamSpan span(*computing_, {TraceCategory::merge, "reduce", plan_.tasks[index].step});
    if (reduce.reduction == Reduction::softmax) {
      std::vector<PartialState> parts;
      for (const Result& part : reduce.parts) {
        parts.push_back({memory_.state(part),
                         part.output.tokens.begin - reduce.into.output.tokens.begin,
                         part.output.heads.begin - reduce.into.output.heads.begin});
      }
      const SoftmaxState into = memory_.state(reduce.into);
      if (reduce.sinks) {
        parts.push_back(sinks_->part(reduce.into.output.heads, into.output.shape(),
                                     parts.empty() ? partial_dtype(into.output.dtype())
                                                   : parts.front().state.output.dtype()));
      }
      operations_->combine(
          parts, into, reduce.unnormalised ? SoftmaxForm::unnormalised : SoftmaxForm::normalised,
          *computing_);
    } else {
      for (const Content content : plan_.buffer(reduce.into.output.buffer).contents) {
        std::vector<ConstTensorView> parts;
        for (const Result& part : reduce.parts) {
          parts.emplace_back(memory_.view(part.output, content));
        }
        operations_->sum(parts, memory_.view(reduce.into.output, content), *computing_);
      }
    }
    end(index);
  }

  void submit(std::size_t index, const Delta& delta) {
    begin(index);
    const StreamSpan span(*computing_, {TraceCategory::other, "delta", plan_.tasks[index].step});
    const auto rows_of = [&](int buffer, Content content) {
      Region region = delta.output;
      region.buffer = buffer;
      return buffer < 0 ? TensorView() : memory_.view(region, content);
    };
    operations_->delta(memory_.view(delta.output, Content::output),
                       rows_of(delta.grad_output, Content::grad_output),
                       rows_of(delta.grad_lse, Content::grad_lse),
                       rows_of(delta.delta, Content::delta), *computing_);
    end(index);
  }

  void submit(std::size_t index, const SinkGradient& gradient) {
    begin(index);
    const StreamSpan span(*computing_,
                          {TraceCategory::other, "sink gradient", plan_.tasks[index].step});
    Region lse = gradient.delta;
    lse.buffer = gradient.lse;
    const Buffer& sinks = plan_.buffer(gradient.grad_sinks);
    operations_->sink_gradient(
        sinks_->logits(), memory_.view(lse, Content::lse),
        memory_.view(gradient.delta, Content::delta),
        memory_.view({gradient.grad_sinks, sinks.tokens, sinks.heads, plan_.batches(sinks)},
                     Content::grad_sinks),
        *computing_);
    end(index);
  }

  void submit(std::size_t index, const BackwardBlock& block) {
    begin(index);
    {
      const StreamSpan span(*computing_, {TraceCategory::kernel, name_of(block) + " backward",
                                          plan_.tasks[index].step});
      kernel_of(block).backward(arguments_.of(block), arguments_.gradients_of(block),
                                {*computing_, background(), options_.threads});
    }
    end(index);
  }

  void begin(std::size_t index) {
    const Task& task = plan_.tasks[index];
    if (task.after.empty()) return;
    const StreamSpan wait(*computing_, {TraceCategory::wait, "transfer", task.step});
    wait_for(*computing_, task.after);
  }

  void end(std::size_t index) {
    if (awaited_[index]) done_[index] = computing_->record();
  }

  void wait_for(Stream& stream, const std::vector<Dependency>& dependencies) {
    for (const Dependency& dependency : dependencies) {
      const auto task = static_cast<std::size_t>(dependency.task);
      if (dependency.stage == Stage::done) {
        stream.wait(done_[task]);
        continue;
      }
      Queue& queue = queues_[static_cast<std::size_t>(group_of(task))];
      const std::size_t e = ordinal_[task];
      reclaim(queue, e);
      if (&stream != queue.stream.get()) stream.wait(queue.released[e]);
    }
  }

  [[nodiscard]] int group_of(std::size_t exchange) const {
    return std::get<Exchange>(plan_.tasks[exchange].work).group;
  }

  [[nodiscard]] Stream* background() const {
    return queues_.empty() ? nullptr : queues_.front().stream.get();
  }

  [[nodiscard]] const Implementation& implementation_of(const Tile& block) const {
    return *implementations_[static_cast<std::size_t>(block.implementation)];
  }

  [[nodiscard]] std::string name_of(const Tile& block) const {
    return implementation_of(block).names().front();
  }

  [[nodiscard]] Kernel& kernel_of(const Tile& block) {
    std::unique_ptr<Kernel>& kernel = kernels_[static_cast<std::size_t>(block.implementation)];
    if (!kernel) kernel = implementation_of(block).make_kernel(problem_, device_);
    return *kernel;
  }

  // True if this rank waits only for its own work: no exchange is left, or the next one waits for
  // the rank's own computation. For devices, which report only their progress.
  [[nodiscard]] bool awaits_only_itself() const {
    return std::all_of(queues_.begin(), queues_.end(), [&](const Queue& queue) {
      const std::uint32_t mark = queue.stream->marked();
      if (mark == finished_mark(queue.tasks.size())) return true;
      const bool taking = mark % 2 == 1;
      const std::size_t next = mark / 2;  // the exchange that is under way or next
      if (next >= queue.tasks.size()) return false;
      const Task& task = plan_.tasks[queue.tasks[next]];
      const auto& dependencies = taking ? std::get<Exchange>(task.work).receive_after : task.after;
      return std::any_of(dependencies.begin(), dependencies.end(), [&](const Dependency& d) {
        return computing_->marked() < marked_through_[static_cast<std::size_t>(d.task)];
      });
    });
  }

  [[nodiscard]] std::string describe_wait() const {
    for (std::size_t g = 0; g < queues_.size(); ++g) {
      std::string text = describe_transfers(plan_, static_cast<int>(g), queues_[g].stream->marked(),
                                            queues_[g].group->traits().one_sided);
      if (!text.empty()) return text;
    }
    return fmt::format("waiting for {} to compute", to_string(device_.place()));
  }

  void give_up() noexcept {
    gave_up_ = true;
    recordings_.clear();  // NCCL would wait for recordings to be destroyed
    for (Group* group : groups_) group->give_up();
  }

  // A copy, since graphs may hold calls longer than the planning lives. Its call arguments are the
  // last call's.
  AttentionProblem problem_;
  CallValues values_;  // of the call being submitted, in device memory
  const RankPlan plan_;
  std::vector<const Implementation*> implementations_;
  std::vector<Content> contents_;  // of the caller's buffers
  std::vector<Group*> groups_;
  Device& device_;
  RunnerOptions options_;
  std::unique_ptr<LocalOperations> operations_;
  PlanMemory memory_;
  Arrivals arrivals_;
  std::vector<std::unique_ptr<Kernel>> kernels_;  // by implementation; null until needed
  // Graphs of the caller that hold calls by current and earlier kernels.
  using Graphs = std::vector<std::weak_ptr<void>>;
  struct Retired {
    std::vector<std::unique_ptr<Kernel>> kernels;
    Graphs graphs;
  };
  Graphs graphs_;
  std::vector<Retired> retired_;
  bool ready_ = false;
  bool gave_up_ = false;
  bool rehearsing_ = false;            // computes without exchanges
  std::vector<bool> awaited_;          // by task: others wait for it to be done …
  std::vector<bool> awaited_release_;  // … and other streams for its release
  std::vector<std::size_t> ordinal_;   // by task: of an exchange, in its queue
  // By task: the mark of the last long block up to it.
  std::vector<std::uint32_t> marked_through_;
  bool marks_ = false;  // there are long blocks
  std::vector<std::shared_ptr<Event>> done_;
  std::size_t replays_ = 0;
  std::optional<SinkStates> sinks_;
  // Declared after what they use, so that they are destroyed first.
  std::unique_ptr<Stream> computing_;
  CallArrays arrays_;
  BlockArguments arguments_;
  std::vector<Queue> queues_;
  Recordings recordings_;
  std::optional<CallWatch::Watched> watched_;
};

Runner::Runner(const AttentionProblem& problem, RankPlan plan,
               std::span<const Implementation* const> implementations, std::vector<Group*> groups,
               Device& device, const Watchdog& watchdog, RunnerOptions options)
    : impl_(std::make_unique<Impl>(problem, std::move(plan), implementations, std::move(groups),
                                   device, watchdog, options)) {}
Runner::~Runner() = default;
Runner::Runner(Runner&& other) noexcept = default;
Runner& Runner::operator=(Runner&& other) noexcept = default;

void Runner::connect() {
  impl_->connect();
}
std::vector<CallTensor> Runner::expected() const {
  return impl_->expected();
}
void Runner::check(CallTensors tensors) const {
  impl_->check(tensors);
}
bool Runner::is_ready_for(CallTensors tensors) const {
  return impl_->is_ready_for(tensors);
}
std::vector<Refusal> Runner::prepare(CallTensors tensors) {
  return impl_->prepare(tensors);
}
void Runner::rehearse(CallTensors tensors) {
  impl_->rehearse(tensors);
}
void Runner::submit(CallTensors tensors, ForeignStream* caller) {
  impl_->submit(tensors, caller);
}
void Runner::set_values(const CallValues& values, const AttentionProblem& planned,
                        const Mask& mask) {
  impl_->set_values(values, planned, mask);
}
bool Runner::is_captured() {
  return impl_->is_captured();
}
void Runner::wait() {
  impl_->wait();
}
const RankPlan& Runner::plan() const noexcept {
  return impl_->plan();
}
std::size_t Runner::extra_bytes() const noexcept {
  return impl_->extra_bytes();
}
std::size_t Runner::replays() const noexcept {
  return impl_->replays();
}

}  // namespace annulus::ring
