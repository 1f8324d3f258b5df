// A server of local modules with faults on demand: real sockets, so that the layer meets what a network gives it.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "net/expert_uid.hpp"
#include "net/rpc_server.hpp"

#include <torch/types.h>
#include <boost/asio/io_context.hpp>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

namespace dmoe::test {

using Tensors = std::vector<torch::Tensor>;
/// Differentiable in its floating inputs.
using ExpertFunction = std::function<Tensors(const Tensors&)>;

enum class Fault {
  kNone,
  kSilent,  ///< Never answers.
  kNaN,     ///< Answers with NaN (forward) or Inf (backward).
  kError,   ///< Answers kInternal.
  kRefuse,  ///< Answers kInvalidArgument.
  kHold,    ///< Answers when `release_held` says so.
};

class ExpertHost {
 public:
  explicit ExpertHost(std::uint8_t number);
  ~ExpertHost();

  void host(const ExpertUid& uid, ExpertFunction expert);
  void describe(const ExpertUid& uid, std::vector<std::vector<std::int64_t>> inputs,
                std::vector<std::vector<std::int64_t>> outputs, std::vector<torch::Dtype> input_types = {});
  void set_fault(const ExpertUid& uid, Fault forward, Fault backward);
  void set_fault(Fault forward, Fault backward);  ///< Of all experts hosted now.
  /// Nothing is answered, as if stopped by SIGSTOP: neither calls nor questions. Those that came stay unanswered.
  void hang(bool on = true);
  void lose_calls(std::size_t count);      ///< The next so many are never answered.
  void lose_questions(std::size_t count);  ///< Likewise of those about an expert.
  void wait_for_held(std::size_t count);
  void release_held();

  /// Closes the port and every connection, as SIGKILL would.
  void kill();

  dht::ServerAddress address(std::uint64_t announced = 1) const;

  std::size_t forwards(const ExpertUid& uid) const;
  std::size_t backwards(const ExpertUid& uid) const;
  std::size_t frames() const;  ///< Messages that carried forward or backward calls.
  std::size_t calls() const;
  std::size_t questions() const;  ///< About experts, answered or not.
  Tensors last_grads(const ExpertUid& uid) const;
  Tensors last_inputs(const ExpertUid& uid) const;

 private:
  struct Expert {
    ExpertFunction function;
    Fault forward_fault = Fault::kNone;
    Fault backward_fault = Fault::kNone;
    std::size_t forwards = 0;
    std::size_t backwards = 0;
    Tensors inputs;
    Tensors grads;
    std::vector<std::vector<std::int64_t>> input_shapes;
    std::vector<std::vector<std::int64_t>> output_shapes;
    std::vector<torch::Dtype> input_types;
  };

  void handle(net::IncomingCall call);
  bool swallows(net::IncomingCall& call);
  void answer(net::IncomingCall call);
  void answer_info(net::IncomingCall& call, const ExpertUid& uid);

  const std::uint8_t number_;
  boost::asio::io_context io_{1};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<ExpertUid, Expert> experts_;           // Guarded by mutex_.
  std::vector<net::IncomingCall> held_;           // Guarded by mutex_.
  std::vector<net::IncomingCall> silent_;         // Guarded by mutex_.
  std::set<std::shared_ptr<const void>> frames_;  // Guarded by mutex_. Kept, so that addresses stay distinct.
  std::size_t calls_ = 0;                         // Guarded by mutex_.
  std::size_t questions_ = 0;                     // Guarded by mutex_.
  bool hangs_ = false;                            // Guarded by mutex_.
  std::size_t calls_to_lose_ = 0;                 // Guarded by mutex_.
  std::size_t questions_to_lose_ = 0;             // Guarded by mutex_.
  std::uint16_t port_ = 0;
  std::optional<net::RpcServer> server_;
  std::thread thread_;
};

}  // namespace dmoe::test
