#include "dht/asio_clock.hpp"

#include <boost/asio/post.hpp>

namespace dmoe::dht {

std::uint64_t AsioClock::wall_millis() const {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
}

TimerId AsioClock::schedule(TimePoint when, std::function<void()> action) {
  const TimerId id = ++last_id_;
  timers_.emplace(std::make_pair(when, id), std::move(action));
  times_.emplace(id, when);
  arm();
  return id;
}

void AsioClock::cancel(TimerId timer) {
  const auto found = times_.find(timer);
  if (found == times_.end()) return;
  timers_.erase({found->second, timer});
  times_.erase(found);
}

void AsioClock::post(std::function<void()> action) { boost::asio::post(strand_, std::move(action)); }

void AsioClock::start() {
  started_ = true;
  arm();
}

void AsioClock::stop() {
  stopped_ = true;
  timers_.clear();
  times_.clear();
  timer_.cancel();
}

void AsioClock::arm() {
  if (!started_ || stopped_ || timers_.empty() || timers_.begin()->first.first >= armed_) return;
  armed_ = timers_.begin()->first.first;
  timer_.expires_at(armed_);
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->on_timer();
  });
}

void AsioClock::on_timer() {
  armed_ = TimePoint::max();
  const TimePoint until = now();
  while (!stopped_ && !timers_.empty() && timers_.begin()->first.first <= until) {
    auto entry = timers_.extract(timers_.begin());
    times_.erase(entry.key().second);
    entry.mapped()();
  }
  arm();
}

}  // namespace dmoe::dht
