// Real time on a strand. Private to dht.
#pragma once

#include "dht/environment.hpp"

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <utility>

namespace dmoe::dht {

/// All timers of one node behind one Asio timer, which is set anew only for an earlier one.
class AsioClock final : public Clock, public std::enable_shared_from_this<AsioClock> {
 public:
  using Strand = boost::asio::strand<boost::asio::io_context::executor_type>;

  explicit AsioClock(Strand strand) : strand_(std::move(strand)), timer_(strand_) {}

  TimePoint now() const override { return std::chrono::steady_clock::now(); }
  std::uint64_t wall_millis() const override;
  TimerId schedule(TimePoint when, std::function<void()> action) override;
  void cancel(TimerId timer) override;
  void post(std::function<void()> action) override;
  bool on_strand() const override { return !started_ || strand_.running_in_this_thread(); }

  /// Timers fire from here on: until then the owner may set up on its own thread. On the strand.
  void start();
  /// No timer fires any more. On the strand.
  void stop();
  const Strand& strand() const noexcept { return strand_; }

 private:
  void arm();
  void on_timer();

  Strand strand_;
  boost::asio::steady_timer timer_;
  std::map<std::pair<TimePoint, TimerId>, std::function<void()>> timers_;
  std::map<TimerId, TimePoint> times_;
  TimerId last_id_ = 0;
  TimePoint armed_ = TimePoint::max();
  std::atomic<bool> started_{false};
  bool stopped_ = false;
};

}  // namespace dmoe::dht
