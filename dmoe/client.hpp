// A trainer's connection to the swarm: one per process, shared by all its layers.
#pragma once

#include "dht/prefix_resolver.hpp"
#include "dmoe/exception.hpp"
#include "net/endpoint.hpp"
#include "net/error.hpp"
#include "net/expert_uid.hpp"
#include "net/identity.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dmoe {

namespace net {
class RpcClient;
class TraceFile;
}  // namespace net
namespace gating {
class BeamSearch;
}
class ServerFormats;
class ServerHealth;
class UsualTimes;
class HedgeBudget;

/// Settings of a Client, in libtorch's style: `ClientOptions().initial_peers({"203.0.113.5:4040"})`.
class ClientOptions {
 public:
  /// "host:port" of any DHT nodes or expert servers of the swarm; one that answers is enough. Required.
  ClientOptions& initial_peers(std::vector<std::string> peers);
  /// The same, already parsed; replaces what initial_peers named.
  ClientOptions& initial_endpoints(std::vector<net::Endpoint> peers);
  /// This trainer's key. Default: a new one for each process.
  ClientOptions& identity(net::Identity identity);
  /// For the first contact with the swarm. Default 10 s.
  ClientOptions& join_timeout(std::chrono::milliseconds timeout);
  /// For dialing one server; a refused connection fails at once. Default 3 s.
  ClientOptions& connect_timeout(std::chrono::milliseconds timeout);
  /// How long an expert that failed is left out unless it announces itself again. Default 15 s.
  ClientOptions& ban_time(std::chrono::milliseconds time);
  /// What the directory said is refreshed in the background after this, if it is in use. Default 15 s.
  ClientOptions& directory_ttl(std::chrono::milliseconds ttl);
  /// Largest message sent or accepted, in bytes. Default 256 MiB.
  ClientOptions& max_frame_bytes(std::size_t bytes);
  /// Writes when each call began and ended to this file, which Perfetto and chrome://tracing open; `max_bytes` bounds
  /// it and the older file.old together. See net/trace_file.hpp for how to see a server's trace (`dmoe serve
  /// --trace-file`) beside it. Default: none.
  ClientOptions& trace_file(std::filesystem::path file, std::uint64_t max_bytes = 64UL * 1024 * 1024);

 private:
  friend class Client;
  std::vector<std::string> peer_texts_;
  std::vector<net::Endpoint> peers_;
  std::optional<net::Identity> identity_;
  std::chrono::milliseconds join_timeout_{10'000};
  std::chrono::milliseconds connect_timeout_{3'000};
  std::chrono::milliseconds ban_time_{15'000};
  std::chrono::milliseconds directory_ttl_{15'000};
  std::size_t max_frame_bytes_ = 256UL * 1024 * 1024;
  std::filesystem::path trace_file_;
  std::uint64_t max_trace_bytes_ = 0;
};

/// The live experts of a grid and who hosts them.
using ExpertMap = std::map<ExpertUid, std::vector<std::shared_ptr<const dht::ServerAddress>>>;

/// Owns the network side of a trainer: an I/O thread, pooled connections to expert servers, a DHT node that stores
/// nothing, and what is known about live and failing experts. Thread-safe; layers share it and keep it alive.
class Client {
 public:
  /// Joins the swarm. @throws Exception: kInvalidArgument, no or malformed initial peers; kUnavailable, none of them
  /// answered within join_timeout (the message lists each with its reason), or the trace file cannot be written.
  static std::shared_ptr<Client> connect(ClientOptions options);
  /// The same as a value, for programs that do not use exceptions.
  static Result<std::shared_ptr<Client>> try_connect(ClientOptions options);
  /// A client whose directory is `resolver` instead of a DHT node: a fixed list of experts, or another registry.
  /// @throws Exception: kUnavailable, the trace file cannot be written.
  static std::shared_ptr<Client> with_resolver(std::shared_ptr<dht::PrefixResolver> resolver,
                                               ClientOptions options = {});
  ~Client();  ///< Fails what is in flight, then joins the I/O thread.
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  /// Every live expert of `grid` with `dimensions` dimensions, asked afresh: for listings, not for training steps.
  /// Empty when there is none. @throws Exception: the directory gave no answer within `timeout`.
  ExpertMap list_experts(const std::string& grid, std::size_t dimensions,
                         std::chrono::milliseconds timeout = std::chrono::seconds(5));

  /// Who hosts `uid`, asked afresh; empty when nobody does. @throws Exception as list_experts.
  std::vector<std::shared_ptr<const dht::ServerAddress>> resolve(
      const ExpertUid& uid, std::chrono::milliseconds timeout = std::chrono::seconds(5));

  // Below: for the layers of this folder and for tools that call experts themselves.

  net::RpcClient& rpc() noexcept;
  std::size_t max_frame_bytes() const noexcept;
  /// Which servers answer, where, and who is left alone for a while. Shared by all layers.
  ServerHealth& health() noexcept;
  /// Which servers read which compression. Shared by all layers.
  ServerFormats& formats() noexcept;
  /// How long experts usually take, by direction. Shared by all layers.
  UsualTimes& usual_times(bool backward) noexcept;
  /// Extra calls that may be made beside slow ones. Shared by all layers.
  HedgeBudget& hedge_budget() noexcept;
  /// Null without trace_file.
  net::TraceFile* trace() noexcept;
  /// The search of one grid; layers with the same grid share it and its cache.
  std::shared_ptr<gating::BeamSearch> beam_search(const std::string& grid, const std::vector<std::size_t>& grid_size);

 private:
  class Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmoe
