#include "dht/lookup.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kMaxCandidates = 64;    // Per key: several times what a walk of ten thousand nodes needs.
constexpr std::size_t kFew = 2;               // Holders that will do where the others seem to be dead.
constexpr std::size_t kCountedPerSubnet = 2;  // Among the nearest.
constexpr std::size_t kKeptPerSubnet = 24;
constexpr std::array<std::uint8_t, kReplication> kTurns{0, 128, 64, 192, 32, 160, 96, 224};
constexpr Duration kHedgeIsCheap = std::chrono::milliseconds{10};
constexpr Duration kShortestGrace = std::chrono::milliseconds{20};  // Below it scheduling noise decides who is late.

/// Whom a free slot goes to: first to those nobody doubts.
enum class Patience { kTrials, kDoubtful, kSuspects };

}  // namespace

Lookup::Lookup(Context context, std::vector<Key> keys, LookupOptions options, OnKey on_key)
    : context_(context), options_(options), on_key_(std::move(on_key)), searches_(keys.size()), open_(keys.size()) {
  sources_.push_back({context_.self, 0, 0});
  for (std::size_t i = 0; i < keys.size(); ++i) searches_[i].key = keys[i];
}

void Lookup::start(const std::vector<wire::NodeInfo>& seeds) {
  for (Search& search : searches_) {
    for (const auto& node : context_.table.closest(search.key.bytes, kBucketSize)) add(search, node, 0);
    for (const auto& node : seeds) add(search, node, 0);
  }
  pump();
}

bool Lookup::Crowd::admits(std::uint64_t subnet) noexcept {
  if (subnet == 0 || count_ == seen_.size()) return true;
  const auto end = seen_.begin() + static_cast<std::ptrdiff_t>(count_);
  if (static_cast<std::size_t>(std::count(seen_.begin(), end, subnet)) >= kCountedPerSubnet) return false;
  seen_[count_++] = subnet;
  return true;
}

/// Whether there are enough of the subnet, all nearer than `place`. Where one is farther, it makes way.
bool Lookup::crowded(Search& search, std::uint64_t subnet, std::vector<Candidate>::iterator& place) {
  if (subnet == 0) return false;
  auto& list = search.candidates;
  std::size_t kept = 0;
  auto farthest = list.end();
  for (auto known = list.begin(); known != list.end(); ++known) {
    if (known->subnet != subnet || known->state == State::kFailed) continue;
    ++kept;
    if (known->state == State::kNew) farthest = known;
  }
  if (kept < kKeptPerSubnet) return false;
  if (farthest == list.end() || farthest < place) return true;
  const auto at = place - list.begin();
  list.erase(farthest);
  place = list.begin() + at;
  return false;
}

/// In a full list the farthest makes way for a nearer one, but nobody whose answer may still come: the first who were
/// asked are at the end by now. Where the dead (or invented) fill half of it, one of them goes.
bool Lookup::make_room(Search& search, std::ptrdiff_t& at) {
  auto& list = search.candidates;
  const auto farthest = std::find_if(list.rbegin(), list.rend(), [](const Candidate& known) {
    return known.state == State::kNew || known.state == State::kAnswered;
  });
  if (farthest != list.rend() && list.rend() - farthest - 1 >= at) {
    list.erase(std::next(farthest).base());
    return true;
  }
  const auto is_dead = [](const Candidate& known) { return known.state == State::kFailed; };
  if (static_cast<std::size_t>(std::count_if(list.begin(), list.end(), is_dead)) < kMaxCandidates / 2) return false;
  const auto dead = std::find_if(list.begin(), list.end(), is_dead);
  if (dead - list.begin() < at) --at;
  list.erase(dead);
  return true;
}

void Lookup::add(Search& search, const wire::NodeInfo& node, std::uint16_t source) {
  if (node.id == context_.self) return;
  auto& list = search.candidates;
  auto place = std::lower_bound(list.begin(), list.end(), node.id, [&](const Candidate& known, const NodeId& id) {
    return closer(known.node.id.bytes, id.bytes, search.key.bytes);
  });
  if (place != list.end() && place->node.id == node.id) {
    const bool agrees = place->node.address == node.address && place->source != source;
    if (agrees && place->second == kNobodyElse) place->second = source;
    return;
  }
  const bool counted = context_.table.limits_subnets() && node.address.is_global();
  const std::uint64_t subnet = counted ? node.address.subnet() : 0;
  if (crowded(search, subnet, place)) return;
  auto at = place - list.begin();
  if (list.size() >= kMaxCandidates && !make_room(search, at)) return;
  list.insert(list.begin() + at, Candidate{node, State::kNew, false, source, kNobodyElse, subnet});
  // What proved itself here goes before what a stranger says.
  if (source == 0) return;
  if (const Contact* contact = context_.table.find(node.id))
    candidate(search, node.id)->node.address = contact->address;
}

std::uint16_t Lookup::source_of(const NodeId& id) {
  const auto [entry, fresh] = source_index_.try_emplace(id, static_cast<std::uint16_t>(sources_.size()));
  if (fresh && sources_.size() < 0xFFFF) sources_.push_back({id, 0, 0});
  return std::min<std::uint16_t>(entry->second, static_cast<std::uint16_t>(sources_.size() - 1));
}

/// Where a round trip is so short that asking the next one later costs nothing.
bool Lookup::is_near_network() const {
  const RoundTrip& everybody = context_.book.everybody();
  return everybody.known() && everybody.usual() < kHedgeIsCheap;
}

bool Lookup::is_doubtful(const Candidate& known) const {
  // Where nobody was silent yet, or the next one costs nothing, trials would cost more than they save.
  if (!some_are_silent_ || is_near_network()) return false;
  return known.source != 0 && known.second == kNobodyElse && !sources_[known.source].vindicated();
}

bool Lookup::is_suspect(const Candidate& known) const {
  return sources_[known.source].suspect() && (known.second == kNobodyElse || sources_[known.second].suspect());
}

bool Lookup::Trials::has(std::uint16_t source) const noexcept {
  const auto end = sources_.begin() + static_cast<std::ptrdiff_t>(count_);
  return std::find(sources_.begin(), end, source) != end;
}

void Lookup::Trials::add(std::uint16_t source) noexcept {
  if (!full() && !has(source)) sources_[count_++] = source;
}

/// How many unanswered requests a key may have: on a near network one at a time is enough. Silence widens the front.
std::size_t Lookup::slots(const Search& search) const {
  const std::size_t base = options_.want_records && is_near_network() ? std::max<std::size_t>(1, options_.quorum)
                                                                      : std::max(kAlpha, options_.quorum);
  const auto silent = std::count_if(search.candidates.begin(), search.candidates.end(), [](const Candidate& c) {
    return c.state == State::kSlow || c.state == State::kFailed;
  });
  return base + std::min<std::size_t>(static_cast<std::size_t>(silent), 3);
}

Lookup::Candidate* Lookup::next_to_ask(Search& search) {
  // Whoever is asked but no longer among the nearest known is not waited for: the walk has got beyond it.
  std::size_t busy = 0;
  std::size_t nearest = 0;
  Trials trials;
  for (const Candidate& known : search.candidates) {
    if (known.state == State::kFailed || known.state == State::kSlow) continue;
    const bool doubtful = is_doubtful(known);
    if (known.state == State::kNew && doubtful) continue;  // It may never be asked.
    if (known.state == State::kAsked && doubtful) trials.add(known.source);
    if (known.state == State::kAsked && !doubtful) ++busy;
    if (++nearest >= options_.width) break;
  }
  const bool slot_is_free = busy < slots(search);
  if (!slot_is_free && trials.full()) return nullptr;
  // Crowds come last: where the others are enough, nobody needs them.
  for (const bool even_crowd : {false, true}) {
    bool enough = false;
    for (const Patience patience : {Patience::kTrials, Patience::kDoubtful, Patience::kSuspects}) {
      if (patience != Patience::kTrials && !slot_is_free) return nullptr;
      Crowd crowd;
      std::size_t in_front = 0;
      for (Candidate& next : search.candidates) {
        if (next.state == State::kFailed || next.state == State::kSlow) continue;
        if (!even_crowd && !crowd.admits(next.subnet)) continue;
        if (next.state == State::kNew) {
          if (is_suspect(next) && patience != Patience::kSuspects) continue;
          if (is_doubtful(next) && patience == Patience::kTrials) {
            if (!trials.full() && !trials.has(next.source)) return &next;  // Takes nobody's slot.
          } else if (slot_is_free) {
            return &next;
          }
          continue;
        }
        if (++in_front < options_.width) continue;
        enough = true;
        break;
      }
    }
    if (enough) break;
  }
  return nullptr;
}

/// Whoever seeks a record and found none asks suspects as well: an honest node may have named many that just died.
bool Lookup::is_exhausted(const Search& search) const {
  const bool may_skip_suspects = !options_.want_records || search.holders != 0;
  for (const bool even_crowd : {false, true}) {
    Crowd crowd;
    std::size_t answered = 0;
    for (const Candidate& known : search.candidates) {
      if (known.state == State::kFailed || (!even_crowd && !crowd.admits(known.subnet))) continue;
      if (may_skip_suspects && known.state == State::kNew && is_suspect(known) && answered >= options_.width / 2) {
        continue;
      }
      if (known.state != State::kAnswered) return false;
      if (++answered >= options_.width) return true;
    }
  }
  return true;
}

/// Replies that came in one burst are answered by one round of requests.
void Lookup::pump_soon() {
  if (pump_posted_) return;
  if (searches_.size() == 1) return pump();
  pump_posted_ = true;
  context_.clock.post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    self->pump_posted_ = false;
    self->pump();
  });
}

void Lookup::pump() {
  const auto alive = shared_from_this();  // Reporting the last key may end the owner's interest.
  std::vector<std::pair<wire::NodeInfo, std::vector<std::size_t>>> plan;
  std::unordered_map<NodeId, std::size_t> place;
  for (std::size_t index = 0; index < searches_.size(); ++index) {
    Search& search = searches_[index];
    if (search.done) continue;
    while (Candidate* next = next_to_ask(search)) {
      next->state = State::kAsked;
      const auto [entry, fresh] = place.try_emplace(next->node.id, plan.size());
      if (fresh) plan.push_back({next->node, {}});
      plan[entry->second].second.push_back(index);
    }
    finish_if_done(index);
  }
  for (auto& [node, indices] : plan) {
    for (std::size_t at = 0; at < indices.size(); at += wire::kMaxKeysPerFind) {
      const std::size_t count = std::min(wire::kMaxKeysPerFind, indices.size() - at);
      const auto first = indices.begin() + static_cast<std::ptrdiff_t>(at);
      ask(node, {first, first + static_cast<std::ptrdiff_t>(count)});
    }
  }
}

void Lookup::ask(const wire::NodeInfo& node, std::vector<std::size_t> indices) {
  std::erase_if(indices, [this](std::size_t index) { return searches_[index].done; });
  if (indices.empty()) return;
  wire::Find find;
  for (const std::size_t index : indices) {
    Search& search = searches_[index];
    find.keys.push_back(search.key);
    // Several opinions: each begins with other records, so that the first pages of all are most of what there is.
    if (wants_several()) find.turns.push_back(kTurns[search.asked++ % kTurns.size()]);
  }
  find.want_records = options_.want_records;
  find.allow_cached = copies_will_do();
  find.nodes_per_key =
      static_cast<std::uint8_t>(std::clamp<std::size_t>(kBucketSize / find.keys.size(), 4, kBucketSize));
  ++requests_made_;

  Request request;
  request.to = node.address;
  request.expected = node.id;
  request.body = std::move(find);
  const auto weak = weak_from_this();
  request.on_reply = [weak, node, indices](const wire::Message&, const wire::Reply& reply) {
    if (const auto self = weak.lock()) self->on_answer(node, indices, reply);
  };
  request.on_slow = [weak, node, indices] {
    const auto self = weak.lock();
    if (!self) return;
    self->set_state(node.id, indices, State::kSlow);
    self->pump_soon();
  };
  request.on_failure = [weak, node, indices] {
    const auto self = weak.lock();
    if (!self) return;
    self->set_state(node.id, indices, State::kFailed);
    self->pump_soon();
  };
  context_.requests.start(std::move(request));
}

Lookup::Candidate* Lookup::candidate(Search& search, const NodeId& id) {
  const auto found = std::find_if(search.candidates.begin(), search.candidates.end(),
                                  [&](const Candidate& c) { return same(c.node.id.bytes, id.bytes); });
  return found == search.candidates.end() ? nullptr : &*found;
}

void Lookup::set_state(const NodeId& id, const std::vector<std::size_t>& indices, State state) {
  for (const std::size_t index : indices) {
    Candidate* known = candidate(searches_[index], id);
    if (known == nullptr) continue;
    for (const std::uint16_t by : {known->source, known->second}) {
      if (by == 0 || by == kNobodyElse) continue;
      Source& source = sources_[by];
      if (state == State::kAnswered) ++source.good;
      if (state == State::kAnswered && known->state == State::kSlow) --source.bad;  // It was there, only late.
      if (known->state == State::kAsked && state != State::kAnswered) {
        ++source.bad;
        some_are_silent_ = true;
      }
    }
    known->state = state;
  }
}

void Lookup::on_answer(const wire::NodeInfo& node, const std::vector<std::size_t>& indices, const wire::Reply& reply) {
  std::vector<std::size_t> answered;
  std::vector<std::size_t> left_out;  // No room in the reply: to be asked again.
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const bool done = ((reply.done_keys >> i) & 1U) != 0;
    (done ? answered : left_out).push_back(indices[i]);
  }
  if (answered.empty()) {
    set_state(node.id, indices, State::kFailed);  // An answer about nothing would be asked for ever.
    return pump_soon();
  }
  set_state(node.id, answered, State::kAnswered);
  const std::uint16_t source = source_of(node.id);
  for (const std::size_t index : answered) {
    if (searches_[index].done) continue;
    for (const wire::NodeInfo& named : reply.nodes) add(searches_[index], named, source);
  }
  for (const wire::KeyRecords& found : reply.found) {
    if (found.index < indices.size()) take_records(node, indices[found.index], found);
  }
  // Each by itself: together they did not fit.
  for (const std::size_t index : left_out) ask(node, {index});
  pump_soon();
}

void Lookup::finish_if_done(std::size_t index) {
  Search& search = searches_[index];
  if (search.done || !search.gatherings.empty()) return;
  const bool enough = options_.want_records && options_.quorum != 0 && search.holders >= options_.quorum;
  if (enough || search.grace_over || is_exhausted(search)) return finish(index, false);
  if (options_.enough == 0) return;
  if (search.holders >= options_.enough || (search.holders >= kFew && only_silent_left(search))) begin_grace(index);
}

/// Whether whoever among the nearest has not answered is past its usual time: dead, as likely as not. Who was named
/// only by somebody whose other names are silent does not count as near.
bool Lookup::only_silent_left(const Search& search) const {
  std::size_t nearest = 0;
  for (const Candidate& known : search.candidates) {
    const Source& source = sources_[known.source];
    if (known.source != 0 && known.second == kNobodyElse && source.bad > source.good) continue;
    if (known.state == State::kNew || known.state == State::kAsked) return false;
    if (++nearest >= options_.width) return true;
  }
  return true;
}

/// A quarter of a usual round trip for who is late: of eight answers the last takes three times as long as the fourth.
void Lookup::begin_grace(std::size_t index) {
  if (std::exchange(searches_[index].in_grace, true)) return;
  const auto mean = std::chrono::duration<float, std::micro>(context_.book.everybody().mean_us);
  const Duration grace = std::max(kShortestGrace, std::chrono::duration_cast<Duration>(mean / 4));
  context_.clock.schedule(context_.clock.now() + grace, [weak = weak_from_this(), index] {
    const auto self = weak.lock();
    if (!self) return;
    self->searches_[index].grace_over = true;
    self->finish_if_done(index);
  });
}

void Lookup::finish(std::size_t index, bool by_deadline) {
  Search& search = searches_[index];
  search.done = true;
  --open_;
  LookupOutcome outcome;
  outcome.ended_by_deadline = by_deadline;
  outcome.holders = search.holders;
  outcome.requests = requests_made_;
  outcome.cached = search.cached;
  outcome.complete = search.complete_total != 0 && search.records.size() == search.complete_total;
  Crowd crowd;
  std::vector<wire::NodeInfo> others;
  for (const Candidate& known : search.candidates) {
    if (known.state != State::kAnswered) continue;
    auto& list = crowd.admits(known.subnet) ? outcome.nearest : others;
    if (list.size() < options_.width) list.push_back(known.node);
    if (!known.has_records && !outcome.cache_at) outcome.cache_at = known.node;
  }
  for (const wire::NodeInfo& node : others) {
    if (outcome.nearest.size() < options_.width) outcome.nearest.push_back(node);
  }
  for (auto& [place, live] : search.records) outcome.records.push_back(std::move(live));
  search.records.clear();
  search.candidates = {};
  search.gatherings.clear();
  if (const auto on_key = on_key_) on_key(index, std::move(outcome));
}

void Lookup::end(bool by_deadline) {
  const auto alive = shared_from_this();
  for (std::size_t index = 0; index < searches_.size(); ++index) {
    if (!searches_[index].done) finish(index, by_deadline);
  }
}

void Lookup::abandon() {
  on_key_ = {};
  for (Search& search : searches_) search.done = true;
  open_ = 0;
}

}  // namespace dmoe::dht
