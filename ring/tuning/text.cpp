#include "tuning/text.hpp"

#include <limits>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>
#include <annulus/ring/planner.hpp>

#include "json_object.hpp"
#include "tuning/parameters.hpp"

namespace annulus::ring {
namespace {

using nlohmann::json;

constexpr const char* kSchema = "annulus.tuning";
constexpr double kLongest = 1e15;  // seconds

json choice_json(const Choice& choice) {
  json object = json::object();
  if (!choice.implementation.empty()) object["implementation"] = choice.implementation;
  if (!choice.schedule.empty()) object["schedule"] = choice.schedule;
  if (choice.transport != Transport::automatic) {
    object["transport"] = annulus::name_of(choice.transport);
  }
  for_each_parameter([&](const char* key, const char*, auto chosen, auto) {
    if (choice.*chosen > 0) object[key] = choice.*chosen;
  });
  return object;
}

Choice read_choice(const JsonObject& object) {
  std::vector<std::string_view> known{"implementation", "schedule", "transport"};
  for_each_parameter([&](const char* key, auto...) { known.emplace_back(key); });
  object.expect_no_others(known);
  Choice choice;
  if (object.has("implementation")) choice.implementation = object.text("implementation");
  if (object.has("schedule")) {
    choice.schedule = ring::name_of(object.parsed("schedule", parse_schedule));
  }
  if (object.has("transport")) choice.transport = object.parsed("transport", parse_transport);
  for_each_parameter([&](const char* key, const char*, auto chosen, auto) {
    using Value = std::remove_reference_t<decltype(choice.*chosen)>;
    if (!object.has(key)) return;
    choice.*chosen = static_cast<Value>(object.integer(key, 1, std::numeric_limits<Value>::max()));
  });
  return choice;
}

json candidate_json(const TunedCandidate& candidate) {
  json object{{"choice", choice_json(candidate.choice)},
              {"predicted_seconds", candidate.predicted}};
  if (candidate.seconds > 0) object["seconds"] = candidate.seconds;
  if (!candidate.reason.empty()) object["passed_over"] = candidate.reason;
  return object;
}

TunedCandidate read_candidate(const JsonObject& object) {
  object.expect_no_others({"choice", "predicted_seconds", "seconds", "passed_over"});
  TunedCandidate candidate;
  candidate.choice = read_choice(object.object("choice"));
  candidate.predicted = object.number("predicted_seconds", 0, kLongest);
  if (object.has("seconds")) candidate.seconds = object.number("seconds", 0, kLongest);
  if (object.has("passed_over")) candidate.reason = object.text("passed_over");
  return candidate;
}

json list_json(const std::vector<TunedCandidate>& candidates) {
  json list = json::array();
  for (const TunedCandidate& candidate : candidates) list.push_back(candidate_json(candidate));
  return list;
}

std::vector<TunedCandidate> read_candidates(const JsonObject& object) {
  std::vector<TunedCandidate> candidates;
  object.each("candidates", "", [&](const json& entry, const std::string& where) {
    candidates.push_back(read_candidate({entry, where, object.path()}));
  });
  return candidates;
}

TuningEntry read_entry(const JsonObject& object) {
  object.expect_no_others({"key", "date", "choice", "candidates"});
  TuningEntry entry;
  const JsonObject key = object.object("key");
  for (const auto& item : object.at("key").items()) {
    entry.key.emplace(item.key(), key.text(item.key().c_str()));
  }
  entry.date = object.text("date");
  entry.choice = read_choice(object.object("choice"));
  entry.candidates = read_candidates(object);
  return entry;
}

// Texts may quote a kernel or a system call, which need not be UTF-8.
template <class Json>
std::string dumped(const Json& data, int indent = -1) {
  return data.dump(indent, ' ', false, json::error_handler_t::replace);
}

// Reads the text that ranks send each other.
template <class Read>
auto from_rank(std::string_view text, const Read& read) {
  const std::string from = "tuning";
  try {
    return read(json::parse(text), from);
  } catch (const json::exception& error) {
    throw InternalError(fmt::format("tuning: {}", error.what()));
  } catch (const FileError& error) {
    throw InternalError(error.what());
  }
}

}  // namespace

CacheText kind_of(std::string_view text) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return CacheText::empty;
  if (text.find(fmt::format("\"{}\"", kSchema)) == std::string_view::npos)
    return CacheText::foreign;
  try {
    const json data = parse_json_file(text, "");
    const json version = data.is_object() ? data.value("version", json()) : json();
    if (version.is_number_integer() && version != kTuningVersion) return CacheText::other_version;
  } catch (const FileError&) {
    // Broken, but the rest shows that it was a cache.
  }
  return CacheText::cache;
}

std::string to_json(const std::vector<TuningEntry>& entries) {
  json list = json::array();
  for (const TuningEntry& entry : entries) {
    list.push_back({{"key", json(entry.key)},
                    {"date", entry.date},
                    {"choice", choice_json(entry.choice)},
                    {"candidates", list_json(entry.candidates)}});
  }
  // In this order, so that even the beginning of a file says what it is.
  const nlohmann::ordered_json file{
      {"schema", kSchema}, {"version", kTuningVersion}, {"entries", std::move(list)}};
  return dumped(file, 1);
}

std::vector<TuningEntry> parse_tuning(std::string_view text, const std::string& path) {
  const json data = parse_json_file(text, path);
  const JsonObject file(data, "", path);
  const json schema = data.value("schema", json());
  const json version = data.value("version", json());
  if (schema != kSchema || version != kTuningVersion) {
    file.fail("schema", fmt::format("is {} version {}, expected \"{}\" version {}", dumped(schema),
                                    dumped(version), kSchema, kTuningVersion));
  }
  file.expect_no_others({"schema", "version", "entries"});
  std::vector<TuningEntry> entries;
  std::set<TuningKey> keys;
  file.each("entries", "", [&](const json& entry, const std::string& where) {
    entries.push_back(read_entry({entry, where, path}));
    if (!keys.insert(entries.back().key).second) {
      file.fail(where, "has the key of an earlier entry");
    }
  });
  return entries;
}

std::string candidates_json(const std::vector<TunedCandidate>& candidates) {
  return dumped(json{{"candidates", list_json(candidates)}});
}

std::vector<TunedCandidate> parse_candidates(std::string_view text) {
  return from_rank(text, [](const json& data, const std::string& from) {
    return read_candidates({data, "", from});
  });
}

std::string to_json(const Decision& decision) {
  json passed = json::array();
  for (const Decision::Passed& one : decision.passed) {
    passed.push_back({static_cast<int>(one.link), one.reason});
  }
  return dumped(json{{"by", static_cast<int>(decision.by)},
                     {"choice", choice_json(decision.choice)},
                     {"why", decision.why},
                     {"passed", passed},
                     {"candidates", list_json(decision.candidates)}});
}

Decision parse_decision(std::string_view text) {
  return from_rank(text, [](const json& data, const std::string& from) {
    Decision decision;
    decision.by = static_cast<DecidedBy>(data.at("by").get<int>());
    decision.choice = read_choice({data.at("choice"), "choice", from});
    decision.why = data.at("why").get<std::string>();
    for (const json& one : data.at("passed")) {
      decision.passed.push_back(
          {static_cast<DecidedBy>(one.at(0).get<int>()), one.at(1).get<std::string>()});
    }
    decision.candidates = read_candidates({data, "", from});
    return decision;
  });
}

}  // namespace annulus::ring
