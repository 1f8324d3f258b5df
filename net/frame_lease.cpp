#include "net/frame_lease.hpp"

#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/post.hpp>

#include <utility>

namespace dmoe::net {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using Done = std::function<void(Result<FrameBudget::Lease>)>;

/// Lives as long as its timer runs.
class Request : public std::enable_shared_from_this<Request> {
 public:
  Request(const Strand& strand, std::shared_ptr<FrameBudget> budget, std::size_t bytes, Done done)
      : budget_(std::move(budget)), bytes_(bytes), done_(std::move(done)), timer_(strand) {}

  void start(std::chrono::milliseconds patience) {
    timer_.expires_after(patience);
    timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
      if (!cancelled) self->ask(/*last=*/true);
    });
    listen();
    ask(/*last=*/false);  // What was freed before `listen` called nobody.
  }

 private:
  void listen() {
    budget_->when_freed([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (!self) return;
      asio::post(self->timer_.get_executor(), [self] {
        if (!self->done_) return;
        self->listen();
        self->ask(/*last=*/false);
      });
    });
  }

  void ask(bool last) {
    if (!done_) return;
    auto lease = budget_->take(bytes_);
    if (lease.has_error() && lease.error().code == Errc::kOverloaded && !last) return;
    timer_.cancel();
    std::exchange(done_, nullptr)(std::move(lease));
  }

  const std::shared_ptr<FrameBudget> budget_;
  const std::size_t bytes_;
  Done done_;  // Empty once called.
  asio::basic_waitable_timer<Clock, asio::wait_traits<Clock>, Strand> timer_;
};

}  // namespace

void take_lease(const Strand& strand, std::shared_ptr<FrameBudget> budget, std::size_t bytes,
                std::chrono::milliseconds patience, Done done) {
  auto lease = budget->take(bytes);
  if (lease.has_value() || lease.error().code != Errc::kOverloaded) return done(std::move(lease));
  std::make_shared<Request>(strand, std::move(budget), bytes, std::move(done))->start(patience);
}

}  // namespace dmoe::net
