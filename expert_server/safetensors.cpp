#include "expert_server/safetensors.hpp"

#include "expert_server/file_io.hpp"
#include "expert_server/file_stream.hpp"
#include "expert_server/large_memory.hpp"
#include "expert_server/piece_digest.hpp"
#include "expert_server/sha256_stream.hpp"

#include <torch/types.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <utility>

namespace dmoe::expert_server {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr std::size_t kDigestDigits = 64;
constexpr std::size_t kMaxDimensions = 16;
constexpr std::size_t kCacheLine = 64;
constexpr const char* kTemporaryMark = ".tmp-";

struct FileDtype {
  at::ScalarType dtype;
  const char* name;
};

constexpr std::array<FileDtype, 10> kFileDtypes{{{at::kFloat, "F32"},
                                                 {at::kDouble, "F64"},
                                                 {at::kHalf, "F16"},
                                                 {at::kBFloat16, "BF16"},
                                                 {at::kLong, "I64"},
                                                 {at::kInt, "I32"},
                                                 {at::kShort, "I16"},
                                                 {at::kChar, "I8"},
                                                 {at::kByte, "U8"},
                                                 {at::kBool, "BOOL"}}};

Error damaged(const fs::path& file, const std::string& what) {
  return {Errc::kInvalidArgument, file.string() + " is damaged: " + what, {}};
}

std::span<const std::uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::span<const std::uint8_t> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::uint8_t*>(tensor.data_ptr()), tensor.nbytes()};
}

std::array<std::uint8_t, 8> little_endian(std::uint64_t value) {
  std::array<std::uint8_t, 8> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
  return bytes;
}

std::uint64_t from_little_endian(const std::array<std::uint8_t, 8>& bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

/// Where the digits stand in the header; npos: it was not written by this program.
std::size_t digest_place(const std::string& header, const std::string& key, const std::string& digits) {
  const auto before = "\"" + key + "\":\"";
  const auto place = header.find(before + digits + "\"");
  return place == std::string::npos ? place : place + before.size();
}

// ---- writing

Result<std::string> header_text(const SafetensorsContent& content) {
  Json header = Json::object();
  header["__metadata__"] = content.metadata;
  std::uint64_t offset = 0;
  for (const auto& [name, tensor] : content.tensors) {
    const auto found = std::find_if(kFileDtypes.begin(), kFileDtypes.end(), [&tensor = tensor](const auto& item) {
      return item.dtype == tensor.scalar_type();
    });
    if (found == kFileDtypes.end() || name == "__metadata__" || header.contains(name)) {
      return Error{Errc::kInvalidArgument, "tensor " + name + " cannot be written: dtype or name", {}};
    }
    const std::uint64_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", found->name}, {"shape", tensor.sizes().vec()}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  // Tensors start aligned, and the header is rewritten as whole blocks.
  const auto before = text.size() + sizeof(std::uint64_t);
  text.append((kDirectAlignment - before % kDirectAlignment) % kDirectAlignment, ' ');
  return text;
}

/// The length and the header, as they begin a file, in memory for a transfer of its own.
StreamPiece first_blocks(const std::array<std::uint8_t, 8>& length, const std::string& header) {
  const auto size = length.size() + header.size();
  StreamPiece blocks(static_cast<std::uint8_t*>(std::aligned_alloc(kDirectAlignment, size)), &std::free);
  if (!blocks) throw std::bad_alloc();
  std::memcpy(blocks.get(), length.data(), length.size());
  std::memcpy(blocks.get() + length.size(), header.data(), header.size());
  return blocks;
}

Result<void> write_body(File& file, const SafetensorsContent& content) {
  auto header = header_text(content);
  if (!header) return header.error();
  const auto length = little_endian(header->size());
  PieceDigest digest;
  StreamWriter stream(file, digest);
  if (auto done = stream.add(length); !done) return done;
  if (auto done = stream.add(bytes_of(*header)); !done) return done;
  for (const auto& item : content.tensors) {
    if (auto done = stream.add(bytes_of(item.tensor)); !done) return done;
  }
  const auto size = stream.finish();
  if (!size) return size.error();
  // The digest takes the place of its own zeros.
  const auto place = digest_place(*header, kChecksumKey, std::string(kDigestDigits, '0'));
  header->replace(place, kDigestDigits, digest.finish_hex(*size));
  const auto blocks = first_blocks(length, *header);
  if (auto done = file.write_at(0, {blocks.get(), length.size() + header->size()}); !done) return done;
  return file.sync();
}

fs::path temporary_beside(const fs::path& target) {
  std::random_device random;
  return target.string() + kTemporaryMark + std::to_string(random());
}

// ---- reading

struct Entry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct Header {
  std::map<std::string, std::string> metadata;
  std::vector<Entry> entries;  ///< By offset.
  std::string text;
  std::uint64_t data_bytes = 0;
};

/// The element count times `item_size`, or nothing when it overflows or a size is negative.
std::optional<std::uint64_t> byte_count(const std::vector<std::int64_t>& shape, std::uint64_t item_size) {
  std::uint64_t bytes = item_size;
  for (const auto size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) return std::nullopt;
  }
  return bytes;
}

bool is_natural(const Json& value) { return value.is_number_unsigned(); }

/// What is wrong with a tensor's description; empty: nothing.
std::string read_entry(const Json& json, Entry& entry) {
  if (!json.is_object() || !json.contains("dtype") || !json.contains("shape") || !json.contains("data_offsets")) {
    return "lacks dtype, shape or data_offsets";
  }
  const auto& dtype = json["dtype"];
  const auto& shape = json["shape"];
  const auto& offsets = json["data_offsets"];
  const auto known =
      std::find_if(kFileDtypes.begin(), kFileDtypes.end(), [&](const auto& item) { return dtype == item.name; });
  if (known == kFileDtypes.end()) return "has an unknown dtype";
  if (!shape.is_array() || shape.size() > kMaxDimensions || !std::all_of(shape.begin(), shape.end(), is_natural)) {
    return "has a bad shape";
  }
  if (!offsets.is_array() || offsets.size() != 2 || !is_natural(offsets[0]) || !is_natural(offsets[1])) {
    return "has bad offsets";
  }
  entry.dtype = known->dtype;
  for (const auto& size : shape) {
    const auto value = size.get<std::uint64_t>();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return "has a bad shape";
    entry.shape.push_back(static_cast<std::int64_t>(value));
  }
  entry.begin = offsets[0].get<std::uint64_t>();
  entry.end = offsets[1].get<std::uint64_t>();
  const auto bytes = byte_count(entry.shape, c10::elementSize(entry.dtype));
  if (!bytes || entry.end < entry.begin || *bytes != entry.end - entry.begin) return "has a shape unlike its size";
  return {};
}

/// A JSON object whose keys are unique at the top level; nlohmann would silently keep the last.
std::optional<Json> parse_unique(const std::string& text) {
  std::set<std::string> keys;
  bool repeated = false;
  bool deep = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > 4) deep = true;
    if (event == Json::parse_event_t::key && depth == 1) {
      repeated = !keys.insert(parsed.get<std::string>()).second || repeated;
    }
    return !deep;  // Deeper values are dropped unread.
  };
  auto json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (repeated || deep || json.is_discarded() || !json.is_object()) return std::nullopt;
  return json;
}

/// What is wrong; empty: nothing.
std::string read_entries(const Json& json, Header& header) {
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return "its metadata is no object";
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return "its metadata holds something else than text";
        header.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    Entry entry;
    entry.name = name;
    if (auto wrong = read_entry(value, entry); !wrong.empty()) return "tensor " + name + " " + wrong;
    header.entries.push_back(std::move(entry));
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& left, const auto& right) {
    return std::pair(left.begin, left.end) < std::pair(right.begin, right.end);
  });
  std::uint64_t next = 0;
  for (const auto& entry : header.entries) {
    if (entry.begin != next) return "tensor " + entry.name + " overlaps another or leaves a gap";
    next = entry.end;
  }
  if (next != header.data_bytes)
    return "its tensors take " + std::to_string(next) + " bytes of " + std::to_string(header.data_bytes);
  return {};
}

Result<Header> read_header(File& file, const fs::path& path) {
  const auto size = file.size();
  if (!size) return size.error();
  std::array<std::uint8_t, 8> length_bytes{};
  if (*size < length_bytes.size()) return damaged(path, "it has only " + std::to_string(*size) + " bytes");
  if (auto done = file.read(length_bytes); !done) return done.error();
  const auto length = from_little_endian(length_bytes);
  if (length > kMaxSafetensorsHeader || length > *size - length_bytes.size()) {
    return damaged(path, "its header claims " + std::to_string(length) + " bytes");
  }
  Header header;
  header.text.resize(length);
  header.data_bytes = *size - length_bytes.size() - length;
  if (auto done = file.read({reinterpret_cast<std::uint8_t*>(header.text.data()), header.text.size()}); !done) {
    return done.error();
  }
  const auto json = parse_unique(header.text);
  if (!json) return damaged(path, "its header is no JSON object with unique keys");
  if (auto wrong = read_entries(*json, header); !wrong.empty()) return damaged(path, wrong);
  return header;
}

/// The digest that a file carries.
struct Checksum {
  bool in_pieces = true;  ///< Or a plain SHA-256.
  std::string digits;
  std::uint64_t place = 0;  ///< Of its first digit, in the file.
};

std::optional<Checksum> checksum_in(const Header& header) {
  for (const char* key : {kChecksumKey, kPlainChecksumKey}) {
    const auto digest = header.metadata.find(key);
    if (digest == header.metadata.end() || digest->second.size() != kDigestDigits) continue;
    const auto place = digest_place(header.text, key, digest->second);
    if (place == std::string::npos) continue;
    return Checksum{key == kChecksumKey, digest->second, sizeof(std::uint64_t) + place};
  }
  return std::nullopt;
}

/// Puts zeros where the digits are, if they are in `piece`, which begins at `offset`: so they were when the digest was
/// taken.
void blank(std::uint64_t place, std::uint64_t offset, std::span<std::uint8_t> piece) {
  const auto begin = std::max(place, offset);
  const auto end = std::min(place + kDigestDigits, offset + piece.size());
  if (begin < end) std::memset(piece.data() + (begin - offset), '0', static_cast<std::size_t>(end - begin));
}

/// A file in memory, and what its bytes say about its digest.
struct ReadFile {
  std::shared_ptr<LargeMemory> memory;
  bool intact = true;
};

/// Reads a file whose header was read before, and checks it.
Result<ReadFile> read_all(File& file, const Header& header, const std::optional<Checksum>& checksum) {
  const auto size = sizeof(std::uint64_t) + header.text.size() + header.data_bytes;
  ReadFile read{std::make_shared<LargeMemory>(size), true};
  PieceDigest pieces;
  pieces.resize(size);
  auto done = read_in_pieces(file, size, read.memory->data(), [&](std::uint64_t offset, std::span<std::uint8_t> piece) {
    if (checksum) blank(checksum->place, offset, piece);
    if (checksum && checksum->in_pieces) pieces.add(offset, piece);
  });
  if (!done) return done.error();
  // The header that was acted upon is the one that was digested.
  auto expected = header.text;
  if (checksum) expected.replace(checksum->place - sizeof(std::uint64_t), kDigestDigits, kDigestDigits, '0');
  const auto length = little_endian(expected.size());
  const auto* bytes = read.memory->data();
  read.intact = std::equal(length.begin(), length.end(), bytes) &&
                std::memcmp(bytes + length.size(), expected.data(), expected.size()) == 0;
  if (!checksum) return read;
  if (checksum->in_pieces) {
    read.intact = read.intact && pieces.finish_hex(size) == checksum->digits;
  } else {
    Sha256Stream plain;
    plain.add({bytes, size});
    read.intact = read.intact && plain.finish_hex() == checksum->digits;
  }
  return read;
}

/// The tensor that `entry` describes: a view of the file's memory, whose pages go back with it, or a copy where it is
/// not aligned as torch's own tensors are.
at::Tensor tensor_of(const Entry& entry, const std::shared_ptr<LargeMemory>& memory, std::uint64_t data_begin) {
  auto* const bytes = memory->data() + data_begin + entry.begin;
  const auto size = static_cast<std::size_t>(entry.end - entry.begin);
  const auto options = at::TensorOptions(entry.dtype);
  if (size == 0 || reinterpret_cast<std::uintptr_t>(bytes) % kCacheLine != 0) {
    auto copy = at::empty(entry.shape, options);
    if (size > 0) std::memcpy(copy.data_ptr(), bytes, size);
    LargeMemory::release({bytes, size});
    return copy;
  }
  const auto give_back = [memory, size](void* begin) {
    LargeMemory::release({static_cast<std::uint8_t*>(begin), size});
  };
  return at::from_blob(bytes, entry.shape, give_back, options);
}

}  // namespace

Result<void> write_safetensors(const fs::path& target, SafetensorsContent content) {
  content.metadata[kChecksumKey] = std::string(kDigestDigits, '0');
  // Whole cache lines first, then wide elements, so that each tensor is aligned without gaps, which the format forbids.
  std::stable_sort(content.tensors.begin(), content.tensors.end(), [](const auto& left, const auto& right) {
    const auto key = [](const at::Tensor& tensor) {
      return std::pair(tensor.nbytes() % kCacheLine == 0, tensor.element_size());
    };
    return key(left.tensor) > key(right.tensor);
  });
  const auto temporary = temporary_beside(target);
  auto written = [&]() -> Result<void> {
    try {
      auto file = File::create_new(temporary);
      if (!file) return file.error();
      return write_body(*file, content);
    } catch (const std::exception& e) {  // No memory for buffers, or no thread.
      return Error{Errc::kUnavailable, "cannot write " + target.string() + ": " + e.what(), {}};
    }
  }();
  if (written) written = rename_file(temporary, target);
  if (!written) {
    std::error_code ignored;  // The first failure is the one to tell.
    fs::remove(temporary, ignored);
    return Error{written.error().code == Errc::kInvalidArgument ? Errc::kInvalidArgument : Errc::kUnavailable,
                 written.error().message,
                 {}};
  }
  return sync_folder(target.parent_path());
}

static Result<SafetensorsContent> read_body(const fs::path& path, bool require_checksum) {
  auto file = File::open_to_read(path);
  if (!file) return file.error();
  auto header = read_header(*file, path);
  if (!header) return header.error();
  const auto checksum = checksum_in(*header);
  if (!checksum && require_checksum) return damaged(path, "it has no checksum");
  const auto read = read_all(*file, *header, checksum);
  if (!read) return read.error();
  if (!read->intact) return damaged(path, "its checksum does not match its content");
  SafetensorsContent content{std::move(header->metadata), {}};
  const auto data_begin = sizeof(std::uint64_t) + header->text.size();
  for (auto& entry : header->entries) {
    auto tensor = tensor_of(entry, read->memory, data_begin);
    content.tensors.push_back({std::move(entry.name), std::move(tensor)});
  }
  return content;
}

Result<SafetensorsContent> read_safetensors(const fs::path& path, bool require_checksum) {
  try {
    return read_body(path, require_checksum);
  } catch (const std::exception& e) {  // No memory for the tensors, or no thread.
    return Error{Errc::kUnavailable, "cannot read " + path.string() + ": " + e.what(), {}};
  }
}

Result<std::map<std::string, std::string>> read_safetensors_metadata(const fs::path& path) {
  auto file = File::open_to_read(path);
  if (!file) return file.error();
  auto header = read_header(*file, path);
  if (!header) return header.error();
  return std::move(header->metadata);
}

bool is_temporary_name(const std::string& file_name) { return file_name.find(kTemporaryMark) != std::string::npos; }

}  // namespace dmoe::expert_server
