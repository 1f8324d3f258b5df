#include "dht/record_store.hpp"

#include <algorithm>
#include <cstring>

namespace dmoe::dht {

std::optional<PutOutcome> UsageLedger::refusal(std::uint64_t publisher, std::uint64_t host, std::size_t bytes) const {
  if (host == 0) return {};
  if (records_ + 1 > limits_.max_records || bytes_ + bytes > limits_.max_bytes) return PutOutcome::kFull;
  if (const auto found = publishers_.find(publisher); found != publishers_.end()) {
    if (found->second.records + 1 > limits_.max_records_per_publisher) return PutOutcome::kQuota;
    if (found->second.bytes + bytes > limits_.max_bytes_per_publisher) return PutOutcome::kQuota;
  }
  if (const auto found = hosts_.find(host); found != hosts_.end()) {
    if (found->second.records + 1 > limits_.max_records_per_host) return PutOutcome::kQuota;
  }
  return {};
}

void UsageLedger::add(std::uint64_t publisher, std::uint64_t host, std::size_t bytes) {
  for (Usage* usage : {&publishers_[publisher], &hosts_[host]}) {
    ++usage->records;
    usage->bytes += bytes;
  }
  ++records_;
  bytes_ += bytes;
}

void UsageLedger::take(std::unordered_map<std::uint64_t, Usage>& map, std::uint64_t who, std::size_t bytes) {
  const auto found = map.find(who);
  if (found == map.end()) return;
  found->second.bytes -= std::min<std::uint64_t>(found->second.bytes, bytes);
  if (--found->second.records == 0) map.erase(found);
}

void UsageLedger::remove(std::uint64_t publisher, std::uint64_t host, std::size_t bytes) {
  take(publishers_, publisher, bytes);
  take(hosts_, host, bytes);
  records_ -= std::min<std::size_t>(records_, 1);
  bytes_ -= std::min(bytes_, bytes);
}

void UsageLedger::clear() {
  publishers_.clear();
  hosts_.clear();
  records_ = 0;
  bytes_ = 0;
}

std::uint64_t UsageLedger::tag(const net::PublicKey& publisher) noexcept {
  std::uint64_t tag = 0;
  std::memcpy(&tag, publisher.data(), sizeof tag);
  return tag;
}

Duration grave_time(std::uint32_t max_ttl_ms) noexcept {
  return std::min<Duration>(std::chrono::milliseconds{max_ttl_ms}, std::chrono::minutes{10});
}

}  // namespace dmoe::dht
