// What a test's subject tells people.
#pragma once

#include "tests/support/text.hpp"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dmoe::test {

/// Keeps what the default logger is given, instead of printing it, while this lives. Thread-safe. Declare it before
/// what logs on threads of its own. Its user links spdlog.
class CapturedLog {
 public:
  CapturedLog() : before_(spdlog::default_logger()), sink_(std::make_shared<Sink>()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", sink_));
  }
  ~CapturedLog() { spdlog::set_default_logger(before_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  /// Lines of any level that contain `part`, in order.
  std::vector<std::string> lines_with(const std::string& part) const {
    auto lines = sink_->lines(spdlog::level::trace);
    std::erase_if(lines, [&](const auto& line) { return !contains(line, part); });
    return lines;
  }
  /// Warnings and errors, in order.
  std::vector<std::string> warnings() const { return sink_->lines(spdlog::level::warn); }
  bool warned_of(const std::string& part) const {
    const auto lines = warnings();
    return std::any_of(lines.begin(), lines.end(), [&](const auto& line) { return contains(line, part); });
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::vector<std::string> lines(spdlog::level::level_enum least) {
      const std::lock_guard lock(mutex_);
      std::vector<std::string> found;
      for (const auto& line : lines_) {
        if (line.level >= least) found.push_back(line.text);
      }
      return found;
    }

   private:
    struct Line {
      spdlog::level::level_enum level;
      std::string text;
    };
    void sink_it_(const spdlog::details::log_msg& message) override {
      lines_.push_back({message.level, {message.payload.data(), message.payload.size()}});
    }
    void flush_() override {}

    std::vector<Line> lines_;  // Guarded by mutex_, of the base.
  };

  std::shared_ptr<spdlog::logger> before_;
  std::shared_ptr<Sink> sink_;  // Shared with the logger.
};

}  // namespace dmoe::test
