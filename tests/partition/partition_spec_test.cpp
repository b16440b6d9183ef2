#include <array>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/partition/named_sharding.hpp>

#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

const MeshShape kMesh({{"dp", 2}, {"fsdp", 2}, {"tp", 4}, {"sp", 3}});

TEST(PartitionSpec, ParsesWhatTheProgramTakes) {
  const PartitionSpec spec = PartitionSpec::parse("fsdp+dp,sp, tp ,-");
  EXPECT_EQ(spec.entries(), 4);
  EXPECT_THAT(spec[0], ElementsAre("fsdp", "dp"));
  EXPECT_THAT(spec[1], ElementsAre("sp"));
  EXPECT_THAT(spec[2], ElementsAre("tp"));
  EXPECT_THAT(spec[3], IsEmpty());
  EXPECT_THAT(spec[7], IsEmpty());
  EXPECT_THAT(spec.axes(), ElementsAre("fsdp", "dp", "sp", "tp"));
  EXPECT_TRUE(spec.names("dp"));
  EXPECT_FALSE(spec.names("ep"));
}

TEST(PartitionSpec, PrintsAsItParses) {
  for (const std::string text : {"fsdp+dp,sp,tp,-", "-", "-,sp", "x"}) {
    EXPECT_EQ(to_string(PartitionSpec::parse(text)), text);
  }
  EXPECT_EQ(to_string(PartitionSpec()), "-");
  EXPECT_EQ(PartitionSpec::parse(""), PartitionSpec());
}

TEST(PartitionSpec, MissingTrailingEntriesAreNone) {
  EXPECT_EQ(PartitionSpec::parse("x"), PartitionSpec::parse("x,-,-"));
  EXPECT_EQ(PartitionSpec::parse("-,-"), PartitionSpec());
  EXPECT_NE(PartitionSpec::parse("x"), PartitionSpec::parse("-,x"));
  EXPECT_NE(PartitionSpec::parse("x"), PartitionSpec::parse("x,y"));
  EXPECT_NE(PartitionSpec::parse("x+y"), PartitionSpec::parse("y+x"));
  EXPECT_EQ(PartitionSpec(std::vector<AxisNames>{{"x"}}), PartitionSpec::parse("x"));
}

TEST(PartitionSpec, RefusesMissingNames) {
  for (const std::string text : {"x,,y", "x+,y", "+", "x,", "-+x"}) {
    EXPECT_THAT([&] { (void)PartitionSpec::parse(text, "query-spec"); },
                ThrowsMessage<ArgumentError>(HasSubstr("query-spec: got '" + text + "'")));
  }
  EXPECT_THROW(PartitionSpec({AxisNames{"x"}, AxisNames{""}}), ArgumentError);
}

TEST(PartitionSpec, RefusesAnAxisTwice) {
  for (const std::string text : {"sp,sp", "sp+sp", "tp,sp+dp,-,dp+sp"}) {
    EXPECT_THROW((void)PartitionSpec::parse(text), DuplicateSpecError) << text;
  }
  const auto error =
      test::thrown_by<DuplicateSpecError>([&] { (void)PartitionSpec::parse("tp,sp,-,sp"); });
  EXPECT_EQ(error.axis(), "sp");
  EXPECT_THAT(error.what(), AllOf(HasSubstr("'tp,sp,-,sp'"), HasSubstr("'sp'")));
  EXPECT_EQ(error.exit_code(), ExitCode::usage);
}

TEST(Validate, AcceptsWhatDivides) {
  EXPECT_NO_THROW(validate(PartitionSpec::parse("fsdp+dp,-,tp"), kMesh, {8, 5, 4}));
  EXPECT_NO_THROW(validate(PartitionSpec(), kMesh, {7}));
  EXPECT_NO_THROW(validate(PartitionSpec::parse("tp"), kMesh, {0}));
}

TEST(Validate, NamesTheUnknownAxis) {
  EXPECT_THAT(
      [] {
        validate(PartitionSpec::parse("-,ep"), kMesh, {8, 8});
      },
      ThrowsMessage<UnknownAxisError>(AllOf(HasSubstr("'ep'"), HasSubstr("dp, fsdp, tp, sp"))));
}

TEST(Validate, RefusesMoreEntriesThanDimensions) {
  EXPECT_THAT(
      [] {
        validate(PartitionSpec::parse("dp,-,-"), kMesh, {8, 6});
      },
      ThrowsMessage<SpecRankError>(
          AllOf(HasSubstr("'dp,-,-'"), HasSubstr("3 entries"), HasSubstr("rank 2: [8, 6]"))));
}

TEST(Validate, SaysWhatDoesNotDivide) {
  const auto error = test::thrown_by<IndivisibleError>([&] {
    validate(PartitionSpec::parse("dp,fsdp+tp"), kMesh, {8, 12});
  });
  EXPECT_EQ(error.dimension(), 1);
  EXPECT_EQ(error.size(), 12);
  EXPECT_THAT(error.axes(), ElementsAre("fsdp", "tp"));
  EXPECT_THAT(error.what(), AllOf(HasSubstr("dimension 1"), HasSubstr("size 12"),
                                  HasSubstr("8 ranks"), HasSubstr("fsdp+tp")));
  EXPECT_EQ(error.exit_code(), ExitCode::usage);
}

TEST(Validate, LetsSequencesBeUnevenAndKvHeadsBeFew) {
  const PartitionSpec spec = PartitionSpec::parse("dp,sp,tp");
  const std::array distributions{Distribution::block(), Distribution::sequence(),
                                 Distribution::kv_heads()};
  EXPECT_NO_THROW(validate(spec, kMesh, {2, 10, 2}, distributions));
  EXPECT_NO_THROW(validate(spec, kMesh, {2, 1, 8}, distributions));
  EXPECT_THROW(validate(spec, kMesh, {2, 10, 3}, distributions), IndivisibleError);
  EXPECT_THROW(validate(spec, kMesh, {2, 10, 6}, distributions), IndivisibleError);
  EXPECT_THROW(validate(spec, kMesh, {3, 10, 2}, distributions), IndivisibleError);
  // Without saying so, dimensions are blocks.
  EXPECT_THROW(validate(spec, kMesh, {2, 10, 2}), IndivisibleError);
}

TEST(CorrectedSpec, LeavesAGoodSpecAlone) {
  const PartitionSpec spec = PartitionSpec::parse("fsdp+dp,-,tp");
  const CorrectedSpec corrected = corrected_spec(spec, kMesh, {8, 5, 4});
  EXPECT_EQ(corrected.spec, spec);
  EXPECT_THAT(corrected.corrections, IsEmpty());
}

TEST(CorrectedSpec, DegradesEachWrongEntryAndSaysWhy) {
  const CorrectedSpec corrected =
      corrected_spec(PartitionSpec::parse("ep+dp,sp,tp,fsdp"), kMesh, {8, 9, 6});
  EXPECT_EQ(corrected.spec, PartitionSpec::parse("-,sp,-"));
  EXPECT_EQ(corrected.spec.entries(), 3);
  ASSERT_THAT(corrected.corrections, SizeIs(3));
  EXPECT_EQ(corrected.corrections[0].dimension, 0);
  EXPECT_THAT(corrected.corrections[0].axes, ElementsAre("ep", "dp"));
  EXPECT_THAT(corrected.corrections[0].reason, HasSubstr("'ep'"));
  EXPECT_EQ(corrected.corrections[1].dimension, 2);
  EXPECT_THAT(corrected.corrections[1].axes, ElementsAre("tp"));
  EXPECT_THAT(corrected.corrections[1].reason, HasSubstr("size 6"));
  EXPECT_EQ(corrected.corrections[2].dimension, 3);
  EXPECT_THAT(corrected.corrections[2].axes, ElementsAre("fsdp"));
  EXPECT_THAT(corrected.corrections[2].reason, HasSubstr("rank 3"));
}

TEST(CorrectedSpec, AlwaysPassesValidation) {
  const Extents shape{6, 10, 4};
  const std::array distributions{Distribution::block(), Distribution::sequence()};
  for (const std::string text : {"sp,tp,dp", "tp,sp+x,fsdp+dp", "a,b,c,d", "-,-,tp+dp,sp"}) {
    const CorrectedSpec corrected =
        corrected_spec(PartitionSpec::parse(text), kMesh, shape, distributions);
    EXPECT_NO_THROW(validate(corrected.spec, kMesh, shape, distributions)) << text;
  }
}

}  // namespace
}  // namespace annulus
