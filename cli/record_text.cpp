#include "cli/record_text.hpp"

#include "cli/options.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

namespace dmoe::cli {
namespace {

std::string base64(const std::vector<std::uint8_t>& bytes) {
  constexpr const char* kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t group = 0;
    for (std::size_t j = 0; j < 3; ++j) group = group << 8U | (j < count ? bytes[i + j] : 0U);
    for (std::size_t j = 0; j < 4; ++j) {
      text += j <= count ? kDigits[group >> (18 - 6 * j) & 63U] : '=';
    }
  }
  return text;
}

/// On one line and harmless to a terminal; UTF-8 stays as it is.
std::string printable(const std::vector<std::uint8_t>& bytes, bool is_text) {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    const bool control = byte < 0x20 || byte == 0x7f;
    if (byte == '\\') {
      text += "\\\\";
    } else if (control || (byte >= 0x80 && !is_text)) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\x%02x", byte);
      text += escaped.data();
    } else {
      text += static_cast<char>(byte);
    }
  }
  return text;
}

/// Whether JSON can hold it as a string and give it back unchanged.
bool is_utf8(const std::vector<std::uint8_t>& bytes) {
  try {
    (void)nlohmann::json(std::string(bytes.begin(), bytes.end())).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

/// C1 control characters are UTF-8, and still drive terminals.
bool is_plain_text(const std::vector<std::uint8_t>& bytes) {
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    if (bytes[i] == 0xc2 && bytes[i + 1] < 0xa0) return false;
  }
  return is_utf8(bytes);
}

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

std::vector<FoundRecord> describe_records(const std::vector<dht::LiveRecord>& records,
                                          std::chrono::steady_clock::time_point now) {
  std::vector<FoundRecord> described;
  for (const dht::LiveRecord& live : records) {
    const auto remaining = std::chrono::duration_cast<std::chrono::milliseconds>(live.deadline - now);
    described.push_back({live.record.subkey, net::to_string(net::peer_id_of(live.record.publisher)),
                         live.record.sequence, std::max(remaining, std::chrono::milliseconds{0}), live.record.value});
  }
  std::stable_sort(described.begin(), described.end(),
                   [](const FoundRecord& a, const FoundRecord& b) { return a.sequence > b.sequence; });
  return described;
}

std::string to_line(const FoundRecord& record) {
  const auto subkey = bytes_of(record.subkey);
  return (record.subkey.empty() ? "-" : printable(subkey, is_plain_text(subkey))) + "  " + record.publisher + "  " +
         duration_text(record.remaining) + "  " + std::to_string(record.value.size()) + " bytes  " +
         printable(record.value, is_plain_text(record.value));
}

nlohmann::ordered_json to_json(const std::string& key, const std::vector<FoundRecord>& records) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const FoundRecord& record : records) {
    nlohmann::ordered_json entry{{"subkey", record.subkey},
                                 {"publisher", record.publisher},
                                 {"sequence", record.sequence},
                                 {"remaining_seconds", static_cast<double>(record.remaining.count()) / 1'000},
                                 {"bytes", record.value.size()}};
    if (is_utf8(record.value)) {
      entry["value"] = std::string(record.value.begin(), record.value.end());
    } else {
      entry["value_base64"] = base64(record.value);
    }
    list.push_back(std::move(entry));
  }
  return {{"key", key}, {"records", std::move(list)}};
}

std::string json_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace dmoe::cli
