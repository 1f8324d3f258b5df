// Records on disk: restarts, kills, damage, clocks.
#include "dht/rocksdb_store.hpp"

#include "dht/store_directory.hpp"
#include "tests/dht/service_fixture.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

namespace dmoe::dht::test {
namespace {

using namespace std::chrono_literals;
using dmoe::test::TemporaryFolder;

const IdentitySigner& signer() {
  static const IdentitySigner one(net::Identity::from_seed({1, 2, 3}));
  return one;
}

LiveRecord live(const std::string& key, const std::string& value, Duration life, std::uint64_t sequence = 1) {
  Record record{Key::of(key), signer().public_key(),        sequence, 3'600'000, false,
                {},           {value.begin(), value.end()}, 0,        {},        {}};
  sign_batch(signer(), {&record, 1});
  return {record, std::chrono::steady_clock::now() + life};
}

PutOutcome put(RecordStore& store, const LiveRecord& record) {
  return store.put(record, 1, std::chrono::steady_clock::now());
}

std::optional<std::string> value_of(RecordStore& store, const std::string& key) {
  std::optional<std::string> value;
  store.visit(Key::of(key), std::chrono::steady_clock::now(), 0, [&](const LiveRecord& found) {
    value.emplace(found.record.value.begin(), found.record.value.end());
    return true;
  });
  return value;
}

std::unique_ptr<RocksDbStore> open(const std::filesystem::path& directory) {
  auto store = RocksDbStore::open(directory, {});
  INFO((store.has_value() ? "" : describe(store.error())));
  REQUIRE(store.has_value());
  return std::move(*store);
}

TEST_CASE("Records survive a restart unchanged and verify", "[dht][rocksdb][b2]") {
  const TemporaryFolder directory;
  {
    const auto store = open(directory.path());
    for (int i = 0; i < 100; ++i) {
      CHECK(put(*store, live("k" + std::to_string(i), "v" + std::to_string(i), 1h)) == PutOutcome::kStored);
    }
    store->save_state({1, 2, 3});
  }
  const auto store = open(directory.path());
  RecordVerifier verifier(signer());
  for (int i = 0; i < 100; ++i) CHECK(value_of(*store, "k" + std::to_string(i)) == "v" + std::to_string(i));
  store->visit(Key::of("k7"), std::chrono::steady_clock::now(), 0, [&](const LiveRecord& found) {
    CHECK(verifier.verify(found.record));
    CHECK(found.deadline <= std::chrono::steady_clock::now() + 1h);
    return true;
  });
  CHECK(store->load_state() == std::vector<std::uint8_t>{1, 2, 3});
  CHECK(store->keys_after({}, 1'000, std::chrono::steady_clock::now()).size() == 100);
  CHECK(put(*store, live("k1", "old", 1h, 0)) == PutOutcome::kOlder);
  CHECK(put(*store, live("k1", "new", 1h, 2)) == PutOutcome::kStored);
  CHECK(value_of(*store, "k1") == "new");
}

TEST_CASE("An expired record is not returned without any compaction and not after a restart",
          "[dht][rocksdb][b1][d18]") {
  const TemporaryFolder directory;
  const auto dies = std::chrono::steady_clock::now() + 60ms;
  {
    const auto store = open(directory.path());
    auto record = live("k", "v", 0ms);
    record.deadline = dies;
    put(*store, record);
    store->flush();
    while (std::chrono::steady_clock::now() <= dies) std::this_thread::yield();
    CHECK_FALSE(value_of(*store, "k").has_value());
    CHECK_FALSE(store->get(Key::of("k"), signer().public_key(), {}, dies).has_value());
    CHECK(store->keys_after({}, 10, dies).empty());
  }
  CHECK_FALSE(value_of(*open(directory.path()), "k").has_value());
}

TEST_CASE("Time on the store's axis goes on over restarts and a clock set back kills what was", "[dht][rocksdb][d18]") {
  const StoreTime first("");
  const std::int64_t before = first.now();
  const StoreTime again(first.save());
  CHECK(again.now() >= before);
  CHECK(again.now() < before + 10'000);
  // Another boot, and the wall clock stands before the time that was saved.
  const StoreTime back("another-boot " + std::to_string(before) + " 5 99999999999999");
  CHECK(back.now() > before + std::chrono::milliseconds(kMaxTtl).count());
  // Another boot, an hour of wall time later.
  const auto wall =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  const StoreTime later("another-boot 1000 5 " + std::to_string(wall - 3'600'000));
  CHECK(later.now() >= 3'601'000);
  CHECK(later.now() < 3'700'000);
}

TEST_CASE("A directory in use by another process is a clear error", "[dht][rocksdb]") {
  const TemporaryFolder directory;
  const auto store = open(directory.path());
  const auto second = RocksDbStore::open(directory.path(), {});
  REQUIRE_FALSE(second.has_value());
  CHECK(second.error().code == Errc::kUnavailable);
  CHECK(second.error().message.find(directory.path().string()) != std::string::npos);
  CHECK(second.error().message.find(std::to_string(::getpid())) != std::string::npos);
}

TEST_CASE("A database of somebody else is left alone", "[dht][rocksdb][b2]") {
  const TemporaryFolder directory;
  std::filesystem::create_directories(directory.path() / "records");
  std::ofstream(directory.path() / "records" / "CURRENT") << "MANIFEST-000001\n";
  const auto store = RocksDbStore::open(directory.path(), {});
  REQUIRE_FALSE(store.has_value());
  CHECK(store.error().message.find("format") != std::string::npos);
  CHECK(std::filesystem::exists(directory.path() / "records" / "CURRENT"));
}

TEST_CASE("A damaged database is moved aside and made anew", "[dht][rocksdb][d14]") {
  const TemporaryFolder directory;
  {
    const auto store = open(directory.path());
    put(*store, live("k", "v", 1h));
    store->flush();
  }
  std::ofstream(directory.path() / "records" / "CURRENT") << "MANIFEST-999999\n";
  const auto store = open(directory.path());
  CHECK(put(*store, live("l", "w", 1h)) == PutOutcome::kStored);
  store->flush();
  CHECK(value_of(*store, "l") == "w");
  CHECK(std::filesystem::exists(directory.path() / "records.damaged"));
}

constexpr int kReportTo = 9;  // A descriptor that nothing else has.

/// Run by the next test in a process of its own: RocksDB's threads do not survive a fork without exec.
TEST_CASE("Writer that is to be killed", "[.child]") {
  const char* directory = std::getenv("DMOE_TEST_DIRECTORY");
  REQUIRE(directory != nullptr);
  const auto store = open(directory);
  const auto start = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  for (std::uint64_t i = 0;; ++i) {
    put(*store, live("k" + std::to_string(i % 500), std::string(200, 'x'), 1h, start + i));
    if (i == 40) REQUIRE(::write(kReportTo, "w", 1) == 1);
  }
}

/// Kills a process that writes for ever, `kills` times on one folder, and opens what is left.
void kill_writers(int kills) {
  const TemporaryFolder directory;
  for (int round = 0; round < kills; ++round) {
    int pipe_ends[2];
    REQUIRE(::pipe(pipe_ends) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      ::setenv("DMOE_TEST_DIRECTORY", directory.path().c_str(), 1);
      ::dup2(pipe_ends[1], kReportTo);
      ::execl("/proc/self/exe", "dmoe_test_dht", "Writer that is to be killed", nullptr);
      ::_exit(1);
    }
    ::close(pipe_ends[1]);
    char started = 0;
    CHECK(::read(pipe_ends[0], &started, 1) == 1);  // Nothing to read: the child could not open.
    CHECK(started == 'w');
    ::kill(child, SIGKILL);
    ::close(pipe_ends[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
  }
  const auto store = open(directory.path());
  CHECK(put(*store, live("last", "v", 1h)) == PutOutcome::kStored);
  CHECK_FALSE(std::filesystem::exists(directory.path() / "records.damaged"));
}

TEST_CASE("A store killed while writing opens again each time", "[dht][rocksdb][d14]") { kill_writers(12); }

TEST_CASE("A store killed 100 times while writing opens again each time", "[.long][d14]") { kill_writers(100); }

/// Run by the next test in a process of its own, which may mount.
TEST_CASE("Store on a disk that fills up", "[.child]") {
  const char* directory = std::getenv("DMOE_TEST_DIRECTORY");
  REQUIRE(directory != nullptr);
  REQUIRE(::mount("none", directory, "tmpfs", 0, "size=40m") == 0);
  const std::filesystem::path filler = std::filesystem::path(directory) / "filler";
  const auto fill = [&] {
    std::ofstream out(filler, std::ios::binary | std::ios::app);
    const std::vector<char> block(1U << 16U, 'x');
    while (out.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  };
  constexpr int kRecords = 2'000;
  const std::filesystem::path data = std::filesystem::path(directory) / "dht";
  {
    const auto store = open(data);
    for (int i = 0; i < kRecords; ++i) put(*store, live("before" + std::to_string(i), std::string(500, 'a'), 1h));
    store->flush();
    fill();
    for (int i = 0; i < kRecords; ++i) {
      REQUIRE(put(*store, live("during" + std::to_string(i), std::string(500, 'b'), 1h)) == PutOutcome::kStored);
    }
    while (!store->stats().degraded) std::this_thread::yield();
    // It serves on: what was there, and what came since.
    CHECK(value_of(*store, "before7") == std::string(500, 'a'));
    CHECK(value_of(*store, "during1999") == std::string(500, 'b'));
    std::filesystem::remove(filler);
    while (store->stats().degraded) std::this_thread::yield();
    store->flush();
  }
  {
    const auto store = open(data);
    for (int i = 0; i < kRecords; ++i) {
      REQUIRE(value_of(*store, "before" + std::to_string(i)).has_value());
      REQUIRE(value_of(*store, "during" + std::to_string(i)).has_value());
    }
    // And a process that ends while the disk is full starts again.
    fill();
    for (int i = 0; i < kRecords; ++i) put(*store, live("late" + std::to_string(i), std::string(500, 'c'), 1h));
  }
  std::filesystem::remove(filler);
  const auto store = open(data);
  CHECK(put(*store, live("last", "v", 1h)) == PutOutcome::kStored);
  CHECK(value_of(*store, "before7") == std::string(500, 'a'));
}

TEST_CASE("A full disk means memory until there is space", "[dht][rocksdb][d12]") {
  const TemporaryFolder directory;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Where mounting is not allowed, or would show outside (in a chroot), there is nothing to see.
    if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) ::_exit(0);
    ::setenv("DMOE_TEST_DIRECTORY", directory.path().c_str(), 1);
    ::execl("/proc/self/exe", "dmoe_test_dht", "Store on a disk that fills up", nullptr);
    ::_exit(1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("A node with a data directory serves its records after a restart", "[dht][udp][rocksdb]") {
  const TemporaryFolder directory;
  Loopback loopback;
  ServiceOptions options;
  options.data_dir = directory.path();
  {
    const auto service = loopback.start(options);
    REQUIRE(store(*service, "k", "v").has_value());
  }
  const auto service = loopback.start(options);
  CHECK(text_of(find(*service, "k")) == "v");
  const auto second = Service::start(loopback.io(), net::Identity::generate(), options);
  REQUIRE_FALSE(second.has_value());
  CHECK(second.error().code == Errc::kUnavailable);
}

}  // namespace
}  // namespace dmoe::dht::test
