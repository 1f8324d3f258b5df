#include "cli/options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <system_error>
#include <utility>

namespace dmoe::cli {
namespace {

template <class Number>
bool reads_as(const std::string& text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size();
}

CLI::Validator checked(std::function<std::string(std::string&)> check) { return {std::move(check), "", ""}; }

}  // namespace

CLI::Validator whole_number(std::int64_t least, std::int64_t most, std::string example) {
  return checked([=](std::string& text) -> std::string {
    std::int64_t value = 0;
    if (reads_as(text, value) && value >= least && value <= most) return {};
    return "'" + text + "' is not a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
           "; for example " + example;
  });
}

CLI::Validator decimal_number(double least, double most, std::string example) {
  return checked([=](std::string& text) -> std::string {
    double value = 0;
    if (reads_as(text, value) && std::isfinite(value) && value >= least && value <= most) return {};
    std::ostringstream message;
    message << "'" << text << "' is not a number from " << least << " to " << most << "; for example " << example;
    return message.str();
  });
}

CLI::Validator one_of(std::vector<std::string> words) {
  return checked([words = std::move(words)](std::string& text) -> std::string {
    if (std::find(words.begin(), words.end(), text) != words.end()) return {};
    std::string message = "'" + text + "' is not one of";
    for (const std::string& word : words) message += (&word == words.data() ? " " : ", ") + word;
    return message;
  });
}

CLI::Validator endpoint_text() {
  return checked([](std::string& text) -> std::string {
    if (const auto endpoint = net::parse_endpoint(text); !endpoint) return endpoint.error().message;
    return {};
  });
}

void add_initial_peers(CLI::App& command, std::vector<std::string>& peers) {
  command
      .add_option("--initial-peers", peers,
                  "Addresses of nodes that are already in the network; one that answers is enough. Several: 'A B', "
                  "'A,B' or the option repeated")
      ->type_name("HOST:PORT ...")
      ->delimiter(',')
      ->check(endpoint_text());
}

std::vector<net::Endpoint> to_endpoints(const std::vector<std::string>& texts) {
  std::vector<net::Endpoint> endpoints;
  for (const std::string& text : texts) {
    if (auto endpoint = net::parse_endpoint(text)) endpoints.push_back(*std::move(endpoint));
  }
  return endpoints;
}

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1'000));
}

}  // namespace dmoe::cli
