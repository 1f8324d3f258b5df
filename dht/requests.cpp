#include "dht/requests.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kWindow = 96;
constexpr std::size_t kWideWindow = 256;
constexpr Duration kWideNetwork = std::chrono::milliseconds{20};
constexpr Duration kShortestFailure = std::chrono::milliseconds{200};
constexpr Duration kLongestFailure = std::chrono::milliseconds{3'000};
constexpr Duration kStalled = std::chrono::milliseconds{20};  // A timer so late was not the peer's fault.
constexpr Duration kCookieFresh = std::chrono::minutes{4};    // Shorter than any cookie's life.
constexpr std::uint16_t kUnheardAllowed = 8;                  // Requests to a silent address that others named …
constexpr Duration kUnheardWindow = std::chrono::minutes{1};  // … in this time.

wire::Message message_of(const Request& request) {
  wire::Message message;
  std::visit([&](const auto& body) { message.body = body; }, request.body);
  return message;
}

}  // namespace

Requests::Requests(DatagramNetwork& network, Clock& clock, RandomSource& random, const Signer& signer, PeerBook& book,
                   bool client, Hooks hooks)
    : network_(network),
      clock_(clock),
      random_(random),
      signer_(signer),
      book_(book),
      client_(client),
      hooks_(std::move(hooks)) {}

/// On a wide network the answers to one burst come spread over a round trip, and waiting for a place would cost one.
std::size_t Requests::window() const noexcept {
  const RoundTrip& everybody = book_.everybody();
  return everybody.known() && everybody.usual() > kWideNetwork ? kWideWindow : kWindow;
}

Requests::~Requests() { stop(); }

void Requests::stop() {
  stopped_ = true;
  alive_.reset();
  if (armed_) clock_.cancel(timer_);
  armed_.reset();
  // Handlers may own what owns this object: they are destroyed only after the containers are empty.
  const auto flights = std::exchange(in_flight_, {});
  const auto waiting = std::exchange(waiting_, {});
}

void Requests::start(Request request) {
  if (stopped_) return;
  if (is_spared(request)) {
    clock_.post([watched = std::weak_ptr<const bool>(alive_), failed = std::move(request.on_failure)] {
      if (failed && !watched.expired()) failed();
    });
    return;
  }
  if (in_window_ >= window()) {
    waiting_.push_back(std::move(request));
    return;
  }
  launch(std::move(request));
}

/// Whether an address that never answered has had enough: whoever names a victim a thousand times shall not have it
/// flooded by this node.
bool Requests::is_spared(const Request& request) {
  if (!request.expected) return false;  // Given by this node's owner, not named by a stranger.
  const TimePoint now = clock_.now();
  Peer& peer = book_.at(request.to, now);
  if (now - peer.unheard_since > kUnheardWindow) {
    peer.unheard = 0;
    peer.unheard_since = now;
  }
  if (peer.last_heard != TimePoint{}) return false;
  return ++peer.unheard > kUnheardAllowed;
}

void Requests::launch(Request request) {
  std::uint64_t transaction = 0;
  do {
    transaction = random_();
  } while (in_flight_.contains(transaction));
  auto flight = std::make_unique<Flight>();
  const TimePoint now = clock_.now();
  flight->patience = book_.patience(request.to);
  flight->first_sent = now;
  flight->fails = now + request.takes + std::clamp(4 * flight->patience, kShortestFailure, kLongestFailure);
  flight->proving = request.fresh_proof || !request.expected || !book_.has_proven(request.to, *request.expected);
  flight->request = std::move(request);
  Flight& placed = *in_flight_.emplace(transaction, std::move(flight)).first->second;
  ++in_window_;
  transmit(transaction, placed);
  wake_at(now + placed.patience, transaction);
}

void Requests::transmit(std::uint64_t transaction, Flight& flight) {
  wire::Message message = message_of(flight.request);
  message.transaction = transaction;
  const TimePoint now = clock_.now();
  const Peer& peer = book_.at(flight.request.to, now);
  message.cookie = peer.cookie;
  message.sender = signer_.public_key();
  message.client = client_;
  message.prove = flight.proving;
  if (!wire::encode(message, buffer_)) return;  // It will fail like a lost one; callers budget their sizes.
  // Without a good cookie the reply may be no larger than this request, so the request is made as large as a reply can
  // be. A knock wants no reply.
  const bool cookie_is_good = message.cookie != 0 && now - peer.last_heard < kCookieFresh;
  if (!cookie_is_good && !std::holds_alternative<wire::Probe>(message.body)) buffer_.pad_to(kMaxDatagram);
  flight.last_sent = now;
  ++sent_;
  network_.send(flight.request.to, buffer_.bytes());
}

void Requests::wake_at(TimePoint when, std::uint64_t transaction) {
  wakes_.push({when, transaction});
  arm();
}

void Requests::arm() {
  while (!wakes_.empty() && !in_flight_.contains(wakes_.top().transaction)) wakes_.pop();
  if (wakes_.empty() || (armed_ && *armed_ <= wakes_.top().when)) return;
  if (armed_) clock_.cancel(timer_);
  armed_ = wakes_.top().when;
  timer_ = clock_.schedule(*armed_, [this] { on_timer(); });
}

void Requests::on_timer() {
  const TimePoint now = clock_.now();
  const Duration late = now - *armed_;
  armed_.reset();
  if (late > kStalled) forgive(late);
  while (!stopped_ && !wakes_.empty() && wakes_.top().when <= now) {
    const std::uint64_t transaction = wakes_.top().transaction;
    wakes_.pop();
    look_at(transaction);
  }
  if (!stopped_) arm();
}

/// Who did not run could not hear: what came meanwhile still lies in the socket's buffer. Nobody is taken for slow or
/// dead for the time that this node itself missed.
void Requests::forgive(Duration late) {
  std::priority_queue<Wake, std::vector<Wake>, std::greater<>> wakes;
  for (; !wakes_.empty(); wakes_.pop()) wakes.push({wakes_.top().when + late, wakes_.top().transaction});
  wakes_ = std::move(wakes);
  for (auto& [transaction, flight] : in_flight_) {
    flight->first_sent += late;
    flight->last_sent += late;
    flight->fails += late;
  }
}

void Requests::look_at(std::uint64_t transaction) {
  const auto found = in_flight_.find(transaction);
  if (found == in_flight_.end()) return;
  Flight& flight = *found->second;
  const TimePoint now = clock_.now();
  if (now >= flight.fails) return fail(transaction);
  if (flight.repeats_done < flight.request.repeats) {
    ++flight.repeats_done;
    transmit(transaction, flight);
  }
  const bool over = flight.repeats_done >= flight.request.repeats;  // Nothing left to do but to fail.
  wake_at(over ? flight.fails : std::min(flight.fails, now + flight.patience * (1 + flight.repeats_done)), transaction);
  if (flight.slow) return;
  leave_window(flight);
  if (flight.request.on_slow) {
    const auto on_slow = flight.request.on_slow;  // It may end the request.
    on_slow();
  }
}

void Requests::leave_window(Flight& flight) {
  if (std::exchange(flight.slow, true)) return;
  --in_window_;
  while (!waiting_.empty() && in_window_ < window()) {
    Request next = std::move(waiting_.front());
    waiting_.pop_front();
    launch(std::move(next));
  }
}

void Requests::fail(std::uint64_t transaction) {
  const auto found = in_flight_.find(transaction);
  const auto flight = std::move(found->second);
  in_flight_.erase(found);
  leave_window(*flight);
  if (flight->request.expected) hooks_.on_failed(*flight->request.expected, flight->request.to);
  if (flight->request.on_failure) flight->request.on_failure();
}

bool Requests::proof_holds(const wire::Message& message, const wire::Reply& reply) const {
  return reply.proof &&
         signer_.verify(message.sender, wire::proof_message(message.transaction, signer_.public_key()), *reply.proof);
}

bool Requests::on_reply(const Address& source, const wire::Message& message, wire::Reply& reply) {
  const auto found = in_flight_.find(message.transaction);
  if (found == in_flight_.end() || found->second->request.to != source) return false;
  const NodeId& id = message.sender_id;
  if (found->second->proving && !proof_holds(message, reply)) return false;
  // Our own key answers: our own socket, or a copy of our key. Neither is a peer.
  if (message.sender == signer_.public_key()) return fail(message.transaction), true;
  if (found->second->request.expected && *found->second->request.expected != id) {
    fail(message.transaction);  // Somebody else lives there now.
    return true;
  }
  const auto flight = std::move(found->second);
  in_flight_.erase(found);
  const TimePoint now = clock_.now();
  // A reply to a repeated datagram may belong to either: counted from the first, the estimate errs on the long side.
  std::optional<Duration> round_trip = now - (flight->repeats_done == 0 ? flight->last_sent : flight->first_sent);
  if (flight->request.takes != Duration{}) round_trip.reset();
  book_.heard(source, round_trip, now);
  Peer& peer = book_.at(source, now);
  peer.cookie = message.cookie;
  if (flight->proving) {
    peer.proven = id;
    if (!message.client) hooks_.on_proven(id, source);
  }
  if (reply.conflict) hooks_.on_conflict(*reply.conflict);
  hooks_.on_heard(id, source);
  if (message.client) hooks_.on_client(id, source);
  if (stopped_) return true;
  leave_window(*flight);
  std::erase_if(reply.nodes, [&](const wire::NodeInfo& node) { return !may_name(source, node.address); });
  if (flight->request.on_reply) flight->request.on_reply(message, reply);
  return true;
}

}  // namespace dmoe::dht
