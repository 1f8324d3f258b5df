// What becomes of one call in this server, as spans of a trace. Private to expert_server/.
#pragma once

#include "expert_server/task.hpp"
#include "net/trace_file.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace dmoe::expert_server {

/// "queue" from its arrival until its batch is computed; "device" until the batch is; "reply" until the answer has been
/// handed to the connection. They lie within the caller's span of the same call.
class CallTrace {
 public:
  /// @param file null: nothing is noted.
  CallTrace(std::shared_ptr<net::TraceFile> file, const std::string& uid, Direction direction, std::uint64_t seed,
            TimePoint arrived);

  void started(TimePoint now, std::size_t tasks, std::int64_t rows);
  void computed(TimePoint now) { computed_ = now; }
  void replied(TimePoint now);
  void failed(TimePoint now, const Error& error);

 private:
  void add(const char* what, TimePoint begin, TimePoint end, const std::string& error = {});

  std::shared_ptr<net::TraceFile> file_;  // Shared with the server, which the call may outlive.
  std::string uid_;
  std::uint64_t id_ = 0;
  TimePoint arrived_;
  TimePoint started_;
  TimePoint computed_;
  std::size_t tasks_ = 0;
  std::int64_t rows_ = 0;
};

}  // namespace dmoe::expert_server
