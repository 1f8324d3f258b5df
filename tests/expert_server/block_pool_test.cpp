// Memory that is used again.
#include "expert_server/block_pool.hpp"

#include "tests/support/catch.hpp"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

using namespace dmoe::expert_server;

namespace {

constexpr std::size_t kMiB = 1UL << 20U;

}  // namespace

TEST_CASE("a block that was given back is the next of its size", "[memory]") {
  BlockPool pool(100 * kMiB);
  void* const first = pool.take(8 * kMiB);
  std::memset(first, 7, 8 * kMiB);
  pool.give_back(first);
  CHECK(pool.kept() == 8 * kMiB);
  CHECK(pool.take(7 * kMiB + 1) == first);  // Sizes of a class share blocks.
  CHECK(pool.kept() == 0);
  void* const second = pool.take(8 * kMiB);
  CHECK(second != first);
  CHECK(pool.give_back(first));
  CHECK(pool.give_back(second));
  CHECK_FALSE(pool.give_back(second));
  int other = 0;
  CHECK_FALSE(pool.give_back(&other));
}

TEST_CASE("a block is larger than what was asked for by a fourth at most", "[memory]") {
  BlockPool pool(1'000 * kMiB);
  for (std::size_t bytes = kMiB; bytes < 100 * kMiB; bytes += kMiB / 3 + 1) {
    void* const block = pool.take(bytes);
    static_cast<char*>(block)[bytes - 1] = 1;
    pool.give_back(block);
    REQUIRE(pool.kept() >= bytes);
    REQUIRE(pool.kept() <= bytes + bytes / 4 + 4'096);
    pool.release_unused_since(BlockPool::Clock::time_point::max());
    REQUIRE(pool.kept() == 0);
  }
}

TEST_CASE("a small block is found again too", "[memory]") {
  BlockPool pool(kMiB);
  void* const block = pool.take(100);
  CHECK(pool.give_back(block));
  CHECK(pool.take(3'000) == block);
  CHECK(pool.kept() == 0);
  CHECK(pool.give_back(block));
}

TEST_CASE("no more is kept than was agreed", "[memory]") {
  BlockPool pool(10 * kMiB);
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(pool.take(4 * kMiB));
  for (void* const block : blocks) pool.give_back(block);
  CHECK(pool.kept() == 8 * kMiB);
}

TEST_CASE("what nobody takes any more goes back to the kernel, what is taken stays", "[memory]") {
  BlockPool pool(100 * kMiB);
  void* const cold = pool.take(4 * kMiB);
  void* const hot = pool.take(4 * kMiB);
  pool.give_back(cold);
  pool.give_back(hot);
  const auto between = BlockPool::Clock::now();
  CHECK(pool.take(4 * kMiB) == hot);  // The one used last: the other one grows old.
  pool.give_back(hot);
  pool.release_unused_since(between);
  CHECK(pool.kept() == 4 * kMiB);
  CHECK(pool.take(4 * kMiB) == hot);
  pool.give_back(hot);
}

TEST_CASE("threads that take and give back never share a block", "[memory]") {
  BlockPool pool(64 * kMiB);
  std::vector<std::thread> threads;
  std::atomic<int> broken{0};
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&pool, &broken, thread] {
      for (int i = 0; i < 500; ++i) {
        auto* const block = static_cast<int*>(pool.take(kMiB));
        block[0] = thread;
        block[1'000] = i;
        if (i % 100 == 0) pool.release_unused_since(BlockPool::Clock::now());
        if (block[0] != thread || block[1'000] != i) ++broken;
        pool.give_back(block);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(broken == 0);
  CHECK(pool.kept() <= 4 * kMiB);
}
