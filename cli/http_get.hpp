// One question to a node's HTTP port.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"

#include <chrono>
#include <string>

namespace dmoe::cli {

struct HttpAnswer {
  unsigned status = 0;
  std::string body;  ///< At most 1 MiB.
};

/// GET `path`; waits for the whole answer, whatever its status. kUnavailable: nobody listens, the name does not
/// resolve, or what came is no HTTP; kDeadlineExceeded: no answer within `timeout`.
Result<HttpAnswer> http_get(const net::Endpoint& node, const std::string& path, std::chrono::milliseconds timeout);

}  // namespace dmoe::cli
