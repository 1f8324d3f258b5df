// The part of a lookup that collects records: checks, pages of keys with many records, parts of large values.
#include "dht/lookup.hpp"

#include <algorithm>

namespace dmoe::dht {

struct Lookup::Gathering {
  wire::NodeInfo node;
  std::size_t index = 0;
  std::uint32_t total = 0;  // Records the holder says it has.
  std::size_t outstanding = 0;
  bool any = false;     // At least one record passed.
  bool broken = false;  // A page or part did not come.
  bool leads = false;   // Its pages are being fetched.
  bool over = false;
  std::vector<wire::NodeInfo> agreeing;  // Holders that say the same total: their pages are not fetched.
  std::size_t helped = 0;                // Times that one of them was asked for a page that is late.
};

/// Checked, and kept when it is the newest of its place. An expired, foreign or forged record is nothing.
bool Lookup::take_record(Search& search, const wire::TravellingRecord& travelling) {
  const Record& record = travelling.record;
  if (record.key != search.key || travelling.remaining_ms == 0 || !travelling.whole()) return false;
  if (!check_limits(record).has_value()) return false;
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
  gathering->outstanding = 1;
  search.gatherings.push_back(gathering);
  for (const wire::TravellingRecord& travelling : found.records) {
    if (!travelling.whole()) {
      request_parts(gathering, travelling);
    } else if (take_record(search, travelling)) {
      gathering->any = true;
    }
  }
  if (gathering->total > found.records.size()) {
    // A second opinion is the same number of records; only the first holder to answer is fetched page by page.
    const auto leader = std::find_if(search.gatherings.begin(), search.gatherings.end(), [&](const auto& other) {
      return other->leads && other->total == gathering->total;
    });
    if (gathering->any && leader != search.gatherings.end()) {
      (*leader)->agreeing.push_back(node);
      search.gatherings.pop_back();
      return conclude_gatherings(search);
    }
    if (search.complete_total != gathering->total) fetch_rest(gathering, found);
  }
  one_less(gathering);
  conclude_gatherings(search);
}

/// Several runs of pages at once; each goes on only as long as its pages bring something. A run is not shorter than
/// what a page has room for when it need not be shared with other keys.
void Lookup::fetch_rest(const std::shared_ptr<Gathering>& gathering, const wire::KeyRecords& found) {
  constexpr std::uint32_t kRuns = 16;
  gathering->leads = true;
  const auto got = static_cast<std::uint32_t>(found.records.size());
  const std::uint32_t total = gathering->total;
  std::size_t bytes = 0;
  for (const wire::TravellingRecord& travelling : found.records) bytes += wire::record_size(travelling);
  const auto page = static_cast<std::uint32_t>(std::clamp<std::size_t>(
      wire::kMaxInlineRecord * got / std::max<std::size_t>(bytes, 1), 1, wire::kMaxRecordsPerDatagram));
  const std::uint32_t span = std::max(page, (total - got + kRuns - 1) / kRuns);
  const auto fetch = [&](std::uint32_t from, std::uint32_t end) {
    for (; from < end; from += span) request_page(gathering, gathering->node, from, std::min(from + span, end));
  };
  // What is there lies anywhere in the order, and may go round its end.
  const std::uint32_t end = found.from + got;
  if (end <= total) {
    fetch(end, total);
    fetch(0, found.from);
  } else {
    fetch(end - total, found.from);
  }
}

void Lookup::request_page(const std::shared_ptr<Gathering>& gathering, const wire::NodeInfo& node, std::uint32_t from,
                          std::uint32_t end) {
  ++gathering->outstanding;
  ++requests_made_;
  wire::Find find;
  find.keys = {searches_[gathering->index].key};
  find.want_records = true;
  find.from = from;
  Request request;
  request.to = node.address;
  request.expected = node.id;
  request.body = std::move(find);
  request.repeats = 3;
  const auto weak = weak_from_this();
  request.on_reply = [weak, gathering, node, from, end](const wire::Message&, const wire::Reply& reply) {
    const auto self = weak.lock();
    if (!self) return;
    Search& search = self->searches_[gathering->index];
    std::uint32_t got = 0;
    if (!search.done && reply.found.size() == 1) {
      for (const wire::TravellingRecord& travelling : reply.found.front().records) {
        ++got;
        if (!travelling.whole()) {
          self->request_parts(gathering, travelling);
        } else if (self->take_record(search, travelling)) {
          gathering->any = true;
        }
      }
    }
    if (got != 0 && from + got < end && !gathering->over) self->request_page(gathering, node, from + got, end);
    self->one_less(gathering);
    self->conclude_gatherings(search);
  };
  // The same page from a holder that has as many: the first of both will do.
  if (node.id == gathering->node.id) {
    request.on_slow = [weak, gathering, from, end] {
      const auto self = weak.lock();
      if (!self || gathering->over || gathering->agreeing.empty()) return;
      const auto& other = gathering->agreeing[gathering->helped++ % gathering->agreeing.size()];
      self->request_page(gathering, other, from, end);
    };
  }
  request.on_failure = [weak, gathering] {
    gathering->broken = true;
    if (const auto self = weak.lock()) self->one_less(gathering);
  };
  context_.requests.start(std::move(request));
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
    self->conclude_gatherings(search);
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
  if (--gathering->outstanding == 0 && !gathering->over) conclude(searches_[gathering->index], gathering);
}

/// Whose records are all there, whoever sent them, is not waited for.
void Lookup::conclude_gatherings(Search& search) {
  const auto gatherings = search.gatherings;
  for (const auto& gathering : gatherings) {
    if (gathering->over || search.done || !gathering->any || search.records.size() < gathering->total) continue;
    gathering->broken = false;
    conclude(search, gathering);
  }
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
