#include "expert_server/safetensors.hpp"

#include "expert_server/file_io.hpp"
#include "expert_server/file_stream.hpp"
#include "expert_server/large_memory.hpp"
#include "expert_server/piece_digest.hpp"
#include "expert_server/sha256_stream.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/catch.hpp"

#include <fstream>
#include <iterator>
#include <limits>
#include <random>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;

namespace fs = std::filesystem;

namespace {

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

std::string framed(const std::string& header, const std::string& data) {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFFU);
  return text + header + data;
}

SafetensorsContent sample() {
  SafetensorsContent content;
  content.metadata = {{"name", "value with \"quotes\" and ünïcode"}};
  content.tensors = {{"flag", torch::tensor({true, false, true})},
                     {"half", torch::randn({3}).to(at::kHalf)},
                     {"matrix", torch::randn({2, 3})},
                     {"count", torch::scalar_tensor(7, at::kLong)},
                     {"empty", torch::zeros({0, 4})}};
  return content;
}

/// Of several pieces: whole ones and a last one that is not.
SafetensorsContent large_sample() {
  return {{{"name", "large"}},
          {{"matrix", torch::randn({3, 1'024, 1'024})}, {"odd", torch::randn({7})}, {"row", torch::randn({100'000})}}};
}

const at::Tensor& tensor_in(const SafetensorsContent& content, const std::string& name) {
  const auto found =
      std::find_if(content.tensors.begin(), content.tensors.end(), [&](const auto& item) { return item.name == name; });
  REQUIRE(found != content.tensors.end());
  return found->tensor;
}

std::span<const std::uint8_t> bytes_in(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

/// Where the digits of the digest under `key` begin.
std::size_t digits_after(const std::string& text, const std::string& key) {
  const auto before = "\"" + key + "\":\"";
  const auto place = text.find(before);
  REQUIRE(place != std::string::npos);
  return place + before.size();
}

constexpr std::size_t kDigits = 64;

}  // namespace

TEST_CASE("tensors and metadata come back from a file with the same bits", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  const auto content = sample();
  REQUIRE(write_safetensors(file, content).has_value());
  const auto back = read_safetensors(file);
  REQUIRE(back.has_value());
  CHECK(back->metadata.at("name") == content.metadata.at("name"));
  REQUIRE(back->tensors.size() == content.tensors.size());
  for (const auto& item : content.tensors) {
    const auto found = std::find_if(back->tensors.begin(), back->tensors.end(),
                                    [&](const auto& other) { return other.name == item.name; });
    REQUIRE(found != back->tensors.end());
    CHECK(same_bits(found->tensor, item.tensor));
  }
}

TEST_CASE("the file is laid out as the public specification says", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  REQUIRE(write_safetensors(file, {{}, {{"w", torch::tensor({1.0F, 2.0F})}}}).has_value());
  const auto text = read_text(file);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) length |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
  REQUIRE(text.size() == 8 + length + 8);
  CHECK(length % 8 == 0);
  const auto header = text.substr(8, length);
  CHECK(header.starts_with("{"));
  CHECK(header.find(R"("w":{"data_offsets":[0,8],"dtype":"F32","shape":[2]})") != std::string::npos);
  CHECK(header.find("\"__metadata__\"") != std::string::npos);
}

TEST_CASE("d3 one flipped bit anywhere is noticed", "[safetensors][d3]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  REQUIRE(write_safetensors(file, sample()).has_value());
  const auto intact = read_text(file);
  for (std::size_t place = 0; place < intact.size(); ++place) {
    auto text = intact;
    text[place] = static_cast<char>(text[place] ^ (1 << (place % 8)));
    write_text(file, text);
    INFO("byte " << place);
    REQUIRE(read_safetensors(file).has_error());
  }
}

TEST_CASE("d2 a file cut short anywhere is noticed", "[safetensors][d2]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  REQUIRE(write_safetensors(file, sample()).has_value());
  const auto intact = read_text(file);
  for (std::size_t size = 0; size < intact.size(); ++size) {
    write_text(file, intact.substr(0, size));
    REQUIRE(read_safetensors(file).has_error());
  }
  write_text(file, intact + "x");
  CHECK(read_safetensors(file).has_error());
}

TEST_CASE("d3 in a file of many pieces a bit or a byte or a whole piece out of its place is noticed",
          "[safetensors][d3]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  const auto content = large_sample();
  REQUIRE(write_safetensors(file, content).has_value());
  const auto back = read_safetensors(file);
  REQUIRE(back.has_value());
  for (const auto& item : content.tensors) CHECK(same_bits(tensor_in(*back, item.name), item.tensor));
  const auto intact = read_text(file);
  REQUIRE(intact.size() > 3 * kStreamPiece);
  REQUIRE(intact.size() % kDigestPiece != 0);
  const auto refused = [&](const std::string& text) {
    write_text(file, text);
    return read_safetensors(file).has_error();
  };
  for (std::size_t edge = kStreamPiece; edge < intact.size(); edge += kStreamPiece) {
    for (const auto place : {edge - 1, edge}) {
      auto flipped = intact;
      flipped[place] = static_cast<char>(flipped[place] ^ 0x40);
      CHECK(refused(flipped));
    }
  }
  for (const auto piece : {kDigestPiece, kStreamPiece}) {
    auto swapped = intact;
    const auto at = [&](std::size_t i) { return swapped.begin() + static_cast<std::ptrdiff_t>(i * piece); };
    std::swap_ranges(at(1), at(2), at(2));
    CHECK(refused(swapped));
    CHECK(refused(intact.substr(0, 2 * piece)));
  }
  CHECK(refused(intact.substr(0, intact.size() - 1)));
  write_text(file, intact);
  CHECK(read_safetensors(file).has_value());
}

TEST_CASE("the checksum is what its description says", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  REQUIRE(write_safetensors(file, large_sample()).has_value());
  auto text = read_text(file);
  const auto place = digits_after(text, kChecksumKey);
  const auto digits = text.substr(place, kDigits);
  text.replace(place, kDigits, kDigits, '0');
  std::string summary = std::to_string(text.size()) + " 65536\n";
  for (std::size_t at = 0; at < text.size(); at += kDigestPiece) {
    Sha256Stream piece;
    piece.add(bytes_in(text).subspan(at, std::min(kDigestPiece, text.size() - at)));
    const auto digest = piece.finish();
    summary.append(digest.begin(), digest.end());
  }
  Sha256Stream all;
  all.add(bytes_in(summary));
  CHECK(all.finish_hex() == digits);
}

TEST_CASE("d3 files with the plain checksum of earlier versions are read and checked", "[safetensors][d3]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  const auto content = large_sample();
  REQUIRE(write_safetensors(file, content).has_value());
  auto text = read_text(file);
  const auto place = digits_after(text, kChecksumKey);
  const std::string key = kChecksumKey;
  const std::string old_key = kPlainChecksumKey;
  text.replace(place, kDigits, kDigits, '0');
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) length |= std::uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
  text.insert(8 + length, key.size() - old_key.size(), ' ');  // The key is shorter; spaces make up for it.
  text.replace(text.find(key), key.size(), old_key);
  Sha256Stream digest;
  digest.add(bytes_in(text));
  text.replace(digits_after(text, old_key), kDigits, digest.finish_hex());
  write_text(file, text);
  const auto back = read_safetensors(file);
  REQUIRE(back.has_value());
  for (const auto& item : content.tensors) CHECK(same_bits(tensor_in(*back, item.name), item.tensor));
  text[text.size() - 5] = static_cast<char>(text[text.size() - 5] ^ 1);
  write_text(file, text);
  CHECK(read_safetensors(file).has_error());
}

TEST_CASE("tensors of a file outlive each other", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  const auto content = large_sample();
  REQUIRE(write_safetensors(file, content).has_value());
  auto back = read_safetensors(file).value();
  const auto row = tensor_in(back, "row");
  back.tensors.clear();  // What lay before and behind it gives its memory back.
  CHECK(same_bits(row, tensor_in(content, "row")));
  row.fill_(1);
  CHECK(read_safetensors(file).has_value());
}

TEST_CASE("large memory is zero and aligned and gives parts of itself back", "[safetensors]") {
  for (const std::size_t size : {1UL, 5'000UL, (2UL << 20U) - 1, 2UL << 20U, (5UL << 20U) + 12'345}) {
    const LargeMemory memory(size);
    REQUIRE(memory.size() >= size);
    CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % kDirectAlignment == 0);
    const std::span<std::uint8_t> bytes(memory.data(), memory.size());
    CHECK(std::all_of(bytes.begin(), bytes.end(), [](auto byte) { return byte == 0; }));
    std::fill(bytes.begin(), bytes.end(), std::uint8_t{7});
    const auto third = bytes.size() / 3;
    LargeMemory::release(bytes.subspan(third, third));
    CHECK(
        std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(third), [](auto b) { return b == 7; }));
    CHECK(std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(2 * third), bytes.end(),
                      [](auto b) { return b == 7; }));
  }
}

TEST_CASE("hostile headers are refused before anything is allocated", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  const std::vector<std::string> hostile{
      framed("", ""),
      framed("[]", ""),
      framed("{", ""),
      framed("null", ""),
      framed(R"({"a":1})", ""),
      framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", "12345678"),
      framed(R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", "1234"),
      framed(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "1234"),
      framed(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "1234"),
      framed(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", ""),
      framed(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", "1234"),
      framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "12345678"),
      framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "1234"),
      framed(
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
          "1234"),
      framed(
          R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
          "12345678"),
      framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "12345678"),
      framed(R"({"__metadata__":{"a":1}})", ""),
      framed(R"({"__metadata__":[]})", ""),
      framed("{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}", ""),
      std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}",
      std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}",
  };
  for (const auto& text : hostile) {
    write_text(file, text);
    INFO(text.substr(8, 100));
    const auto read = read_safetensors(file, /*require_checksum=*/false);
    REQUIRE(read.has_error());
    CHECK(read.error().code == Errc::kInvalidArgument);
  }
  CHECK(read_safetensors(folder.path() / "none").error().code == Errc::kNotFound);
  CHECK(read_safetensors(folder.path()).has_error());
}

TEST_CASE("random bytes as a header never do harm", "[safetensors][fuzz]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  REQUIRE(write_safetensors(file, sample()).has_value());
  const auto intact = read_text(file);
  std::mt19937_64 random(dmoe::test::seed());
  for (int round = 0; round < 500; ++round) {
    auto text = intact;
    for (int i = 0; i < 4; ++i) text[random() % text.size()] = static_cast<char>(random());
    write_text(file, text);
    (void)read_safetensors(file, /*require_checksum=*/false);
  }
  SUCCEED();
}

TEST_CASE("a file of another program is read when no checksum is asked for", "[safetensors]") {
  const TemporaryFolder folder;
  const auto file = folder.path() / "x.safetensors";
  write_text(file, framed(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", std::string(4, '\0')));
  CHECK(read_safetensors(file).has_error());
  const auto read = read_safetensors(file, /*require_checksum=*/false);
  REQUIRE(read.has_value());
  CHECK(read->tensors.at(0).tensor.item<float>() == 0);
}

TEST_CASE("d10 the temporary file lies beside its target and is gone afterwards", "[safetensors][d10]") {
  const TemporaryFolder folder;
  REQUIRE(write_safetensors(folder.path() / "x.safetensors", sample()).has_value());
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
  const auto refused = write_safetensors(folder.path() / "no-such-folder" / "x.safetensors", sample());
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kUnavailable);
}
