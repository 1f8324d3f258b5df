// The part of a lookup that collects records: checks, pages of keys with many records, parts of large values.
#include "dht/lookup.hpp"

#include <algorithm>

namespace dmoe::dht {

struct Lookup::Gathering {
  wire::NodeInfo node;
  std::size_t index = 0;
  std::uint32_t total = 0;  // Records the holder says it has.
  std::size_t outstanding = 0;
  bool any = false;              // At least one record passed.
  bool broken = false;           // A page or part did not come.
  std::vector<NodeId> agreeing;  // Holders that say the same total: their pages are not fetched.
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
  const auto got = static_cast<std::uint32_t>(found.records.size());
  const std::uint32_t total = std::min<std::uint32_t>(found.total, 1U << 16U);
  const auto gathering = std::make_shared<Gathering>();
  gathering->node = node;
  gathering->index = index;
  gathering->total = total;
  gathering->outstanding = 1;
  ++search.gathering;
  for (const wire::TravellingRecord& travelling : found.records) {
    if (!travelling.whole()) {
      request_parts(gathering, travelling);
    } else if (take_record(search, travelling)) {
      gathering->any = true;
    }
  }
  if (total > got) {
    // A second opinion is the same number of records; only the first holder to answer is fetched page by page.
    const auto leader = search.leader.lock();
    if (gathering->any && leader && leader->total == total) {
      leader->agreeing.push_back(node.id);
      --search.gathering;
      return;
    }
    if (search.complete_total != total) {
      search.leader = gathering;
      // Several runs of pages at once; each goes on only as long as its pages bring something. A run is not shorter
      // than what a page has room for when it need not be shared with other keys.
      constexpr std::uint32_t kRuns = 16;
      std::size_t bytes = 0;
      for (const wire::TravellingRecord& travelling : found.records) bytes += wire::record_size(travelling);
      const auto page = static_cast<std::uint32_t>(std::clamp<std::size_t>(
          wire::kMaxInlineRecord * got / std::max<std::size_t>(bytes, 1), 1, wire::kMaxRecordsPerDatagram));
      const std::uint32_t span = std::max(page, (total - got + kRuns - 1) / kRuns);
      for (std::uint32_t from = got; from < total; from += span)
        request_page(gathering, from, std::min(from + span, total));
    }
  }
  finish_gathering(gathering);
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
  request.on_reply = [weak, gathering, from, end](const wire::Message&, const wire::Reply& reply) {
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
    if (got != 0 && from + got < end) self->request_page(gathering, from + got, end);
    self->finish_gathering(gathering);
  };
  request.on_failure = [weak, gathering] {
    gathering->broken = true;
    if (const auto self = weak.lock()) self->finish_gathering(gathering);
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
    self->finish_gathering(gathering);
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

void Lookup::finish_gathering(const std::shared_ptr<Gathering>& gathering) {
  if (--gathering->outstanding != 0) return;
  Search& search = searches_[gathering->index];
  --search.gathering;
  if (search.done) return;
  if (gathering->any) count_holder(search, gathering->node.id);
  if (gathering->any && !gathering->broken) {
    search.complete_total = gathering->total;
    for (const NodeId& id : gathering->agreeing) count_holder(search, id);
  } else {
    // Whoever agreed with a holder that then fell silent is asked for its own pages.
    for (const NodeId& id : gathering->agreeing) {
      if (Candidate* holder = candidate(search, id)) holder->state = State::kNew;
    }
  }
  if (search.leader.lock() == gathering) search.leader.reset();
  pump_soon();
}

}  // namespace dmoe::dht
