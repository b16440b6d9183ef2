#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <annulus/attention/softmax_state.hpp>
#include <annulus/core/error.hpp>

#include "schedules/accesses.hpp"
#include "schedules/building/plan_builder.hpp"

// Partial results lie in places: pieces of memory for the rows and heads of a group, one result
// beside the other as long as they share no row. Place 0 is as large as the target, and is the
// target itself where dtypes permit. Rows that a kernel completes go straight into the target,
// unless there are sinks or the output is unnormalised: both are up to the reduction into the
// target.
namespace annulus::ring {
namespace {

template <class Range>
bool covers(const Range& whole, const Range& part) {
  return whole.begin <= part.begin && part.end() <= whole.end();
}

// A result that waits to be reduced.
struct Pending {
  int place = 0;
  DType dtype = DType::float32;
  LocalRange rows;
  BatchRange batches;
};

class Placer {
 public:
  Placer(const PlanInput& input, RankPlan& plan)
      : input_(input),
        plan_(plan),
        dtype_(input.problem.dtype),
        partial_dtype_(partial_dtype(dtype_)),
        lse_dtype_(partial_lse_dtype(input)),
        all_batches_{0, plan.local.batch},
        unnormalised_(!input.problem.normalize_output),
        most_parts_(most_parts(input.problem)),
        tasks_(std::exchange(plan.tasks, {})) {}

  void run() {
    choose_places();
    plan_.tasks.reserve(tasks_.size());
    for (std::size_t i = 0; i < tasks_.size(); ++i) {
      const int step = tasks_[i].step;
      if (const auto* block = std::get_if<Block>(&tasks_[i].work)) {
        if (!completion_) begin_group(i);
        if (!completes(*completion_, *block)) {
          throw InternalError("blocks of different groups of heads overlap or alternate");
        }
        place(std::move(std::get<Block>(tasks_[i].work)), step, later_rows_[i]);
      } else if (is_completion(tasks_[i]) && completion_) {
        finish_group(step);
      } else if (!is_nothing(tasks_[i])) {
        plan_.tasks.push_back(std::move(tasks_[i]));
      }
    }
  }

 private:
  [[nodiscard]] const Declaration& declaration_of(const Block& block) const {
    return input_.candidates[static_cast<std::size_t>(block.implementation)]->declares();
  }

  // True for the reduction that completes a group of blocks: see PlanBuilder::complete().
  [[nodiscard]] static bool is_completion(const Task& task) {
    const auto* reduce = std::get_if<Reduce>(&task.work);
    return reduce != nullptr && reduce->parts.empty();
  }
  [[nodiscard]] static bool is_nothing(const Task& task) {
    return is_completion(task) && std::get<Reduce>(task.work).into.output.heads.count == 0;
  }
  [[nodiscard]] static bool completes(const Reduce& completion, const Block& block) {
    return completion.into.output.buffer == block.result.output.buffer &&
           completion.into.output.heads == block.heads;
  }

  // Sets the number of places, and the first one.
  void choose_places() {
    std::int64_t most_rows = 0;
    std::int64_t heads = 0;
    bool rounded = false;
    for (const Task& task : tasks_) {
      const auto* block = std::get_if<Block>(&task.work);
      if (is_completion(task)) {
        most_rows = std::max(most_rows, std::get<Reduce>(task.work).into.output.tokens.count);
      }
      if (block == nullptr) continue;
      heads = std::max(heads, block->heads.count);
      rounded = rounded || declaration_of(*block).results == ResultForm::rounded;
    }
    first_dtype_ = rounded ? dtype_ : partial_dtype_;
    if (input_.options.result_bytes == 0) return;
    // Combining costs the same memory traffic per result, alone or with others. So as many as fit
    // are combined.
    const std::int64_t row_values = plan_.local.batch * plan_.local.value_dim;
    const std::int64_t most = std::max(input_.options.result_bytes,
                                       row_values * plan_.local.query_length * plan_.local.heads *
                                           static_cast<std::int64_t>(size_of(partial_dtype_)));
    const std::int64_t each = std::max<std::int64_t>(
        1, row_values * most_rows * heads * static_cast<std::int64_t>(size_of(first_dtype_)));
    places_ = 1 + static_cast<int>(std::clamp<std::int64_t>(most / each, 1, most_parts_ - 1));
  }

  void begin_group(std::size_t first) {
    const Block& block = std::get<Block>(tasks_[first].work);
    std::size_t last = first;
    while (++last < tasks_.size()) {
      if (!is_completion(tasks_[last])) continue;
      const Reduce& completion = std::get<Reduce>(tasks_[last].work);
      if (completes(completion, block)) break;
    }
    if (last == tasks_.size()) throw InternalError("a group of blocks is never completed");
    completion_ = std::get<Reduce>(tasks_[last].work);
    buffers_.clear();
    open_ = completion_->into.output.tokens;
    later_rows_.resize(tasks_.size());
    LocalRange rows;
    for (std::size_t i = last; i-- > first;) {
      later_rows_[i] = rows;
      if (const auto* later = std::get_if<Block>(&tasks_[i].work)) rows = hull(rows, later->rows);
    }
  }

  // `later`: the rows that later blocks of the group add to.
  void place(Block block, int step, LocalRange later) {
    const auto known = state_of(block);
    if (const LocalRange rows = final_rows(block, known, later); rows.count > 0) {
      auto [final, rest] = cut(block, rows);
      if (fits(final, rest)) {
        finish(std::move(final), step, known);
        if (rest) place(*rest, step, later);
        return;
      }
    }
    if (known != pending_.end()) {
      block.result = result_of(*known, block.rows, block.batches);
      block.state = block.result;
      plan_.tasks.push_back({std::move(block), step, {}});
      return;
    }
    const DType dtype =
        declaration_of(block).results == ResultForm::rounded ? dtype_ : partial_dtype_;
    int place = static_cast<int>(pending_.size()) < most_parts_ ? free_place(block, dtype) : -1;
    if (place < 0) {
      fold(step);
      place = free_place(block, dtype);
    }
    const Pending part{place, dtype, block.rows, block.batches};
    make_room(part);
    block.result = result_of(part, block.rows, block.batches);
    plan_.tasks.push_back({std::move(block), step, {}});
    keep(part);
  }

  using PendingAt = std::vector<Pending>::iterator;

  // Rows of the block that no later block adds to, at one end of the open rows. The kernel can
  // round these into the output, which saves writing them in float32 and reading them again.
  [[nodiscard]] LocalRange final_rows(const Block& block, PendingAt state, LocalRange later) {
    if (completion_->sinks || unnormalised_ ||
        declaration_of(block).results != ResultForm::either || target_dtype() != dtype_ ||
        lse_dtype_ != DType::float32 || !(block.batches == all_batches_)) {
      return {};
    }
    LocalRange rows = block.rows;
    if (later.count > 0 && overlap(rows, later)) {
      if (rows.begin < later.begin) {
        rows.count = later.begin - rows.begin;
      } else {
        const LocalPosition begin = std::min(later.end(), rows.end());
        rows = {begin, rows.end() - begin};
      }
    }
    const auto at_an_end_of = [&](const LocalRange& whole) {
      return rows.begin == whole.begin || rows.end() == whole.end();
    };
    if (!at_an_end_of(open_) || (state != pending_.end() && !at_an_end_of(state->rows))) return {};
    for (auto part = pending_.begin(); part != pending_.end(); ++part) {
      if (part != state && overlap(part->rows, rows)) return {};
    }
    return rows;
  }

  // The block's part for `rows`, and for its other rows; no second part if there are none.
  [[nodiscard]] std::pair<Block, std::optional<Block>> cut(const Block& block,
                                                           const LocalRange& rows) const {
    if (rows == block.rows) return {block, std::nullopt};
    const bool front = rows.begin == block.rows.begin;
    const LocalRange others = front ? LocalRange{rows.end(), block.rows.count - rows.count}
                                    : LocalRange{block.rows.begin, block.rows.count - rows.count};
    return {part_of(block, rows), part_of(block, others)};
  }

  [[nodiscard]] Block part_of(const Block& block, const LocalRange& rows) const {
    Block part = block;
    part.rows = rows;
    part.row_positions =
        block.row_positions.slice({LocalPosition(rows.begin - block.rows.begin), rows.count});
    part.pairs = 0;
    bool exact = true;
    for (const PositionRange& range : part.row_positions.ranges()) {
      for (const PositionRange& columns : part.column_positions.ranges()) {
        const Visibility seen = input_.problem.mask.examine(plan_.first_batch + block.batches.begin,
                                                            block.batches.count, range, columns);
        part.pairs += seen.pairs;
        exact = exact && seen.exact;
      }
    }
    part.full =
        block.full || (exact && !input_.problem.call_arguments.change_visibility() &&
                       part.pairs == rows.count * block.columns.count * block.batches.count);
    return part;
  }

  // True if the `final` rows of a block should be rounded at once, with a second call for the
  // `rest`: the kernel takes both, and rounding saves more than that call costs.
  [[nodiscard]] bool fits(const Block& final, const std::optional<Block>& rest) const {
    const auto& candidate = *input_.candidates[static_cast<std::size_t>(final.implementation)];
    if (!refusal_of(candidate, input_, plan_, final, true).empty()) return false;
    if (!rest) return true;
    const double saved = input_.prices.model.memory_seconds(
        2 * sizeof(float) *
        static_cast<double>(final.rows.count * final.heads.count * final.batches.count *
                            plan_.local.value_dim));
    return final.pairs > 0 && rest->pairs > 0 &&
           saved > input_.prices.kernel(candidate.names().front()).call_latency &&
           obstacle_of(candidate, input_, plan_, final).empty() &&
           obstacle_of(candidate, input_, plan_, *rest).empty();
  }

  // Places the last block of its rows, which go into the output.
  void finish(Block block, int step, PendingAt state) {
    if (state != pending_.end()) {
      block.state = result_of(*state, block.rows, block.batches);
      state->rows = without(state->rows, block.rows);
      if (state->rows.count == 0) pending_.erase(state);
    }
    open_ = without(open_, block.rows);
    block.result = target_of(block.rows, all_batches_);
    plan_.tasks.push_back({std::move(block), step, {}});
  }

  // A run without a part at one of its ends.
  [[nodiscard]] static LocalRange without(const LocalRange& whole, const LocalRange& part) {
    if (part.begin == whole.begin) return {part.end(), whole.count - part.count};
    return {whole.begin, whole.count - part.count};
  }

  // The result that the block can continue.
  [[nodiscard]] PendingAt state_of(const Block& block) {
    if (!declaration_of(block).continues_state) return pending_.end();
    return std::find_if(pending_.begin(), pending_.end(), [&](const Pending& part) {
      return part.dtype == partial_dtype_ && covers(part.rows, block.rows) &&
             covers(part.batches, block.batches);
    });
  }

  // Adds a result to the pending parts. Results that continue each other form one part.
  void keep(const Pending& part) {
    for (Pending& other : pending_) {
      if (other.place == part.place && other.dtype == part.dtype && other.batches == part.batches &&
          other.rows.end() == part.rows.begin) {
        other.rows.count += part.rows.count;
        return;
      }
    }
    pending_.push_back(part);
  }

  // The first place with room for the result; −1 if there is none. Offsets of rows depend on the
  // dtype, so a place never holds two dtypes.
  [[nodiscard]] int free_place(const Block& block, DType dtype) const {
    const bool fits_first = dtype == first_dtype_ || dtype == dtype_;
    for (int place = fits_first ? 0 : 1; place < places_; ++place) {
      const bool taken = std::any_of(pending_.begin(), pending_.end(), [&](const Pending& part) {
        return part.place == place &&
               (part.dtype != dtype ||
                (overlap(part.rows, block.rows) && overlap(part.batches, block.batches)));
      });
      if (!taken) return place;
    }
    return -1;
  }

  // The buffers of a place for results of the group.
  struct Buffers {
    int output = -1;
    int lse = -1;
    int maximum = -1;  // −1 where the output is normalised
  };

  // Makes the buffers of a part's place, or extends them to its rows.
  void make_room(const Pending& part) {
    const auto [known, fresh] = buffers_.try_emplace({part.place, part.dtype});
    Buffers& place = known->second;
    if (fresh) {
      const Result& target = completion_->into;
      const bool in_place = part.place == 0 && part.dtype == target_dtype();
      place.output =
          in_place ? target.output.buffer : make(part.place, Content::output, part.dtype);
      place.lse = in_place && lse_dtype_ == plan_.buffer(target.lse).dtype
                      ? target.lse
                      : make(part.place, Content::lse, lse_dtype_);
      if (unnormalised_) {
        place.maximum =
            in_place ? target.maximum : make(part.place, Content::maximum, DType::float32);
      }
    }
    for (const int index : {place.output, place.lse, place.maximum}) {
      if (index < 0) continue;
      LocalRange& tokens = plan_.buffers[static_cast<std::size_t>(index)].tokens;
      tokens = hull(tokens, part.rows);
    }
  }

  int make(int place, Content content, DType dtype) {
    const auto [memory, first] = memory_.try_emplace({place, content}, -1);
    plan_.buffers.push_back({BufferKind::local, {content}, dtype, {}, heads(), memory->second});
    const int index = static_cast<int>(plan_.buffers.size()) - 1;
    if (first) memory->second = index;
    return index;
  }

  [[nodiscard]] Result result_of(const Pending& part, LocalRange rows, BatchRange batches) const {
    const Buffers& place = buffers_.at({part.place, part.dtype});
    return {{place.output, rows, heads(), batches}, place.lse, place.maximum};
  }

  [[nodiscard]] HeadRange heads() const { return completion_->into.output.heads; }
  [[nodiscard]] DType target_dtype() const {
    return plan_.buffer(completion_->into.output.buffer).dtype;
  }
  [[nodiscard]] Result target_of(LocalRange rows, BatchRange batches) const {
    Result target = completion_->into;
    target.output.tokens = rows;
    target.output.batches = batches;
    return target;
  }

  // If some parts do not cover all batches, batches are reduced one by one.
  void reduce(const Result& into, int step, bool completes) {
    const bool together = std::all_of(pending_.begin(), pending_.end(), [&](const Pending& part) {
      return part.batches == all_batches_;
    });
    if (together) return reduce(into, all_batches_, step, completes);
    for (std::int64_t batch = 0; batch < all_batches_.count; ++batch) {
      reduce(into, {batch, 1}, step, completes);
    }
  }

  void reduce(Result into, BatchRange batches, int step, bool completes) {
    Reduce reduction;
    into.output.batches = batches;
    reduction.into = into;
    reduction.sinks = completes && completion_->sinks;
    reduction.unnormalised = completes && completion_->unnormalised;
    for (const Pending& part : pending_) {
      if (covers(part.batches, batches)) {
        reduction.parts.push_back(result_of(part, part.rows, batches));
      }
    }
    plan_.tasks.push_back({std::move(reduction), step, {}});
  }

  // Combines the results so far into one, without rounding.
  void fold(int step) {
    const Pending whole{first_dtype_ == partial_dtype_ ? 0 : places_, partial_dtype_, open_,
                        all_batches_};
    make_room(whole);
    reduce(result_of(whole, open_, all_batches_), step, false);
    pending_ = {whole};
  }

  void finish_group(int step) {
    const Result target = target_of(open_, all_batches_);
    const bool alone = pending_.size() == 1 && result_of(pending_.front(), pending_.front().rows,
                                                         pending_.front().batches) == target;
    if (open_.count > 0 && (!alone || completion_->sinks || completion_->unnormalised)) {
      reduce(target, step, true);
    }
    pending_.clear();
    completion_.reset();
  }

  const PlanInput& input_;
  RankPlan& plan_;
  DType dtype_;
  DType partial_dtype_;  // of results that are not rounded
  DType lse_dtype_;
  BatchRange all_batches_;
  bool unnormalised_;
  int most_parts_;  // of a reduction, without the sinks
  std::vector<Task> tasks_;
  int places_ = 2;
  DType first_dtype_ = DType::float32;
  std::optional<Reduce> completion_;    // of the group that is open
  LocalRange open_;                     // rows of the group whose output is not complete
  std::vector<LocalRange> later_rows_;  // by task: the rows that later blocks of its group add to
  std::map<std::pair<int, DType>, Buffers> buffers_;  // of the group
  std::map<std::pair<int, Content>, int> memory_;     // first buffer of a place
  std::vector<Pending> pending_;
};

}  // namespace

DType partial_lse_dtype(const PlanInput& input) {
  const DType dtype = input.problem.dtype;
  return partial_dtype(dtype) == dtype ? DType::float64 : input.options.lse_dtype;
}

int most_parts(const AttentionProblem& problem) {
  return kMaximumParts - (problem.sinks ? 1 : 0);
}

void place_results(const PlanInput& input, RankPlan& plan) {
  Placer(input, plan).run();
}

}  // namespace annulus::ring
