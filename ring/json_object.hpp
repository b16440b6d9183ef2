#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

namespace annulus::ring {

/// The JSON of a file. Throws FileError, naming `path`, if `text` is not JSON, nests too deeply or
/// has a number that float64 cannot hold.
[[nodiscard]] nlohmann::json parse_json_file(std::string_view text, const std::string& path);

/// An object of a file, and its location there: "entries[2].choice". All that is not as expected
/// becomes a FileError that names the location. The JSON and the path must outlive it.
class JsonObject {
 public:
  using json = nlohmann::json;

  /// `where` is empty for the file's outermost object.
  JsonObject(const json& object, std::string where, const std::string& path);

  template <class Keys = std::initializer_list<std::string_view>>
  void expect_no_others(const Keys& keys) const {
    for (const auto& item : object_.items()) {
      bool known = false;
      for (const std::string_view key : keys) known = known || item.key() == key;
      if (!known) fail(name(item.key()), "is not a key of this kind of file");
    }
  }

  [[nodiscard]] bool has(const std::string& key) const { return object_.contains(key); }
  [[nodiscard]] const json& at(const std::string& key) const;
  [[nodiscard]] JsonObject object(const std::string& key) const {
    return {at(key), name(key), path_};
  }
  /// Calls visit(entry, its location) for the entries of a list. `of` says in messages what the
  /// entries are: " of names".
  template <class Visit>
  void each(const std::string& key, const char* of, const Visit& visit) const {
    if (!at(key).is_array()) fail(name(key), std::string("is not a list") + of);
    for (std::size_t i = 0; i < at(key).size(); ++i) {
      visit(at(key)[i], fmt::format("{}[{}]", name(key), i));
    }
  }

  [[nodiscard]] std::string text(const std::string& key) const;
  [[nodiscard]] bool flag(const std::string& key) const;
  /// From `least` to `most`.
  [[nodiscard]] double number(const std::string& key, double least, double most) const;
  [[nodiscard]] std::int64_t integer(const std::string& key, std::int64_t least,
                                     std::int64_t most) const;

  /// parse(text); the message quotes what its ArgumentError expected.
  template <class Parse>
  [[nodiscard]] auto parsed(const std::string& key, const Parse& parse) const {
    try {
      return parse(text(key));
    } catch (const ArgumentError& error) {
      fail(name(key), fmt::format("is {}, expected {}", error.value(), error.expected()));
    }
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// The location of a member.
  [[nodiscard]] std::string name(const std::string& key) const {
    return where_.empty() ? key : where_ + "." + key;
  }
  [[noreturn]] void fail(const std::string& location, const std::string& problem) const {
    throw FileError(path_, location + " " + problem);
  }

 private:
  const json& object_;
  std::string where_;
  const std::string& path_;
};

}  // namespace annulus::ring
