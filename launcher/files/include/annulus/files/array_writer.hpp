#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <annulus/core/file_descriptor.hpp>
#include <annulus/core/position.hpp>
#include <annulus/core/temporary_file.hpp>
#include <annulus/core/tensor.hpp>
#include <annulus/files/array_info.hpp>
#include <annulus/mesh/control.hpp>

namespace annulus::files {

/// An array to be written.
struct ArraySpec {
  std::string name;  ///< of the tensor; not used in a .npy file
  DType dtype = DType::float32;
  Extents shape;  ///< of the whole array
};

/// One file that ranks write together, each its own slices. The file appears complete under its
/// name when all have committed, or not at all: until then it is a TemporaryFile of rank 0. Ranks
/// on the same machine reach it through /proc; if there are ranks elsewhere, it has a temporary
/// name.
///
/// ".safetensors" takes one or more arrays; any other name becomes .npy 1.0 and takes one. bfloat16
/// is written to .npy as its bits, uint16.
class ArrayWriter {
 public:
  /// Collective over `group`, which must outlive the writer; its ranks must see one file system.
  /// The space that the file needs is taken now, where the file system can.
  /// All ranks throw UserError (a directory that is missing or not writable, a name that is taken
  /// by something other than a file) or LibraryError (a full disk), as agree() does. `shown` is
  /// what errors call the file ("--output o.npy"); by default its path.
  ArrayWriter(Control& group, std::string path, std::vector<ArraySpec> arrays,
              const std::string& shown = "");
  /// Not collective. Without commit() nothing of the file remains.
  ~ArrayWriter() = default;
  ArrayWriter(const ArrayWriter&) = delete;
  ArrayWriter& operator=(const ArrayWriter&) = delete;

  /// Writes a host view to the entries at `index` (positions per dimension) of one array. Not
  /// collective. Together the ranks must write every entry once: one of the ranks with equal data
  /// writes. Throws nothing: a failure is kept for commit(), so that no rank leaves the others
  /// waiting.
  void write_slice(std::span<const PositionRanges> index, const ConstTensorView& source,
                   std::size_t array = 0) noexcept;

  /// Collective. Brings the data to disk, so that little can fail in commit(). All ranks throw
  /// LibraryError (as agree() does) if one fails, or if the number of entries written is wrong;
  /// then neither the new file nor the temporary one remains.
  void complete();
  /// Collective. Gives the file its name, after complete() if that was not called. Throws as
  /// complete() does.
  void commit();

 private:
  void create(const std::string& header, std::int64_t bytes);
  void open_on_other_ranks();
  // Runs body() and makes its errors use the name by which the user knows the file.
  template <class Body>
  void as_shown(const Body& body) const;
  [[nodiscard]] const FileDescriptor& file() const {
    return temporary_ ? temporary_->descriptor() : file_;
  }
  void write(std::span<const PositionRanges> index, const ConstTensorView& source,
             std::size_t array);

  Control& group_;
  std::string path_;
  std::string shown_;
  std::vector<ArrayInfo> arrays_;
  FileDescriptor file_;                       // not on rank 0
  std::unique_ptr<TemporaryFile> temporary_;  // rank 0 only
  bool completed_ = false;
  std::vector<double> written_;  // entries that this rank wrote, per array
  std::exception_ptr failure_;   // this rank's first
};

}  // namespace annulus::files
