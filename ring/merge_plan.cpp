#include <algorithm>
#include <cstddef>
#include <utility>

#include <annulus/core/error.hpp>
#include <annulus/ring/merge_plan.hpp>

namespace annulus::ring {
namespace {

bool overlap(const LocalRange& a, const LocalRange& b) {
  return a.begin < b.end() && b.begin < a.end();
}

bool overlap(const HeadRange& a, const HeadRange& b) {
  return a.begin < b.begin + b.count && b.begin < a.begin + a.count;
}

class Planner {
 public:
  Planner(const RankPlan& plan, const MergeRules& rules) : plan_(plan), rules_(rules) {}

  MergePlan run() {
    std::vector<const Block*> blocks;
    for (const Step& step : plan_.steps) {
      for (const Block& block : step.blocks) blocks.push_back(&block);
    }
    std::int64_t done = 0;  // heads that are finished; groups come in order
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const HeadRange heads = blocks[i]->heads;
      if (!pending_.empty() && !(pending_.front().heads == heads)) {
        throw InternalError("blocks of different groups of heads overlap or alternate");
      }
      add(*blocks[i]);
      if (i + 1 < blocks.size() && blocks[i + 1]->heads == heads) continue;
      leave_out(done, heads.begin);
      done = heads.begin + heads.count;
      finish(heads);
    }
    leave_out(done, plan_.local.heads);
    return std::move(result_);
  }

 private:
  void add(const Block& block) {
    BlockMerge merge;
    int slot = static_cast<int>(pending_.size()) < rules_.most_parts ? free_slot(block) : -1;
    if (slot < 0) {
      merge.before = fold(block.heads);
      slot = free_slot(block);
    }
    merge.slot = slot;
    result_.slots = std::max(result_.slots, slot + 1);
    result_.group_heads = std::max(result_.group_heads, block.heads.count);
    keep({slot, rules_.dtype_of(block), block.rows, block.heads});
    result_.blocks.push_back(std::move(merge));
  }

  // Results that continue each other make one part.
  void keep(const Part& part) {
    for (Part& other : pending_) {
      if (other.slot == part.slot && other.dtype == part.dtype && other.heads == part.heads &&
          other.rows.end() == part.rows.begin) {
        other.rows.count += part.rows.count;
        return;
      }
    }
    pending_.push_back(part);
  }

  // The first slot with room for the result; −1 if there is none. Where rows lie in a slot depends
  // on the dtype, so that one slot never holds two.
  [[nodiscard]] int free_slot(const Block& block) const {
    const DType dtype = rules_.dtype_of(block);
    const bool fits_first = dtype == rules_.first_dtype;
    for (int slot = fits_first ? 0 : 1; slot < rules_.slots; ++slot) {
      const bool taken = std::any_of(pending_.begin(), pending_.end(), [&](const Part& part) {
        return part.slot == slot && (part.dtype != dtype || (overlap(part.rows, block.rows) &&
                                                             overlap(part.heads, block.heads)));
      });
      if (!taken) return slot;
    }
    return -1;
  }

  Combination fold(HeadRange heads) {
    const int slot = rules_.first_dtype == DType::float32 ? 0 : rules_.slots;
    result_.fold_slot = slot;
    Combination all{std::exchange(pending_, {}), heads, slot};
    pending_ = {{slot, DType::float32, {LocalPosition(0), plan_.local.query_length}, heads}};
    return all;
  }

  void finish(HeadRange heads) {
    const bool alone = pending_.size() == 1 && pending_.front().slot == 0 &&
                       pending_.front().rows.count == plan_.local.query_length;
    if (!(alone && rules_.first_is_output)) {
      result_.blocks.back().after = {pending_, heads, Combination::kOutput};
    }
    pending_.clear();
  }

  void leave_out(std::int64_t begin, std::int64_t end) {
    if (begin < end) result_.rest.push_back({{}, {begin, end - begin}, Combination::kOutput});
  }

  const RankPlan& plan_;
  const MergeRules& rules_;
  MergePlan result_;
  std::vector<Part> pending_;
};

}  // namespace

MergePlan plan_merges(const RankPlan& plan, const MergeRules& rules) {
  return Planner(plan, rules).run();
}

}  // namespace annulus::ring
