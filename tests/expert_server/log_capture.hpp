// What a test's subject tells people.
#pragma once

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dmoe::expert_server::test {

/// Keeps what the default logger is given, instead of printing it, while this lives. Thread-safe.
class LogCapture {
 public:
  LogCapture() : before_(spdlog::default_logger()), sink_(std::make_shared<Sink>()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("captured", sink_));
  }
  ~LogCapture() { spdlog::set_default_logger(before_); }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  /// Warnings and errors, in order.
  std::vector<std::string> warnings() const { return sink_->warnings(); }
  bool warned_of(const std::string& part) const {
    for (const auto& line : warnings()) {
      if (line.find(part) != std::string::npos) return true;
    }
    return false;
  }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::vector<std::string> warnings() {
      const std::lock_guard lock(mutex_);
      return warnings_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      if (message.level < spdlog::level::warn) return;
      warnings_.emplace_back(message.payload.data(), message.payload.size());
    }
    void flush_() override {}
    std::vector<std::string> warnings_;  // Guarded by mutex_, of the base.
  };

  std::shared_ptr<spdlog::logger> before_;
  std::shared_ptr<Sink> sink_;
};

}  // namespace dmoe::expert_server::test
