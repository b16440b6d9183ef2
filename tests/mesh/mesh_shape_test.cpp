#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/mesh/mesh_shape.hpp>

#include "tests/support/message_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Every tuple of distinct axes of a shape, in every order.
void for_each_tuple(const MeshShape& shape, const std::function<void(const AxisNames&)>& visit) {
  AxisNames tuple;
  const std::function<void()> extend = [&] {
    visit(tuple);
    for (const MeshAxis& axis : shape.axes()) {
      if (std::find(tuple.begin(), tuple.end(), axis.name) != tuple.end()) continue;
      tuple.push_back(axis.name);
      extend();
      tuple.pop_back();
    }
  };
  extend();
}

// All coordinates of every rank, counted like the digits of a clock: the last axis fastest.
std::vector<std::vector<int>> count_coordinates(const MeshShape& shape) {
  std::vector<std::vector<int>> all;
  std::vector<int> digits(shape.axes().size(), 0);
  for (;;) {
    all.push_back(digits);
    std::size_t i = digits.size();
    while (i > 0 && ++digits[i - 1] == shape.axes()[i - 1].size) digits[--i] = 0;
    if (i == 0) return all;
  }
}

class MeshShapeBruteForce : public ::testing::TestWithParam<const char*> {};

TEST_P(MeshShapeBruteForce, CoordinatesAndGroups) {
  const MeshShape shape = MeshShape::parse(GetParam(), 0);
  const auto all = count_coordinates(shape);
  ASSERT_EQ(shape.ranks(), static_cast<int>(all.size()));
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const auto& mine = all[static_cast<std::size_t>(rank)];
    for (const MeshAxis& axis : shape.axes()) {
      ASSERT_EQ(shape.coordinate(rank, axis.name),
                mine[static_cast<std::size_t>(shape.axis_index(axis.name))]);
    }
  }
  for_each_tuple(shape, [&](const AxisNames& axes) {
    for (int rank = 0; rank < shape.ranks(); ++rank) {
      const auto& mine = all[static_cast<std::size_t>(rank)];
      // Members: equal in every axis outside the tuple; sorted by the tuple's digits.
      std::vector<std::pair<std::vector<int>, int>> members;
      for (int other = 0; other < shape.ranks(); ++other) {
        const auto& theirs = all[static_cast<std::size_t>(other)];
        bool same = true;
        for (std::size_t i = 0; i < mine.size(); ++i) {
          const bool inside =
              std::find(axes.begin(), axes.end(), shape.axes()[i].name) != axes.end();
          same = same && (inside || mine[i] == theirs[i]);
        }
        if (!same) continue;
        std::vector<int> key;
        for (const std::string& axis : axes) {
          key.push_back(theirs[static_cast<std::size_t>(shape.axis_index(axis))]);
        }
        members.emplace_back(key, other);
      }
      std::sort(members.begin(), members.end());
      const std::vector<int> group = shape.group(rank, axes);
      ASSERT_EQ(group.size(), members.size());
      ASSERT_EQ(shape.size(axes), static_cast<int>(members.size()));
      for (std::size_t i = 0; i < group.size(); ++i) {
        ASSERT_EQ(group[i], members[i].second);
        if (group[i] == rank) {
          ASSERT_EQ(shape.coordinate(rank, axes), static_cast<int>(i));
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, MeshShapeBruteForce,
                         ::testing::Values("sp=1", "sp=5", "dp=2,sp=3", "dp=2,fsdp=1,tp=3,sp=2",
                                           "a=3,b=2,c=2,d=1", "x=1,y=1"));

TEST(MeshShape, DefaultIsOneRankWithoutAxes) {
  const MeshShape shape;
  EXPECT_EQ(shape.ranks(), 1);
  EXPECT_TRUE(shape.axes().empty());
  EXPECT_EQ(to_string(shape), "1 rank");
  EXPECT_THAT(shape.group(0, AxisNames{}), ElementsAre(0));
  EXPECT_EQ(shape.size(AxisNames{}), 1);
}

TEST(MeshShape, ParsesAndPrints) {
  const MeshShape shape = MeshShape::parse("dp=2,sp=4", 8);
  EXPECT_THAT(shape.axes(), ElementsAre(MeshAxis{"dp", 2}, MeshAxis{"sp", 4}));
  EXPECT_EQ(to_string(shape), "dp=2,sp=4");
  EXPECT_EQ(MeshShape::parse(to_string(shape), 0), shape);
  EXPECT_TRUE(shape.has_axis("dp"));
  EXPECT_FALSE(shape.has_axis("tp"));
  EXPECT_EQ(shape.axis_index("sp"), 1);
  EXPECT_EQ(shape.axis_size("sp"), 4);
}

TEST(MeshShape, InfersOneSize) {
  EXPECT_EQ(to_string(MeshShape::parse("dp=2,sp=-1", 8)), "dp=2,sp=4");
  EXPECT_EQ(to_string(MeshShape::parse("dp=-1,sp=3", 3)), "dp=1,sp=3");
  EXPECT_EQ(to_string(MeshShape::parse("sp=-1", 7)), "sp=7");
  EXPECT_EQ(to_string(MeshShape::parse("a=2,b=-1,c=3", 30)), "a=2,b=5,c=3");
}

struct BadMesh {
  const char* text;
  int ranks;
  const char* expected;  // part of what the error says was expected
};

class MeshShapeErrors : public ::testing::TestWithParam<BadMesh> {};

TEST_P(MeshShapeErrors, SayWhatWasExpected) {
  const auto& [text, ranks, expected] = GetParam();
  const auto error = test::thrown_by<ArgumentError>(
      [&text = text, &ranks = ranks] { (void)MeshShape::parse(text, ranks); });
  EXPECT_EQ(error.argument(), "mesh") << text;
  EXPECT_THAT(error.expected(), HasSubstr(expected)) << text;
}

INSTANTIATE_TEST_SUITE_P(
    All, MeshShapeErrors,
    ::testing::Values(
        BadMesh{"", 4, "name=size"}, BadMesh{"sp", 4, "name=size"},
        BadMesh{"sp=4,", 4, "name=size"}, BadMesh{"sp=4,,dp=1", 4, "name=size"},
        BadMesh{"sp=", 4, "whole number as size of axis 'sp'"},
        BadMesh{"sp=four", 4, "whole number"}, BadMesh{"sp=4x", 4, "whole number"},
        BadMesh{"sp=4.0", 4, "whole number"}, BadMesh{"sp= 4", 4, "whole number"},
        BadMesh{"sp=99999999999", 4, "whole number"}, BadMesh{"=4", 4, "letters, digits"},
        BadMesh{"s-p=4", 4, "letters, digits"}, BadMesh{"a+b=4", 4, "letters, digits"},
        BadMesh{"sp=2,sp=2", 4, "each axis once"}, BadMesh{"sp=0", 4, "1 or more"},
        BadMesh{"sp=-2", 4, "1 or more"}, BadMesh{"dp=0,sp=-1", 4, "1 or more"},
        BadMesh{"dp=-1,sp=-1", 4, "at most one"},
        BadMesh{"sp=-1", 0, "number of ranks is not known"},
        BadMesh{"dp=3,sp=-1", 4, "product (3) divides 4"}, BadMesh{"dp=2,sp=4", 4, "product is 4"},
        BadMesh{"dp=2,sp=1", 4, "product is 4"}, BadMesh{"dp=8,sp=-1", 4, "product (8) divides 4"},
        BadMesh{"a=65536,b=65536", 0, "below 2^31"}, BadMesh{"a=65536,b=65536,c=-1", 4, "2^31"}));

TEST(MeshShape, ErrorsQuoteTheValue) {
  const auto error =
      test::thrown_by<ArgumentError>([&] { (void)MeshShape::parse("dp=2,sp=x", 4); });
  EXPECT_EQ(error.value(), "'dp=2,sp=x'");
  EXPECT_EQ(test::message_of<ArgumentError>([&] {
              const MeshShape shape(std::vector<MeshAxis>{{"sp", -3}});
            }),
            "mesh: got sp=-3, expected a size of 1 or more");
}

TEST(MeshShape, UnknownAxisNamesItAndTheAxes) {
  const MeshShape shape = MeshShape::parse("dp=2,sp=4", 8);
  const AxisNames axes{"sp", "tp"};
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { (void)shape.axis_index("tp"); }, [&] { (void)shape.axis_size("tp"); },
           [&] { (void)shape.coordinate(0, "tp"); }, [&] { (void)shape.coordinate(0, axes); },
           [&] { (void)shape.size(axes); }, [&] { (void)shape.group(0, axes); }}) {
    EXPECT_THAT(test::message_of<UnknownAxisError>([&] { call(); }),
                AllOf(HasSubstr("'tp'"), HasSubstr("dp, sp")));
  }
  EXPECT_THAT(UnknownAxisError("sp", MeshShape()).what(), HasSubstr("axes are none"));
}

TEST(MeshShape, AnAxisTwiceInATupleIsAnError) {
  const MeshShape shape = MeshShape::parse("dp=2,sp=4", 8);
  const AxisNames axes{"sp", "sp"};
  EXPECT_THROW((void)shape.size(axes), ArgumentError);
  EXPECT_THROW((void)shape.group(0, axes), ArgumentError);
}

}  // namespace
}  // namespace annulus
