#include "dht/dial_test.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

namespace dmoe::dht {
namespace {

constexpr std::size_t kAskedOfEach = 3;  // Of either address family.

/// One test. Requests in flight hold it.
class DialTest : public std::enable_shared_from_this<DialTest> {
 public:
  DialTest(NodeCore& core, std::uint16_t port, std::function<void(DialReport)> handler)
      : core_(core), port_(port), handler_(std::move(handler)) {}

  void start() {
    std::vector<Contact> contacts = core_.table.contacts();
    while (!contacts.empty()) {
      const auto at = contacts.begin() + static_cast<std::ptrdiff_t>(core_.random() % contacts.size());
      Family& family = family_of(at->address);
      if (family.asking < kAskedOfEach) {
        ++family.asking;
        ask(*at, false);
      }
      contacts.erase(at);
    }
    settle_if_done();
  }

 private:
  struct Family {
    std::size_t asking = 0;
    bool reached = false;
  };

  Family& family_of(const Address& address) { return families_[address.is_v4() ? 0 : 1]; }

  void ask(const Contact& contact, bool repeated) {
    Request request;
    request.to = contact.address;
    request.expected = contact.id;
    request.body = wire::Probe{wire::Probe::Stage::kDial, port_, 0, {}};
    request.repeats = 0;  // Each would be a dial.
    request.takes = kDialLimit;
    request.on_reply = [self = shared_from_this(), contact, repeated](const wire::Message&, const wire::Reply& reply) {
      const auto ack = reply.acks.size() == 1 ? reply.acks.front() : wire::Ack::kFull;
      // Not written to for long: its refusal brought the cookie to use.
      if (ack == wire::Ack::kBadCookie && !repeated) return self->ask(contact, true);
      self->take(contact, reply.observed, ack);
    };
    request.on_failure = [self = shared_from_this(), contact] { self->take(contact, {}, wire::Ack::kFull); };
    core_.requests.start(std::move(request));
  }

  void take(const Contact& contact, std::optional<Address> seen_at, wire::Ack ack) {
    Family& family = family_of(contact.address);
    --family.asking;
    if (seen_at) {
      seen_at->port = port_;
      if (ack == wire::Ack::kStored) reached_.insert(*seen_at);
      if (ack == wire::Ack::kUnreachable) unreached_.insert(*seen_at);
      family.reached = family.reached || ack == wire::Ack::kStored;
    }
    settle_if_done();
  }

  /// One connection proves that there is a way in, whatever the others say; who is silent is not waited for then.
  void settle_if_done() {
    const bool done =
        std::all_of(families_.begin(), families_.end(), [](const Family& f) { return f.reached || f.asking == 0; });
    if (!done || !handler_) return;
    DialReport report{{reached_.begin(), reached_.end()}, {}};
    for (const Address& address : unreached_) {
      if (!reached_.contains(address)) report.unreached.push_back(address);
    }
    core_.post([handler = std::exchange(handler_, {}), report = std::move(report)] { handler(report); });
  }

  NodeCore& core_;
  std::uint16_t port_;
  std::function<void(DialReport)> handler_;
  std::array<Family, 2> families_;
  std::set<Address> reached_;
  std::set<Address> unreached_;
};

}  // namespace

void run_dial_test(NodeCore& core, std::uint16_t port, std::function<void(DialReport)> handler) {
  std::make_shared<DialTest>(core, port, std::move(handler))->start();
}

}  // namespace dmoe::dht
