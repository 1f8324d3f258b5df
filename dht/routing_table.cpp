#include "dht/routing_table.hpp"

#include <algorithm>

namespace dmoe::dht {
namespace {

constexpr std::size_t kSpares = 8;             // Replacements per bucket.
constexpr std::size_t kSparesSought = 2;       // Until there are so many, strangers are asked for their proof.
constexpr std::size_t kPerSubnetInBucket = 4;  // Of one /24 or /48, global addresses only.
constexpr std::uint8_t kFailuresAllowed = 2;

template <class Contacts>
auto find_in(Contacts& contacts, const NodeId& id) {
  return std::find_if(contacts.begin(), contacts.end(),
                      [&](const Contact& contact) { return same(contact.id.bytes, id.bytes); });
}

}  // namespace

std::size_t RoutingTable::capacity(std::size_t index) noexcept {
  return index < 3 ? std::size_t{128} >> index : kBucketSize;
}

std::size_t RoutingTable::index_of(const NodeId& id) const noexcept {
  return std::min<std::size_t>(static_cast<std::size_t>(shared_prefix_bits(self_.bytes, id.bytes)), kBuckets - 1);
}

bool RoutingTable::subnet_full(const Bucket& bucket, const Address& address) const {
  if (!limit_subnets_ || !address.is_global()) return false;
  const std::uint64_t subnet = address.subnet();
  const auto same = std::count_if(bucket.live.begin(), bucket.live.end(), [&](const Contact& contact) {
    return contact.address.is_global() && contact.address.subnet() == subnet;
  });
  return static_cast<std::size_t>(same) >= kPerSubnetInBucket;
}

RoutingTable::Offer RoutingTable::offer(const NodeId& id, const Address& address, TimePoint now) {
  if (id == self_) return Offer::kRefused;
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) buckets_.resize(index + 1);
  Bucket& bucket = buckets_[index];
  if (const auto known = find_in(bucket.live, id); known != bucket.live.end()) {
    if (known->address != address) return Offer::kRefused;
    known->last_heard = now;
    known->failures = 0;
    return Offer::kKnown;
  }
  if (subnet_full(bucket, address)) return Offer::kRefused;
  std::erase_if(bucket.spare, [&](const Contact& contact) { return contact.id == id; });
  if (bucket.live.size() < capacity(index)) {
    bucket.live.push_back({id, address, now, 0});
    ++size_;
    return Offer::kAdded;
  }
  if (bucket.spare.size() >= kSpares) bucket.spare.erase(bucket.spare.begin());
  bucket.spare.push_back({id, address, now, 0});
  return Offer::kSpare;
}

bool RoutingTable::wants(const NodeId& id, const Address& address) const {
  if (id == self_) return false;
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) return true;
  const Bucket& bucket = buckets_[index];
  if (find_in(bucket.live, id) != bucket.live.end() || find_in(bucket.spare, id) != bucket.spare.end()) return false;
  if (subnet_full(bucket, address)) return false;
  return bucket.live.size() < capacity(index) || bucket.spare.size() < kSparesSought;
}

const Contact* RoutingTable::find(const NodeId& id) const {
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) return nullptr;
  const auto known = find_in(buckets_[index].live, id);
  return known == buckets_[index].live.end() ? nullptr : &*known;
}

void RoutingTable::heard(const NodeId& id, const Address& address, TimePoint now) {
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) return;
  const auto known = find_in(buckets_[index].live, id);
  if (known == buckets_[index].live.end() || known->address != address) return;
  known->last_heard = now;
  known->failures = 0;
}

void RoutingTable::promote_spare(Bucket& bucket) {
  while (!bucket.spare.empty()) {
    const Contact spare = bucket.spare.back();
    bucket.spare.pop_back();
    if (subnet_full(bucket, spare.address)) continue;
    bucket.live.push_back(spare);
    ++size_;
    return;
  }
}

bool RoutingTable::failed(const NodeId& id, const Address& address) {
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) return false;
  Bucket& bucket = buckets_[index];
  std::erase_if(bucket.spare, [&](const Contact& contact) { return contact.id == id && contact.address == address; });
  const auto known = find_in(bucket.live, id);
  if (known == bucket.live.end() || known->address != address) return false;
  if (++known->failures < kFailuresAllowed && bucket.spare.empty()) return false;
  bucket.live.erase(known);
  --size_;
  promote_spare(bucket);
  return true;
}

void RoutingTable::remove(const NodeId& id) {
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index) return;
  Bucket& bucket = buckets_[index];
  const auto known = find_in(bucket.live, id);
  if (known == bucket.live.end()) return;
  bucket.live.erase(known);
  --size_;
  promote_spare(bucket);
}

std::optional<Contact> RoutingTable::stalest(const NodeId& id) const {
  const std::size_t index = index_of(id);
  if (buckets_.size() <= index || buckets_[index].live.empty()) return {};
  const auto& live = buckets_[index].live;
  return *std::min_element(live.begin(), live.end(),
                           [](const Contact& a, const Contact& b) { return a.last_heard < b.last_heard; });
}

std::vector<wire::NodeInfo> RoutingTable::closest(const Bits& target, std::size_t count) const {
  struct Near {
    std::uint64_t distance;  // The first 64 bits of it; ties are rare, and forged.
    const Contact* contact;
  };
  std::vector<wire::NodeInfo> result;
  result.reserve(std::min(count, size_));
  thread_local std::vector<Near> group;  // Its memory is kept: every request that is answered comes through here.
  group.clear();
  const auto take_group = [&] {
    const std::size_t room = std::min(count - result.size(), group.size());
    std::partial_sort(group.begin(), group.begin() + static_cast<std::ptrdiff_t>(room), group.end(),
                      [&](const Near& a, const Near& b) {
                        if (a.distance != b.distance) return a.distance < b.distance;
                        return closer(a.contact->id.bytes, b.contact->id.bytes, target);
                      });
    for (std::size_t i = 0; i < room; ++i) result.push_back({group[i].contact->id, group[i].contact->address});
    group.clear();
  };
  const auto gather = [&](std::size_t index) {
    for (const Contact& contact : buckets_[index].live) {
      group.push_back({distance_prefix(contact.id.bytes, target), &contact});
    }
  };
  // Nearest first: the target's own bucket, then all deeper ones together, then the shallower ones one by one.
  const auto own =
      std::min<std::size_t>(static_cast<std::size_t>(shared_prefix_bits(self_.bytes, target)), kBuckets - 1);
  if (own < buckets_.size()) gather(own);
  take_group();
  if (result.size() < count) {
    for (std::size_t index = own + 1; index < buckets_.size(); ++index) gather(index);
    take_group();
  }
  for (std::size_t index = std::min(own, buckets_.size()); index-- > 0 && result.size() < count;) {
    gather(index);
    take_group();
  }
  return result;
}

bool RoutingTable::self_is_near(const Bits& target) const {
  const auto nearest = closest(target, kReplication);
  return nearest.size() < kReplication || closer(self_.bytes, nearest.back().id.bytes, target);
}

std::vector<Contact> RoutingTable::contacts() const {
  std::vector<Contact> all;
  for (const Bucket& bucket : buckets_) all.insert(all.end(), bucket.live.begin(), bucket.live.end());
  return all;
}

int RoutingTable::depth() const noexcept {
  for (std::size_t index = buckets_.size(); index-- > 0;) {
    if (!buckets_[index].live.empty()) return static_cast<int>(index);
  }
  return -1;
}

bool RoutingTable::stale(int index, TimePoint since) const {
  if (static_cast<std::size_t>(index) >= buckets_.size()) return true;
  const auto& live = buckets_[static_cast<std::size_t>(index)].live;
  return std::none_of(live.begin(), live.end(), [&](const Contact& contact) { return contact.last_heard >= since; });
}

}  // namespace dmoe::dht
