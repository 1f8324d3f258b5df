// Asks a server, this one or another, whether it answers for an expert.
#pragma once

#include "expert_server/expert_module.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_client.hpp"

#include <chrono>
#include <stop_token>
#include <vector>

namespace dmoe::expert_server {

/// Whether `endpoint` hosts `uid`: an `info` call. Blocks; not on an io thread.
Result<void> probe_info(net::RpcClient& client, const net::Endpoint& endpoint, const ExpertUid& uid,
                        std::chrono::milliseconds limit, const std::stop_token& stop = {});

/// A whole forward call of one row of zeros through the socket: decode, queue, device, reply. Blocks; not on an io
/// thread. Sizes that the schema leaves open are 1.
Result<void> probe_forward(net::RpcClient& client, const net::Endpoint& endpoint, const ExpertUid& uid,
                           const ExpertSchema& schema, std::chrono::milliseconds limit,
                           const std::stop_token& stop = {});

}  // namespace dmoe::expert_server
