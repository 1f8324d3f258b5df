#include "cli/ready_line.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <system_error>

namespace dmoe::cli {
namespace {

Error not_writable(int descriptor, int number) {
  return {Errc::kInvalidArgument,
          "--ready-fd " + std::to_string(descriptor) + ": " + std::generic_category().message(number) +
              "; give the number of a descriptor that is open for writing",
          {}};
}

}  // namespace

std::string to_json(const ReadyLine& line) {
  nlohmann::ordered_json json;
  json["peer_id"] = line.peer_id;
  json["identity"] = line.identity;
  json["listen"] = net::to_string(line.listen);
  json["announced"] = nlohmann::json::array();
  for (const net::Endpoint& endpoint : line.announced) json["announced"].push_back(net::to_string(endpoint));
  json["experts"] = line.experts;
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<ReadyLine> parse_ready_line(std::string_view text) {
  const auto wrong = [&](const std::string& what) {
    return Error{Errc::kInvalidArgument, "not a ready line (" + what + "): " + std::string(text.substr(0, 200)), {}};
  };
  ReadyLine line;
  std::vector<std::string> announced;
  std::string listen;
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    line.peer_id = json.at("peer_id").get<std::string>();
    line.identity = json.at("identity").get<std::string>();
    line.experts = json.at("experts").get<std::vector<std::string>>();
    announced = json.at("announced").get<std::vector<std::string>>();
    listen = json.at("listen").get<std::string>();
  } catch (const nlohmann::json::exception& error) {
    return wrong(error.what());
  }
  const auto bound = net::parse_endpoint(listen);
  if (!bound) return wrong("listen");
  line.listen = *bound;
  for (const std::string& endpoint : announced) {
    auto parsed = net::parse_endpoint(endpoint);
    if (!parsed) return wrong("announced");
    line.announced.push_back(*std::move(parsed));
  }
  return line;
}

Result<void> check_ready_fd(int descriptor) {
  if (descriptor < 0) return {};
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0) return not_writable(descriptor, errno);
  if ((flags & O_ACCMODE) == O_RDONLY) return not_writable(descriptor, EBADF);
  return {};
}

Result<void> report_ready(int descriptor, const ReadyLine& line) {
  if (descriptor < 0) return {};
  const std::string text = to_json(line) + "\n";
  std::size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t count = write(descriptor, text.data() + sent, text.size() - sent);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return not_writable(descriptor, errno);
    sent += static_cast<std::size_t>(count);
  }
  close(descriptor);
  return {};
}

}  // namespace dmoe::cli
