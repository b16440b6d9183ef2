#include "runner/exchange_queue.hpp"

#include <utility>

#include <annulus/mesh/agreement.hpp>

#include "runner/transfer_wait.hpp"
#include "task_labels.hpp"

namespace annulus::ring {

ExchangeQueue::ExchangeQueue(const RankPlan& plan, int group_index, Group& group,
                             std::shared_ptr<Stream> stream)
    : plan_(plan),
      group_index_(group_index),
      group_(group),
      stream_(std::move(stream)),
      tasks_(exchanges_of(plan, group_index)),
      prepared_(tasks_.size()),
      wanted_(tasks_.size()),
      reclaimed_(tasks_.size()),
      released_(tasks_.size()) {}

void ExchangeQueue::connect(const PlanMemory& memory, FirstError& error) {
  for (std::size_t e = 0; e < tasks_.size(); ++e) {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    for (const Transfer& send : exchange(e).sends) {
      sends.push_back({send.peer, memory.address(send.buffer, send.tokens),
                       static_cast<std::size_t>(send.bytes)});
    }
    for (const Transfer& receive : exchange(e).receives) {
      receives.push_back({receive.peer, memory.address(receive.buffer, receive.tokens),
                          static_cast<std::size_t>(receive.bytes)});
    }
    const ExchangeLabel label{contents_of(plan_, exchange(e)), plan_.tasks[tasks_[e]].step};
    try {
      prepared_[e] = group_.prepare(std::move(sends), std::move(receives), label);
    } catch (const AgreedFailure&) {
      error.of([] { throw; });
    }
  }
}

void ExchangeQueue::offer(std::size_t e) {
  if (e == 0) stream_->mark(0);
  prepared_[e]->offer(*stream_);
  stream_->mark(taking_mark(e));
}

void ExchangeQueue::take(std::size_t e) {
  if (stream_->place().is_host()) {
    prepared_[e]->take(*stream_);  // a host stream traces every message itself
  } else {
    const StreamSpan span(*stream_, label_of(e));
    prepared_[e]->take(*stream_);
  }
  stream_->mark(taken_mark(e));
}

void ExchangeQueue::reclaim(std::size_t e) {
  if (reclaimed_[e]) return;
  reclaimed_[e] = true;
  prepared_[e]->reclaim(*stream_);
  if (wanted_[e]) released_[e] = stream_->record();
}

void ExchangeQueue::rehearse(std::size_t e) {
  if (wanted_[e]) released_[e] = stream_->record();
}

void ExchangeQueue::end() {
  for (std::size_t e = 0; e < tasks_.size(); ++e) reclaim(e);
  mark_end();
}

void ExchangeQueue::mark_end() {
  stream_->mark(end_mark());
  stream_->flush();
}

const std::vector<Dependency>* ExchangeQueue::awaited() const {
  const std::uint32_t mark = stream_->marked();
  if (mark == end_mark()) return nullptr;
  const bool taking = mark % 2 == 1;
  const std::size_t next = mark / 2;  // the exchange that is under way, or comes next
  static const std::vector<Dependency> none;
  if (next >= tasks_.size()) return &none;
  return taking ? &exchange(next).receive_after : &plan_.tasks[tasks_[next]].after;
}

std::string ExchangeQueue::describe() const {
  return describe_transfers(plan_, group_index_, stream_->marked(), group_.traits().one_sided);
}

std::uint32_t ExchangeQueue::end_mark() const {
  return finished_mark(tasks_.size());
}

const Exchange& ExchangeQueue::exchange(std::size_t e) const {
  return std::get<Exchange>(plan_.tasks[tasks_[e]].work);
}

TraceLabel ExchangeQueue::label_of(std::size_t e) const {
  TraceLabel label = trace_label(plan_, plan_.tasks[tasks_[e]]);
  const std::vector<int>& ranks = plan_.groups[static_cast<std::size_t>(group_index_)].ranks;
  const auto add = [&](const std::vector<Transfer>& transfers, bool incoming) {
    for (const Transfer& transfer : transfers) {
      label.messages.push_back(
          {ranks[static_cast<std::size_t>(transfer.peer)], transfer.bytes, incoming});
    }
  };
  add(exchange(e).receives, true);
  add(exchange(e).sends, false);
  return label;
}

}  // namespace annulus::ring
