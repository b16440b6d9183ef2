// The text of the persistent cache, and what ranks send each other.
#include "tuning/text.hpp"

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <annulus/core/error.hpp>

#include "tests/ring/tuning/entries.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::ring {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(TuningText, GivesEntriesBack) {
  const std::vector<TuningEntry> entries{example_entry(), example_entry("B=2 T=64")};
  EXPECT_EQ(parse_tuning(to_json(entries), "t.json"), entries);
  EXPECT_THAT(parse_tuning(to_json(std::vector<TuningEntry>()), "t.json"), IsEmpty());
}

TEST(TuningText, IsReadable) {
  const json file = json::parse(to_json({example_entry()}));
  EXPECT_EQ(file["schema"], "annulus.tuning");
  EXPECT_EQ(file["entries"][0]["key"]["device"], "a CPU");
  EXPECT_EQ(file["entries"][0]["choice"]["transport"], "peer");
  EXPECT_EQ(file["entries"][0]["candidates"][1]["passed_over"], "out of memory");
}

TEST(TuningText, NamesWhatIsWrong) {
  const json good = json::parse(to_json({example_entry(), example_entry("B=2 T=64")}));
  const auto with = [&](const char* pointer, json value) {
    json bad = good;
    bad[json::json_pointer(pointer)] = std::move(value);
    return bad.dump();
  };
  const auto without = [&](const char* object, const char* key) {
    json bad = good;
    bad[json::json_pointer(object)].erase(key);
    return bad.dump();
  };
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "is not JSON"},
      {"[1]", "the file is not an object"},
      {std::string(100, '['), "brackets more than"},
      {R"({"a": 1e999})", "beyond what float64 holds"},
      {with("/schema", "annulus.cost_model"), "schema is \"annulus.cost_model\""},
      {with("/version", 2), "version 2, expected \"annulus.tuning\" version 1"},
      {with("/more", 1), "more is not a key"},
      {without("", "entries"), "entries is missing"},
      {with("/entries", 3), "entries is not a list"},
      {with("/entries/1", 3), "entries[1] is not an object"},
      {with("/entries/1/key/shape", 3), "entries[1].key.shape is 3, expected a string"},
      {with("/entries/1/key/shape", "B=1 T=64"), "entries[1] has the key of an earlier entry"},
      {without("/entries/0", "date"), "entries[0].date is missing"},
      {with("/entries/0/choice/schedule", "rnig"), "entries[0].choice.schedule is 'rnig'"},
      {with("/entries/0/choice/transport", "pigeon"), "entries[0].choice.transport is "},
      {with("/entries/0/choice/ulysses_degree", 0), "expected a whole number from 1"},
      {with("/entries/0/choice/inner_size", 1.5), "expected a whole number from 1"},
      {with("/entries/0/choice/inner_size", std::int64_t{1} << 40), "expected a whole number"},
      {with("/entries/0/choice/colour", "red"), "entries[0].choice.colour is not a key"},
      {with("/entries/0/candidates/0/seconds", -1), "candidates[0].seconds is -1"},
      {with("/entries/0/candidates/0/seconds", "1"), "expected a number from 0"},
      {without("/entries/0/candidates/2", "predicted_seconds"), "predicted_seconds is missing"}};
  for (const auto& [text, expected] : cases) {
    const std::string message =
        test::message_of<FileError>([&, wrong = text] { (void)parse_tuning(wrong, "t.json"); });
    EXPECT_THAT(message, HasSubstr("t.json: ")) << text;
    EXPECT_THAT(message, HasSubstr(expected)) << text;
  }
}

TEST(TuningText, RanksUnderstandEachOther) {
  const std::vector<TunedCandidate> candidates = example_entry().candidates;
  EXPECT_EQ(parse_candidates(candidates_json(candidates)), candidates);
  Decision decision;
  decision.by = DecidedBy::file;
  decision.choice = example_entry().choice;
  decision.why = "t.json";
  decision.passed = {{DecidedBy::memory, "not UTF-8: \xff"}};
  decision.candidates = candidates;
  const Decision again = parse_decision(to_json(decision));
  EXPECT_EQ(again.by, decision.by);
  EXPECT_EQ(again.choice, decision.choice);
  EXPECT_EQ(again.why, decision.why);
  ASSERT_EQ(again.passed.size(), 1U);
  EXPECT_EQ(again.passed[0].link, DecidedBy::memory);
  EXPECT_THAT(again.passed[0].reason, HasSubstr("not UTF-8"));
  EXPECT_EQ(again.candidates, candidates);
  EXPECT_THROW((void)parse_decision("{}"), InternalError);
  EXPECT_THROW((void)parse_candidates("nonsense"), InternalError);
}

}  // namespace
}  // namespace annulus::ring
