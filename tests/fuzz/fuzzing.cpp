#include "fuzzing.hpp"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <annulus/core/position.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/files/integer_file.hpp>

namespace annulus::test {
namespace {

// Entries 1, 3, 5, … of every dimension that has so many; the others whole.
std::vector<PositionRanges> every_other(const Extents& shape) {
  std::vector<PositionRanges> index;
  for (const std::int64_t size : shape) {
    index.push_back(size < 2 ? PositionRanges::all(size)
                             : PositionRanges({{GlobalPosition(1), size / 2, 2}}));
  }
  return index;
}

// The same entries of a view.
ConstTensorView every_other(const TensorView& view) {
  Extents shape = view.shape();
  Extents strides = view.strides();
  std::int64_t offset = 0;
  for (int dim = 0; dim < view.rank(); ++dim) {
    if (shape[dim] < 2) continue;
    offset += strides[dim];
    strides[dim] *= 2;
    shape[dim] /= 2;
  }
  const auto* const first = static_cast<const std::byte*>(view.data()) +
                            offset * static_cast<std::int64_t>(size_of(view.dtype()));
  return {first, view.dtype(), shape, strides};
}

}  // namespace

void require(bool holds, const char* claim) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", claim);
  std::abort();
}

InputFile::InputFile(const char* name) {
  std::string folder = std::filesystem::temp_directory_path() / "annulus-fuzz-XXXXXX";
  require(::mkdtemp(folder.data()) != nullptr, "a folder for the input can be made");
  folder_ = std::move(folder);
  path_ = folder_ + "/" + name;
}

InputFile::~InputFile() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void InputFile::set(std::string_view contents) const {
  std::ofstream file(path_, std::ios::binary | std::ios::trunc);
  file << contents;
  file.close();
  require(file.good(), "the input can be written to a file");
}

void read_array(const InputFile& input, std::string_view contents, const std::string& tensor,
                const std::vector<DType>& accepted) {
  const auto file = taken([&] { return files::ArrayFile(input.path(), tensor, accepted); });
  if (!file) return;
  const std::optional<std::int64_t> size = files::byte_count(file->dtype(), file->shape());
  require(size && *size <= static_cast<std::int64_t>(contents.size()), "an array fits its file");
  std::vector<std::byte> bytes(static_cast<std::size_t>(*size));
  const TensorView whole(bytes.data(), file->dtype(), file->shape());
  const auto read = [&] {
    file->read_slice(files::whole(file->shape()), whole);
    return true;
  };
  if (!taken(read) || bytes.empty()) return;
  const std::string_view seen(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  require(contents.find(seen) != std::string_view::npos, "an array's bytes are in the file");

  const ConstTensorView expected = every_other(whole);
  std::vector<std::byte> packed(expected.bytes());
  std::vector<std::byte> sliced(expected.bytes());
  copy(expected, TensorView(packed.data(), file->dtype(), expected.shape()));
  file->read_slice(every_other(file->shape()),
                   TensorView(sliced.data(), file->dtype(), expected.shape()));
  require(packed == sliced, "a slice has the entries of the whole array");
}

void read_integers(const InputFile& input, const std::string& tensor) {
  const auto file = taken([&] { return files::IntegerFile(input.path(), tensor); });
  if (!file) return;
  const auto values = taken([&] { return file->read(); });
  require(!values || static_cast<std::int64_t>(values->size()) == file->shape().product(),
          "there are as many numbers as the shape says");
}

}  // namespace annulus::test
