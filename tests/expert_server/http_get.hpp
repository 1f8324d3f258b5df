// One plain HTTP request.
#pragma once

#include "net/endpoint.hpp"

#include <string>

namespace dmoe::expert_server::test {

struct HttpAnswer {
  unsigned status = 0;  ///< 0: no answer.
  std::string body;
};

HttpAnswer http_get(const net::Endpoint& endpoint, const std::string& path);

}  // namespace dmoe::expert_server::test
