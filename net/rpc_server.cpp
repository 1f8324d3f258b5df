#include "net/rpc_server.hpp"

#include "net/acceptor.hpp"
#include "net/frame_memory.hpp"
#include "net/server_state.hpp"
#include "net/session.hpp"

#include <boost/asio/dispatch.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include <algorithm>
#include <utility>

namespace dmoe::net {

namespace asio = boost::asio;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kKeepFrameMemory{5};

/// Owns the acceptor and the timers; runs on one strand. Sessions run on theirs.
class RpcServer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(asio::io_context& io, RpcServerOptions options, CallHandler on_call)
      : io_(io),
        strand_(asio::make_strand(io)),
        state_(std::make_shared<ServerState>(std::move(options), std::move(on_call))),
        acceptor_(std::make_shared<Acceptor>(strand_)),
        tick_timer_(strand_),
        grace_timer_(strand_) {}

  void route(std::string path, HttpHandler handler) { state_->routes[std::move(path)] = std::move(handler); }

  Result<void> listen() {
    const auto bound = acceptor_->listen(state_->options.listen);
    if (bound.has_error()) return bound.error();
    port_ = *bound;
    acceptor_->start([state = state_](TcpSocket socket) { welcome(state, std::move(socket)); });
    asio::post(strand_, [self = shared_from_this()] { self->schedule_tick(); });
    return {};
  }

  std::uint16_t port() const noexcept { return port_; }

  void stop_accepting() {
    state_->draining = true;
    asio::dispatch(strand_, [acceptor = acceptor_] { acceptor->stop(); });
  }

  void stop(std::chrono::milliseconds grace, std::function<void()> done) {
    stop_accepting();
    state_->stopped = true;
    asio::post(strand_, [self = shared_from_this(), grace, done = std::move(done)]() mutable {
      self->shut_down(grace, std::move(done));
    });
  }

 private:
  static void welcome(const std::shared_ptr<ServerState>& state, TcpSocket socket) {
    error_code ignored;
    socket.set_option(asio::ip::tcp::no_delay(true), ignored);
    const auto strand = socket.get_executor();
    const auto session = std::make_shared<Session>(std::move(socket), state);
    if (state->draining || !state->admit(session)) return ServerCounters::add(state->counters.refused);
    ServerCounters::add(state->counters.accepted);
    asio::dispatch(strand, [session] { session->start(); });
  }

  void schedule_tick() {
    if (stopping_) return;
    const auto shortest =
        std::min({state_->options.handshake_timeout, state_->options.idle_timeout, state_->options.arrival_timeout});
    const auto period = std::clamp<std::chrono::milliseconds>(shortest / 8, std::chrono::milliseconds{10},
                                                              std::chrono::milliseconds{2'000});
    tick_timer_.expires_after(period);
    tick_timer_.async_wait([self = shared_from_this()](error_code failure) {
      if (failure) return;
      const auto now = Clock::now();
      self->for_each_session([now](Session& session) { session.tick(now); });
      trim_frame_memory(kKeepFrameMemory);
      self->schedule_tick();
    });
  }

  template <class Action>
  void for_each_session(Action action) {
    for (auto& session : state_->sessions()) {
      const auto strand = session->strand();
      asio::post(strand, [session = std::move(session), action] { action(*session); });
    }
  }

  void shut_down(std::chrono::milliseconds grace, std::function<void()> done) {
    if (done) {
      state_->when_empty([strand = strand_, done = std::move(done)] { asio::post(strand, done); });
    }
    const auto cut = Clock::now() + grace;
    if (!std::exchange(stopping_, true)) {
      tick_timer_.cancel();
      for_each_session([](Session& session) { session.shut_down(); });
    } else if (cut >= cut_) {
      return;
    }
    cut_ = cut;
    cut_off_after(grace);
  }

  void cut_off_after(std::chrono::milliseconds grace) {
    grace_timer_.expires_after(grace);
    grace_timer_.async_wait([self = shared_from_this()](error_code failure) {
      if (failure) return;
      self->for_each_session([](Session& session) { session.abort({Errc::kUnavailable, "the server stopped", {}}); });
    });
    // The last session to go takes the timer with it, so that an io_context without other work runs dry.
    state_->when_empty([strand = strand_, weak = weak_from_this()] {
      asio::post(strand, [weak] {
        if (const auto self = weak.lock()) self->grace_timer_.cancel();
      });
    });
  }

  asio::io_context& io_;
  Strand strand_;
  std::shared_ptr<ServerState> state_;
  std::shared_ptr<Acceptor> acceptor_;
  asio::basic_waitable_timer<Clock, asio::wait_traits<Clock>, Strand> tick_timer_;
  asio::basic_waitable_timer<Clock, asio::wait_traits<Clock>, Strand> grace_timer_;
  std::atomic<std::uint16_t> port_{0};
  bool stopping_ = false;
  Clock::time_point cut_;
};

RpcServer::RpcServer(asio::io_context& io, RpcServerOptions options, CallHandler on_call)
    : impl_(std::make_shared<Impl>(io, std::move(options), std::move(on_call))) {}

RpcServer::~RpcServer() { impl_->stop(std::chrono::milliseconds{0}, {}); }

void RpcServer::route(std::string path, HttpHandler handler) { impl_->route(std::move(path), std::move(handler)); }
Result<void> RpcServer::listen() { return impl_->listen(); }
std::uint16_t RpcServer::port() const noexcept { return impl_->port(); }
void RpcServer::stop_accepting() { impl_->stop_accepting(); }

void RpcServer::stop(std::chrono::milliseconds grace, std::function<void()> done) {
  impl_->stop(grace, std::move(done));
}

}  // namespace dmoe::net
