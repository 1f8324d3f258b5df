// From a call on the wire to a task in a pool, and back.
#pragma once

#include "expert_server/expert_table.hpp"
#include "expert_server/memory_budget.hpp"
#include "expert_server/refusal_log.hpp"
#include "expert_server/runtimes.hpp"
#include "expert_server/server_metrics.hpp"
#include "net/rpc_server.hpp"
#include "net/trace_file.hpp"

namespace dmoe::expert_server {

/// Runs on the io threads and never blocks: decodes (without copying), checks the call against the expert's schema,
/// and queues it. What does not pass is answered at once and never meets another caller's rows.
class CallHandler {
 public:
  /// All outlive the calls. Beyond `budget` calls are refused. @param trace where calls are noted; may be null.
  CallHandler(const ExpertTable& table, Runtimes& runtimes, ServerMetrics& metrics,
              std::shared_ptr<MemoryBudget> budget, std::shared_ptr<net::TraceFile> trace = nullptr)
      : table_(table), runtimes_(runtimes), metrics_(metrics), budget_(std::move(budget)), trace_(std::move(trace)) {}

  void handle(net::IncomingCall call) const;

 private:
  Error unknown(std::string_view uid) const;
  Result<MemoryBudget::Lease> reserve(const ExpertBackend& backend, Direction direction, const Task& task,
                                      std::uint64_t bytes) const;
  Result<void> queue(const std::shared_ptr<HostedExpert>& expert, net::IncomingCall& call, Direction direction) const;
  void answer_info(net::IncomingCall& call) const;
  Result<void> submit(net::IncomingCall& call, Direction direction) const;

  const ExpertTable& table_;
  Runtimes& runtimes_;
  ServerMetrics& metrics_;
  std::shared_ptr<MemoryBudget> budget_;
  std::shared_ptr<net::TraceFile> trace_;  // Shared with calls in flight.
  mutable RefusalLog refusals_;
};

}  // namespace dmoe::expert_server
