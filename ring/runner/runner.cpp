#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/awaiting_calls.hpp>
#include <annulus/core/error.hpp>
#include <annulus/core/first_error.hpp>
#include <annulus/core/foreign_stream.hpp>
#include <annulus/ring/local_operations.hpp>
#include <annulus/ring/runner.hpp>

#include "calls/call_values.hpp"
#include "runner/arrivals.hpp"
#include "runner/block_arguments.hpp"
#include "runner/call_arrays.hpp"
#include "runner/exchange_queue.hpp"
#include "runner/local_tasks.hpp"
#include "runner/plan_kernels.hpp"
#include "runner/plan_memory.hpp"
#include "runner/progress.hpp"
#include "runner/recordings.hpp"
#include "runner/sink_states.hpp"
#include "runner/tensor_checks.hpp"
#include "task_labels.hpp"

namespace annulus::ring {
namespace {

bool wants_uniform_calls(const std::vector<Group*>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const Group* group) { return group->traits().uniform_calls; });
}

class PlanRunner final : public Runner {
 public:
  PlanRunner(const AttentionProblem& problem, RankPlan plan,
             std::span<const Implementation* const> implementations, std::vector<Group*> groups,
             Device& device, const Watchdog& watchdog, RunnerOptions options)
      : problem_(problem),
        plan_(std::move(plan)),
        groups_(std::move(groups)),
        device_(device),
        options_(options),
        operations_(make_local_operations(device.place())),
        memory_(plan_, groups_, device),
        arrivals_(plan_, device.memory()),
        kernels_(problem_, plan_, implementations, device),
        done_(plan_.tasks.size()),
        computing_(device.make_stream("compute", watchdog, options.tracer)),
        arrays_(problem, plan_.global({0, plan_.local.batch}), device, *computing_),
        arguments_(plan_, memory_, arrivals_, arrays_.arrays(), problem.shape.kv_length),
        local_(plan_, memory_, *operations_, sinks_, *computing_),
        progress_(plan_, device.place(), *computing_, queues_),
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
      std::shared_ptr<Stream> stream =
          shares && g > 0
              ? queues_.front().shared_stream()
              : std::shared_ptr<Stream>(device.make_stream(name, watchdog, options.tracer, true));
      queues_.emplace_back(plan_, static_cast<int>(g), *groups_[g], std::move(stream));
    }
    number_tasks();
    if (options_.watch != nullptr && !queues_.empty() && !device.place().is_host()) {
      for (ExchangeQueue& queue : queues_) queue.mark_end();
      watched_.emplace(*options_.watch, calls());
    }
  }

  // Calls under way still use memory that goes back to the pool.
  ~PlanRunner() override {
    if (gave_up_) return;
    try {
      wait_for_calls();
    } catch (...) {
      // A failure is reported to callers that wait for results.
    }
  }
  PlanRunner(const PlanRunner&) = delete;
  PlanRunner& operator=(const PlanRunner&) = delete;

  void connect() override {
    FirstError error;
    for (ExchangeQueue& queue : queues_) queue.connect(memory_, error);
    error.rethrow();
  }

  [[nodiscard]] std::vector<CallTensor> expected() const override {
    std::vector<CallTensor> named;
    for (const TensorView& tensor : memory_.expected()) {
      named.push_back({contents_[named.size()], tensor});
    }
    return named;
  }

  void check(CallTensors tensors) const override {
    check_tensors(plan_, memory_.expected(), ordered(tensors));
  }

  [[nodiscard]] bool is_ready_for(CallTensors tensors) const override {
    return lies_as_before(ordered(tensors));
  }

  [[nodiscard]] std::vector<Refusal> prepare(CallTensors tensors) override {
    std::vector<Refusal> refusals = make_ready(ordered(tensors));
    recordings_.restart();
    return refusals;
  }

  void set_values(const CallValues& values, const AttentionProblem& planned,
                  const Mask& mask) override {
    apply_values(values, planned, mask, plan_.global({0, plan_.local.batch}), plan_.local.heads,
                 device_.place(), problem_);
    values_ = values;
  }

  void submit(CallTensors named, ForeignStream* caller) override {
    const auto current = device_.make_current();
    const std::vector<TensorView> tensors = ordered(named);
    const bool captured = caller != nullptr && caller->is_captured();
    if (captured && !lies_as_before(tensors)) {
      throw UnsupportedError(
          "tensors with other strides than before cannot be captured into a CUDA graph: call once "
          "with them before");
    }
    if (captured && refuses_capture_) {
      throw UnsupportedError(
          "attention whose kernels wait for other ranks cannot be captured into a CUDA graph; "
          "schedules other than allgather can");
    }
    const std::weak_ptr<void> graph = captured ? caller->captured_graph() : std::weak_ptr<void>();
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
      if (captured) kernels_.hold_for(graph);
      begin_call(caller);
      // A waiting kernel depends on transfers that run at the same time. In a recording, the
      // kernel's branch may run before the transfers' branch.
      const bool records = !captured && !arrivals_.any();
      Recording* const recording =
          records ? recording_for(recordings_, tensors, [this] { submit_tasks(); }) : nullptr;
      if (recording != nullptr) {
        recording->submit(*computing_);
        ++replays_;
      } else {
        submit_tasks();
      }
      device_.end_call(*computing_, caller);
    } catch (const UserError& error) {
      fail(captured);
      throw LibraryError(fmt::format("rank {}: {}", plan_.rank, error.what()));
    } catch (...) {
      fail(captured);
      throw;
    }
  }

  void rehearse(CallTensors tensors) override {
    const auto current = device_.make_current();
    memory_.bind(ordered(tensors));
    rehearsing_ = true;
    FirstError error;
    error.of([&] {
      try {
        begin_call(nullptr);
        submit_tasks();
        device_.end_call(*computing_, nullptr);
      } catch (...) {
        for (ExchangeQueue& queue : queues_) queue.mark_end();
        throw;
      }
    });
    rehearsing_ = false;
    error.of([&] { wait_for_streams(); });
    error.rethrow();
  }

  // No kernel waits for columns, since the last call has announced them all.
  void run_kernels(CallTensors named) override {
    const auto current = device_.make_current();
    const std::vector<TensorView> tensors = ordered(named);
    memory_.bind(tensors);
    device_.begin_call(*computing_, nullptr);
    const auto submit_kernels = [this] {
      for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
        const auto& work = plan_.tasks[t].work;
        if (const auto* block = std::get_if<Block>(&work)) compute(t, *block);
        if (const auto* block = std::get_if<BackwardBlock>(&work)) compute(t, *block);
      }
    };
    if (Recording* recording = recording_for(kernels_alone_, tensors, submit_kernels)) {
      recording->submit(*computing_);
    } else {
      submit_kernels();
    }
    device_.end_call(*computing_, nullptr);
    computing_->synchronize();
  }

  void wait() override {
    wait_for_calls();
    try {
      arrays_.check();
    } catch (const ArgumentError& error) {
      throw UserError(fmt::format("rank {}: {}", plan_.rank, error.what()));
    }
  }

  [[nodiscard]] bool awaits_arrivals() const noexcept override { return arrivals_.any(); }
  void refuse_capture() noexcept override { refuses_capture_ = true; }
  [[nodiscard]] bool is_captured() override { return kernels_.is_captured(); }

  [[nodiscard]] const RankPlan& plan() const noexcept override { return plan_; }
  [[nodiscard]] std::size_t extra_bytes() const noexcept override { return memory_.bytes(); }
  [[nodiscard]] std::size_t replays() const noexcept override { return replays_; }

 private:
  void wait_for_calls() {
    if (computing_->is_captured()) {
      throw UnsupportedError(
          "calls that are being captured into a CUDA graph cannot be waited for: end the capture "
          "first");
    }
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

  // Throws the watch's error. Streams that the watch has released end without an error, or with the
  // transport's error.
  void check_watch() const {
    if (options_.watch != nullptr) options_.watch->check();
  }

  [[nodiscard]] CallWatch::Calls calls() {
    return {[this] { return progress_.is_under_way(); }, [this] { return progress_.moved(); },
            [this] { return progress_.awaits_only_itself(); },
            [this] { return progress_.describe(); },
            [this] {
              for (Group* group : groups_) group->give_up();
            }};
  }

  void wait_for_streams() {
    const Waiting waiting{[this] {
                            for (Group* group : groups_) group->check();
                          },
                          [this] { return progress_.describe(); },
                          [this] { return progress_.awaits_only_itself(); },
                          [this] { return progress_.moved(); }};
    for (ExchangeQueue& queue : queues_) queue.stream().synchronize(waiting);
    computing_->synchronize(waiting);
  }

  // Kernels keep state for tensors of other strides, and recordings point to it. Both are dropped
  // once no call uses them.
  std::vector<Refusal> make_ready(std::span<const TensorView> tensors) {
    const auto current = device_.make_current();
    wait_for_calls();
    ready_ = false;
    clear_recordings();
    memory_.bind({tensors.begin(), tensors.end()});
    std::vector<Refusal> refusals = kernels_.prepare(arguments_, memory_);
    ready_ = refusals.empty();
    return refusals;
  }

  // Finds out which tasks others wait for, and where exchanges stand in their queues.
  void number_tasks() {
    awaited_.resize(plan_.tasks.size());
    ordinal_.resize(plan_.tasks.size());
    for (const ExchangeQueue& queue : queues_) {
      const std::vector<std::size_t>& tasks = queue.tasks();
      for (std::size_t e = 0; e < tasks.size(); ++e) ordinal_[tasks[e]] = e;
      begins_with_an_exchange_ |= !tasks.empty() && plan_.tasks[tasks.front()].after.empty();
    }
    for (const Task& task : plan_.tasks) {
      const auto* exchange = std::get_if<Exchange>(&task.work);
      const auto await = [&](const std::vector<Dependency>& dependencies) {
        for (const Dependency& dependency : dependencies) {
          const auto awaited = static_cast<std::size_t>(dependency.task);
          if (dependency.stage == Stage::done) {
            awaited_[awaited] = true;
          } else if (exchange == nullptr || exchange->group != group_of(awaited)) {
            queue_of(awaited).want_release(ordinal_[awaited]);
          }
        }
      };
      await(task.after);
      if (exchange != nullptr) await(exchange->receive_after);
    }
  }

  // The recording to submit in place of `work`; null if the work must be submitted itself.
  template <class Work>
  [[nodiscard]] Recording* recording_for(Recordings& recordings,
                                         std::span<const TensorView> tensors, const Work& work) {
    const bool traced = options_.tracer != nullptr && options_.tracer->enabled();
    if (!options_.replay || traced || device_.place().is_host()) return nullptr;
    return recordings.find(tensors, [&] { return device_.record(*computing_, work); });
  }
  void clear_recordings() noexcept {
    recordings_.clear();
    kernels_alone_.clear();
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
    std::unique_lock<std::mutex> turn;
    if (arrivals_.any()) {
      AwaitingCalls& others = device_.awaiting_calls();
      turn = std::unique_lock(others.mutex);
      if (others.last) computing_->wait(others.last);
      arrivals_.begin(*operations_, *computing_);
      if (rehearsing_) announce_all();
    }
    progress_.begin();
    for (ExchangeQueue& queue : queues_) queue.begin(rehearsing_);
    if (begins_with_an_exchange_) begun_ = computing_->record();
    for (std::size_t t = 0; t < plan_.tasks.size();) {
      if (std::holds_alternative<Copy>(plan_.tasks[t].work)) {
        t = submit_copies(t);
      } else {
        std::visit([&](const auto& work) { submit(t, work); }, plan_.tasks[t].work);
        ++t;
      }
    }
    for (ExchangeQueue& queue : queues_) {
      if (queue.tasks().empty()) continue;
      queue.end();
      computing_->wait(queue.stream().record());
    }
    if (arrivals_.any()) device_.awaiting_calls().last = computing_->record();
  }

  // Announces columns before any kernel runs, so that no kernel is left waiting if a later kernel
  // fails.
  void announce_all() {
    for (std::size_t t = 0; t < plan_.tasks.size(); ++t) {
      if (!std::holds_alternative<Exchange>(plan_.tasks[t].work)) continue;
      arrivals_.announce(t, *operations_, *computing_);
    }
  }

  void submit(std::size_t index, const Exchange& exchange) {
    ExchangeQueue& queue = queue_of(index);
    Stream& stream = queue.stream();
    const std::size_t e = ordinal_[index];
    if (rehearsing_) {
      queue.rehearse(e);
    } else {
      if (e == 0 && plan_.tasks[index].after.empty()) stream.wait(begun_);
      wait_for(stream, plan_.tasks[index].after);
      queue.offer(e);
      wait_for(stream, exchange.receive_after);
      queue.take(e);
      arrivals_.announce(index, *operations_, stream);
    }
    if (awaited_[index]) done_[index] = stream.record();
    stream.flush();
  }

  // Submits a copy, together with the copies that follow it without waiting for anything. Returns
  // the task after them.
  std::size_t submit_copies(std::size_t first) {
    begin(first);
    std::size_t next = first;
    {
      const StreamSpan span(*computing_, trace_label(plan_, plan_.tasks[first]));
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

  template <class Work>
  void submit(std::size_t index, const Work& work) {
    begin(index);
    compute(index, work);
    progress_.mark(index);
    end(index);
  }

  template <class Work>
  void compute(std::size_t index, const Work& work) {
    const StreamSpan span(*computing_, trace_label(plan_, plan_.tasks[index]));
    execute(index, work);
  }
  void execute(std::size_t index, const Block& block) {
    kernels_.of(block).forward(arguments_.of(index, block), memory_.state(block.result),
                               {*computing_, background(), options_.threads});
  }
  void execute(std::size_t /*index*/, const BackwardBlock& block) {
    kernels_.of(block).backward(arguments_.of(block), arguments_.gradients_of(block),
                                {*computing_, background(), options_.threads});
  }
  template <class Work>
  void execute(std::size_t /*index*/, const Work& work) {
    local_.submit(work);
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
      ExchangeQueue& queue = queue_of(task);
      const std::size_t e = ordinal_[task];
      queue.reclaim(e);
      if (&stream != &queue.stream()) stream.wait(queue.released(e));
    }
  }

  [[nodiscard]] int group_of(std::size_t exchange) const {
    return std::get<Exchange>(plan_.tasks[exchange].work).group;
  }

  [[nodiscard]] ExchangeQueue& queue_of(std::size_t exchange) {
    return queues_[static_cast<std::size_t>(group_of(exchange))];
  }

  [[nodiscard]] Stream* background() const {
    return queues_.empty() ? nullptr : &queues_.front().stream();
  }

  // Transfers may be under way: the other ranks do not know of the error, and cannot agree on it
  // any more. A graph that is not complete transfers nothing.
  void fail(bool captured) noexcept {
    computing_->discard();
    for (const ExchangeQueue& queue : queues_) queue.stream().discard();
    if (!captured) give_up();
  }

  void give_up() noexcept {
    gave_up_ = true;
    clear_recordings();  // NCCL would wait for recordings to be destroyed
    for (Group* group : groups_) group->give_up();
  }

  // A copy of the problem, since graphs may outlive the planning. Its call arguments are the last
  // call's.
  AttentionProblem problem_;
  CallValues values_;  // of the call being submitted, in device memory
  const RankPlan plan_;
  std::vector<Content> contents_;  // of the caller's buffers
  std::vector<Group*> groups_;
  Device& device_;
  RunnerOptions options_;
  std::unique_ptr<LocalOperations> operations_;
  PlanMemory memory_;
  Arrivals arrivals_;
  PlanKernels kernels_;
  bool ready_ = false;
  bool gave_up_ = false;
  bool refuses_capture_ = false;
  bool rehearsing_ = false;           // computes without exchanges
  std::vector<bool> awaited_;         // by task: others wait for it to be done
  std::vector<std::size_t> ordinal_;  // by task: the place of an exchange in its queue
  // The call's beginning. Some queue waits for nothing else.
  bool begins_with_an_exchange_ = false;
  std::shared_ptr<Event> begun_;
  std::vector<std::shared_ptr<Event>> done_;
  std::size_t replays_ = 0;
  std::optional<SinkStates> sinks_;
  // Declared after what they use, so that they are destroyed first.
  std::unique_ptr<Stream> computing_;
  CallArrays arrays_;
  BlockArguments arguments_;
  LocalTasks local_;
  std::vector<ExchangeQueue> queues_;
  Progress progress_;
  Recordings recordings_;
  Recordings kernels_alone_{false};
  std::optional<CallWatch::Watched> watched_;
};

}  // namespace

std::unique_ptr<Runner> make_runner(const AttentionProblem& problem, RankPlan plan,
                                    std::span<const Implementation* const> implementations,
                                    std::vector<Group*> groups, Device& device,
                                    const Watchdog& watchdog, RunnerOptions options) {
  return std::make_unique<PlanRunner>(problem, std::move(plan), implementations, std::move(groups),
                                      device, watchdog, options);
}

}  // namespace annulus::ring
