#include "dht/hand_over.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kPartsAtOnce = 16;

std::uint32_t left_of(const LiveRecord& live, TimePoint now) {
  const auto left = std::chrono::floor<std::chrono::milliseconds>(live.deadline - now).count() - 1;
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 0, live.record.max_ttl_ms));
}

}  // namespace

void HandOver::send(const std::vector<LiveRecord>& records, const wire::NodeInfo& to) {
  const TimePoint now = core_.clock.now();
  wire::Store store;
  std::size_t size = wire::kRequestOverhead;
  for (const LiveRecord& live : records) {
    wire::TravellingRecord travelling{live.record, left_of(live, now),
                                      static_cast<std::uint32_t>(live.record.value.size())};
    if (travelling.remaining_ms == 0) continue;
    const std::size_t needed = wire::record_size(travelling);
    if (needed + wire::kRequestOverhead > kMaxDatagram) {
      if (large_.size() >= kMaxLarge) continue;
      large_.push_back(std::make_shared<Large>(Large{live, to, 0, 0, false, false, false}));
      if (large_.size() == 1) next_large();
      continue;
    }
    if (size + needed > kMaxDatagram || store.records.size() == wire::kMaxRecordsPerDatagram) {
      send_store(to, std::exchange(store, {}), false);
      size = wire::kRequestOverhead;
    }
    size += needed;
    store.records.push_back(std::move(travelling));
  }
  if (!store.records.empty()) send_store(to, std::move(store), false);
}

void HandOver::send_store(const wire::NodeInfo& to, wire::Store store, bool repeated) {
  Request request;
  request.to = to.address;
  request.expected = to.id;
  request.repeats = 2;
  if (!repeated) {
    // Who has not been written to for ten minutes knows no cookie of ours; its refusal brought one.
    request.on_reply = [this, to, store](const wire::Message&, const wire::Reply& reply) {
      const bool refused = std::find(reply.acks.begin(), reply.acks.end(), wire::Ack::kBadCookie) != reply.acks.end();
      if (refused) send_store(to, store, true);
    };
  }
  request.body = std::move(store);
  core_.requests.start(std::move(request));
}

void HandOver::next_large() {
  if (!large_.empty()) send_part(large_.front(), 0);
}

void HandOver::send_part(const std::shared_ptr<Large>& large, std::size_t offset) {
  const Record& record = large->live.record;
  wire::Chunk chunk;
  chunk.record = {record, left_of(large->live, core_.clock.now()), static_cast<std::uint32_t>(record.value.size())};
  chunk.record.record.value.clear();
  chunk.offset = static_cast<std::uint32_t>(offset);
  const std::size_t size = std::min(wire::kChunkBytes, record.value.size() - offset);
  chunk.data.assign(record.value.begin() + static_cast<std::ptrdiff_t>(offset),
                    record.value.begin() + static_cast<std::ptrdiff_t>(offset + size));
  ++large->open;
  large->next = std::max(large->next, offset + size);
  Request request;
  request.to = large->to.address;
  request.expected = large->to.id;
  request.body = std::move(chunk);
  request.repeats = 4;
  request.on_reply = [this, large, offset](const wire::Message&, const wire::Reply& reply) {
    on_part(large, offset, reply.acks.size() == 1 ? std::optional(reply.acks.front()) : std::nullopt);
  };
  request.on_failure = [this, large, offset] { on_part(large, offset, {}); };
  core_.requests.start(std::move(request));
}

void HandOver::on_part(const std::shared_ptr<Large>& large, std::size_t offset, std::optional<wire::Ack> ack) {
  --large->open;
  if (ack == wire::Ack::kBadCookie && !large->wanted && !std::exchange(large->repeated, true)) {
    return send_part(large, offset);
  }
  if (ack == wire::Ack::kMoreParts) {
    large->wanted = true;
  } else {
    large->broken = true;  // Held already, refused or silent: whatever it is, the rest is not wanted.
  }
  const std::size_t size = large->live.record.value.size();
  while (!large->broken && large->open < kPartsAtOnce && large->next < size) send_part(large, large->next);
  if (large->open != 0) return;
  if (!large_.empty() && large_.front() == large) large_.pop_front();
  next_large();
}

}  // namespace dmoe::dht
