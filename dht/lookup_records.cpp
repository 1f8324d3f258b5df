// The part of a lookup that collects records: checks, pages of keys with many records, parts of large values.
#include "dht/lookup.hpp"

#include <algorithm>

namespace dmoe::dht {

struct Lookup::Gathering {
  wire::NodeInfo node;
  std::size_t index = 0;
  std::uint32_t total = 0;  // Records the holder says it has, …
  std::uint32_t from = 0;   // … of which its first answer has those from here, …
  std::uint32_t got = 0;    // … so many, and round.
  std::uint32_t page = 1;   // How many fit a datagram of their own.
  std::size_t outstanding = 0;
  bool any = false;     // At least one record passed.
  bool broken = false;  // A page or part did not come.
  bool leads = false;   // Without tags: its pages are being fetched.
  bool over = false;
  std::vector<std::uint16_t> tags;       // Of all its records in their order; empty: it does not say.
  std::vector<bool> requested;           // Of this holder, as its tags.
  std::vector<wire::NodeInfo> agreeing;  // Without tags: holders that say the same total, whose pages are not fetched.
};

namespace {

bool contains(const std::vector<std::uint16_t>& tags, std::uint16_t tag) {
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

bool has_twins(std::vector<std::uint16_t> tags) {
  std::sort(tags.begin(), tags.end());
  return std::adjacent_find(tags.begin(), tags.end()) != tags.end();
}

}  // namespace

/// Checked, and kept when it is the newest of its place. An expired, foreign or forged record is nothing.
bool Lookup::take_record(Search& search, const wire::TravellingRecord& travelling) {
  const Record& record = travelling.record;
  if (record.key != search.key || travelling.remaining_ms == 0 || !travelling.whole()) return false;
  if (!check_limits(record).has_value()) return false;
  if (const std::uint16_t tag = record_tag(record); wants_several() && !contains(search.have, tag)) {
    search.have.push_back(tag);
  }
  auto place = std::make_pair(record.publisher, record.subkey);
  const auto known = search.records.find(place);
  if (known != search.records.end() && known->second.record.sequence > record.sequence) return true;
  if (!context_.verifier.verify(record)) return false;
  const Duration remaining = std::min<Duration>(std::chrono::milliseconds{travelling.remaining_ms}, kMaxTtl);
  LiveRecord live{record, context_.clock.now() + remaining};
  if (known != search.records.end() && known->second.record.sequence == record.sequence) {
    // Holders' remaining times differ by what the record travelled: the shortest is the safe one.
    live.deadline = std::min(live.deadline, known->second.deadline);
  }
  search.records.insert_or_assign(std::move(place), std::move(live));
  return true;
}

void Lookup::take_records(const wire::NodeInfo& node, std::size_t index, const wire::KeyRecords& found) {
  Search& search = searches_[index];
  if (search.done || found.records.empty() || (found.cached && !copies_will_do())) return;
  search.cached = search.cached || found.cached;
  const auto gathering = std::make_shared<Gathering>();
  gathering->node = node;
  gathering->index = index;
  gathering->total = std::min<std::uint32_t>(found.total, 1U << 16U);
  gathering->from = found.from;
  gathering->got = static_cast<std::uint32_t>(found.records.size());
  gathering->outstanding = 1;
  search.gatherings.push_back(gathering);
  std::size_t bytes = 0;
  for (const wire::TravellingRecord& travelling : found.records) {
    bytes += wire::record_size(travelling);
    accept(gathering, travelling);
  }
  gathering->page = static_cast<std::uint32_t>(
      std::clamp<std::size_t>(wire::kMaxInlineRecord * gathering->got / bytes, 1, wire::kMaxRecordsPerDatagram));
  if (gathering->total > gathering->got) {
    if (!found.tags.empty() && !has_twins(found.tags)) {
      gathering->tags = found.tags;
      gathering->requested.resize(found.tags.size());
      for (std::uint32_t i = 0; i < gathering->got; ++i) {
        gathering->requested[(gathering->from + i) % gathering->total] = true;
      }
    } else {
      // A second opinion is the same number of records; only the first holder to answer is fetched page by page.
      const auto leader = std::find_if(search.gatherings.begin(), search.gatherings.end(), [&](const auto& other) {
        return other->leads && other->total == gathering->total;
      });
      if (gathering->any && leader != search.gatherings.end()) {
        (*leader)->agreeing.push_back(node);
        search.gatherings.pop_back();
        return;
      }
      if (search.complete_total != gathering->total) fetch_rest(gathering);
    }
  }
  one_less(gathering);
  fetch_missing(search);
}

/// A large value comes in parts, unless it is there already.
void Lookup::accept(const std::shared_ptr<Gathering>& gathering, const wire::TravellingRecord& travelling) {
  Search& search = searches_[gathering->index];
  if (travelling.whole()) {
    if (take_record(search, travelling)) gathering->any = true;
    return;
  }
  const auto known = search.records.find({travelling.record.publisher, travelling.record.subkey});
  if (known != search.records.end() && known->second.record.sequence >= travelling.record.sequence) {
    gathering->any = true;
    return;
  }
  request_parts(gathering, travelling);
}

/// Several runs of pages at once; each goes on only as long as its pages bring something. A run is not shorter than
/// what a page has room for when it need not be shared with other keys.
void Lookup::fetch_rest(const std::shared_ptr<Gathering>& gathering) {
  constexpr std::uint32_t kRuns = 16;
  gathering->leads = true;
  const std::uint32_t total = gathering->total;
  const std::uint32_t span = std::max(gathering->page, (total - gathering->got + kRuns - 1) / kRuns);
  const auto fetch = [&](std::uint32_t from, std::uint32_t end) {
    for (; from < end; from += span) request_page(gathering, from, std::min(from + span, end));
  };
  // What is there lies anywhere in the order, and may go round its end.
  const std::uint32_t end = gathering->from + gathering->got;
  if (end <= total) {
    fetch(end, total);
    fetch(0, gathering->from);
  } else {
    fetch(end - total, gathering->from);
  }
}

/// Of holders that say what they have only that is asked for which nobody gave, and nobody else was asked for.
/// Whoever's records are all there is a holder, whoever sent them.
void Lookup::fetch_missing(Search& search) {
  const auto gatherings = search.gatherings;
  for (const auto& gathering : gatherings) {
    if (search.done || gathering->over || gathering->tags.empty()) continue;
    const bool complete = std::all_of(gathering->tags.begin(), gathering->tags.end(),
                                      [&](std::uint16_t tag) { return contains(search.have, tag); });
    const bool waits = !complete && (request_missing(search, gathering) || gathering->outstanding != 0);
    if (waits) continue;
    gathering->any = gathering->any || complete;
    gathering->broken = !complete;
    conclude(search, gathering);
  }
}

/// @return whether something of it is still to come, from this holder or another one.
bool Lookup::request_missing(Search& search, const std::shared_ptr<Gathering>& gathering) {
  const auto& tags = gathering->tags;
  const auto is_free = [&](std::uint32_t at) {
    return !gathering->requested[at] && !contains(search.have, tags[at]) && !contains(search.pending, tags[at]);
  };
  for (std::uint32_t at = 0; at < tags.size(); ++at) {
    if (!is_free(at)) continue;
    std::uint32_t end = at;
    for (; end < tags.size() && end < at + gathering->page && is_free(end); ++end) gathering->requested[end] = true;
    search.pending.insert(search.pending.end(), tags.begin() + at, tags.begin() + end);
    request_page(gathering, at, end);
    at = end - 1;
  }
  return std::any_of(tags.begin(), tags.end(),
                     [&](std::uint16_t tag) { return !contains(search.have, tag) && contains(search.pending, tag); });
}

void Lookup::request_page(const std::shared_ptr<Gathering>& gathering, std::uint32_t from, std::uint32_t end) {
  ++gathering->outstanding;
  ++requests_made_;
  wire::Find find;
  find.keys = {searches_[gathering->index].key};
  find.want_records = true;
  find.from = from;
  Request request;
  request.to = gathering->node.address;
  request.expected = gathering->node.id;
  request.body = std::move(find);
  request.repeats = 3;
  const auto weak = weak_from_this();
  /// Others may be asked for these from now on.
  const auto release = [gathering, from, end](Search& search) {
    for (std::uint32_t at = from; at < end && at < gathering->tags.size(); ++at) {
      std::erase(search.pending, gathering->tags[at]);
    }
  };
  request.on_reply = [weak, gathering, from, end, release](const wire::Message&, const wire::Reply& reply) {
    const auto self = weak.lock();
    if (!self) return;
    Search& search = self->searches_[gathering->index];
    release(search);
    if (!search.done) self->take_page(gathering, from, end, reply);
    self->one_less(gathering);
    self->fetch_missing(search);
  };
  request.on_slow = [weak, gathering, release] {
    const auto self = weak.lock();
    if (!self || gathering->over) return;
    Search& search = self->searches_[gathering->index];
    release(search);
    self->fetch_missing(search);
  };
  request.on_failure = [weak, gathering, release] {
    gathering->broken = true;
    const auto self = weak.lock();
    if (!self) return;
    Search& search = self->searches_[gathering->index];
    release(search);
    self->one_less(gathering);
    self->fetch_missing(search);
  };
  context_.requests.start(std::move(request));
}

void Lookup::take_page(const std::shared_ptr<Gathering>& gathering, std::uint32_t from, std::uint32_t end,
                       const wire::Reply& reply) {
  if (reply.found.size() != 1) return;
  const auto& records = reply.found.front().records;
  for (const wire::TravellingRecord& travelling : records) accept(gathering, travelling);
  const std::uint32_t next = from + static_cast<std::uint32_t>(records.size());
  if (records.empty() || next >= end || gathering->over) return;
  if (gathering->tags.empty()) return request_page(gathering, next, end);
  for (std::uint32_t at = next; at < end; ++at) gathering->requested[at] = false;
}

void Lookup::request_parts(const std::shared_ptr<Gathering>& gathering, const wire::TravellingRecord& without_value) {
  struct Assembly {
    wire::TravellingRecord travelling;
    std::size_t missing = 0;
    bool broken = false;
  };
  const auto assembly = std::make_shared<Assembly>(Assembly{without_value, 0, false});
  assembly->travelling.record.value.resize(without_value.value_size);
  assembly->missing = (without_value.value_size + wire::kPartBytes - 1) / wire::kPartBytes;
  ++gathering->outstanding;
  const auto weak = weak_from_this();
  const auto settle = [weak, gathering, assembly] {
    if (--assembly->missing != 0) return;
    const auto self = weak.lock();
    if (!self) return;
    Search& search = self->searches_[gathering->index];
    if (assembly->broken) gathering->broken = true;
    if (!search.done && !assembly->broken && self->take_record(search, assembly->travelling)) gathering->any = true;
    self->one_less(gathering);
    self->fetch_missing(search);
  };
  for (std::uint32_t offset = 0; offset < without_value.value_size; offset += wire::kPartBytes) {
    wire::Fetch fetch{without_value.record.key, without_value.record.publisher, without_value.record.subkey,
                      without_value.record.sequence, offset};
    Request request;
    request.to = gathering->node.address;
    request.expected = gathering->node.id;
    request.body = std::move(fetch);
    request.repeats = 3;
    request.on_reply = [assembly, settle, offset](const wire::Message&, const wire::Reply& reply) {
      auto& value = assembly->travelling.record.value;
      const std::size_t size = std::min(wire::kPartBytes, value.size() - offset);
      const bool fits = reply.part && reply.part->total == value.size() && reply.part->offset == offset &&
                        reply.part->data.size() == size;
      if (fits) {
        std::copy(reply.part->data.begin(), reply.part->data.end(), value.begin() + offset);
      } else {
        assembly->broken = true;
      }
      settle();
    };
    request.on_failure = [assembly, settle] {
      assembly->broken = true;
      settle();
    };
    ++requests_made_;
    context_.requests.start(std::move(request));
  }
}

void Lookup::count_holder(Search& search, const NodeId& id) {
  ++search.holders;
  if (Candidate* holder = candidate(search, id)) holder->has_records = true;
}

void Lookup::one_less(const std::shared_ptr<Gathering>& gathering) {
  if (--gathering->outstanding != 0 || gathering->over) return;
  if (gathering->tags.empty()) conclude(searches_[gathering->index], gathering);  // Else fetch_missing does it.
}

void Lookup::conclude(Search& search, const std::shared_ptr<Gathering>& gathering) {
  gathering->over = true;
  std::erase(search.gatherings, gathering);
  if (search.done) return;
  if (gathering->any) count_holder(search, gathering->node.id);
  if (gathering->any && !gathering->broken) {
    search.complete_total = gathering->total;
    for (const auto& node : gathering->agreeing) count_holder(search, node.id);
  } else {
    // Whoever agreed with a holder that then fell silent is asked for its own pages.
    for (const auto& node : gathering->agreeing) {
      if (Candidate* holder = candidate(search, node.id)) holder->state = State::kNew;
    }
  }
  pump_soon();
}

}  // namespace dmoe::dht
