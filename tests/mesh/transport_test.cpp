#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/transport.hpp>
#include <annulus/mesh/transport_traits.hpp>

#include "tests/support/thrown_by.hpp"

namespace annulus {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Transport, NamesGoBothWays) {
  for (const std::string_view name : transport_choices()) {
    EXPECT_EQ(name_of(parse_transport(name)), name);
  }
  EXPECT_THAT(transport_choices(), ElementsAre("auto", "composite", "nccl", "peer"));
  EXPECT_EQ(parse_transport("auto"), Transport::automatic);
  EXPECT_EQ(parse_transport("nccl"), Transport::nccl);
  EXPECT_EQ(parse_transport("peer"), Transport::peer);
  EXPECT_EQ(parse_transport("composite"), Transport::composite);
}

TEST(Transport, AutomaticPrefersCopyEngines) {
  EXPECT_THAT(device_transports(),
              ElementsAre(Transport::peer, Transport::composite, Transport::nccl));
}

TEST(Transport, TraitsByNameAndByChoice) {
  for (const TransportTraits* traits : transports()) {
    EXPECT_EQ(&transport_traits(traits->name), traits);
    if (traits->choice == Transport::automatic) continue;
    EXPECT_EQ(&transport_traits(traits->choice), traits);
    EXPECT_EQ(name_of(traits->choice), traits->name);
  }
  EXPECT_THROW((void)transport_traits(Transport::automatic), InternalError);
  const auto error = test::thrown_by<ArgumentError>([&] { (void)transport_traits("pigeon"); });
  EXPECT_EQ(error.expected(), "self, mpi, peer, composite or nccl");
}

TEST(Transport, TraitsSayWhatTheTransportsDo) {
  const TransportTraits& peer = transport_traits("peer");
  EXPECT_TRUE(peer.ahead && peer.one_sided && peer.shares_devices);
  EXPECT_FALSE(peer.uniform_calls);
  const TransportTraits& nccl = transport_traits("nccl");
  EXPECT_TRUE(nccl.ahead && nccl.uniform_calls);
  EXPECT_FALSE(nccl.one_sided || nccl.shares_devices);
  const TransportTraits& composite = transport_traits("composite");
  EXPECT_TRUE(composite.ahead && composite.uniform_calls);
  EXPECT_FALSE(composite.one_sided || composite.shares_devices);
  EXPECT_EQ(composite.inside_node(), "peer");
  EXPECT_EQ(nccl.inside_node(), "nccl");
  for (const char* const name : {"self", "mpi"}) {
    const TransportTraits& host = transport_traits(name);
    EXPECT_EQ(host.choice, Transport::automatic);
    EXPECT_FALSE(host.ahead || host.one_sided || host.uniform_calls);
  }
}

TEST(Transport, OtherNamesAreRefused) {
  for (const char* const name : {"", "NCCL", "automatic", "mpi", "peer "}) {
    const auto error =
        test::thrown_by<ArgumentError>([&] { static_cast<void>(parse_transport(name)); });
    EXPECT_THAT(error.value(), HasSubstr(name));
    EXPECT_EQ(error.expected(), "auto, composite, nccl or peer");
  }
}

}  // namespace
}  // namespace annulus
