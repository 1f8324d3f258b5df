#include "dht/random_source.hpp"

#include <sys/random.h>

#include <array>
#include <memory>
#include <random>

namespace dmoe::dht {
namespace {

struct Block {
  std::array<std::uint64_t, 32> words{};  // 256 bytes: what getrandom gives without being interrupted.
  std::size_t used = 32;

  std::uint64_t next() {
    if (used == words.size()) {
      if (::getrandom(words.data(), sizeof words, 0) != static_cast<ssize_t>(sizeof words)) {
        std::random_device device;
        for (std::uint64_t& word : words) word = std::uint64_t{device()} << 32U | device();
      }
      used = 0;
    }
    return words[used++];
  }
};

}  // namespace

RandomSource secure_random_source() {
  return [block = std::make_shared<Block>()] { return block->next(); };
}

}  // namespace dmoe::dht
