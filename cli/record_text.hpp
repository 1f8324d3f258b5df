// Records of the DHT as text and JSON.
#pragma once

#include "dht/record.hpp"

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace dmoe::cli {

/// What a person or script wants to know of a record.
struct FoundRecord {
  std::string subkey;     ///< Empty: the publisher gave none.
  std::string publisher;  ///< Peer ID.
  std::uint64_t sequence = 0;
  std::chrono::milliseconds remaining{0};
  std::vector<std::uint8_t> value;
};

/// Newest first: by sequence, which publishers draw from their clocks.
std::vector<FoundRecord> describe_records(const std::vector<dht::LiveRecord>& records,
                                          std::chrono::steady_clock::time_point now);

/// "worker-3  a66edcaa…  59m 58s  5 bytes  hello": what is not printable is escaped.
std::string to_line(const FoundRecord& record);

/// {"key", "records": [{"subkey", "publisher", "sequence", "remaining_seconds", "bytes", "value" or "value_base64"}]}:
/// a value that is no UTF-8 text is given in base64.
nlohmann::ordered_json to_json(const std::string& key, const std::vector<FoundRecord>& records);

/// On one line; bytes that are no UTF-8 (a key from a command line may hold any) are replaced.
std::string json_line(const nlohmann::ordered_json& json);

}  // namespace dmoe::cli
