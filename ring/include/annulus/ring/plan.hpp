#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/mesh/mesh_shape.hpp>
#include <annulus/partition/position.hpp>

/// What every rank does, as plain data. A plan is made by pure functions (planner.hpp), printed,
/// costed and simulated without MPI; the executor only obeys it.
///
/// A rank keeps its rows and sees columns pass. Columns live in buffers, whose tokens are counted
/// in slots: buffer 0 is the rank's own key and value as the caller gave them; packed buffers hold
/// copies of parts of it, laid out for sending; receive buffers hold what came from others. In
/// packed and receive buffers a token's K and V for all batches and heads of the buffer lie
/// together, so that any run of slots is one message.
///
/// The steps of a rank run in order. Step s posts its transfers, then computes its blocks under
/// them; what it receives is computed on in step s + 1. The two sides of a transfer stand in the
/// same step of their ranks, and between two ranks transfers match in order.
namespace annulus::ring {

/// How key/value blocks travel (SEMANTICS §5).
enum class Schedule : std::uint8_t { local, ring, allgather };

[[nodiscard]] std::string_view name_of(Schedule schedule) noexcept;

/// What a transfer carries. The backward pass will add the gradients of key and value, which travel
/// while those of the query stay; pass_q will add queries.
enum class Payload : std::uint8_t { key_value };

[[nodiscard]] std::string_view name_of(Payload payload) noexcept;

/// Heads [begin, begin + count) of a rank's shard.
struct HeadRange {
  std::int64_t begin = 0;
  std::int64_t count = 0;
  bool operator==(const HeadRange&) const = default;
};

enum class BufferKind : std::uint8_t { input, packed, receive };

struct KvBuffer {
  BufferKind kind = BufferKind::input;
  std::int64_t slots = 0;
  HeadRange kv_heads;
  /// Input and packed: the local columns that slots 0, 1, … hold.
  LocalRange source;
  /// Index of an earlier buffer, at least as large, whose memory this one takes over; −1 for none.
  int reuses = -1;
};

struct Transfer {
  Payload payload = Payload::key_value;
  int peer = 0;    ///< group rank on the other side
  int origin = 0;  ///< group rank that owns the columns
  int buffer = 0;  ///< index of the buffer on this side
  LocalRange slots;
  std::int64_t bytes = 0;
};

/// A tile of work: some rows of the rank against some slots of one buffer, for some heads.
struct Block {
  LocalRange rows;  ///< local rows
  PositionRanges row_positions;
  int buffer = 0;
  LocalRange slots;
  PositionRanges column_positions;
  HeadRange heads;  ///< query heads
  /// Visible (row, column) pairs over the batches of the rank, per head; see Mask::examine.
  std::int64_t pairs = 0;
  bool full = false;  ///< no pair is masked
  /// Whether the result is merged into the state of its rows, or becomes it (first touch).
  bool merge = false;
};

struct Step {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
  std::vector<Block> blocks;  ///< computed and merged in this order
};

struct RankPlan {
  int rank = 0;        ///< in the mesh
  int group_rank = 0;  ///< in the group along the key/value sequence axes
  /// Sizes of the rank's shard; query_length and kv_length count local rows and columns.
  AttentionShape local;
  std::int64_t first_batch = 0;
  std::int64_t first_head = 0;
  std::vector<KvBuffer> buffers;
  std::vector<Step> steps;

  /// Visible pairs times query heads.
  [[nodiscard]] double work() const;
  /// Operations of one of its blocks: 2 (D + Dv) for every visible pair and query head.
  [[nodiscard]] double flops(const Block& block) const;
  [[nodiscard]] std::int64_t bytes_received() const;
  [[nodiscard]] std::int64_t bytes_sent() const;
  [[nodiscard]] int merges() const;
  /// Bytes of one slot of a packed or receive buffer: K and V of one token.
  [[nodiscard]] std::int64_t slot_bytes(const KvBuffer& buffer, DType dtype) const;
  /// Bytes of the packed and receive buffers together.
  [[nodiscard]] std::int64_t buffer_bytes(DType dtype) const;
};

/// The plans of all ranks of a mesh.
struct Plan {
  AttentionProblem problem;
  MeshShape mesh;
  AxisNames sequence_axes;  ///< along which key/value is sharded
  Schedule schedule = Schedule::local;
  std::string layout;  ///< of the key/value sequence: "zigzag"
  std::vector<RankPlan> ranks;

  /// Work of the most loaded rank over the mean, minus 1; 0 if there is no work.
  [[nodiscard]] double imbalance() const;
};

/// A readable account of the whole plan: mesh, shards, totals per rank, and for up to `max_ranks`
/// ranks every step.
[[nodiscard]] std::string to_text(const Plan& plan, int max_ranks = 0);
/// The whole plan as JSON, every field named as here; "version": 1.
[[nodiscard]] std::string to_json(const Plan& plan);

}  // namespace annulus::ring
