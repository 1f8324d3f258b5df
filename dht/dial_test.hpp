// Whether others reach a TCP port of this host. Private to dht.
#pragma once

#include "dht/node_core.hpp"

#include <functional>

namespace dmoe::dht {

/// See Node::test_dial. `handler` runs once, and not at all when the node is gone before.
void run_dial_test(NodeCore& core, std::uint16_t port, std::function<void(DialReport)> handler);

}  // namespace dmoe::dht
