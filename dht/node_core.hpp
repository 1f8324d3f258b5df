// What the parts of one node share. Private to dht.
#pragma once

#include "dht/cookie.hpp"
#include "dht/lookup.hpp"
#include "dht/node.hpp"
#include "dht/path_cache.hpp"
#include "dht/peer_book.hpp"
#include "dht/requests.hpp"
#include "dht/routing_table.hpp"

#include <memory>
#include <unordered_set>

namespace dmoe::dht {

struct NodeCore {
  NodeCore(DatagramNetwork& network_in, Clock& clock_in, RandomSource random_in, RecordStore& store_in,
           const Signer& signer_in, NodeOptions options_in, Requests::Hooks hooks)
      : network(network_in),
        clock(clock_in),
        random(std::move(random_in)),
        store(store_in),
        signer(signer_in),
        options(options_in),
        self(net::peer_id_of(signer_in.public_key())),
        client(options_in.client_only),
        jar(random, clock.now()),
        table(self, options.limit_subnets),
        verifier(signer),
        requests(network, clock, random, signer, book, client, std::move(hooks)),
        last_heard(clock.now()) {}

  DatagramNetwork& network;
  Clock& clock;
  RandomSource random;
  RecordStore& store;
  const Signer& signer;
  NodeOptions options;
  NodeId self;
  Dialler* dialler = nullptr;
  bool client;  ///< By option, or because nobody can reach this node.
  CookieJar jar;
  PeerBook book;
  RoutingTable table;
  RecordVerifier verifier;
  PathCache cache;
  Requests requests;
  std::unordered_set<std::shared_ptr<Lookup>> lookups;  ///< Alive until their last key is reported.
  TimePoint last_heard;  ///< An answer, or a request from somebody who has our cookie: the network is there.
  std::uint64_t answered = 0;
  std::uint64_t received = 0;
  std::uint64_t refused = 0;

  /// As the clock's, but nothing runs once this core is gone.
  void post(std::function<void()> action);
  TimerId after(Duration pause, std::function<void()> action);

  /// Starts a walk that this core keeps alive. `on_key` is not called after the node is gone.
  std::shared_ptr<Lookup> look_up(std::vector<Key> keys, LookupOptions lookup_options, Lookup::OnKey on_key,
                                  const std::vector<wire::NodeInfo>& seeds = {});

  /// A duration between half and one and a half of `around`: peers started together do not stay in step.
  Duration jittered(Duration around);

  const std::shared_ptr<const bool> alive = std::make_shared<const bool>(true);  ///< Posted work watches it.
};

}  // namespace dmoe::dht
