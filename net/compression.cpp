#include "net/compression.hpp"

#include <string>

namespace dmoe {

std::string_view to_string(Compression compression) noexcept {
  switch (compression) {
    case Compression::kNone: return "none";
    case Compression::kFloat16: return "float16";
    case Compression::kBfloat16: return "bfloat16";
    case Compression::kInt8: return "int8";
  }
  return "unknown";
}

Result<Compression> parse_compression(std::string_view name) {
  std::string names;
  for (const auto compression : kCompressions) {
    if (to_string(compression) == name) return compression;
    names += (names.empty() ? "" : ", ") + std::string(to_string(compression));
  }
  return Error{Errc::kInvalidArgument, "'" + std::string(name) + "' is not a compression; choose one of " + names, {}};
}

namespace net {

schema::Compression to_wire(Compression compression) noexcept {
  switch (compression) {
    case Compression::kNone: return schema::Compression::NONE;
    case Compression::kFloat16: return schema::Compression::FLOAT16;
    case Compression::kBfloat16: return schema::Compression::BFLOAT16;
    case Compression::kInt8: return schema::Compression::INT8;
  }
  return schema::Compression::NONE;
}

Result<Compression> from_wire(schema::Compression compression) {
  switch (compression) {
    case schema::Compression::NONE: return Compression::kNone;
    case schema::Compression::FLOAT16: return Compression::kFloat16;
    case schema::Compression::BFLOAT16: return Compression::kBfloat16;
    case schema::Compression::INT8: return Compression::kInt8;
  }
  return Error{Errc::kInvalidArgument,
               "a tensor of unknown compression " + std::to_string(static_cast<unsigned>(compression)) +
                   "; the peer may be newer than this program",
               {}};
}

}  // namespace net
}  // namespace dmoe
