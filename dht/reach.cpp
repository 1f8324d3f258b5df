#include "dht/reach.hpp"

#include <algorithm>
#include <utility>

namespace dmoe::dht {
namespace {

using namespace std::chrono_literals;

constexpr Duration kKnockWait = 3s;
constexpr Duration kRelayTakes = 1s;  // For the third node's answer to the second one.
constexpr std::size_t kAsked = 3;     // Contacts that are asked to have somebody knock.
constexpr int kUnsureTries = 3;
constexpr Duration kHoleClosed = 4min;  // Whom one has not written to for so long is a stranger again.
constexpr Duration kLookAgain = 10min;

}  // namespace

void ReachTest::run(std::uint16_t port, std::function<void(Reach)> handler) {
  if (const auto before = test_) settle(before, Reach::kUnknown);
  const auto test = std::make_shared<Test>();
  test->nonce = core_.random() | 1U;
  test->handler = std::move(handler);
  test_ = test;
  std::vector<Contact> contacts = core_.table.contacts();
  while (contacts.size() > kAsked) {
    contacts.erase(contacts.begin() + static_cast<std::ptrdiff_t>(core_.random() % contacts.size()));
  }
  test->asking = contacts.size();
  for (const Contact& contact : contacts) ask(test, contact, port, false);
  if (contacts.empty()) return settle(test, Reach::kUnknown);
  core_.after(kKnockWait, [this, test] {
    // A knock that did not come was a stranger's.
    settle(test, test->knocks > test->known.size() ? Reach::kUnreachable : Reach::kUnknown);
  });
}

void ReachTest::ask(const std::shared_ptr<Test>& test, const Contact& contact, std::uint16_t port, bool repeated) {
  Request request;
  request.to = contact.address;
  request.expected = contact.id;
  request.body = wire::Probe{wire::Probe::Stage::kAsk, port, test->nonce, {}};
  request.repeats = 0;  // Each repeat would send somebody to knock.
  request.takes = kRelayTakes;
  request.on_reply = [this, test, contact, port, repeated](const wire::Message&, const wire::Reply& reply) {
    if (reply.observed) observed_ = reply.observed;
    const auto ack = reply.acks.size() == 1 ? reply.acks.front() : wire::Ack::kFull;
    // Not written to for long: its refusal brought the cookie to use.
    if (ack == wire::Ack::kBadCookie && !repeated) return ask(test, contact, port, true);
    on_answer(test, ack == wire::Ack::kStored);
  };
  request.on_failure = [this, test, contact, port, repeated] {
    if (!repeated) return ask(test, contact, port, true);
    on_answer(test, false);
  };
  core_.requests.start(std::move(request));
}

void ReachTest::on_answer(const std::shared_ptr<Test>& test, bool knocked) {
  --test->asking;
  test->knocks += knocked ? 1 : 0;
  if (test->asking == 0 && test->knocks == 0) settle(test, Reach::kUnknown);  // Nobody can tell.
}

void ReachTest::on_knock(const Address& from, std::uint64_t nonce, std::uint64_t transaction) {
  const auto test = test_;
  if (!test || nonce != test->nonce) return;
  const Peer* peer = core_.book.find(from);
  if (peer != nullptr && core_.clock.now() - peer->last_used < kHoleClosed) {
    // Once each, since a datagram may come twice; but two may send the same third node.
    if (std::find(test->known.begin(), test->known.end(), transaction) == test->known.end()) {
      test->known.push_back(transaction);
    }
    return;
  }
  settle(test, Reach::kReachable);
}

void ReachTest::settle(const std::shared_ptr<Test>& test, Reach reach) {
  if (test_ == test) test_.reset();
  knocks_ = test->knocks;
  if (!test->handler) return;
  core_.post([handler = std::exchange(test->handler, {}), reach] { handler(reach); });
}

void ReachWatch::start(std::function<void()> decided) {
  decided_ = std::move(decided);
  look(0, 0);
}

void ReachWatch::look(int failures, int unsure) {
  test_.run(0, [this, failures, unsure](Reach reach) {
    if (reach == Reach::kUnreachable && failures == 0) return look(1, unsure);
    // Before it joins it knows few: another third node is likely a stranger.
    const bool again = reach == Reach::kUnknown && decided_ && test_.knocks() != 0 && unsure < kUnsureTries;
    if (again) return look(failures, unsure + 1);
    const bool client = reach == Reach::kUnreachable || (core_.client && reach == Reach::kUnknown);
    if (client != core_.client) on_reach_(reach);
    if (decided_) std::exchange(decided_, {})();
    core_.after(core_.jittered(kLookAgain), [this] { look(0, 0); });
  });
}

}  // namespace dmoe::dht
