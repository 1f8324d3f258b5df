// The IDX reader: right files, and every way in which a file can be wrong.
#include "cli/idx_file.hpp"
#include "tests/e2e/program_run.hpp"
#include "tests/support/catch.hpp"

#include <zlib.h>

#include <random>
#include <string>

using namespace dmoe;
using dmoe::test::test_directory;
using dmoe::test::write_text;

namespace {

std::string header(const std::vector<std::uint32_t>& shape, std::uint8_t type = 0x08) {
  std::string bytes{'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const std::uint32_t size : shape) {
    for (const unsigned shift : {24U, 16U, 8U, 0U}) bytes += static_cast<char>(size >> shift);
  }
  return bytes;
}

std::string gzipped(const std::string& bytes, const std::filesystem::path& scratch) {
  gzFile file = gzopen(scratch.c_str(), "wb");
  REQUIRE(file != nullptr);
  REQUIRE(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())) == static_cast<int>(bytes.size()));
  REQUIRE(gzclose(file) == Z_OK);
  return test::read_text(scratch);
}

}  // namespace

TEST_CASE("read_idx reads a plain and a gzipped array alike", "[idx]") {
  const auto directory = test_directory();
  const std::string bytes = header({2, 3, 1}) + std::string("\x00\x01\x02\xfd\xfe\xff", 6);
  write_text(directory.path() / "plain", bytes);
  write_text(directory.path() / "packed.gz", gzipped(bytes, directory.path() / "scratch"));
  for (const char* name : {"plain", "packed.gz"}) {
    const auto array = cli::read_idx(directory.path() / name);
    REQUIRE(array.has_value());
    CHECK(array->shape == std::vector<std::uint32_t>{2, 3, 1});
    CHECK(array->data == std::vector<std::uint8_t>{0, 1, 2, 0xfd, 0xfe, 0xff});
  }
}

TEST_CASE("read_idx refuses damaged files and names the fault", "[idx]") {
  struct Case {
    const char* about;
    std::string bytes;
    const char* message;
  };
  const std::string good = header({4}) + "abcd";
  const std::vector<Case> cases{
      {"empty", "", "not an IDX file"},
      {"shorter than its magic number", std::string(3, '\0'), "not an IDX file"},
      {"another format", "\x89PNG and so on", "not an IDX file"},
      {"float elements", header({4}, 0x0d) + std::string(16, 'x'), "not unsigned bytes"},
      {"no dimension", header({}), "0 dimensions"},
      {"too many dimensions", header({1, 1, 1, 1, 1}) + "x", "5 dimensions"},
      {"header cut off", header({60000, 28, 28}).substr(0, 9), "ends inside its header"},
      {"a dimension of zero", header({0, 28}), "empty array"},
      {"a product over the limit", header({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}), "claims more than"},
      {"a product that would overflow to zero", header({0x80000000, 0x80000000, 4}), "claims more than"},
      {"less data than promised", good.substr(0, good.size() - 1), "ends after 3 of 4 bytes"},
      {"a gigabyte promised and nothing given", header({1U << 30U}), "ends after 0 of"},
      {"more data than promised", good + "e", "longer than its header"},
  };
  const auto directory = test_directory();
  for (const Case& entry : cases) {
    INFO(entry.about);
    write_text(directory.path() / "file", entry.bytes);
    const auto array = cli::read_idx(directory.path() / "file");
    REQUIRE_FALSE(array.has_value());
    CHECK(array.error().code == Errc::kInvalidArgument);
    CHECK(array.error().message.find(entry.message) != std::string::npos);
    CHECK(array.error().message.find("file") != std::string::npos);
  }
}

TEST_CASE("read_idx refuses damaged gzip data", "[idx]") {
  const auto directory = test_directory();
  const std::string packed = gzipped(header({1000}) + std::string(1000, 'x'), directory.path() / "scratch");
  std::string flipped_checksum = packed;
  flipped_checksum[packed.size() - 6] = static_cast<char>(flipped_checksum[packed.size() - 6] ^ 1);
  for (const std::string& bytes : {packed.substr(0, packed.size() / 2), flipped_checksum}) {
    write_text(directory.path() / "file.gz", bytes);
    const auto array = cli::read_idx(directory.path() / "file.gz");
    REQUIRE_FALSE(array.has_value());
    CHECK(array.error().code == Errc::kInvalidArgument);
  }
}

TEST_CASE("read_idx says when there is no file or no regular file", "[idx]") {
  const auto directory = test_directory();
  const auto missing = cli::read_idx(directory.path() / "none");
  REQUIRE_FALSE(missing.has_value());
  CHECK(missing.error().code == Errc::kNotFound);
  const auto folder = cli::read_idx(directory.path());
  REQUIRE_FALSE(folder.has_value());
  CHECK(folder.error().code == Errc::kInvalidArgument);
}

TEST_CASE("read_idx survives random changes of a good file", "[idx]") {
  const auto directory = test_directory();
  const std::string plain = header({3, 5, 7}) + std::string(105, 'x');
  const std::string packed = gzipped(plain, directory.path() / "scratch");
  std::mt19937_64 random(test::seed());
  for (int i = 0; i < 400; ++i) {
    std::string bytes = i % 2 == 0 ? plain : packed;
    for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    bytes.resize(random() % 3 == 0 ? random() % (bytes.size() + 1) : bytes.size());
    write_text(directory.path() / "file", bytes);
    const auto array = cli::read_idx(directory.path() / "file");
    if (!array) continue;
    std::uint64_t product = 1;
    for (const std::uint32_t size : array->shape) product *= size;
    CHECK(array->data.size() == product);
  }
}
