#include "expert_server/server.hpp"

#include "expert_server/announced_endpoints.hpp"
#include "expert_server/announcer.hpp"
#include "expert_server/arrival.hpp"
#include "expert_server/arriving_calls.hpp"
#include "expert_server/call_handler.hpp"
#include "expert_server/checkpoint_timer.hpp"
#include "expert_server/data_directory.hpp"
#include "expert_server/device.hpp"
#include "expert_server/expert_factory.hpp"
#include "expert_server/expert_size.hpp"
#include "expert_server/invalid.hpp"
#include "expert_server/server_ports.hpp"
#include "expert_server/status_routes.hpp"
#include "expert_server/tensor_memory.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <spdlog/spdlog.h>

#include <prometheus/gauge.h>

#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>
#include <utility>

namespace dmoe::expert_server {
namespace {

namespace asio = boost::asio;

constexpr std::uint64_t kMostWithoutNumber = 4'096;      ///< Experts of a pattern that is hosted whole.
constexpr std::chrono::milliseconds kReplyGrace{2'000};  ///< For the last replies to leave the sockets.

constexpr std::size_t kMostDevices = 64;

constexpr std::uint64_t kConnectionBytes = 16UL * 1024;        ///< What an idle one holds, buffers in the kernel aside.
constexpr std::uint64_t kLeastCallMemory = 1UL * 1024 * 1024;  ///< Less cannot hold one call of a small expert.
constexpr std::uint64_t kLeastMemory = 512UL * 1024 * 1024;    ///< Default where the machine does not tell.

/// What `max_memory` leaves for calls once every connection has its share.
Result<std::uint64_t> call_memory(const ServerOptions& options) {
  const auto pages = static_cast<std::uint64_t>(std::max(0L, ::sysconf(_SC_PHYS_PAGES)));
  const auto quarter = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) / 4;
  const auto all = options.max_memory > 0 ? options.max_memory : std::max(quarter, kLeastMemory);
  const auto connections = options.max_connections * kConnectionBytes;
  if (all >= connections + kLeastCallMemory) return all - connections;
  const auto mib = [](std::uint64_t bytes) { return std::to_string(bytes >> 20U) + " MiB"; };
  return invalid("max_memory of " + mib(all) + " is too little: connections (max_connections " +
                 std::to_string(options.max_connections) + ") take " + mib(connections) + " and calls need " +
                 mib(kLeastCallMemory) + "; raise it, or allow fewer connections");
}

Result<UidPattern> check_options(const ServerOptions& options) {
  auto pattern = parse_uid_pattern(options.expert_pattern);
  if (!pattern) return pattern.error();
  if (options.num_experts == 0 && pattern->size() > kMostWithoutNumber) {
    return invalid("pattern " + options.expert_pattern + " names " + std::to_string(pattern->size()) +
                   " experts: say with num_experts how many of them to host");
  }
  if (options.num_experts > pattern->size()) {
    return invalid("num_experts is " + std::to_string(options.num_experts) + ", the pattern " + options.expert_pattern +
                   " names only " + std::to_string(pattern->size()));
  }
  const auto rows = options.expert.max_batch_size;
  if (rows < 1 || rows > 1'000'000) return invalid("max_batch_size must be from 1 to 1000000");
  if (options.heartbeat.count() < 100 || options.announcement_ttl < 2 * options.heartbeat) {
    return invalid("heartbeat must be at least 100 ms, and announcement_ttl at least twice as long");
  }
  if (options.io_threads < 1 || options.io_threads > 256) return invalid("io_threads must be from 1 to 256");
  if (options.compute_threads < 0 || options.compute_threads > 1'024) {
    return invalid("compute_threads must be from 0 to 1024");
  }
  if (options.max_resident_experts > 0 && !options.data_dir) {
    return invalid("max_resident_experts needs a data_dir, where the other experts lie");
  }
  if (const auto budget = call_memory(options); !budget) return budget.error();
  if (auto settings = optimizer_settings(options.expert, nullptr); !settings) return settings.error();
  if (options.devices.empty() || options.devices.size() > kMostDevices) {
    return invalid("devices must be from 1 to " + std::to_string(kMostDevices));
  }
  for (const auto& name : options.devices) {
    if (const auto device = parse_device(name); !device) return device.error();
  }
  const auto known = architectures();
  if (std::find(known.begin(), known.end(), options.expert.architecture) == known.end()) {
    return invalid("unknown expert architecture " + options.expert.architecture);
  }
  auto held = options.num_experts > 0 ? options.num_experts : pattern->size();
  if (options.max_resident_experts > 0) held = std::min<std::uint64_t>(held, options.max_resident_experts);
  if (auto fits = check_fits_memory(options.expert, held); !fits) return fits.error();
  return pattern;
}

Result<net::Identity> load_identity(const ServerOptions& options, const std::optional<DataDirectory>& directory) {
  if (options.identity) return *options.identity;
  if (options.identity_file) return net::Identity::load_or_create(*options.identity_file);
  if (directory) return net::Identity::load_or_create(directory->identity_file());
  return net::Identity::generate();
}

ExpertHostOptions host_options(const ServerOptions& options, const std::optional<DataDirectory>& directory) {
  ExpertHostOptions host;
  host.expert = options.expert;
  host.pool = {.max_batch_rows = options.expert.max_batch_size,
               .max_queued_batches = options.max_queued_batches,
               .max_queued_tasks = options.max_queued_tasks,
               .batch_timeout = options.batch_timeout};
  if (directory) host.checkpoints = directory->checkpoints();
  host.keep_checkpoints = options.keep_checkpoints;
  host.max_disk = options.max_disk;
  for (const auto& name : options.devices) host.devices.push_back(parse_device(name).value());
  host.reset_optimizer = options.reset_optimizer;
  host.compute_threads = options.compute_threads;
  host.grouped = options.grouped;
  host.max_resident = options.max_resident_experts;
  host.seed = options.seed;
  return host;
}

/// Null: none is wanted.
Result<std::shared_ptr<net::TraceFile>> open_trace(const ServerOptions& options) {
  if (!options.trace_file) return std::shared_ptr<net::TraceFile>();
  return net::TraceFile::create(
      {*options.trace_file, "expert server " + options.expert_pattern, options.max_trace_bytes});
}

std::uint64_t random_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32U) | device();
}

}  // namespace

class Server::Impl {
 public:
  Impl(ServerOptions options, UidPattern pattern, std::optional<DataDirectory> directory, net::Identity identity,
       std::shared_ptr<net::TraceFile> trace)
      : options_(std::move(options)),
        pattern_(std::move(pattern)),
        directory_(std::move(directory)),
        identity_(std::move(identity)),
        work_(asio::make_work_guard(io_)),
        metrics_(registry_),
        host_(host_options(options_, directory_), metrics_),
        budget_(std::make_shared<MemoryBudget>(call_memory(options_).value())),
        handler_(host_.table(), host_.runtimes(), metrics_, budget_, std::move(trace)),
        dht_status_(registry_, net::to_string(identity_.peer_id())),
        sources_{registry_, host_, false, net::to_string(identity_.peer_id()), dht_status_},
        client_(io_.get_executor()) {
    auto& held = registry_.gauge("dmoe_expert_call_memory_bytes", "Memory that calls hold or are expected to need.");
    registry_.gauge("dmoe_expert_call_memory_limit_bytes", "What max_memory leaves for calls.")
        .Set(static_cast<double>(budget_->limit()));
    registry_.before_serialize([this, &held] {
      held.Set(static_cast<double>(budget_->used()));
      refresh_load();
    });
    for (int i = 0; i < options_.io_threads; ++i) io_threads_.emplace_back([this] { io_.run(); });
  }

  ~Impl() { stop(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<void> start(const std::stop_token& abort) {
    if (auto bound = bind(); !bound) return bound;
    auto endpoints =
        announced_endpoints(options_.announce, options_.listen, ports_.rpc->port(), options_.initial_peers);
    if (!endpoints) return endpoints.error();
    announced_ = std::move(*endpoints);
    if (auto joined = join(abort); !joined) return joined;
    sources_.reach = &reach_.emplace(*ports_.dht, announced_);
    announcer_.emplace(ports_.dht->directory(), *reach_, host_, client_, identity_.peer_id(),
                       AnnouncerOptions{.pattern = pattern_,
                                        .num_experts = options_.num_experts,
                                        .own = own_endpoint(options_.listen, ports_.rpc->port()),
                                        .heartbeat = options_.heartbeat,
                                        .ttl = options_.announcement_ttl,
                                        .seed = options_.seed});
    if (auto started = announcer_->start(abort); !started) return started;
    sources_.ready = true;
    if (directory_) checkpoint_timer_.emplace(host_, options_.checkpoint_period);
    return {};
  }

  void stop() {
    const std::lock_guard once(stop_mutex_);
    if (stopped_) return;
    stopped_ = true;
    const bool served = sources_.ready.exchange(false);
    if (announcer_) announcer_->withdraw();
    if (ports_.rpc) ports_.rpc->stop_accepting();
    if (checkpoint_timer_) checkpoint_timer_->stop();
    host_.stop(options_.shutdown_grace);
    if (directory_ && served) write_last_checkpoints();
    if (ports_.rpc) close_connections();
    client_.stop();
    if (ports_.dht) ports_.dht->stop();
    work_.reset();
    for (auto& thread : io_threads_) thread.join();
  }

  Result<void> checkpoint() { return host_.checkpoint(); }

  std::uint16_t port() const noexcept { return ports_.rpc->port(); }
  const net::PeerId& peer_id() const noexcept { return identity_.peer_id(); }
  const std::vector<net::Endpoint>& announced() const noexcept { return announced_; }
  std::vector<ExpertUid> experts() const { return host_.table().uids(); }
  dht::Service& dht() noexcept { return *ports_.dht; }

 private:
  void refresh_load() {
    const auto experts = host_.table().all();
    metrics_.set_load(host_.runtimes().load(), experts.size());
    const std::lock_guard lock(refresh_mutex_);
    metrics_.clear_queued();  // Experts that share a label are added up.
    for (const auto& expert : experts) {
      for (const auto direction : {Direction::kForward, Direction::kBackward}) {
        const auto waiting = host_.runtimes().of(*expert).load(*expert, direction).tasks;
        if (waiting > 0) expert->meters->add_queued(direction, waiting);
      }
    }
  }

  Result<void> bind() {
    host_.table().set_loading(true);
    const auto make_rpc = [this] {
      net::RpcServerOptions rpc;
      rpc.listen = options_.listen;
      rpc.max_frame_bytes = options_.max_frame_bytes;
      rpc.max_connections = options_.max_connections;
      rpc.frame_budget = std::make_shared<ArrivingCalls>(budget_);
      rpc.frame_patience = options_.memory_patience;
      rpc.metrics = &registry_;
      auto server = std::make_unique<net::RpcServer>(
          io_, rpc, [this](net::IncomingCall call) { handler_.handle(std::move(call)); });
      add_status_routes(*server, sources_);
      return server;
    };
    dht::ServiceOptions dht;
    dht.listen = options_.listen;
    dht.initial_peers = options_.initial_peers;
    if (directory_) dht.data_dir = directory_->path();
    dht.join_timeout = options_.join_timeout;
    auto ports = bind_ports(io_, identity_, dht, make_rpc);
    if (!ports) return ports.error();
    ports_ = std::move(*ports);
    dht_status_.watch(*ports_.dht);
    return {};
  }

  Result<void> join(const std::stop_token& abort) {
    const auto answer = Arrival<Result<void>>::make();
    ports_.dht->join([answer](Result<void> outcome) { answer->set(std::move(outcome)); });
    const auto outcome = answer->wait(options_.join_timeout + std::chrono::seconds{5}, abort);
    if (abort.stop_requested()) return Error{Errc::kCancelled, "the start was given up", {}};
    const auto failed = outcome ? *outcome : Error{Errc::kUnavailable, "no initial peer answered", {}};
    if (failed || !options_.allow_alone) return failed;
    spdlog::warn("serving alone until an initial peer answers: {}", failed.error().message);
    return {};
  }

  void write_last_checkpoints() {
    if (auto written = host_.checkpoint(); !written) {
      spdlog::error("the last checkpoints failed, earlier ones are intact: {}", written.error().message);
    }
  }

  void close_connections() {
    const auto closed = Arrival<bool>::make();
    ports_.rpc->stop(kReplyGrace, [closed] { closed->set(true); });
    closed->wait(kReplyGrace + std::chrono::seconds{1});
  }

  const ServerOptions options_;
  const UidPattern pattern_;
  std::optional<DataDirectory> directory_;
  const net::Identity identity_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  net::Metrics registry_;
  ServerMetrics metrics_;
  ExpertHost host_;
  std::shared_ptr<MemoryBudget> budget_;
  CallHandler handler_;
  dht::ServiceStatus dht_status_;
  StatusSources sources_;
  net::RpcClient client_;  ///< For calls to itself and to rivals for a UID.
  ServerPorts ports_;
  std::vector<net::Endpoint> announced_;
  std::optional<ReachCheck> reach_;
  std::optional<Announcer> announcer_;
  std::optional<CheckpointTimer> checkpoint_timer_;
  std::mutex refresh_mutex_;
  std::mutex stop_mutex_;
  bool stopped_ = false;
  std::vector<std::thread> io_threads_;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;

Result<std::unique_ptr<Server>> Server::start(ServerOptions options, std::stop_token abort) {
  auto pattern = check_options(options);
  if (!pattern) return pattern.error();
  reuse_tensor_memory();
  std::optional<DataDirectory> directory;
  if (options.data_dir) {
    auto opened = DataDirectory::open(*options.data_dir);
    if (!opened) return opened.error();
    directory = std::move(*opened);
  }
  auto identity = load_identity(options, directory);
  if (!identity) return identity.error();
  if (options.seed == 0) options.seed = random_seed();
  auto trace = open_trace(options);
  if (!trace) return trace.error();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*pattern), std::move(directory), *identity,
                                     std::move(*trace));
  if (auto started = impl->start(abort); !started) return started.error();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

std::uint16_t Server::port() const noexcept { return impl_->port(); }
const net::PeerId& Server::peer_id() const noexcept { return impl_->peer_id(); }
const std::vector<net::Endpoint>& Server::announced() const noexcept { return impl_->announced(); }
std::vector<ExpertUid> Server::experts() const { return impl_->experts(); }
dht::Service& Server::dht() noexcept { return impl_->dht(); }
Result<void> Server::checkpoint() { return impl_->checkpoint(); }
void Server::stop() { impl_->stop(); }

}  // namespace dmoe::expert_server
