// The main function of every test program: prints the seed with which a failure can be repeated.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "tests/support/catch.hpp"

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

}  // namespace dmoe::test

int main(int argc, char* argv[]) {
  (void)std::signal(SIGPIPE, SIG_IGN);
  std::cerr << "DMOE_TEST_SEED=" << dmoe::test::seed() << '\n' << std::flush;
  return Catch::Session().run(argc, argv);
}
