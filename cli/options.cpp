#include "cli/options.hpp"

#include <algorithm>
#include <array>
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

CLI::Validator short_text(std::size_t most, std::string example) {
  return checked([=](std::string& text) -> std::string {
    if (text.size() <= most) return {};
    return "it has " + std::to_string(text.size()) + " bytes; at most " + std::to_string(most) +
           " are allowed, for example " + example;
  });
}

CLI::Validator hexadecimal(std::size_t most, std::string example) {
  return checked([=](std::string& text) -> std::string {
    const bool fits = !text.empty() && text.size() <= most;
    if (fits && text.find_first_not_of("0123456789abcdef") == std::string::npos) return {};
    return "'" + text.substr(0, most) + "' is not 1 to " + std::to_string(most) +
           " hexadecimal digits (0-9, a-f); for example " + example;
  });
}

CLI::Validator endpoint_text() {
  return checked([](std::string& text) -> std::string {
    if (const auto endpoint = net::parse_endpoint(text); !endpoint) return endpoint.error().message;
    return {};
  });
}

std::vector<net::Endpoint> to_endpoints(const std::vector<std::string>& texts) {
  std::vector<net::Endpoint> endpoints;
  for (const std::string& text : texts) {
    if (auto endpoint = net::parse_endpoint(text)) endpoints.push_back(*std::move(endpoint));
  }
  return endpoints;
}

Result<std::chrono::milliseconds> parse_duration(std::string_view text) {
  constexpr std::array<std::pair<char, double>, 4> kUnits{{{'s', 1}, {'m', 60}, {'h', 3'600}, {'d', 86'400}}};
  constexpr double kLongest = 1e9;  // Seconds; far from where a count of milliseconds would overflow.
  const std::string given(text);
  double unit = 1;
  for (const auto& [letter, seconds] : kUnits) {
    if (!text.ends_with(letter)) continue;
    unit = seconds;
    text.remove_suffix(1);
    break;
  }
  double value = 0;
  if (!reads_as(std::string(text), value) || !std::isfinite(value) || value < 0 || value * unit > kLongest) {
    return Error{Errc::kInvalidArgument, "'" + given + "' is not a duration; for example 90s, 15m, 1h or 1d", {}};
  }
  return to_milliseconds(value * unit);
}

std::string duration_text(std::chrono::milliseconds duration) {
  const auto seconds = std::chrono::round<std::chrono::seconds>(duration).count();
  constexpr std::array<std::pair<std::int64_t, const char*>, 4> kUnits{
      {{86'400, "d"}, {3'600, "h"}, {60, "m"}, {1, "s"}}};
  std::string text;
  int parts = 0;
  std::int64_t left = seconds;
  for (const auto& [size, letter] : kUnits) {
    if (left < size || parts == 2) continue;
    text += (text.empty() ? "" : " ") + std::to_string(left / size) + letter;
    left %= size;
    ++parts;
  }
  return text.empty() ? "0s" : text;
}

CLI::Validator duration(std::chrono::milliseconds least, std::chrono::milliseconds most, std::string example) {
  return checked([=](std::string& text) -> std::string {
    const auto value = parse_duration(text);
    if (!value) return value.error().message;
    if (*value >= least && *value <= most) return {};
    return "'" + text + "' is not from " + duration_text(least) + " to " + duration_text(most) + "; for example " +
           example;
  });
}

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1'000));
}

}  // namespace dmoe::cli
