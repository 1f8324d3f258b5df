#include "dht/publisher.hpp"

#include "dht/publication.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr Duration kGroupCommit = std::chrono::milliseconds{10};
constexpr std::size_t kMaxBatch = 4'096;
constexpr std::size_t kMaxKept = 16'384;

}  // namespace

void Publisher::add(std::vector<StoreRequest> requests, Handler handler) {
  const auto order = std::make_shared<Order>();
  order->handler = std::move(handler);
  order->open = requests.size();
  order->results.assign(requests.size(), Error{Errc::kInternal, "not sent", {}});
  if (requests.empty()) return core_.post([order] { order->handler({}); });
  orders_.insert(order);
  if (stopped_) return stop();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    keep(requests[i]);
    waiting_.push_back({std::move(requests[i]), order, i, false});
  }
  flush_soon();
}

/// The newest request for a place decides whether that place is renewed.
void Publisher::keep(const StoreRequest& request) {
  auto place = std::make_pair(request.key, request.subkey);
  if (!request.keep || request.tombstone) {
    kept_.erase(place);
    return;
  }
  if (kept_.size() >= kMaxKept && !kept_.contains(place)) return;
  kept_.insert_or_assign(std::move(place), Kept{request, core_.clock.now() + core_.jittered(request.ttl / 3)});
}

void Publisher::tick() {
  const TimePoint now = core_.clock.now();
  std::vector<StoreRequest> due;
  for (const auto& [place, kept] : kept_) {
    if (kept.next <= now) due.push_back(kept.request);
  }
  if (!due.empty()) add(std::move(due), [](const std::vector<Result<StoreReport>>&) {});
}

void Publisher::stop() {
  stopped_ = true;
  waiting_.clear();
  for (const auto& order : std::exchange(orders_, {})) {
    for (auto& result : order->results) result = Error{Errc::kCancelled, "the DHT node has stopped", {}};
    core_.post([order] { order->handler(std::move(order->results)); });
  }
}

void Publisher::flush_soon() {
  if (flush_posted_) return;
  if (on_their_way_ == 0) {
    flush_posted_ = true;
    core_.post([this] {
      flush_posted_ = false;
      flush();
    });
  } else if (!flush_timed_) {
    flush_timed_ = true;
    flush_timer_ = core_.after(kGroupCommit, [this] {
      flush_timed_ = false;
      flush();
    });
  }
}

/// Later than any before, and than this machine's clock when that is right.
std::uint64_t Publisher::next_sequence() {
  last_sequence_ = std::max(last_sequence_ + 1, core_.clock.wall_millis());
  return last_sequence_;
}

void Publisher::flush() {
  if (waiting_.empty() || stopped_) return;
  if (flush_timed_) {
    core_.clock.cancel(flush_timer_);
    flush_timed_ = false;
  }
  auto batch = std::make_shared<std::vector<Waiting>>();
  std::vector<Record> records;
  const std::size_t count = std::min(waiting_.size(), kMaxBatch);
  for (std::size_t i = 0; i < count; ++i) {
    Waiting& waiting = waiting_[i];
    Record record;
    record.key = waiting.request.key;
    record.publisher = core_.signer.public_key();
    record.sequence = next_sequence();
    const auto ttl = std::clamp(waiting.request.ttl, std::chrono::milliseconds{0}, core_.options.max_ttl);
    record.max_ttl_ms = static_cast<std::uint32_t>(ttl.count());
    record.tombstone = waiting.request.tombstone;
    record.subkey = waiting.request.subkey;
    record.value = waiting.request.value;
    if (const auto fits = check_limits(record); !fits.has_value()) {
      settle(waiting, fits.error());
      continue;
    }
    records.push_back(std::move(record));
    batch->push_back(std::move(waiting));
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  if (!waiting_.empty()) flush_soon();
  if (records.empty()) return;
  sign_batch(core_.signer, records);
  ++on_their_way_;
  const auto open = std::make_shared<std::size_t>(records.size());
  std::vector<std::uint64_t> sequences;
  for (const Record& record : records) sequences.push_back(record.sequence);
  auto on_record = [this, batch, open, sequences](std::size_t index, const Publication::Fate& fate) {
    Waiting& waiting = (*batch)[index];
    if (fate.newer_exists && !waiting.repeated) {
      learn_sequence(std::move(waiting));
    } else if (fate.replicas != 0) {
      settle(waiting, StoreReport{fate.replicas, sequences[index]});
    } else if (fate.all_full) {
      settle(waiting, Error{Errc::kOverloaded, "every DHT node near the key is full or over this publisher's quota",
                            std::chrono::milliseconds{5'000}});
    } else {
      settle(waiting, Error{Errc::kUnavailable, "no DHT node took the record: none is reachable", {}});
    }
    if (--*open != 0) return;
    --on_their_way_;
    flush_soon();
  };
  std::make_shared<Publication>(core_, std::move(records), std::move(on_record))->start();
}

void Publisher::settle(const Waiting& waiting, Result<StoreReport> result) {
  waiting.order->results[waiting.index] = std::move(result);
  if (--waiting.order->open != 0 || orders_.erase(waiting.order) == 0) return;
  core_.post([order = waiting.order] { order->handler(std::move(order->results)); });
}

/// A holder has a newer record of ours: this machine's clock went back. Find how new, and publish above it.
void Publisher::learn_sequence(Waiting waiting) {
  LookupOptions options;
  options.quorum = 0;
  options.allow_cached = false;
  waiting.repeated = true;
  const auto shared = std::make_shared<Waiting>(std::move(waiting));
  core_.look_up({shared->request.key}, options, [this, shared](std::size_t, LookupOutcome outcome) {
    for (const LiveRecord& live : outcome.records) {
      if (live.record.publisher == core_.signer.public_key()) {
        last_sequence_ = std::max(last_sequence_, live.record.sequence);
      }
    }
    waiting_.push_back(std::move(*shared));
    flush_soon();
  });
}

}  // namespace dmoe::dht
