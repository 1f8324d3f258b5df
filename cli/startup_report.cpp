#include "cli/startup_report.hpp"

#include "cli/announced_address.hpp"
#include "net/expert_uid.hpp"

#include <algorithm>
#include <limits>

namespace dmoe::cli {
namespace {

std::string joined(const std::vector<net::Endpoint>& endpoints, const char* separator) {
  std::string text;
  for (const net::Endpoint& endpoint : endpoints) text += (text.empty() ? "" : separator) + net::to_string(endpoint);
  return text;
}

std::string experts_text(const std::vector<std::string>& experts) {
  std::string text = std::to_string(experts.size()) + ": " + experts.front();
  if (experts.size() > 1) text += (experts.size() > 2 ? " ... " : " ") + experts.back();
  return text;
}

}  // namespace

std::string startup_report(const ReadyLine& line, const std::string& join_command) {
  std::string text;
  text += "identity   " + (line.identity.empty() ? "not kept: a new one at each start" : line.identity) + "\n";
  text += "peer id    " + line.peer_id + "\n";
  text += "listening  " + net::to_string(line.listen) + " (TCP and UDP)\n";
  text += "announced  " + joined(line.announced, " ") + "\n";
  if (!line.experts.empty()) text += "experts    " + experts_text(line.experts) + "\n";
  const std::string port = std::to_string(line.listen.port);
  if (std::all_of(line.announced.begin(), line.announced.end(), is_loopback)) {
    text += "To join from this machine:\n  " + join_command + " --initial-peers " + joined(line.announced, " ") + "\n";
    text += "Other machines cannot reach this loopback address. To let them in, start this with\n";
    text += "  --listen 0.0.0.0:" + port + " --announce THIS_MACHINE:" + port + "\n";
  } else {
    text += "To join from another machine:\n  " + join_command + " --initial-peers " + joined(line.announced, " ") +
            " --listen 0.0.0.0:" + port + " --announce THAT_MACHINE:" + port + "\n";
  }
  return text;
}

std::string pattern_beside(std::string_view text) {
  auto pattern = parse_uid_pattern(text);
  if (!pattern) return std::string(text);
  auto& first = pattern->dimensions.front();
  const auto size = first.end - first.first;
  if (first.end > std::numeric_limits<Coordinate>::max() - size) return std::string(text);
  first = {first.end, static_cast<Coordinate>(first.end + size)};
  std::string beside = pattern->grid;
  for (const auto& range : pattern->dimensions) {
    beside += range.end - range.first == 1 ? "." + std::to_string(range.first)
                                           : ".[" + std::to_string(range.first) + ":" + std::to_string(range.end) + "]";
  }
  return beside;
}

std::string shell_word(const std::string& text) {
  constexpr const char* kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+=:,./-";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

}  // namespace dmoe::cli
