// The socket below a WebSocket whose data frames we write ourselves.
#pragma once

#include <boost/asio/basic_stream_socket.hpp>
#include <boost/asio/compose.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/role.hpp>
#include <boost/beast/websocket/teardown.hpp>

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>

namespace dmoe::net {

/// A concrete type on purpose: a type-erased executor costs virtual calls and reference counts on each operation.
using Strand = boost::asio::strand<boost::asio::io_context::executor_type>;
using TcpSocket = boost::asio::basic_stream_socket<boost::asio::ip::tcp, Strand>;

/// A TCP socket whose writers take turns, a whole frame each. Beast writes the handshake, pings, pongs and closes; a
/// link writes its data frames, straight from where their bytes lie: Beast copies every byte of a client's frame into a
/// buffer of its own to mask it. Models Beast's AsyncStream. Everything runs on the strand.
class SharedSocket {
 public:
  using executor_type = TcpSocket::executor_type;
  using next_layer_type = TcpSocket;

  explicit SharedSocket(TcpSocket socket) : socket_(std::move(socket)) {}

  executor_type get_executor() { return socket_.get_executor(); }
  TcpSocket& next_layer() noexcept { return socket_; }
  const TcpSocket& next_layer() const noexcept { return socket_; }

  template <class Buffers, class Token>
  auto async_read_some(const Buffers& buffers, Token&& token) {
    return socket_.async_read_some(buffers, std::forward<Token>(token));
  }

  /// Writes all of `buffers`, as one turn: a frame is never cut by another.
  template <class Buffers, class Token>
  auto async_write_some(const Buffers& buffers, Token&& token) {
    return boost::asio::async_compose<Token, void(boost::system::error_code, std::size_t)>(
        Turn<Buffers>{*this, buffers}, token, socket_);
  }

 private:
  /// An operation that waits for its turn.
  class Waiting {
   public:
    Waiting() = default;
    virtual ~Waiting() = default;
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    virtual void start() = 0;
  };

  template <class Operation>
  class WaitingFor final : public Waiting {
   public:
    explicit WaitingFor(Operation operation) : operation_(std::move(operation)) {}
    void start() override { operation_(boost::system::error_code{}, std::size_t{0}); }

   private:
    Operation operation_;
  };

  /// How much is offered to the kernel at a time. Asio's own condition ends each system call at 64 KiB.
  struct WholeFrame {
    static constexpr std::size_t kMostPerCall = 512UL * 1024;
    std::size_t operator()(const boost::system::error_code& failure, std::size_t) const noexcept {
      return failure ? 0 : kMostPerCall;
    }
  };

  template <class Buffers>
  class Turn {
   public:
    Turn(SharedSocket& shared, const Buffers& buffers) : shared_(shared), buffers_(buffers) {}

    template <class Self>
    void operator()(Self& self, boost::system::error_code failure = {}, std::size_t bytes = 0) {
      auto& shared = shared_;  // `self` owns this object, and is moved from below.
      switch (std::exchange(step_, step_ == Step::kAsk ? Step::kWrite : Step::kDone)) {
        case Step::kAsk:
          if (!std::exchange(shared.taken_, true)) return (*this)(self);
          shared.waiting_.push_back(std::make_unique<WaitingFor<Self>>(std::move(self)));
          return;
        case Step::kWrite: {
          const auto buffers = buffers_;
          boost::asio::async_write(shared.socket_, buffers, WholeFrame{}, std::move(self));
          return;
        }
        case Step::kDone: shared.pass_on(); self.complete(failure, bytes);
      }
    }

   private:
    enum class Step { kAsk, kWrite, kDone };

    SharedSocket& shared_;
    Buffers buffers_;
    Step step_ = Step::kAsk;
  };

  void pass_on() {
    if (waiting_.empty()) {
      taken_ = false;
      return;
    }
    const auto next = std::move(waiting_.front());
    waiting_.pop_front();
    next->start();
  }

  TcpSocket socket_;
  bool taken_ = false;
  std::deque<std::unique_ptr<Waiting>> waiting_;  // At most one of Beast's and one of the link's.
};

// What Beast looks for by name when it ends a connection.

inline void teardown(boost::beast::role_type role, SharedSocket& socket, boost::system::error_code& failure) {
  boost::beast::websocket::teardown(role, socket.next_layer(), failure);
}

template <class Handler>
void async_teardown(boost::beast::role_type role, SharedSocket& socket, Handler&& handler) {
  boost::beast::websocket::async_teardown(role, socket.next_layer(), std::forward<Handler>(handler));
}

}  // namespace dmoe::net
