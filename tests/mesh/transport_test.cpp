#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>

namespace annulus {
namespace {

using ::testing::HasSubstr;

TEST(Transport, NamesGoBothWays) {
  for (const Transport transport : {Transport::automatic, Transport::nccl, Transport::peer}) {
    EXPECT_EQ(parse_transport(name_of(transport)), transport);
  }
  EXPECT_EQ(name_of(Transport::automatic), "auto");
}

TEST(Transport, OtherNamesAreRefused) {
  for (const char* const name : {"", "NCCL", "automatic", "mpi", "peer "}) {
    try {
      static_cast<void>(parse_transport(name));
      FAIL() << name;
    } catch (const ArgumentError& error) {
      EXPECT_THAT(error.value(), HasSubstr(name));
      EXPECT_EQ(error.expected(), "auto, nccl or peer");
    }
  }
}

}  // namespace
}  // namespace annulus
