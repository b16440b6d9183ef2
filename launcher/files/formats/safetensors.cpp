#include "formats/safetensors.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

namespace annulus::files {
namespace {

using nlohmann::json;

constexpr std::int64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr std::string_view kMetadata = "__metadata__";

struct Name {
  std::string_view text;
  DType dtype;
};
constexpr std::array kNames{
    Name{"BOOL", DType::boolean}, Name{"U8", DType::uint8},      Name{"I32", DType::int32},
    Name{"F16", DType::float16},  Name{"BF16", DType::bfloat16}, Name{"F32", DType::float32},
    Name{"F64", DType::float64},
};

// The header's JSON. A duplicate name is refused, since readers differ in which one they take.
json parse_json(const std::string& text, const std::string& path) {
  std::set<std::string> keys;
  const auto check_keys = [&](int depth, json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 &&
        !keys.insert(parsed.get<std::string>()).second) {
      throw FileError(path, fmt::format("tensor {} comes twice in the header", parsed.dump()));
    }
    return true;
  };
  try {
    json header = json::parse(text, check_keys);
    if (!header.is_object()) throw FileError(path, "the header is not a JSON object");
    return header;
  } catch (const json::exception& error) {
    throw FileError(path, fmt::format("the header is not JSON: {}", error.what()));
  }
}

// A list of integers ≥ 0.
std::vector<std::int64_t> sizes(const json& object, const char* key, const std::string& name,
                                const std::string& path) {
  const auto found = object.find(key);
  std::vector<std::int64_t> values;
  bool good = found != object.end() && found->is_array();
  if (good) {
    for (const json& value : *found) {
      good = good && value.is_number_unsigned() &&
             value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
      if (good) values.push_back(value.get<std::int64_t>());
    }
  }
  if (!good) {
    throw FileError(path, fmt::format("tensor '{}': '{}' is not a list of sizes", name, key));
  }
  return values;
}

SafetensorsEntry entry(const std::string& name, const json& object, std::int64_t data_bytes,
                       const std::string& path) {
  if (!object.is_object() || !object.contains("dtype") || !object["dtype"].is_string()) {
    throw FileError(path, fmt::format("tensor '{}' has no dtype", name));
  }
  SafetensorsEntry result{name, object["dtype"].get<std::string>(),
                          sizes(object, "shape", name, path), 0, 0};
  const std::vector<std::int64_t> offsets = sizes(object, "data_offsets", name, path);
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    throw FileError(path, fmt::format("tensor '{}': data_offsets [{}] in {} bytes of data", name,
                                      fmt::join(offsets, ", "), data_bytes));
  }
  result.offset = offsets[0];
  result.bytes = offsets[1] - offsets[0];
  return result;
}

// The tensors must tile the data.
void check_tiling(std::vector<SafetensorsEntry> entries, std::int64_t data_bytes,
                  const std::string& path) {
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  std::int64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset != end) {
      throw FileError(path, fmt::format("tensor '{}' starts at byte {} of the data, expected {}",
                                        entry.name, entry.offset, end));
    }
    end += entry.bytes;
  }
  if (end != data_bytes) {
    throw FileError(path,
                    fmt::format("tensors end at byte {} of {} bytes of data", end, data_bytes));
  }
}

}  // namespace

std::vector<SafetensorsEntry> read_safetensors_header(const FileDescriptor& file,
                                                      const std::string& path) {
  const std::int64_t size = file_size(file, path);
  if (size < kLengthBytes) throw FileError(path, "is too short for a .safetensors file");
  std::array<std::byte, kLengthBytes> prefix{};
  read_at(file, path, 0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < prefix.size(); ++i) {
    length |= std::to_integer<std::uint64_t>(prefix[i]) << (8 * i);
  }
  if (length > kMaxHeader || length > static_cast<std::uint64_t>(size - kLengthBytes)) {
    throw FileError(
        path, fmt::format(".safetensors header of {} bytes in a file of {} bytes", length, size));
  }
  std::string text(length, '\0');
  read_at(file, path, kLengthBytes, std::as_writable_bytes(std::span(text)));

  const std::int64_t data_begin = kLengthBytes + static_cast<std::int64_t>(length);
  const std::int64_t data_bytes = size - data_begin;
  const json header = parse_json(text, path);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, object] : header.items()) {
    if (name != kMetadata) entries.push_back(entry(name, object, data_bytes, path));
  }
  check_tiling(entries, data_bytes, path);
  for (SafetensorsEntry& entry : entries) entry.offset += data_begin;
  return entries;
}

const SafetensorsEntry& find_entry(std::span<const SafetensorsEntry> entries,
                                   const std::string& path, std::string_view name) {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const auto& entry) { return entry.name == name; });
  if (found == entries.end()) {
    std::vector<std::string_view> names;
    for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
    throw FileError(
        path, fmt::format("has no tensor '{}'; its tensors are: {}", name, fmt::join(names, ", ")));
  }
  if (found->shape.size() > Extents::kMaxRank) {
    throw FileError(path, fmt::format("tensor '{}' has {} dimensions; accepted are up to {}", name,
                                      found->shape.size(), Extents::kMaxRank));
  }
  return *found;
}

ArrayInfo find_tensor(std::span<const SafetensorsEntry> entries, const std::string& path,
                      std::string_view name, std::span<const DType> accepted) {
  const SafetensorsEntry& found = find_entry(entries, path, name);
  const auto* const dtype = std::find_if(kNames.begin(), kNames.end(), [&](const Name& candidate) {
    return candidate.text == found.dtype;
  });
  if (dtype == kNames.end()) {
    throw FileError(path, fmt::format("tensor '{}': dtype {}, expected {}", name, found.dtype,
                                      list_of(accepted)));
  }
  ArrayInfo info{found.name, dtype->dtype, Extents(found.shape), found.offset};
  check_data_bytes(path, fmt::format("tensor '{}': ", name), found.dtype, size_of(info.dtype),
                   info.shape, found.bytes);
  return info;
}

std::string make_safetensors_header(std::span<ArrayInfo> arrays) {
  constexpr std::size_t kAlignment = 8;
  // Wide elements first, so that every tensor is aligned to its elements.
  std::vector<ArrayInfo*> order;
  for (ArrayInfo& array : arrays) order.push_back(&array);
  std::stable_sort(order.begin(), order.end(), [](const ArrayInfo* a, const ArrayInfo* b) {
    return size_of(a->dtype) > size_of(b->dtype);
  });
  json header = json::object();
  std::int64_t end = 0;
  for (ArrayInfo* array : order) {
    if (array->name.empty() || array->name == kMetadata || header.contains(array->name)) {
      throw InternalError("'" + array->name + "' cannot name a tensor");
    }
    const auto* const name = std::find_if(kNames.begin(), kNames.end(), [&](const Name& candidate) {
      return candidate.dtype == array->dtype;
    });
    array->offset = end;
    end += byte_count(array->dtype, array->shape).value();
    header[array->name] = {
        {"dtype", name->text},
        {"shape", std::vector<std::int64_t>(array->shape.begin(), array->shape.end())},
        {"data_offsets", {array->offset, end}}};
  }
  std::string text = header.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  for (ArrayInfo& array : arrays) {
    array.offset += kLengthBytes + static_cast<std::int64_t>(text.size());
  }
  std::string prefix;
  for (unsigned i = 0; i < kLengthBytes; ++i) {
    prefix += static_cast<char>((text.size() >> (8 * i)) & 0xffU);
  }
  return prefix + text;
}

}  // namespace annulus::files
