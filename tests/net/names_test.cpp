// Endpoints, expert UIDs, prefixes and patterns as people write them.
#include "net/endpoint.hpp"
#include "net/expert_uid.hpp"
#include "tests/support/catch.hpp"

#include <unordered_set>

using namespace dmoe;

TEST_CASE("b20 endpoints are read in every form that people write", "[names][b20]") {
  struct Case {
    const char* text;
    const char* host;
    std::uint16_t port;
    const char* canonical;
  };
  const std::vector<Case> cases = {
      {"203.0.113.5:4040", "203.0.113.5", 4040, "203.0.113.5:4040"},
      {"seed.example:1", "seed.example", 1, "seed.example:1"},
      {"[::1]:4000", "::1", 4000, "[::1]:4000"},
      {"fe80::1%lo:4000", "fe80::1%lo", 4000, "[fe80::1%lo]:4000"},
      {"[fe80::1%lo]:65535", "fe80::1%lo", 65535, "[fe80::1%lo]:65535"},
      {"localhost:0", "localhost", 0, "localhost:0"},
  };
  for (const auto& [text, host, port, canonical] : cases) {
    INFO(text);
    const auto parsed = net::parse_endpoint(text);
    REQUIRE(parsed.has_value());
    CHECK(parsed->host == host);
    CHECK(parsed->port == port);
    CHECK(net::to_string(*parsed) == canonical);
    CHECK(net::parse_endpoint(canonical).value() == *parsed);
  }
}

TEST_CASE("what is no endpoint is refused with the accepted forms", "[names]") {
  for (const auto* text : {"", ":", "host", "host:", ":4040", "host:65536", "host:-1", "host:4040x", "host: 4040",
                           "[::1]", "[::1]4040", "[]:1"}) {
    INFO(text);
    const auto parsed = net::parse_endpoint(text);
    REQUIRE(parsed.has_error());
    CHECK(parsed.error().code == Errc::kInvalidArgument);
    CHECK(parsed.error().message.find("HOST:PORT") != std::string::npos);
  }
  CHECK(net::parse_endpoint(std::string(300, 'a') + ":1").has_error());
}

TEST_CASE("expert UIDs read back as they were written", "[names]") {
  for (const auto* text : {"ffn.0", "ffn.3.17", "_a-b~C9.4294967295", "f.1.2.3.4.5.6.7.8"}) {
    INFO(text);
    const auto uid = parse_expert_uid(text);
    REQUIRE(uid.has_value());
    CHECK(to_string(*uid) == text);
  }
  CHECK(to_string(parse_expert_uid("ffn.3.17").value().parent()) == "ffn.3.");
  CHECK(to_string(parse_expert_uid("ffn.3").value().parent()) == "ffn.");
}

TEST_CASE("what is no expert UID is refused", "[names]") {
  for (const auto* text : {"", "ffn", "ffn.", ".1", "ffn.01", "ffn.-1", "ffn.+1", "ffn.1.", "ffn..1", "9ffn.1",
                           "f fn.1", "ffn.1a", "ffn.4294967296", "f.1.2.3.4.5.6.7.8.9", "ffn.1\n"}) {
    INFO(text);
    CHECK(parse_expert_uid(text).has_error());
  }
  CHECK(parse_expert_uid("f" + std::string(500, 'x') + ".1").has_error());
  CHECK(parse_expert_uid(std::string(65, 'f') + ".1").has_error());
  const auto long_text = parse_expert_uid(std::string(100'000, 'f'));
  REQUIRE(long_text.has_error());
  CHECK(long_text.error().message.size() < 500);
}

TEST_CASE("prefixes end with a dot", "[names]") {
  CHECK(to_string(parse_expert_prefix("ffn.").value()) == "ffn.");
  CHECK(to_string(parse_expert_prefix("ffn.3.").value()) == "ffn.3.");
  for (const auto* text : {"", ".", "ffn", "ffn.3", "ffn..", "ffn.03."}) CHECK(parse_expert_prefix(text).has_error());
}

TEST_CASE("UIDs and prefixes of the same text parts differ as keys", "[names]") {
  std::unordered_set<ExpertUid> uids;
  for (Coordinate i = 0; i < 32; ++i) {
    for (Coordinate j = 0; j < 32; ++j) uids.insert({"ffn", {i, j}});
  }
  CHECK(uids.size() == 1024);
  CHECK(uids.contains(parse_expert_uid("ffn.31.0").value()));
}

TEST_CASE("a pattern names its UIDs in order", "[names]") {
  const auto pattern = parse_uid_pattern("ffn.[1:3].7.[0:2]").value();
  REQUIRE(pattern.size() == 4);
  const std::vector<std::string> expected = {"ffn.1.7.0", "ffn.1.7.1", "ffn.2.7.0", "ffn.2.7.1"};
  for (std::uint64_t i = 0; i < pattern.size(); ++i) {
    CHECK(to_string(pattern.at(i)) == expected[i]);
    CHECK(pattern.contains(pattern.at(i)));
  }
  CHECK_FALSE(pattern.contains(parse_expert_uid("ffn.3.7.0").value()));
  CHECK_FALSE(pattern.contains(parse_expert_uid("ffn.1.7").value()));
  CHECK_FALSE(pattern.contains(parse_expert_uid("nop.1.7.0").value()));
}

TEST_CASE("what is no pattern is refused with an example", "[names]") {
  for (const auto* text : {"", "ffn", "ffn.", "ffn.[3:3]", "ffn.[4:3]", "ffn.[0:]", "ffn.[:4]", "ffn.[0:4", "ffn.0:4]",
                           "ffn.[0:4:2]", "ffn.[a:b]", "ffn.[0:4294967296]", "ffn.4294967295", "1.[0:2]"}) {
    INFO(text);
    const auto parsed = parse_uid_pattern(text);
    REQUIRE(parsed.has_error());
    CHECK(parsed.error().message.find("ffn.[0:4].[0:8]") != std::string::npos);
  }
}

TEST_CASE("the size of an enormous pattern saturates", "[names]") {
  const auto pattern = parse_uid_pattern("f.[0:4294967295].[0:4294967295].[0:4294967295]").value();
  CHECK(pattern.size() == std::uint64_t{1} << 63U);
  CHECK(pattern.contains(pattern.at(pattern.size() - 1)));
}
