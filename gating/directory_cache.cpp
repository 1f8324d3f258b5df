#include "gating/directory_cache.hpp"

#include <algorithm>

namespace dmoe::gating {

DirectoryCache::DirectoryCache(std::shared_ptr<dht::PrefixResolver> resolver, DirectoryCacheOptions options)
    : resolver_(std::move(resolver)), shared_(std::make_shared<Shared>()) {
  shared_->options = options;
}

DirectoryCache::Entry DirectoryCache::find(const ExpertPrefix& prefix, TimePoint now) const {
  const std::lock_guard lock(shared_->mutex);
  const auto it = shared_->slots.find(prefix);
  if (it == shared_->slots.end() || now >= it->second.good_until) return {};
  const Slot& slot = it->second;
  if (!slot.listing) return {slot.failed ? State::kFailed : State::kUnknown, nullptr, slot.good_until, slot.refresh_at};
  return {State::kKnown, slot.listing, slot.good_until, slot.refresh_at};
}

std::vector<Coordinate> DirectoryCache::known_below(const ExpertPrefix& prefix, TimePoint now) const {
  std::vector<Coordinate> coordinates;
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [key, slot] : shared_->slots) {
    if (key.coordinates.size() != prefix.coordinates.size() + 1 || now >= slot.good_until) continue;
    if (!slot.listing || slot.listing->children.empty()) continue;
    const bool below = std::equal(prefix.coordinates.begin(), prefix.coordinates.end(), key.coordinates.begin());
    if (below && key.grid == prefix.grid) coordinates.push_back(key.coordinates.back());
  }
  std::sort(coordinates.begin(), coordinates.end());
  return coordinates;
}

std::size_t DirectoryCache::fetch(const std::vector<ExpertPrefix>& prefixes, TimePoint deadline) {
  const auto now = std::chrono::steady_clock::now();
  std::vector<ExpertPrefix> unknown;
  {
    const std::lock_guard lock(shared_->mutex);
    make_room(*shared_, now);
    for (const auto& prefix : prefixes) {
      Slot& slot = shared_->slots[prefix];
      if (slot.in_flight || now < slot.good_until) continue;
      slot.in_flight = true;
      unknown.push_back(prefix);
    }
  }
  const std::size_t asked = unknown.size();
  if (asked > 0) ask(std::move(unknown));

  std::unique_lock lock(shared_->mutex);
  shared_->answered.wait_until(lock, deadline, [&] {
    return std::none_of(prefixes.begin(), prefixes.end(), [&](const ExpertPrefix& prefix) {
      const auto it = shared_->slots.find(prefix);
      return it != shared_->slots.end() && it->second.in_flight;
    });
  });
  return asked;
}

std::size_t DirectoryCache::refresh(const std::vector<ExpertPrefix>& prefixes, TimePoint now) {
  std::vector<ExpertPrefix> due;
  {
    const std::lock_guard lock(shared_->mutex);
    for (const auto& prefix : prefixes) {
      const auto it = shared_->slots.find(prefix);
      if (it == shared_->slots.end() || it->second.in_flight || now < it->second.refresh_at) continue;
      it->second.in_flight = true;
      due.push_back(prefix);
    }
  }
  const std::size_t asked = due.size();
  if (asked > 0) ask(std::move(due));
  return asked;
}

void DirectoryCache::ask(std::vector<ExpertPrefix> prefixes) {
  shared_->lookups.fetch_add(prefixes.size(), std::memory_order_relaxed);
  const auto deadline = std::chrono::steady_clock::now() + shared_->options.lookup_timeout;
  auto asked = std::make_shared<const std::vector<ExpertPrefix>>(std::move(prefixes));
  resolver_->list(*asked, deadline, [shared = shared_, asked](std::vector<Result<dht::PrefixListing>> results) {
    answer(*shared, *asked, std::move(results));
  });
}

void DirectoryCache::answer(Shared& shared, const std::vector<ExpertPrefix>& prefixes,
                            std::vector<Result<dht::PrefixListing>> results) {
  const auto now = std::chrono::steady_clock::now();
  {
    const std::lock_guard lock(shared.mutex);
    for (std::size_t i = 0; i < prefixes.size(); ++i) {
      Slot& slot = shared.slots[prefixes[i]];
      slot.in_flight = false;
      auto result = i < results.size() ? std::move(results[i])
                                       : Result<dht::PrefixListing>(Error{Errc::kInternal, "no answer", {}});
      accept(shared.options, slot, std::move(result), now);
    }
    shared.generation.fetch_add(1, std::memory_order_acq_rel);
  }
  shared.answered.notify_all();
}

void DirectoryCache::accept(const DirectoryCacheOptions& options, Slot& slot, Result<dht::PrefixListing> result,
                            TimePoint now) {
  if (!result.has_value()) {
    slot.refresh_at = now + options.retry;
    slot.failed = true;
    const bool usable =
        slot.listing && !slot.listing->children.empty() && now < slot.listing->expires + options.stale_grace;
    if (!usable) slot.listing.reset();
    slot.good_until = usable ? slot.listing->expires + options.stale_grace : now + options.retry;
    return;
  }
  slot.failed = false;
  slot.listing = std::make_shared<const dht::PrefixListing>(std::move(*result));
  const auto good_for = slot.listing->children.empty() ? std::chrono::steady_clock::duration(options.negative_ttl)
                                                       : std::max<std::chrono::steady_clock::duration>(
                                                             slot.listing->expires - now, options.negative_ttl);
  slot.good_until = now + good_for;
  // Three quarters of the way leaves time for a lookup before the listing runs out.
  slot.refresh_at = now + std::min<std::chrono::steady_clock::duration>(options.ttl, good_for * 3 / 4);
}

void DirectoryCache::make_room(Shared& shared, TimePoint now) {
  if (shared.slots.size() < shared.options.max_entries) return;
  std::erase_if(shared.slots, [&](const auto& slot) {
    return !slot.second.in_flight && (now >= slot.second.good_until || now >= slot.second.refresh_at);
  });
  if (shared.slots.size() < shared.options.max_entries) return;
  std::erase_if(shared.slots, [](const auto& slot) { return !slot.second.in_flight; });
}

}  // namespace dmoe::gating
