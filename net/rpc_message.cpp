#include "net/rpc_message.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

namespace dmoe::net {
namespace {

constexpr std::size_t kMaxErrorText = 1'024;  ///< Bytes of a peer's error that are kept.
constexpr auto kLastCode = static_cast<std::uint16_t>(Errc::kLost);

Errc read_code(std::uint16_t code) noexcept {
  return code >= 1 && code <= kLastCode ? static_cast<Errc>(code) : Errc::kInternal;
}

/// `text` without the rest of a UTF-8 sequence that a cut left behind.
std::string cut(std::string_view text, std::size_t limit) {
  if (text.size() <= limit) return std::string(text);
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80U) --limit;
  return std::string(text.substr(0, limit));
}

}  // namespace

void write_error(const Error& error, schema::Error::Builder builder) {
  builder.setCode(static_cast<std::uint16_t>(error.code));
  builder.setMessage(cut(error.message, kMaxErrorText));
  if (error.retry_after) {
    constexpr std::chrono::milliseconds kMost{std::numeric_limits<std::uint32_t>::max()};
    const auto bounded = std::clamp(*error.retry_after, std::chrono::milliseconds{0}, kMost);
    builder.setRetryAfterMillis(static_cast<std::uint32_t>(bounded.count()));
  }
}

Error read_error(schema::Error::Reader reader) {
  const auto text = reader.getMessage();
  Error error{read_code(reader.getCode()), cut({text.begin(), text.size()}, kMaxErrorText), {}};
  // It ends on somebody's terminal and in their log: no escape sequences, no forged lines.
  std::replace_if(
      error.message.begin(), error.message.end(), [](unsigned char c) { return c < ' ' || c == 0x7F; }, ' ');
  if (error.code == Errc::kOverloaded && reader.getRetryAfterMillis() != 0) {
    error.retry_after = std::chrono::milliseconds{reader.getRetryAfterMillis()};
  }
  return error;
}

}  // namespace dmoe::net
