// Configurations of attention (--metadata), and sharding rules alone.

#include <annulus/ring/metadata.hpp>

#include "fuzzing.hpp"

using namespace annulus;
using namespace annulus::test;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  if (const auto parsed = taken([&] { return parse_metadata(text, "input.json"); })) {
    const AttentionMetadata metadata = AttentionMetadata::resolve({}, parsed->fields);
    const ParsedMetadata again = parse_metadata(to_json(metadata), "again.json");
    require(again.warnings.empty(), "metadata write no keys that they do not know");
    require(AttentionMetadata::resolve({}, again.fields) == metadata,
            "metadata are what their text says");
    require(!metadata.mesh_text().empty(), "there is always a mesh");
    (void)metadata.unused_hints();
    (void)metadata.rules();
  }
  if (const auto rules = taken([&] { return parse_sharding_rules(text, "input.json"); })) {
    require(parse_sharding_rules(to_json(*rules), "again.json") == *rules,
            "rules are what their text says");
  }
  return 0;
}
