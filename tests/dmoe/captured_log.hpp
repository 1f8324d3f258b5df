// What a test's program writes into its log.
#pragma once

#include "tests/support/text.hpp"

#include <spdlog/logger.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dmoe::test {

/// Takes what is logged while it lives. Declare it before what logs on threads of its own.
class CapturedLog {
 public:
  CapturedLog() : sink_(std::make_shared<Sink>()), before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", sink_));
  }
  ~CapturedLog() { spdlog::set_default_logger(before_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  std::vector<std::string> lines_with(const std::string& part) const {
    std::vector<std::string> found;
    for (const auto& line : sink_->lines()) {
      if (contains(line, part)) found.push_back(line);
    }
    return found;
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::vector<std::string> lines() {
      const std::lock_guard lock(mutex_);
      return lines_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      lines_.emplace_back(message.payload.data(), message.payload.size());
    }
    void flush_() override {}

    std::vector<std::string> lines_;  // Guarded by mutex_.
  };

  std::shared_ptr<Sink> sink_;  // Shared with the logger.
  std::shared_ptr<spdlog::logger> before_;
};

}  // namespace dmoe::test
