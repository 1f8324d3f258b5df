// Calls to experts that are in flight together, and the answers in the order in which they come. Private to dmoe/.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "net/compression.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_client.hpp"
#include "net/trace_file.hpp"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace dmoe {

/// One call. Forward when `grad_outputs` is empty, else backward.
struct ExpertCall {
  ExpertUid uid;
  std::shared_ptr<const dht::ServerAddress> server;
  net::Endpoint endpoint;
  std::vector<at::Tensor> inputs;                ///< CPU, contiguous; dimension 0 is the row.
  std::vector<at::Tensor> grad_outputs;          ///< Likewise.
  std::uint64_t seed = 0;                        ///< The same in forward and backward.
  Compression compression = Compression::kNone;  ///< Of both directions; one that the server reads.
  bool hedge = false;                            ///< Besides a call that is slow.

  std::int64_t rows() const { return inputs.front().size(0); }
  const char* direction() const noexcept { return grad_outputs.empty() ? "forward" : "backward"; }
};

struct Answer {
  std::size_t call = 0;  ///< Index in the order of sending.
  Result<std::vector<at::Tensor>> tensors;
};

/// Belongs to one thread; answers come in from the client's I/O thread.
class CallBatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// @param deadline travels with every call. `rpc` outlives the batch. @param trace where calls are noted; may be
  /// null.
  CallBatch(net::RpcClient& rpc, std::size_t max_frame_bytes, TimePoint deadline, net::TraceFile* trace = nullptr);
  ~CallBatch();  ///< Cancels what is in flight.
  CallBatch(const CallBatch&) = delete;
  CallBatch& operator=(const CallBatch&) = delete;

  /// Sends `calls` after those sent before: one frame per endpoint, more only when one would exceed the frame cap.
  void send(std::vector<ExpertCall> calls);
  /// Blocks until at least one answer is there or `until`; then gives all that are. Empty: time is up.
  std::vector<Answer> wait(TimePoint until);
  /// Gives up what is in flight; the servers are told.
  void cancel_rest();
  /// Asks the servers of these calls whether they still work on them: one whose answer was lost fails with kLost.
  void check(const std::vector<std::size_t>& indices);
  /// Gives up one call: its answer, should it come, is not given by `wait`. @pre it is outstanding
  void give_up(std::size_t index);

  std::size_t size() const noexcept { return calls_.size(); }
  std::size_t outstanding() const noexcept { return outstanding_; }
  std::uint64_t frames() const noexcept { return frames_; }
  const ExpertCall& call(std::size_t index) const { return calls_[index].call; }
  bool is_outstanding(std::size_t index) const { return !calls_[index].answered; }
  bool is_given_up(std::size_t index) const { return calls_[index].given_up; }
  TimePoint sent(std::size_t index) const { return calls_[index].sent; }
  /// From sending to the answer, or until now.
  std::chrono::nanoseconds waited(std::size_t index) const;
  std::uint64_t bytes_received(std::size_t index) const { return calls_[index].bytes_received; }
  std::uint64_t bytes_sent(std::size_t index) const { return calls_[index].bytes_sent; }
  /// Time spent in `wait`.
  std::chrono::nanoseconds blocked() const noexcept { return blocked_; }

 private:
  struct Sent {
    ExpertCall call;
    net::CallId id = 0;
    TimePoint sent;
    std::optional<TimePoint> answered;  // Or given up.
    std::uint64_t bytes_sent = 0;       // Of tensors, as they travel.
    std::uint64_t bytes_received = 0;
    bool given_up = false;
  };
  struct Inbox {
    std::mutex mutex;
    std::condition_variable arrived;
    std::vector<std::pair<std::size_t, Result<net::IncomingReply>>> replies;  // Guarded by mutex.
  };

  void send_frame(const net::Endpoint& endpoint, const std::vector<std::size_t>& indices);
  net::CallSpec spec_of(std::size_t index);
  void trace(std::size_t index, const std::string& outcome) const;
  Result<std::vector<at::Tensor>> decode(std::size_t index, const Result<net::IncomingReply>& reply);

  net::RpcClient& rpc_;
  const std::size_t max_frame_bytes_;
  const TimePoint deadline_;
  net::TraceFile* const trace_;
  std::vector<Sent> calls_;
  std::size_t outstanding_ = 0;
  std::uint64_t frames_ = 0;
  std::chrono::nanoseconds blocked_{0};
  std::shared_ptr<Inbox> inbox_;  // Shared with replies that come after this batch is gone.
};

/// Whether the wire can carry `tensor` at all. kInvalidArgument says why not.
Result<void> check_sendable(const at::Tensor& tensor);

}  // namespace dmoe
