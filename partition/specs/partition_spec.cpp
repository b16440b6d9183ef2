#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/partition/named_sharding.hpp>

namespace annulus {
namespace {

constexpr std::string_view kNone = "-";

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    pieces.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return pieces;
}

std::string joined(const std::vector<AxisNames>& entries) {
  std::string text;
  for (const AxisNames& entry : entries) text += (text.empty() ? "" : ",") + to_string(entry);
  return text.empty() ? std::string(kNone) : text;
}

Distribution distribution_of(std::span<const Distribution> distributions, int dim) {
  const auto index = static_cast<std::size_t>(dim);
  return index < distributions.size() ? distributions[index] : Distribution::block();
}

// Throws the error in the entry of one dimension, if any.
void validate_entry(const PartitionSpec& spec, int dim, const MeshShape& mesh, const Extents& shape,
                    std::span<const Distribution> distributions) {
  const AxisNames& axes = spec[dim];
  const int ranks = mesh.size(axes);  // UnknownAxisError
  if (dim >= shape.rank()) throw SpecRankError(to_string(spec), spec.entries(), shape);
  if (!distribution_of(distributions, dim).fits(shape[dim], ranks)) {
    throw IndivisibleError(dim, shape[dim], axes, ranks);
  }
}

}  // namespace

DuplicateSpecError::DuplicateSpecError(std::string_view spec, std::string axis)
    : UserError(fmt::format("partition spec '{}' names axis '{}' twice", spec, axis)),
      axis_(std::move(axis)) {}

SpecRankError::SpecRankError(std::string_view spec, int entries, const Extents& shape)
    : UserError(fmt::format("partition spec '{}' has {} entries, but the array has rank {}: {}",
                            spec, entries, shape.rank(), to_string(shape))) {}

IndivisibleError::IndivisibleError(int dimension, std::int64_t size, AxisNames axes, int ranks)
    : UserError(fmt::format("dimension {} of size {} is not divisible by the {} ranks along {}",
                            dimension, size, ranks, to_string(axes))),
      dimension_(dimension),
      size_(size),
      axes_(std::move(axes)) {}

PartitionSpec::PartitionSpec(std::vector<AxisNames> entries) : entries_(std::move(entries)) {
  std::set<std::string_view> seen;
  for (const AxisNames& entry : entries_) {
    for (const std::string& axis : entry) {
      if (axis.empty()) throw ArgumentError("partition spec", "an empty axis name", "a mesh axis");
      if (!seen.insert(axis).second) throw DuplicateSpecError(joined(entries_), axis);
    }
  }
}

PartitionSpec PartitionSpec::parse(std::string_view text, std::string argument) {
  std::vector<AxisNames> entries;
  if (trimmed(text).empty()) return {};
  for (const std::string_view entry : split(text, ',')) {
    AxisNames& axes = entries.emplace_back();
    if (entry == kNone) continue;
    for (const std::string_view axis : split(entry, '+')) {
      if (axis.empty() || axis == kNone) {
        throw ArgumentError(std::move(argument), fmt::format("'{}'", text),
                            "one entry per dimension: an axis, a+b for a tuple, - for none");
      }
      axes.emplace_back(axis);
    }
  }
  return PartitionSpec(std::move(entries));
}

const AxisNames& PartitionSpec::operator[](int dim) const noexcept {
  static const AxisNames none;
  return dim < entries() ? entries_[static_cast<std::size_t>(dim)] : none;
}

bool PartitionSpec::names(std::string_view axis) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(), [&](const AxisNames& entry) {
    return std::find(entry.begin(), entry.end(), axis) != entry.end();
  });
}

AxisNames PartitionSpec::axes() const {
  AxisNames all;
  for (const AxisNames& entry : entries_) all.insert(all.end(), entry.begin(), entry.end());
  return all;
}

bool operator==(const PartitionSpec& a, const PartitionSpec& b) {
  for (int dim = 0; dim < std::max(a.entries(), b.entries()); ++dim) {
    if (a[dim] != b[dim]) return false;
  }
  return true;
}

std::string to_string(const AxisNames& axes) {
  return axes.empty() ? std::string(kNone) : fmt::format("{}", fmt::join(axes, "+"));
}

std::string to_string(const PartitionSpec& spec) {
  std::vector<AxisNames> entries;
  for (int dim = 0; dim < spec.entries(); ++dim) entries.push_back(spec[dim]);
  return joined(entries);
}

void validate(const PartitionSpec& spec, const MeshShape& mesh, const Extents& shape,
              std::span<const Distribution> distributions) {
  for (int dim = 0; dim < spec.entries(); ++dim) {
    validate_entry(spec, dim, mesh, shape, distributions);
  }
}

CorrectedSpec corrected_spec(const PartitionSpec& spec, const MeshShape& mesh, const Extents& shape,
                             std::span<const Distribution> distributions) {
  std::vector<AxisNames> entries;
  std::vector<SpecCorrection> corrections;
  for (int dim = 0; dim < spec.entries(); ++dim) {
    AxisNames axes = spec[dim];
    try {
      validate_entry(spec, dim, mesh, shape, distributions);
    } catch (const UserError& error) {
      corrections.push_back({dim, std::exchange(axes, {}), error.what()});
    }
    if (dim < shape.rank()) entries.push_back(std::move(axes));
  }
  return {PartitionSpec(std::move(entries)), std::move(corrections)};
}

}  // namespace annulus
