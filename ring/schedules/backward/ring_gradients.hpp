#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "schedules/backward/backward_builder.hpp"
#include "schedules/building/ring_rounds.hpp"

namespace annulus::ring {

/// A round of a ring, backward pass.
///
/// Keys and values go round as in the forward pass. The gradients of a member's columns follow in
/// float32, and the exchanges of a step bring keys and values first, so that gradients do not delay
/// them. They come home in one of two ways. Directly: every member sends its part to the owner, who
/// adds the parts in the order of the hops. This is done if columns come directly as well, or if
/// parts are rounded (PlanOptions::grad_wire). Otherwise the sum travels one hop behind the
/// columns, past the members that compute any of them, and the last of these members sends it home.
/// In a double ring it always travels behind, and holds the sum of a whole row when it crosses to
/// the next one.
class RingGradients {
 public:
  /// Plans the computation of some columns, whose gradients are added to these buffers.
  using Compute =
      std::function<void(int step, const PlacedColumns& columns, const ColumnGradients& gradients)>;

  /// `needs` are the members', of which this rank is `me`; `group_rank` maps a member to the plan's
  /// group. All references must outlive the object.
  RingGradients(const RankContext& context, BackwardBuilder& builder, const KvNeeds& needs,
                RingOrder order, int me, std::function<int(int member)> group_rank,
                HeadRange kv_heads);

  /// Plans the round, from this step on. The gradients of the member's own columns are added to
  /// `own`.
  void add(int first_step, const RingShare& share, const ColumnGradients& own,
           const Compute& compute);
  /// The step after which all gradients are home.
  [[nodiscard]] int last_step(int first_step) const { return first_step + order_.members; }

 private:
  enum class Role : std::uint8_t { part, received, sum, home, wire };
  static constexpr std::size_t kSlots = 2;

  [[nodiscard]] std::vector<LocalRange> needed(int origin, int member) const;
  [[nodiscard]] std::vector<LocalRange> needed_in(int origin, int hop) const;
  [[nodiscard]] int needed_before(int origin, int hop) const;
  [[nodiscard]] int needed_after(int origin, int hop) const;
  [[nodiscard]] std::vector<LocalRange> summed(int origin, int hop) const;
  int& last_of(Role role);
  int add_buffer(Role role, std::int64_t tokens);
  int fresh(std::int64_t tokens);
  void compute_hop(int step, int hop, const PlacedColumns& columns, const Compute& compute);
  void send(int step, int member, int origin, int buffer);
  void receive(int step, int member, int origin, int buffer);
  int add_up(int step, int origin, int before, int hop, int part,
             const std::vector<LocalRange>& mine);
  void bring_home(const ColumnGradients& own);
  void take_home(int hop, const std::vector<LocalRange>& runs, const ColumnGradients& own);

  BackwardBuilder& builder_;
  const KvNeeds& needs_;
  RingOrder order_;
  int me_;
  std::function<int(int)> group_rank_;
  HeadRange kv_heads_;
  bool sends_columns_directly_;
  bool direct_;  // gradients
  RingTraffic traffic_;
  RingRounds rounds_;
  int first_step_ = 0;
  std::map<Role, std::array<int, kSlots>> buffers_;  // the latest
  std::map<Role, std::size_t> used_;
};

}  // namespace annulus::ring
