#include "cli/log_format.hpp"

#include <spdlog/formatter.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>

#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <string_view>
#include <utility>

namespace dmoe::cli {
namespace {

std::string_view text_of(const spdlog::string_view_t& text) { return {text.data(), text.size()}; }

/// "2026-11-30T21:14:05.123Z"
std::string utc(spdlog::log_clock::time_point time) {
  const auto seconds = std::chrono::system_clock::to_time_t(time);
  const auto since = time.time_since_epoch();
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(since).count() -
                      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::seconds(seconds)).count();
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> date{};
  const auto length = std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::array<char, 8> fraction{};
  std::snprintf(fraction.data(), fraction.size(), ".%03dZ", static_cast<int>(millis < 0 ? 0 : millis % 1'000));
  return std::string(date.data(), length) + fraction.data();
}

/// Whatever a message holds, the line is one JSON object: quotes and line ends are escaped, bytes that are no UTF-8
/// become U+FFFD.
class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    nlohmann::ordered_json json{{"time", utc(message.time)},
                                {"level", text_of(spdlog::level::to_string_view(message.level))},
                                {"thread", message.thread_id}};
    if (message.logger_name.size() > 0) json["logger"] = text_of(message.logger_name);
    json["message"] = text_of(message.payload);
    const auto text = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
    line.append(text.data(), text.data() + text.size());
  }

  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonFormatter>(); }
};

}  // namespace

Result<LogFormat> parse_log_format(const std::string& name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return Error{Errc::kInvalidArgument, "unknown log format " + name + "; known: text, json", {}};
}

void set_log_format(spdlog::logger& logger, LogFormat format) {
  if (format == LogFormat::kJson) {
    logger.set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger.set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
  }
}

}  // namespace dmoe::cli
