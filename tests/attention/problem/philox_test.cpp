#include <gtest/gtest.h>

#include <annulus/attention/philox.hpp>

namespace annulus {
namespace {

// The known answers that Salmon et al. publish with Random123 (kat_vectors, philox4x32, 10 rounds).
TEST(Philox, GivesTheKnownAnswers) {
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, KeyHoldsBothHalvesOfTheSeed) {
  EXPECT_EQ(philox_key(0x0123456789abcdef), (PhiloxKey{0x89abcdef, 0x01234567}));
}

TEST(Philox, IsKnownAtCompileTime) {
  static_assert(philox({0, 0, 0, 0}, {0, 0})[0] == 0x6627e8d5);
}

}  // namespace
}  // namespace annulus
