// Linked into every test program beside Catch2's main: prints the seed with which a failure can be repeated.
#include "tests/support/seed.hpp"

#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

namespace dmoe::test {

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): nothing in the test programs sets the environment.
    if (const char* text = std::getenv("DMOE_TEST_SEED")) {
      std::uint64_t given = 0;
      std::from_chars(text, text + std::strlen(text), given);
      return given;
    }
    return std::uint64_t{std::random_device{}()};
  }();
  return value;
}

namespace {

const bool kPrepared = [] {
  (void)std::signal(SIGPIPE, SIG_IGN);
  std::cerr << "DMOE_TEST_SEED=" << seed() << '\n' << std::flush;
  return true;
}();

}  // namespace
}  // namespace dmoe::test
