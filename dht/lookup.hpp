// One walk through the network for one or many keys.
#pragma once

#include "dht/requests.hpp"
#include "dht/routing_table.hpp"

#include <array>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace dmoe::dht {

inline constexpr std::size_t kAlpha = 3;  ///< Requests in flight per key. Kademlia §2.3.

struct LookupOptions {
  bool want_records = true;
  bool allow_cached = true;  ///< Copies kept along the path count as found.
  std::size_t quorum = 1;    ///< The key ends when so many holders gave records; 0: only when all nearest answered.
  /// Once so many holders gave records, the others up to `quorum` are waited for only a little longer; 0: as long as it
  /// takes.
  std::size_t enough = 0;
  std::size_t width = kReplication;  ///< So many nearest nodes must have answered before a key ends without.
};

/// What one key's walk came to.
struct LookupOutcome {
  std::vector<LiveRecord> records;         ///< Verified; newest per publisher and subkey; tombstones among them.
  std::vector<wire::NodeInfo> nearest;     ///< Answered, nearest first, at most `width`.
  std::optional<wire::NodeInfo> cache_at;  ///< The nearest that answered without having it.
  std::size_t holders = 0;                 ///< Nodes that gave records.
  std::size_t requests = 0;                ///< Of the whole walk so far.
  bool cached = false;                     ///< At least one of the holders counted only had a copy.
  bool complete = false;                   ///< All that a holder had under the key is among the records.
  bool ended_by_deadline = false;
};

/// alpha-parallel and iterative (Kademlia §2.3). Each turn collects what all keys want to ask next, and a node is
/// asked about up to 32 keys in one datagram. A slow node frees its slot for another and is still listened to. Of what
/// one node alone names, one at a time is tried beside the others until one answered, once somebody named was silent:
/// who invents nodes near every key holds up nobody for long. Nodes named by somebody whose other names stay silent are
/// asked last. Finished keys are reported one by one.
class Lookup : public std::enable_shared_from_this<Lookup> {
 public:
  struct Context {
    Requests& requests;
    const RoutingTable& table;
    const PeerBook& book;
    RecordVerifier& verifier;
    Clock& clock;
    NodeId self;
  };
  using OnKey = std::function<void(std::size_t index, LookupOutcome outcome)>;

  Lookup(Context context, std::vector<Key> keys, LookupOptions options, OnKey on_key);

  /// Starts from the routing table, and from `seeds` where given.
  void start(const std::vector<wire::NodeInfo>& seeds = {});
  /// Reports every key that is not finished with what there is; nothing is reported afterwards.
  void end(bool by_deadline);
  /// Forgets everything without reporting.
  void abandon();
  bool finished() const noexcept { return open_ == 0; }

 private:
  static constexpr std::uint16_t kNobodyElse = 0xFFFF;
  enum class State : std::uint8_t { kNew, kAsked, kSlow, kAnswered, kFailed };
  struct Candidate {
    wire::NodeInfo node;
    State state = State::kNew;
    bool has_records = false;
    std::uint16_t source = 0;            // Who named it first: index into sources_; 0: the own table.
    std::uint16_t second = kNobodyElse;  // And who else did.
    std::uint64_t subnet = 0;            // What it is counted by; 0: not at all.
  };
  /// A holder's answer that needs more datagrams.
  struct Gathering;
  struct Search {
    Key key;
    std::vector<Candidate> candidates;  // Nearest first.
    std::map<std::pair<net::PublicKey, std::string>, LiveRecord> records;
    std::size_t holders = 0;
    std::vector<std::shared_ptr<Gathering>> gatherings;  // Holders whose pages or parts are still coming.
    std::uint32_t complete_total = 0;                    // Records of a holder that was fetched whole.
    std::vector<std::uint16_t> have;                     // Tags of the records that came.
    std::vector<std::uint16_t> pending;                  // And of those that somebody was asked for.
    std::uint32_t asked = 0;                             // Requests so far.
    bool cached = false;
    bool in_grace = false;    // Enough holders answered: the rest has until …
    bool grace_over = false;  // … now.
    bool done = false;
  };
  /// Lets the first few of each subnet through: one owner's hundred identities around a key count as two.
  class Crowd {
   public:
    bool admits(std::uint64_t subnet) noexcept;

   private:
    std::array<std::uint64_t, 32> seen_;
    std::size_t count_ = 0;
  };
  struct Source {
    NodeId id;
    int good = 0;
    int bad = 0;
    bool suspect() const noexcept { return bad >= 3 && bad > good; }
    bool vindicated() const noexcept { return good > bad; }
  };
  /// Sources whose word is being tried.
  class Trials {
   public:
    bool has(std::uint16_t source) const noexcept;
    void add(std::uint16_t source) noexcept;
    bool full() const noexcept { return count_ == sources_.size(); }

   private:
    std::array<std::uint16_t, kAlpha> sources_;
    std::size_t count_ = 0;
  };

  bool crowded(Search& search, std::uint64_t subnet, std::vector<Candidate>::iterator& place);
  bool make_room(Search& search, std::ptrdiff_t& at);
  void add(Search& search, const wire::NodeInfo& node, std::uint16_t source);
  std::uint16_t source_of(const NodeId& id);
  bool is_near_network() const;
  /// Named by one node only, whose names have not answered yet.
  bool is_doubtful(const Candidate& known) const;
  /// Named only by nodes whose names stay silent.
  bool is_suspect(const Candidate& known) const;
  std::size_t slots(const Search& search) const;
  Candidate* next_to_ask(Search& search);
  bool is_exhausted(const Search& search) const;
  /// Copies count only where any one answer will do.
  bool copies_will_do() const noexcept { return options_.allow_cached && options_.quorum == 1; }
  bool wants_several() const noexcept { return options_.want_records && options_.quorum != 1; }
  void pump_soon();
  void pump();
  void ask(const wire::NodeInfo& node, std::vector<std::size_t> indices);
  void set_state(const NodeId& id, const std::vector<std::size_t>& indices, State state);
  Candidate* candidate(Search& search, const NodeId& id);
  void on_answer(const wire::NodeInfo& node, const std::vector<std::size_t>& indices, const wire::Reply& reply);
  void finish_if_done(std::size_t index);
  bool only_silent_left(const Search& search) const;
  void begin_grace(std::size_t index);
  void finish(std::size_t index, bool by_deadline);

  // lookup_records.cpp
  void take_records(const wire::NodeInfo& node, std::size_t index, const wire::KeyRecords& found);
  bool take_record(Search& search, const wire::TravellingRecord& travelling);
  void accept(const std::shared_ptr<Gathering>& gathering, const wire::TravellingRecord& travelling);
  void fetch_rest(const std::shared_ptr<Gathering>& gathering);
  void fetch_missing(Search& search);
  bool request_missing(Search& search, const std::shared_ptr<Gathering>& gathering);
  void request_page(const std::shared_ptr<Gathering>& gathering, std::uint32_t from, std::uint32_t end);
  void take_page(const std::shared_ptr<Gathering>& gathering, std::uint32_t from, std::uint32_t end,
                 const wire::Reply& reply);
  void request_parts(const std::shared_ptr<Gathering>& gathering, const wire::TravellingRecord& without_value);
  void count_holder(Search& search, const NodeId& id);
  void one_less(const std::shared_ptr<Gathering>& gathering);
  void conclude(Search& search, const std::shared_ptr<Gathering>& gathering);

  Context context_;
  LookupOptions options_;
  OnKey on_key_;
  std::vector<Search> searches_;
  std::vector<Source> sources_;
  std::unordered_map<NodeId, std::uint16_t> source_index_;
  std::size_t open_ = 0;
  std::size_t requests_made_ = 0;
  bool pump_posted_ = false;
  bool some_are_silent_ = false;  // Of those that others named.
};

}  // namespace dmoe::dht
