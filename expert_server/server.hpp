// A process that hosts experts: what `dmoe serve` and tests start.
#pragma once

#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

namespace dmoe::dht {
class Service;
}

namespace dmoe::expert_server {

/// What each hosted expert is and how it learns. An unset optional takes the value of the expert's checkpoint, and
/// without a checkpoint the default that its comment gives: a set value always wins over the file.
struct ExpertOptions {
  std::string architecture = "ffn";  ///< "ffn", "transformer", "nop", or another name that architectures() lists.
  std::int64_t hidden_dim = 1024;    ///< h: features of one row (ffn, nop) or of one token (transformer).
  std::map<std::string, std::string> arguments;  ///< `--expert-arg name=value`; unknown names are refused.

  std::optional<std::string> optimizer;       ///< "adam", "adamw" or "sgd". Default adam.
  std::optional<double> learning_rate;        ///< Default 0.001.
  std::optional<std::string> schedule;        ///< "constant", "linear" or "cosine". Default constant.
  std::optional<std::uint64_t> warmup_steps;  ///< Optimizer steps over which the rate rises from 0. Default 0.
  std::optional<std::uint64_t> total_steps;   ///< Linear and cosine: the step at which the rate reaches 0.
  std::optional<bool> amsgrad;                ///< Adam and AdamW. Default true.
  std::optional<bool> nesterov;               ///< SGD with momentum only. Default false.
  std::optional<double> momentum;             ///< SGD only. Default 0.
  std::optional<double> weight_decay;         ///< Added to the gradient; adamw: decoupled. Default 0.
  std::optional<double> clip_grad_norm;       ///< Largest 2-norm of all gradients of one step; 0: no limit. Default 1.

  bool frozen = false;  ///< For inference: backward returns gradients and changes nothing.

  std::int64_t max_batch_size = 4'096;  ///< Rows of one call, and of one batch of many calls.
};

struct ServerOptions {
  net::Endpoint listen{"0.0.0.0", 0};        ///< TCP and UDP on one port number. Port 0: any that is free for both.
  std::vector<net::Endpoint> announce;       ///< Where others reach this server; empty: derived. Port 0: the bound one.
  std::vector<net::Endpoint> initial_peers;  ///< DHT nodes to join; empty: a first node.
  bool allow_alone = false;                  ///< Serve although no initial peer answered; keeps trying.
  std::chrono::milliseconds join_timeout{10'000};

  std::string expert_pattern = "ffn.[0:4].[0:4]";  ///< See UidPattern.
  std::size_t num_experts = 0;  ///< 0: every UID of the pattern; fewer: free ones, claimed at random.
  ExpertOptions expert;

  std::optional<net::Identity> identity;               ///< Unset: from `identity_file`.
  std::optional<std::filesystem::path> identity_file;  ///< Unset: `<data_dir>/identity.pem`; without both, a new key.
  /// Holds identity.pem, dht/ (RocksDB), checkpoints/<uid>/ and a lock; created. Unset: nothing is kept.
  std::optional<std::filesystem::path> data_dir;
  std::chrono::milliseconds checkpoint_period{300'000};  ///< 0: only on shutdown.
  std::size_t keep_checkpoints = 3;                      ///< Newest files kept per expert, at least 1.
  /// Bytes of all checkpoints together; beyond it the oldest go, though never an expert's newest. 0: no limit.
  std::uint64_t max_disk = 0;
  bool reset_optimizer = false;  ///< Accept a checkpoint of another optimizer; its state is dropped.

  /// "cpu", "cuda" or "cuda:1"; one thread computes on each, and experts are spread over them. The CPU may be named
  /// several times. Architectures that must not run beside others (ExpertModule::runs_beside_others) all go to the
  /// first.
  std::vector<std::string> devices{"cpu"};
  /// Intra-op threads of each device thread; 0: as many as other processes leave free, divided among the CPU's.
  int compute_threads = 0;
  /// Small batches of several experts are computed at once, and products of few rows read their weights once. Off: one
  /// batch after another through the BLAS, for comparison.
  bool grouped = true;
  int io_threads = 1;      ///< Threads that run sockets and the DHT.
  std::uint64_t seed = 0;  ///< Of initial weights and random claims; 0: from the operating system.

  /// Bytes that arriving and queued calls, their activations and connections may hold together, beside weights and
  /// optimizer state. Before it is reached connections are not read; calls that found no room within memory_patience
  /// are refused with kOverloaded. 0: a quarter of the machine's memory.
  std::uint64_t max_memory = 0;
  std::chrono::milliseconds memory_patience{2'000};  ///< How long an arriving call waits for memory, unread.
  /// Experts in memory; the others lie in `data_dir`, which must be set, and come back when they are called. 0: all.
  std::size_t max_resident_experts = 0;

  std::size_t max_queued_batches = 4;          ///< Per pool, in units of max_batch_size rows; beyond it kOverloaded.
  std::size_t max_queued_tasks = 1'024;        ///< Per pool; beyond it kOverloaded.
  std::chrono::milliseconds batch_timeout{0};  ///< How long an oldest task waits for company; 0: not at all.

  std::chrono::milliseconds heartbeat{15'000};
  std::chrono::milliseconds announcement_ttl{60'000};
  std::chrono::milliseconds shutdown_grace{5'000};  ///< For calls that are queued when `stop` begins.

  std::size_t max_frame_bytes = 256UL * 1024 * 1024;
  std::size_t max_connections = 4'096;

  /// When each call waited, was computed and was answered, for Perfetto and chrome://tracing; see net/trace_file.hpp.
  std::optional<std::filesystem::path> trace_file;
  std::uint64_t max_trace_bytes = 64UL * 1024 * 1024;
};

/// A running server. Owns its threads, its DHT node, its listening port and its experts. Thread-safe.
class Server {
 public:
  /// Binds, joins the DHT, loads or makes the experts, calls each through the own socket, announces them. Returns when
  /// they are announced; it may take as long as `join_timeout` and the checkpoints' size ask for. While other nodes say
  /// that they cannot reach any announced endpoint it announces nothing and waits (one log line names the endpoint).
  /// kUnavailable: port taken, data directory in use, no initial peer answered, or every UID of the pattern is hosted
  /// by others; kInvalidArgument: pattern, option or checkpoint that does not fit; kCancelled: `abort` was requested.
  /// The first server of a process changes where torch's large CPU tensors lie: in memory that is used again.
  static Result<std::unique_ptr<Server>> start(ServerOptions options, std::stop_token abort = {});
  ~Server();  ///< As stop().
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::uint16_t port() const noexcept;
  const net::PeerId& peer_id() const noexcept;
  const std::vector<net::Endpoint>& announced() const noexcept;  ///< What the DHT is told, as far as others reach it.
  std::vector<ExpertUid> experts() const;  ///< Hosted now, ascending; changes when a claim was lost to another server.
  dht::Service& dht() noexcept;

  /// Writes a checkpoint of every expert that changed since its last one, now; returns when all are on disk.
  /// kUnavailable: no data directory, or the disk refused; what was there before is intact.
  Result<void> checkpoint();

  /// Withdraws from the DHT, stops accepting, finishes what is queued within `shutdown_grace`, writes checkpoints, ends
  /// its threads. Idempotent. Not from one of its own threads.
  void stop();

 private:
  class Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Names that ExpertOptions::architecture accepts, ascending.
std::vector<std::string> architectures();

}  // namespace dmoe::expert_server
