// The inside of Client: its thread, connections and shared knowledge. Private to dmoe/.
#pragma once

#include "dmoe/client.hpp"
#include "dmoe/hedge_budget.hpp"
#include "dmoe/server_formats.hpp"
#include "dmoe/server_health.hpp"
#include "dmoe/usual_times.hpp"
#include "gating/beam_search.hpp"
#include "net/rpc_client.hpp"
#include "net/trace_file.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace dmoe {

class Client::Impl {
 public:
  /// kUnavailable: the trace file cannot be written.
  static Result<std::unique_ptr<Impl>> create(const ClientOptions& options);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// @param stop ends the directory's I/O; called once, while the I/O thread still runs.
  void use_directory(std::shared_ptr<dht::PrefixResolver> resolver, std::function<void()> stop);

  boost::asio::io_context& io() noexcept { return io_; }
  net::RpcClient& rpc() noexcept { return rpc_; }
  ServerHealth& health() noexcept { return health_; }
  ServerFormats& formats() noexcept { return formats_; }
  UsualTimes& usual_times(bool backward) noexcept { return backward ? backward_times_ : forward_times_; }
  HedgeBudget& hedge_budget() noexcept { return hedge_budget_; }
  net::TraceFile* trace() noexcept { return trace_.get(); }
  dht::PrefixResolver& resolver() noexcept { return *resolver_; }
  std::size_t max_frame_bytes() const noexcept { return max_frame_bytes_; }
  std::shared_ptr<gating::BeamSearch> beam_search(const std::string& grid, const std::vector<std::size_t>& grid_size);

 private:
  Impl(const ClientOptions& options, std::shared_ptr<net::TraceFile> trace);

  const std::shared_ptr<net::TraceFile> trace_;  // Null: none. Shared as TraceFile::create gives it.
  const std::size_t max_frame_bytes_;
  const std::chrono::milliseconds directory_ttl_;
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  net::RpcClient rpc_;
  ServerHealth health_;
  ServerFormats formats_;
  UsualTimes forward_times_;
  UsualTimes backward_times_;
  HedgeBudget hedge_budget_;
  std::shared_ptr<dht::PrefixResolver> resolver_;  // Shared with the beam searches.
  std::function<void()> stop_directory_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::vector<std::size_t>>, std::shared_ptr<gating::BeamSearch>>
      searches_;        // Guarded by mutex_. Shared with the layers.
  std::thread thread_;  // Runs io_. Last: uses the members above.
};

}  // namespace dmoe
