// What a log line looks like.
#pragma once

#include "net/error.hpp"

#include <memory>
#include <string>

namespace spdlog {
class logger;
}

namespace dmoe::cli {

enum class LogFormat {
  kText,  ///< For people: time, level, message.
  kJson,  ///< For machines: one JSON object per line with time (UTC, ISO 8601), level, thread, message, and logger if
          ///< it has a name.
};

/// "text" or "json". kInvalidArgument: anything else.
Result<LogFormat> parse_log_format(const std::string& name);

/// For every sink of `logger`; spdlog's own default logger is spdlog::default_logger(). Not while others log to it.
void set_log_format(spdlog::logger& logger, LogFormat format);

}  // namespace dmoe::cli
