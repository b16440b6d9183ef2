#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/agreement.hpp>

#include "file_reference.hpp"
#include "formats/npy.hpp"
#include "formats/safetensors.hpp"
#include "slice_runs.hpp"

namespace annulus::files {
namespace {

// A disk may take this many timeouts before it counts as hung.
constexpr double kDiskTimeouts = 20;

std::string header_of(const std::string& path, std::vector<ArrayInfo>& arrays) {
  for (const ArrayInfo& array : arrays) {
    if (!byte_count(array.dtype, array.shape)) {
      throw InternalError(path + ": cannot write an array of " + to_string(array.shape));
    }
  }
  if (is_safetensors(path)) return make_safetensors_header(arrays);
  if (arrays.size() != 1) {
    throw InternalError(fmt::format("{}: a .npy file holds 1 array, not {}", path, arrays.size()));
  }
  std::string header = make_npy_header(arrays[0].dtype, arrays[0].shape);
  arrays[0].offset = static_cast<std::int64_t>(header.size());
  return header;
}

}  // namespace

ArrayWriter::ArrayWriter(Control& group, std::string path, std::vector<ArraySpec> arrays,
                         const std::string& shown)
    : group_(group), path_(std::move(path)), shown_(shown), written_(arrays.size(), 0.0) {
  for (ArraySpec& array : arrays) {
    arrays_.push_back({std::move(array.name), array.dtype, array.shape, 0});
  }
  collectively(group_, [&] {
    const std::string header = header_of(path_, arrays_);
    if (group_.rank() != 0) return;
    const Computing making = group_.computing(kDiskTimeouts);
    auto end = static_cast<std::int64_t>(header.size());
    for (const ArrayInfo& array : arrays_) {
      end = std::max(end, array.offset + byte_count(array.dtype, array.shape).value());
    }
    as_shown([&] { create(header, end); });
  });
  open_on_other_ranks();
}

template <class Body>
void ArrayWriter::as_shown(const Body& body) const {
  try {
    body();
  } catch (const FileError& error) {
    if (shown_.empty()) throw;
    throw UserError(shown_ + std::string(error.what()).substr(error.path().size()));
  } catch (const SystemError& error) {
    if (shown_.empty()) throw;
    throw LibraryError(fmt::format("{}: {}", shown_, error.what()));
  }
}

void ArrayWriter::create(const std::string& header, std::int64_t bytes) {
  temporary_ = std::make_unique<TemporaryFile>(path_);
  reserve(file(), bytes);
  write_at(file(), path_, 0, std::as_bytes(std::span(header)));
}

void ArrayWriter::open_on_other_ranks() {
  const std::string own = collectively(
      group_, [&] { return temporary_ ? to_string(reference_to(file())) : std::string(); });
  const FileReference reference = parse_reference(group_.broadcast(own, "reference to a file"));
  collectively(group_, [&] {
    if (group_.rank() != 0) file_ = open_through_proc(reference);
  });
  if (group_.max(std::array{file() ? 0.0 : 1.0}, "whether ranks lack a file")[0] == 0) return;
  collectively(group_, [&] {
    if (temporary_) as_shown([&] { temporary_->give_name(); });
  });
  const std::string name = group_.broadcast(temporary_ ? temporary_->path() : "", "name of a file");
  collectively(group_, [&] {
    if (!file()) as_shown([&] { file_ = open_by_name(name, reference); });
  });
}

void ArrayWriter::write_slice(std::span<const PositionRanges> index, const ConstTensorView& source,
                              std::size_t array) noexcept {
  if (failure_) return;
  try {
    const Computing writing = group_.computing(kDiskTimeouts);
    write(index, source, array);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void ArrayWriter::write(std::span<const PositionRanges> index, const ConstTensorView& source,
                        std::size_t array) {
  const ArrayInfo& info = arrays_.at(array);
  if (source.dtype() != info.dtype) {
    throw InternalError(fmt::format("{} of {} written from {}", path_, name_of(info.dtype),
                                    name_of(source.dtype())));
  }
  const auto* const memory = static_cast<const std::byte*>(source.data());
  const auto size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
  std::vector<std::byte> staging;
  // Gaps are not allowed, since the bytes between two runs belong to other ranks.
  for_each_transfer(info.shape, index, source, 0, [&](std::span<const Run> runs) {
    const Run& first = runs.front();
    std::span<const std::byte> bytes(memory + first.memory, size(first.bytes));
    if (runs.size() > 1) {
      staging.resize(size(runs.back().file_end() - first.file));
      for (const Run& run : runs) {
        std::memcpy(staging.data() + (run.file - first.file), memory + run.memory, size(run.bytes));
      }
      bytes = staging;
    }
    write_at(file(), path_, info.offset + first.file, bytes);
  });
  written_[array] += static_cast<double>(source.elements());
}

void ArrayWriter::complete() {
  std::unique_ptr<TemporaryFile> temporary = std::move(temporary_);  // removed on exception
  collectively(group_, [&] {
    if (failure_) as_shown([&] { std::rethrow_exception(failure_); });
    if (completed_) throw InternalError(path_ + ": completed twice");
    const Computing writing = group_.computing(kDiskTimeouts);
    if (file_) as_shown([&] { sync_and_close(std::move(file_), path_); });
  });
  const std::vector<double> written = group_.sum(written_, "entries written to " + path_);
  for (std::size_t i = 0; i < arrays_.size(); ++i) {
    const std::int64_t elements = arrays_[i].shape.product();
    if (written[i] != static_cast<double>(elements)) {
      throw InternalError(
          fmt::format("{}: {} of {} entries were written", path_, written[i], elements));
    }
  }
  collectively(group_, [&] {
    const Computing writing = group_.computing(kDiskTimeouts);
    if (temporary) as_shown([&] { temporary->complete(); });
  });
  temporary_ = std::move(temporary);
  completed_ = true;
}

void ArrayWriter::commit() {
  if (!completed_) complete();
  // Removed on return or exception, unless it gets its name.
  const std::unique_ptr<TemporaryFile> temporary = std::move(temporary_);
  collectively(group_, [&] {
    if (group_.rank() != 0) return;
    if (!temporary) throw InternalError(path_ + ": committed twice");
    as_shown([&] { temporary->commit(); });
  });
}

}  // namespace annulus::files
