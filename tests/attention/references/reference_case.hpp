#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <annulus/attention/problem.hpp>
#include <annulus/attention/score_tensors.hpp>
#include <annulus/core/tensor.hpp>

namespace annulus::test {

/// How JAX laid a case over its devices.
struct ReferenceSharding {
  using Part = std::vector<std::pair<std::int64_t, std::int64_t>>;  ///< [begin, end) by dimension
  std::string mesh;
  std::string query_spec;
  std::string kv_spec;
  std::map<std::string, std::vector<Part>> devices;  ///< of "query", "key" …: a part per device
};

/// A fixture of cases/: a problem, and the results of another implementation. README.md describes
/// the files.
struct ReferenceCase {
  std::string name;
  AttentionProblem problem;
  Tensor query;                    ///< [B,T,N,D]
  Tensor key;                      ///< [B,S,K,D]
  Tensor value;                    ///< [B,S,K,Dv]
  Tensor output;                   ///< [B,T,N,Dv]
  std::optional<Tensor> lse = {};  ///< [B,N,T], float32
  /// Bias and mask of `problem`: [B,N,T,S], with 1 where broadcast; without dimensions if absent.
  Tensor bias = {};
  Tensor mask = {};
  /// The dtype to which the reference rounded its LSE.
  DType lse_dtype = DType::float32;
  /// Rows that see nothing hold the mean of all values, or 0 past the query's length, and an LSE
  /// that is finite and below −2·10³⁸; docs/semantics.md wants 0 and −∞.
  bool differs_in_empty_rows = false;
  /// The problem that the reference computed, where docs/semantics.md defines the case differently.
  std::optional<AttentionProblem> taken_for = {};
  /// Bias and mask of `taken_for`.
  Tensor bias_as_taken = {}, mask_as_taken = {};
  std::optional<ReferenceSharding> sharding = {};

  /// Bias and mask of `problem`, or of `taken_for`.
  [[nodiscard]] ScoreTensors scores(const AttentionProblem& of) const;
  /// The problem that the reference computed.
  [[nodiscard]] const AttentionProblem& computed() const {
    return taken_for ? *taken_for : problem;
  }
  [[nodiscard]] const Tensor& computed_bias() const { return taken_for ? bias_as_taken : bias; }
  [[nodiscard]] const Tensor& computed_mask() const { return taken_for ? mask_as_taken : mask; }
};

/// A fixture of gradients/: a problem, the gradients of a loss by its results, and those by its
/// operands. Tensors that it lacks have no dimensions.
struct ReferenceGradients {
  ReferenceCase reference;
  Tensor grad_output;  ///< [B,T,N,Dv]
  Tensor grad_lse;     ///< [B,N,T], float32
  Tensor query, key, value, bias, sinks;
};

/// Throws UserError for files that do not match README.md, and for tensors and options that the
/// library does not support.
[[nodiscard]] ReferenceCase read_reference(const std::string& name);

/// The same for gradients/.
[[nodiscard]] ReferenceGradients read_reference_gradients(const std::string& name);

/// Names of all cases in the folders, sorted.
[[nodiscard]] std::vector<std::string> reference_names();
[[nodiscard]] std::vector<std::string> reference_gradient_names();

}  // namespace annulus::test
