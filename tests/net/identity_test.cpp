#include "net/identity.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

using namespace dmoe;
using net::Identity;

namespace {

net::Bytes as_bytes(std::string_view text) { return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}; }

unsigned mode_of(const std::filesystem::path& path) {
  struct stat status {};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_mode & 0777U;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  REQUIRE(::chmod(path.c_str(), 0600) == 0);
}

}  // namespace

TEST_CASE("a signature is accepted for its key and message only", "[identity]") {
  const auto key = Identity::generate();
  const auto other = Identity::generate();
  auto signature = key.sign(as_bytes("announce ffn.3."));
  CHECK(net::verify(key.public_key(), as_bytes("announce ffn.3."), signature));
  CHECK_FALSE(net::verify(key.public_key(), as_bytes("announce ffn.4."), signature));
  CHECK_FALSE(net::verify(other.public_key(), as_bytes("announce ffn.3."), signature));
  signature[10] ^= 1U;
  CHECK_FALSE(net::verify(key.public_key(), as_bytes("announce ffn.3."), signature));
  CHECK(net::verify(key.public_key(), {}, key.sign({})));
}

TEST_CASE("the key of the test vector in RFC 8032 signs as the RFC says", "[identity]") {
  const std::array<std::uint8_t, 32> seed{0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a,
                                          0xf4, 0x92, 0xec, 0x2c, 0xc4, 0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32,
                                          0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60};
  const auto key = Identity::from_seed(seed);
  CHECK(key.public_key()[0] == 0xd7);
  CHECK(key.public_key()[31] == 0x1a);
  const auto signature = key.sign({});
  CHECK(signature[0] == 0xe5);
  CHECK(signature[63] == 0x0b);
}

TEST_CASE("a peer ID is the hash of the key and reads back from its text", "[identity]") {
  const auto key = Identity::generate();
  CHECK(key.peer_id() == net::peer_id_of(key.public_key()));
  const auto text = net::to_string(key.peer_id());
  CHECK(text.size() == 64);
  CHECK(net::short_string(key.peer_id()) == text.substr(0, 8));
  CHECK(net::parse_peer_id(text).value() == key.peer_id());
  for (const auto& bad : {std::string(), text.substr(1), text + "0", "g" + text.substr(1), "A" + text.substr(1)}) {
    CHECK(net::parse_peer_id(bad).error().code == Errc::kInvalidArgument);
  }
}

TEST_CASE("an identity is made once and is the same ever after", "[identity]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "deep" / "er" / "identity.pem";
  const auto first = Identity::load_or_create(file);
  REQUIRE(first.has_value());
  CHECK(mode_of(file) == 0600);
  const auto again = Identity::load_or_create(file);
  REQUIRE(again.has_value());
  CHECK(again->peer_id() == first->peer_id());
  CHECK(Identity::load(file).value().peer_id() == first->peer_id());
  CHECK(first->save_new(file).error().code == Errc::kInvalidArgument);
}

TEST_CASE("a missing identity is told from a bad one", "[identity]") {
  const test::TemporaryFolder folder;
  CHECK(Identity::load(folder.path() / "none.pem").error().code == Errc::kNotFound);
  CHECK(Identity::load(folder.path()).error().code == Errc::kInvalidArgument);
}

TEST_CASE("an identity that others can read is refused with the command that mends it", "[identity]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "identity.pem";
  REQUIRE(Identity::generate().save_new(file).has_value());
  REQUIRE(::chmod(file.c_str(), 0640) == 0);
  const auto loaded = Identity::load_or_create(file);
  REQUIRE(loaded.has_error());
  CHECK(loaded.error().code == Errc::kInvalidArgument);
  CHECK(loaded.error().message.find("chmod 600") != std::string::npos);
}

TEST_CASE("a damaged identity is refused and never replaced", "[identity]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "identity.pem";
  REQUIRE(Identity::generate().save_new(file).has_value());
  const auto good = read(file);
  const std::string rsa_like = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
  for (const auto& damaged : {std::string(), good.substr(0, good.size() / 2), std::string(100'000, 'x'), rsa_like}) {
    write(file, damaged);
    const auto loaded = Identity::load_or_create(file);
    REQUIRE(loaded.has_error());
    CHECK(loaded.error().code == Errc::kInvalidArgument);
    CHECK(loaded.error().message.find(file.string()) != std::string::npos);
    CHECK(read(file) == damaged);
  }
}

TEST_CASE("many who make one identity at once all get the same", "[identity]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "identity.pem";
  std::vector<std::string> ids(8);
  std::vector<std::thread> threads;
  for (auto& id : ids) {
    threads.emplace_back([&file, &id] {
      const auto identity = Identity::load_or_create(file);
      id = identity.has_value() ? net::to_string(identity->peer_id()) : describe(identity.error());
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(std::set<std::string>(ids.begin(), ids.end()).size() == 1);
  CHECK(ids.front().size() == 64);
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++files;
  CHECK(files == 1);
}
