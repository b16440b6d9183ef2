#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "schedules/building/exchange_of_heads.hpp"
#include "schedules/building/head_shares.hpp"
#include "schedules/building/plan_builder.hpp"
#include "schedules/building/ring_rounds.hpp"
#include "schedules/schedules.hpp"

// Ranks next to each other along the sequence exchange heads: each gets the rows and columns of all
// of them for its share of the heads, and sends the rows of the output back. Rows of a bias or a
// dense mask go with the queries, for all keys. If there are more ranks than exchange heads, ranks
// with the same heads form a ring and pass on what they have received.
//
// Heads are sent in several groups, each while the previous one is computed. Group g, in a ring of
// r steps, is packed and arrives in step g·r, and is computed from the next step on, until group g
// + 1 arrives. Its outputs are sent in the step after that, and unpacked in the next.
namespace annulus::ring {
namespace {

constexpr int kMaximumGroups = 8;  // with more, calls of kernels and messages would be too small

class HeadExchange : private ExchangeOfHeads {
 public:
  HeadExchange(const RankContext& context, int degree)
      : ExchangeOfHeads(context, degree),
        builder_(context),
        with_rows_(builder_.sent_with_rows()),
        shares_(share_heads(local().heads, local().kv_heads, degree, groups())),
        traffic_(
            needs_, {rings_, rings_},
            sends_directly(context, {rings_, rings_}, [this](int ring) { return member(ring); })),
        rounds_(
            context, builder_, traffic_, outer_, [this](int ring) { return member(ring); },
            most_kv_heads()) {}

  RankPlan plan() {
    std::size_t groups = 0;
    for (const auto& of_rank : shares_) groups = std::max(groups, of_rank.size());
    for (std::size_t g = 0; g < groups; ++g) {
      group_ = g;
      gather();
      if (const HeadShare* share = share_of(me_)) {
        compute(*share);
      }
      scatter();
    }
    return builder_.finish();
  }

 private:
  [[nodiscard]] const AttentionShape& local() const { return builder_.plan().local; }

  // The number of groups that each rank's heads are cut into.
  [[nodiscard]] int groups() const {
    const std::int64_t rows = context_.input.problem.shape.query_length / rings_;
    std::int64_t row_bytes = 0;  // of a head
    for (const Content content : with_rows_) {
      const RankPlan& plan = builder_.plan();
      const Buffer& all = plan.buffer(plan.caller_buffer(content));
      if (all.heads.count == local().heads && all.heads.count > 0) {
        row_bytes += plan.token_bytes(all) / all.heads.count;
      }
    }
    const std::int64_t bytes = rows * (local().heads / degree_) * row_bytes;
    const std::int64_t asked = context_.input.options.head_group_bytes;
    const std::int64_t least = asked > 0 ? asked : kDefaultHeadGroupBytes;
    return static_cast<int>(std::clamp<std::int64_t>(bytes / least, 1, kMaximumGroups));
  }

  [[nodiscard]] std::int64_t most_kv_heads() const {
    std::int64_t most = 0;
    for (const HeadShare& share : shares_[static_cast<std::size_t>(me_)]) {
      most = std::max(most, share.kv_heads.count);
    }
    return most;
  }

  // The share of the current group; null if the rank has fewer groups.
  [[nodiscard]] const HeadShare* share_of(int inner) const {
    const std::vector<HeadShare>& shares = shares_[static_cast<std::size_t>(inner)];
    return group_ < shares.size() ? &shares[group_] : nullptr;
  }
  // True if the previous group has brought what the heads read of a content that is sent with rows.
  [[nodiscard]] bool has_rows(Content content, int inner) const {
    const std::vector<HeadShare>& shares = shares_[static_cast<std::size_t>(inner)];
    return group_ > 0 && builder_.heads_of(content, shares[group_].heads) ==
                             builder_.heads_of(content, shares[group_ - 1].heads);
  }
  // True if the previous group has brought the key/value heads.
  [[nodiscard]] bool has_columns(int inner) const {
    const std::vector<HeadShare>& shares = shares_[static_cast<std::size_t>(inner)];
    return group_ > 0 && shares[group_].kv_heads == shares[group_ - 1].kv_heads;
  }

  [[nodiscard]] int gathered_in() const { return static_cast<int>(group_) * rings_; }
  // Two groups are under way at a time, so they alternate between two sets of buffers.
  [[nodiscard]] int turn() const { return static_cast<int>(group_ % 2); }

  enum class Role : std::uint8_t { out, in };

  // A buffer for the current group, in the memory of the last one with the same role.
  int add_rows(Content content, Role role, int inner, LocalRange tokens, const HeadShare& share) {
    int& last = buffers_.try_emplace({content, role, inner, turn()}, -1).first->second;
    last = builder_.add_row_buffer(content, tokens, share.heads, last);
    return last;
  }
  int add_columns(Role role, int inner, LocalRange tokens, const HeadShare& share, int turn) {
    int& last = buffers_.try_emplace({Content::key, role, inner, turn}, -1).first->second;
    last = builder_.add_key_value(tokens, share.kv_heads, last);
    return last;
  }

  void gather() {
    for (int turn = 1; turn < degree_; ++turn) {
      const int to = (me_ + turn) % degree_;
      if (const HeadShare* share = share_of(to)) send_heads(to, *share);
    }
    const HeadShare* const mine = share_of(me_);
    if (mine == nullptr) return;
    for (const Content content : with_rows_) {
      if (has_rows(content, me_)) continue;
      rows_in_[content] = add_rows(content, Role::in, me_, rows_.all(), *mine);
    }
    if (!has_columns(me_)) {
      column_turn_ = 1 - column_turn_;
      columns_in_ = add_columns(Role::in, me_, columns_.all(), *mine, column_turn_);
    }
    for (int turn = 0; turn < degree_; ++turn) {
      const int from = (me_ + degree_ - turn) % degree_;
      for (const Content content : with_rows_) {
        if (has_rows(content, me_)) continue;
        take(builder_, gathered_in(), from, rows_in_[content], rows_);
      }
      if (!has_columns(me_)) take(builder_, gathered_in(), from, columns_in_, columns_);
    }
  }

  // Sends the rank's own tokens for the heads of another rank.
  void send_heads(int to, const HeadShare& share) {
    for (const Content content : with_rows_) {
      if (local().query_length == 0 || has_rows(content, to)) continue;
      const int packed = add_rows(content, Role::out, to, builder_.all_rows(), share);
      send_own(builder_, gathered_in(), to, packed, rows_);
    }
    if (local().kv_length > 0 && !has_columns(to)) {
      const int packed = add_columns(Role::out, to, builder_.all_columns(), share, turn());
      send_own(builder_, gathered_in(), to, packed, columns_);
    }
  }

  void compute(const HeadShare& share) {
    const auto results = static_cast<std::size_t>(turn());
    std::optional<Result>& target = computed_[results];
    target = builder_.add_complete_results(rows_.all(), share.heads, target ? &*target : nullptr);
    const int rows = builder_.add_rows(rows_in_, rows_.positions(), *target, true);
    const int first_step = gathered_in() + 1;
    rounds_.add(first_step,
                {share.kv_heads, {columns_in_, columns_in_, columns_.pieces()}, columns_in_},
                [&](int step, int /*hop*/, const PlacedColumns& columns) {
                  builder_.compute(step, rows, share.heads, columns);
                });
    builder_.complete(first_step + rounds_.steps() - 1, rows, share.heads);
  }

  // Sends the outputs of others' rows and receives the outputs of the rank's own rows.
  void scatter() {
    const int sent_in = gathered_in() + rings_ + 1;
    const auto set = static_cast<std::size_t>(turn());
    const HeadShare* const mine = share_of(me_);
    for (int turn = 1; turn < degree_ && mine != nullptr; ++turn) {
      const int to = (me_ + turn) % degree_;
      builder_.send(sent_in, peer(to), peer(to), *computed_[set], rows_.placed(to));
    }
    for (int turn = 0; turn < degree_; ++turn) {
      const int from = (me_ + degree_ - turn) % degree_;
      const HeadShare* const share = share_of(from);
      if (share == nullptr || local().query_length == 0) continue;
      Result part;
      if (from == me_) {
        part = *computed_[set];
      } else {
        std::optional<Result>& received =
            received_.try_emplace({from, static_cast<int>(set)}).first->second;
        received = builder_.add_complete_results(builder_.all_rows(), share->heads,
                                                 received ? &*received : nullptr);
        part = *received;
      }
      for (const Gathering::Message& message : rows_.messages(me_)) {
        const LocalPosition begin = (from == me_ ? message.placed() : message.tokens).begin;
        builder_.copy(sent_in + 1, part, begin, builder_.own_results(share->heads), message.tokens);
      }
      if (from != me_) {
        builder_.receive(sent_in, peer(from), peer(me_), part, rows_.tokens(me_));
      }
    }
  }

  PlanBuilder builder_;
  std::vector<Content> with_rows_;
  std::vector<std::vector<HeadShare>> shares_;  // by inner rank
  RingTraffic traffic_;
  RingRounds rounds_;
  std::size_t group_ = 0;                     // the current one
  RowBuffers rows_in_ = builder_.own_rows();  // its buffers
  int columns_in_ = -1;
  int column_turn_ = 0;
  // The latest, by content, role, rank and turn.
  std::map<std::tuple<Content, Role, int, int>, int> buffers_;
  std::array<std::optional<Result>, 2> computed_;                  // by turn
  std::map<std::pair<int, int>, std::optional<Result>> received_;  // by rank and turn
};

}  // namespace

int ulysses_degree(const PlanInput& input) {
  if (input.options.ulysses_degree != 0) return input.options.ulysses_degree;
  const MeshShape& mesh = input.operands.key.mesh();
  std::vector<int> sizes;
  for (const std::string& axis : input.operands.key.spec()[1]) {
    if (mesh.axis_size(axis) > 1) sizes.push_back(mesh.axis_size(axis));
  }
  if (sizes.size() > 1) return sizes.back();
  const std::int64_t kv_heads =
      std::max<std::int64_t>(1, input.problem.shape.kv_heads / input.operands.key.shards(2));
  return static_cast<int>(std::gcd<std::int64_t>(input.operands.key.shards(1), kv_heads));
}

RankPlan plan_ulysses(const RankContext& context) {
  if (context.group.size() == 1) return plan_local(context);
  return HeadExchange(context, static_cast<int>(context.group.size())).plan();
}

RankPlan plan_hybrid(const RankContext& context) {
  if (context.group.size() == 1) return plan_local(context);
  const int degree = ulysses_degree(context.input);
  if (degree == 1) return plan_ring(context);  // no heads to exchange, so no copies of them
  return HeadExchange(context, degree).plan();
}

}  // namespace annulus::ring
