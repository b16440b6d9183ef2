#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/ring/metadata.hpp>

#include "tests/support/environment_variable.hpp"
#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;
using Variable = test::EnvironmentVariable;

// No field has its default.
AttentionMetadata unusual() {
  AttentionMetadata metadata;
  metadata.runtime_dtype = DType::bfloat16;
  metadata.runtime_softmax_dtype = DType::float64;
  metadata.softmax_scale = 0.1;  // not exact in binary
  metadata.soft_cap = 30;        // a whole number, but not an integer in JSON
  metadata.dropout_prob = 0.25;
  metadata.dropout_seed = std::numeric_limits<std::uint64_t>::max();
  metadata.normalize_output = false;
  metadata.blocksize_q = 128;
  metadata.blocksize_k = std::int64_t{1} << 40;
  metadata.blocksize_b = 2;
  metadata.scan_ring_attention = false;
  metadata.sequence_axis_name = "ctx";
  metadata.mesh = "dp=2,ctx=-1";
  metadata.sharding_rules.set({SemanticAxis::head, std::nullopt, {"tp", "dp"}});
  metadata.sharding_rules.set({SemanticAxis::head, AttentionMode::insert, {"tp"}});
  metadata.sharding_rules.set({SemanticAxis::batch, AttentionMode::autoregressive, {}});
  metadata.backend = Backend::cpu;
  metadata.mode = AttentionMode::prefill;
  metadata.implementation = "native";
  return metadata;
}

AttentionMetadata from_json(const std::string& text) {
  const ParsedMetadata parsed = parse_metadata(text, "m.json");
  EXPECT_THAT(parsed.warnings, IsEmpty());
  return AttentionMetadata::resolve({}, parsed.fields);
}

TEST(Metadata, DefaultsAreThoseOfTheContract) {
  const AttentionMetadata metadata;
  EXPECT_EQ(metadata.runtime_dtype, DType::float32);
  EXPECT_EQ(metadata.runtime_softmax_dtype, DType::float32);
  EXPECT_EQ(metadata.blocksize_q, 512);
  EXPECT_EQ(metadata.blocksize_k, 1024);
  EXPECT_EQ(metadata.blocksize_b, 1);
  EXPECT_EQ(metadata.sequence_axis_name, "sp");
  EXPECT_EQ(metadata.mesh_text(), "sp=-1");
  EXPECT_TRUE(metadata.scan_ring_attention);
  EXPECT_NO_THROW(metadata.validate());
  EXPECT_THAT(metadata.unused_hints(), IsEmpty());
  EXPECT_EQ(AttentionMetadata::resolve({}), metadata);
}

TEST(Metadata, ARoundTripKeepsEveryFieldAndItsType) {
  const AttentionMetadata metadata = unusual();
  const std::string text = to_json(metadata);
  EXPECT_EQ(from_json(text), metadata);
  EXPECT_EQ(to_json(from_json(text)), text);
  EXPECT_THAT(text, AllOf(HasSubstr("\"soft_cap\": 30.0"), HasSubstr("\"blocksize_q\": 128"),
                          HasSubstr("18446744073709551615"), HasSubstr("\"softmax_scale\": 0.1"),
                          HasSubstr("\"runtime_dtype\": \"bfloat16\"")));
  const std::string defaults = to_json(AttentionMetadata());
  EXPECT_EQ(from_json(defaults), AttentionMetadata());
  EXPECT_THAT(defaults, AllOf(HasSubstr("\"mode\": null"), HasSubstr("\"sharding_rules\": {}")));
}

// A field missing from the JSON would keep the weaker source's value.
TEST(Metadata, JsonHasEveryField) {
  for (const auto& [above, below] :
       {std::pair(AttentionMetadata(), unusual()), std::pair(unusual(), AttentionMetadata())}) {
    EXPECT_EQ(below.replace(parse_metadata(to_json(above), "m.json").fields), above);
  }
}

TEST(Metadata, ExplicitBeforeFileBeforeEnvironmentBeforeDefault) {
  const MetadataFields environment{.soft_cap = 1.0, .dropout_prob = 0.1, .blocksize_q = 1};
  const MetadataFields file{.soft_cap = 2.0, .dropout_prob = 0.2};
  const AttentionMetadata metadata =
      AttentionMetadata::resolve({.soft_cap = 3.0}, file, environment);
  EXPECT_EQ(metadata.soft_cap, 3.0);
  EXPECT_EQ(metadata.dropout_prob, 0.2);
  EXPECT_EQ(metadata.blocksize_q, 1);
  EXPECT_EQ(metadata.blocksize_k, 1024);
}

TEST(Metadata, AnExplicitNoneOverridesAValue) {
  const MetadataFields file{.softmax_scale = 2.0, .soft_cap = 2.0, .mode = AttentionMode::insert};
  MetadataFields none;
  none.soft_cap.emplace(std::nullopt);
  const AttentionMetadata metadata = AttentionMetadata::resolve(none, file);
  EXPECT_EQ(metadata.soft_cap, std::nullopt);
  EXPECT_EQ(metadata.softmax_scale, 2.0);
  const AttentionMetadata parsed = AttentionMetadata::resolve(
      {}, parse_metadata("{\"soft_cap\": null, \"mode\": null}", "m.json").fields, file);
  EXPECT_EQ(parsed.soft_cap, std::nullopt);
  EXPECT_EQ(parsed.mode, std::nullopt);
  EXPECT_EQ(parsed.softmax_scale, 2.0);
}

TEST(Metadata, ReplaceGivesAChangedCopy) {
  const AttentionMetadata metadata = unusual();
  const AttentionMetadata changed = metadata.replace({.soft_cap = 5.0, .blocksize_b = 7});
  EXPECT_EQ(changed.soft_cap, 5.0);
  EXPECT_EQ(changed.blocksize_b, 7);
  EXPECT_EQ(metadata, unusual());
  EXPECT_EQ(changed.replace({.soft_cap = metadata.soft_cap, .blocksize_b = 2}), metadata);
  EXPECT_THROW((void)metadata.replace({.dropout_prob = 1.0}), ArgumentError);
}

TEST(Metadata, UnknownKeysAreWarnedAboutByName) {
  const ParsedMetadata parsed = parse_metadata(
      R"({"sofmax_scale": 2, "soft_cap": 4,
          "sharding_rules": {"heads": "tp", "head": {"training": "tp", "train": "tp"}}})",
      "m.json");
  ASSERT_THAT(parsed.warnings, SizeIs(3));
  EXPECT_THAT(parsed.warnings[0], AllOf(HasSubstr("m.json"), HasSubstr("'sofmax_scale'"),
                                        HasSubstr("softmax_scale, soft_cap")));
  EXPECT_THAT(parsed.warnings[1], AllOf(HasSubstr("'sharding_rules.heads'"), HasSubstr("kv_head")));
  EXPECT_THAT(parsed.warnings[2],
              AllOf(HasSubstr("'sharding_rules.head.training'"), HasSubstr("prefill")));
  EXPECT_EQ(parsed.fields.softmax_scale, std::nullopt);
  EXPECT_EQ(parsed.fields.soft_cap, 4.0);
  EXPECT_THAT(parsed.fields.sharding_rules->rules(), SizeIs(1));
  ASSERT_THAT(parsed.unknown, SizeIs(3));
  EXPECT_EQ(parsed.unknown[1].name, "sharding_rules.heads");
}

TEST(Metadata, TextThatIsNotJsonSaysWhereItEnds) {
  const auto message = [](const char* text) {
    return test::message_of<FileError>([&] { (void)parse_metadata(text, "m.json"); });
  };
  EXPECT_EQ(message("{\"soft_cap\": 4,\n ,}"),
            "m.json: is not JSON: line 2, column 2: ',' is not expected here");
  EXPECT_EQ(message("{\"soft_cap\": 4"), "m.json: is not JSON: it ends in the middle of a value");
  EXPECT_EQ(message("\x01"),
            "m.json: is not JSON: line 1, column 1: byte 0x01 is not expected here");
  EXPECT_EQ(message(""), "m.json: is not JSON: it ends in the middle of a value");
}

struct BadField {
  const char* json;
  const char* value;
  const char* expected;
};

TEST(Metadata, ValuesOfAnotherTypeOrRangeNameKeyAndSource) {
  for (const BadField& bad :
       {BadField{"runtime_dtype", "\"float\"", "dtype"},
        BadField{"runtime_dtype", "32", "dtype"},
        BadField{"runtime_dtype", "null", "dtype"},
        BadField{"runtime_dtype", "\"int32\"", "bfloat16"},
        BadField{"runtime_softmax_dtype", "\"bfloat16\"", "float32 or float64"},
        BadField{"softmax_scale", "\"0.5\"", "a number, or null"},
        BadField{"softmax_scale", "1e300", "finite in float32"},
        BadField{"soft_cap", "0", "positive"},
        BadField{"soft_cap", "-1.5", "positive"},
        BadField{"dropout_prob", "1", "below 1"},
        BadField{"dropout_prob", "-0.1", "at least 0"},
        BadField{"dropout_prob", "null", "a number"},
        BadField{"dropout_seed", "-1", "0 or more"},
        BadField{"dropout_seed", "1.5", "whole"},
        BadField{"blocksize_q", "0", "at least 1"},
        BadField{"blocksize_k", "512.0", "whole"},
        BadField{"blocksize_k", "9223372036854775808", "whole"},
        BadField{"blocksize_b", "-1", "at least 1"},
        BadField{"blocksize_b", "true", "whole"},
        BadField{"sequence_axis_name", "\"\"", "mesh axis"},
        BadField{"sequence_axis_name", "null", "a string"},
        BadField{"scan_ring_attention", "1", "true or false"},
        BadField{"normalize_output", "\"no\"", "true or false"},
        BadField{"mesh", "\"\"", "axes"},
        BadField{"mesh", "[4]", "a string, or null"},
        BadField{"sharding_rules", "[]", "object"},
        BadField{"backend", "\"tpu\"", "auto, cpu or cuda"},
        BadField{"mode", "\"training\"", "prefill"},
        BadField{"implementation", "\"\"", "registry"}}) {
    const std::string text = std::string("{\"") + bad.json + "\": " + bad.value + "}";
    const std::string message =
        test::message_of<ArgumentError>([&] { (void)parse_metadata(text, "m.json"); });
    EXPECT_THAT(message,
                AllOf(HasSubstr(std::string(bad.json) + " in m.json"), HasSubstr(bad.expected)))
        << text;
  }
}

TEST(Metadata, ABadShardingRuleIsNamed) {
  for (const auto& [value, entry] :
       {std::pair(R"({"head":4})", "head in m.json: got 4,"),
        {R"({"head":["tp",4]})", "head in m.json: got [\"tp\",4],"},
        {R"({"head":{"train":""}})", "head.train in m.json: got \"\","}}) {
    EXPECT_THAT(test::message_of<ArgumentError>([&, text = value] {
                  (void)parse_metadata(fmt::format(R"({{"sharding_rules": {}}})", text), "m.json");
                }),
                AllOf(StartsWith(std::string("sharding_rules.") + entry),
                      HasSubstr("expected a mesh axis such as \"tp\", a list of mesh axes")));
  }
}

TEST(Metadata, DamagedFilesAreRefused) {
  for (const char* text :
       {"", "[1]", "3", "{", "{\"soft_cap\": nan}", "{\"mesh\": \"\xff\"}", "{} {}"}) {
    EXPECT_THAT(test::message_of<FileError>([&] { (void)parse_metadata(text, "m.json"); }),
                HasSubstr("m.json"))
        << text;
  }
  for (const char* text :
       {R"({"soft_cap": 1, "soft_cap": 2})", R"({"sharding_rules": {"head": "a", "head": "b"}})"}) {
    EXPECT_THAT(test::message_of<ArgumentError>([&] { (void)parse_metadata(text, "m.json"); }),
                AllOf(HasSubstr("m.json"), HasSubstr("twice")));
  }
}

TEST(Metadata, NumbersBeyondFloat64NameKeyAndSource) {
  const auto message = [](const char* text) {
    return test::message_of<ArgumentError>([&] { (void)parse_metadata(text, "m.json"); });
  };
  EXPECT_EQ(
      message(R"({"mode": "train", "soft_cap": 1e400})"),
      "soft_cap in m.json: got a number beyond float64's range, expected one of at most 1.8e308 "
      "in magnitude");
  EXPECT_THAT(message(R"({"sharding_rules": {"head": "tp", "batch": [-1e400]}})"),
              HasSubstr("sharding_rules.batch in m.json: got a number"));
  EXPECT_THAT(message(R"({"sharding_rules": {"head": "tp"}, "softmax_scale": 1e400})"),
              HasSubstr("softmax_scale in m.json: got a number"));
  EXPECT_THAT(message("1e400"), HasSubstr("m.json: got a number"));
  EXPECT_THAT(test::message_of<ArgumentError>(
                  [] { (void)parse_sharding_rules(R"({"head": 1e400})", "rules"); }),
              HasSubstr("head in rules: got a number"));
}

TEST(Metadata, DeepBracketsAreRefused) {
  // The message would print the value, and exhaust the stack.
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  EXPECT_THAT(test::message_of<FileError>(
                  [&] { (void)parse_metadata("{\"mesh\": " + deep + "}", "m.json"); }),
              HasSubstr("m.json: has brackets more than 64 deep"));
  EXPECT_THAT(test::message_of<ArgumentError>(
                  [&] { (void)parse_sharding_rules("{\"head\": " + deep + "}", "rules"); }),
              HasSubstr("brackets at most 64 deep"));
  const Variable variable("ANNULUS_METADATA_BLOCKSIZE_Q", deep.c_str());
  EXPECT_THAT(test::message_of<ArgumentError>([] { (void)metadata_from_environment(); }),
              HasSubstr("ANNULUS_METADATA_BLOCKSIZE_Q: got"));
}

TEST(Metadata, WhatIsSetInTheProgramIsCheckedToo) {
  const auto message = [](const MetadataFields& fields) {
    return test::message_of<ArgumentError>([&] { (void)AttentionMetadata::resolve(fields); });
  };
  EXPECT_THAT(message({.runtime_dtype = DType::int32}), HasSubstr("runtime_dtype: got int32"));
  EXPECT_THAT(message({.softmax_scale = std::nan("")}), HasSubstr("softmax_scale: got nan"));
  EXPECT_THAT(message({.blocksize_q = 0}), HasSubstr("blocksize_q: got 0"));
  AttentionMetadata metadata;
  metadata.softmax_scale = std::numeric_limits<double>::infinity();
  EXPECT_THROW((void)to_json(metadata), ArgumentError);
  metadata.softmax_scale.reset();
  metadata.mesh = "sp=4\xff";
  EXPECT_THROW((void)to_json(metadata), ArgumentError);
}

TEST(Metadata, ComesFromTheEnvironmentToo) {
  const Variable cap("ANNULUS_METADATA_SOFT_CAP", "12.5");
  const Variable mesh("ANNULUS_METADATA_MESH", "sp=2,tp=2");
  const Variable mode("ANNULUS_METADATA_MODE", "null");
  const Variable rules("ANNULUS_METADATA_SHARDING_RULES", R"({"head": null})");
  const Variable empty("ANNULUS_METADATA_BLOCKSIZE_Q", "");
  const Variable unknown("ANNULUS_METADATA_SOFT_CUP", "3");
  const ParsedMetadata parsed = metadata_from_environment();
  EXPECT_EQ(parsed.fields.soft_cap, 12.5);
  EXPECT_EQ(parsed.fields.mesh, "sp=2,tp=2");
  EXPECT_TRUE(parsed.fields.mode.has_value() && !parsed.fields.mode->has_value());
  EXPECT_THAT(parsed.fields.sharding_rules->rules(), SizeIs(1));
  EXPECT_EQ(parsed.fields.blocksize_q, std::nullopt);
  ASSERT_THAT(parsed.warnings, SizeIs(1));
  EXPECT_THAT(parsed.warnings[0], HasSubstr("'ANNULUS_METADATA_SOFT_CUP'"));
}

TEST(Metadata, BadVariablesAreNamed) {
  for (const auto& [name, text] : {std::pair("DROPOUT_PROB", "much"), std::pair("MODE", "training"),
                                   std::pair("BACKEND", "\xff"), std::pair("BLOCKSIZE_B", "0")}) {
    const Variable variable(std::string("ANNULUS_METADATA_") + name, text);
    EXPECT_THAT(test::message_of<ArgumentError>([] { (void)metadata_from_environment(); }),
                HasSubstr(std::string("ANNULUS_METADATA_") + name + ": got"));
  }
}

TEST(Metadata, ModesAreGivenOrInferred) {
  AttentionMetadata metadata;
  EXPECT_EQ(metadata.mode_of(1), AttentionMode::autoregressive);
  EXPECT_EQ(metadata.mode_of(2), AttentionMode::train);
  metadata.mode = AttentionMode::insert;
  EXPECT_EQ(metadata.mode_of(1), AttentionMode::insert);
}

TEST(Metadata, TheSequenceAxisIsTheRuleWhereTheUserHasNone) {
  AttentionMetadata metadata;
  metadata.sequence_axis_name = "ctx";
  EXPECT_EQ(metadata.mesh_text(), "ctx=-1");
  const MeshShape mesh({{"ctx", 4}, {"tp", 2}});
  const ShardingRules rules = metadata.rules().for_mesh(mesh);
  EXPECT_EQ(to_string(rules.query_spec(AttentionMode::train)), "-,ctx,tp,-");
  EXPECT_EQ(to_string(rules.kv_spec(AttentionMode::train)), "-,ctx,tp,-");
  metadata.sharding_rules.set({SemanticAxis::query_length, std::nullopt, {}});
  metadata.sharding_rules.set({SemanticAxis::kv_length, AttentionMode::insert, {}});
  const ShardingRules mine = metadata.rules().for_mesh(mesh);
  EXPECT_EQ(to_string(mine.query_spec(AttentionMode::train)), "-,-,tp,-");
  EXPECT_EQ(to_string(mine.kv_spec(AttentionMode::train)), "-,ctx,tp,-");
  EXPECT_EQ(to_string(mine.kv_spec(AttentionMode::insert)), "-,-,tp,-");
  EXPECT_THROW((void)metadata.rules().for_mesh(MeshShape({{"sp", 4}})), UnknownAxisError);
}

TEST(Metadata, HintsWithoutEffectAreSaid) {
  const AttentionMetadata metadata =
      AttentionMetadata().replace({.blocksize_k = 64, .scan_ring_attention = false});
  ASSERT_THAT(metadata.unused_hints(), SizeIs(2));
  EXPECT_THAT(metadata.unused_hints()[0], HasSubstr("blocksize_k = 64"));
  EXPECT_THAT(metadata.unused_hints()[1], HasSubstr("scan_ring_attention"));
}

TEST(ShardingRulesJson, OneLineBothWays) {
  const ShardingRules rules = unusual().sharding_rules;
  const std::string text = to_json(rules);
  EXPECT_EQ(text,
            R"({"batch":{"autoregressive":null},"head":{"all":["tp","dp"],"insert":["tp"]}})");
  EXPECT_EQ(parse_sharding_rules(text, "--sharding-rules"), rules);
}

TEST(ShardingRulesJson, ErrorsNameTheEntry) {
  const auto message = [](const char* text) {
    return test::message_of<ArgumentError>(
        [&] { (void)parse_sharding_rules(text, "--sharding-rules"); });
  };
  for (const char* text : {"", "[]", "rules.json", "{\"head\": tp}", "3"}) {
    EXPECT_EQ(
        message(text),
        fmt::format("--sharding-rules: got '{}', expected JSON text (not a file), an object of "
                    "the mesh axes for each semantic axis, such as {{\"head\": \"tp\", "
                    "\"batch\": [\"fsdp\", \"dp\"]}}",
                    text));
  }
  EXPECT_EQ(message(R"({"batch": "dp", "head": 3})"),
            "--sharding-rules, entry 'head': got 3, expected a mesh axis such as \"tp\", a list of "
            "mesh axes, null for none, or an object with such an entry for each mode");
  EXPECT_THAT(message(R"({"head": {"train": [3]}})"),
              StartsWith("--sharding-rules, entry 'head.train': got [3], expected a mesh axis"));
  EXPECT_THAT(
      message(R"({"heads": "tp"})"),
      StartsWith("--sharding-rules, entry 'heads': got an unknown name, expected one of batch,"));
  EXPECT_EQ(message(R"({"head": {"training": "tp"}})"),
            "--sharding-rules, entry 'head.training': got an unknown name, expected one of all, "
            "train, prefill, autoregressive, insert");
  EXPECT_EQ(message(R"({"head": "a", "head": "b"})"),
            "head in --sharding-rules: got the key twice, expected it once");
}

}  // namespace
}  // namespace annulus
