#include "formats/npy.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <annulus/core/error.hpp>

namespace annulus::files {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view kMagic = "\x93NUMPY"sv;
constexpr std::size_t kPreamble = 12;  // magic, version, length of the header: at most
constexpr std::int64_t kMaxHeader = std::int64_t{1} << 20;

struct Descr {
  std::string_view text;
  DType dtype;
};
// NumPy has no bfloat16: its bits come as uint16, or as two opaque bytes (ml_dtypes). If a dtype
// has several names, the first is written.
constexpr std::array kDescrs{
    Descr{"|b1", DType::boolean},  Descr{"|u1", DType::uint8},    Descr{"<i4", DType::int32},
    Descr{"<f2", DType::float16},  Descr{"<u2", DType::bfloat16}, Descr{"<V2", DType::bfloat16},
    Descr{"|V2", DType::bfloat16}, Descr{"<f4", DType::float32},  Descr{"<f8", DType::float64},
};

// Bytes of the file for a message; unprintable ones are shown as "?".
std::string shown(std::string_view text) {
  std::string result(text.substr(0, 80));
  std::replace_if(
      result.begin(), result.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return result;
}

// The header is a Python dictionary literal: {'descr': '<f4', 'fortran_order': False, 'shape': (2,
// 3), }. Each key comes once, in any order; there are no others.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  void parse() {
    expect('{');
    while (!take('}')) {
      entry();
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail("text after the dictionary");
    if (!descr_ || !fortran_order_ || !shape_) {
      fail("expected the keys 'descr', 'fortran_order' and 'shape'");
    }
  }

  [[nodiscard]] const std::string& descr() const { return *descr_; }
  [[nodiscard]] bool fortran_order() const { return *fortran_order_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return *shape_; }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw FileError(path_,
                    fmt::format(".npy header, character {}: {} in {}", at_, problem, shown(text_)));
  }

  void entry() {
    const std::string key = string();
    expect(':');
    if (key == "descr") {
      skip_space();
      if (peek() == '[') fail("structured dtypes are not accepted");
      set(descr_, string(), key);
    } else if (key == "fortran_order") {
      set(fortran_order_, boolean(), key);
    } else if (key == "shape") {
      set(shape_, tuple(), key);
    } else {
      fail("unknown key '" + shown(key) + "'");
    }
  }

  template <class T>
  void set(std::optional<T>& slot, T value, const std::string& key) {
    if (slot) fail("'" + key + "' twice");
    slot = std::move(value);
  }

  std::string string() {
    skip_space();
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail("expected a string");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) fail("an unterminated string");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }

  bool boolean() {
    skip_space();
    for (const auto& [word, value] : {std::pair{"True"sv, true}, std::pair{"False"sv, false}}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    fail("expected True or False");
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> sizes;
    bool comma = true;
    expect('(');
    while (!take(')')) {
      if (!comma) fail("expected ',' or ')'");
      sizes.push_back(size());
      comma = take(',');
    }
    if (sizes.size() == 1 && !comma) fail("a number in brackets where a tuple is expected");
    return sizes;
  }

  std::int64_t size() {
    skip_space();
    std::int64_t value = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error == std::errc::result_out_of_range) fail("a size that is too large");
    if (error != std::errc() || value < 0) fail("expected a size of 0 or more");
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (peek() == ' ' || peek() == '\n') ++at_;
  }

  bool take(char wanted) {
    skip_space();
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) fail(fmt::format("expected '{}'", wanted));
  }

  std::string_view text_;
  const std::string& path_;
  std::size_t at_ = 0;
  std::optional<std::string> descr_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<std::int64_t>> shape_;
};

std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

// The dictionary's text, and the offset of its end in the file.
std::pair<std::string, std::int64_t> read_dictionary(const FileDescriptor& file,
                                                     const std::string& path, std::int64_t size) {
  std::string preamble(std::min(kPreamble, static_cast<std::size_t>(size)), '\0');
  read_at(file, path, 0, bytes_of(preamble));
  if (size == 0) throw FileError(path, "is empty, expected a .npy file");
  if (!preamble.starts_with(kMagic)) {
    throw FileError(path, fmt::format("begins with '{}', expected a .npy file, which begins with "
                                      "\\x93NUMPY",
                                      shown(preamble.substr(0, kMagic.size()))));
  }
  // Formats 2.0 and 3.0 differ from 1.0 by the width of the length, and from each other by the
  // encoding of names that we do not accept anyway.
  const auto byte = [&](std::size_t i) -> std::int64_t {
    if (i >= preamble.size()) throw FileError(path, "ends inside the .npy header");
    return static_cast<unsigned char>(preamble[i]);
  };
  const std::int64_t major = byte(6);
  if (major < 1 || major > 3 || byte(7) != 0) {
    throw FileError(
        path, fmt::format(".npy format {}.{}; accepted are 1.0, 2.0 and 3.0", major, byte(7)));
  }
  const std::size_t width = major == 1 ? 2 : 4;
  std::int64_t length = 0;
  for (std::size_t i = 0; i < width; ++i) length |= byte(8 + i) << (8 * i);
  const auto begin = static_cast<std::int64_t>(8 + width);
  if (length > kMaxHeader || length > size - begin) {
    throw FileError(path,
                    fmt::format(".npy header of {} bytes in a file of {} bytes", length, size));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  read_at(file, path, begin, bytes_of(text));
  return {std::move(text), begin + length};
}

}  // namespace

NpyHeader read_npy_header(const FileDescriptor& file, const std::string& path) {
  const std::int64_t size = file_size(file, path);
  const auto [text, offset] = read_dictionary(file, path, size);
  HeaderParser header(text, path);
  header.parse();
  if (const std::string descr = shown(header.descr()); descr.starts_with('>')) {
    throw FileError(path, fmt::format("dtype '{}' is big-endian, expected a little-endian one "
                                      "(array.astype('<{}') in NumPy makes one)",
                                      descr, descr.substr(1)));
  }
  if (header.fortran_order()) {
    throw FileError(path, "is in Fortran order; accepted is C order (numpy.ascontiguousarray)");
  }
  if (header.shape().size() > Extents::kMaxRank) {
    throw FileError(path, fmt::format("has {} dimensions; accepted are up to {}",
                                      header.shape().size(), Extents::kMaxRank));
  }
  return {shown(header.descr()), Extents(header.shape()), offset, size - offset};
}

ArrayInfo find_array(const NpyHeader& header, const std::string& path,
                     std::span<const DType> accepted) {
  const bool bits = accepted.size() == 1 && accepted.front() == DType::bfloat16;
  const auto* const descr =
      std::find_if(kDescrs.begin(), kDescrs.end(),
                   [&](const Descr& candidate) { return candidate.text == header.descr; });
  if (descr == kDescrs.end() || (descr->dtype == DType::bfloat16 && !bits)) {
    throw FileError(
        path,
        fmt::format("dtype '{}', expected {}{}", header.descr, list_of(accepted),
                    descr == kDescrs.end()
                        ? ""
                        : " (uint16 and <V2 are taken as bfloat16 only with --dtype bfloat16)"));
  }
  ArrayInfo info{{}, descr->dtype, header.shape, header.offset};
  check_data_bytes(path, "", std::string(name_of(info.dtype)), size_of(info.dtype), info.shape,
                   header.data_bytes);
  return info;
}

std::string make_npy_header(DType dtype, const Extents& shape) {
  constexpr std::size_t kAlignment = 64;
  constexpr std::size_t kPrefix = 10;
  const auto* const descr = std::find_if(kDescrs.begin(), kDescrs.end(),
                                         [&](const Descr& entry) { return entry.dtype == dtype; });
  std::string dictionary =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr->text,
                  fmt::join(shape.begin(), shape.end(), ", "), shape.rank() == 1 ? "," : "");
  // The newline is the last byte before the data.
  const std::size_t unpadded = kPrefix + dictionary.size() + 1;
  dictionary.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  dictionary += '\n';
  std::string header(kMagic);
  header += {'\1', '\0', static_cast<char>(dictionary.size() & 0xffU),
             static_cast<char>(dictionary.size() >> 8U)};
  return header + dictionary;
}

}  // namespace annulus::files
