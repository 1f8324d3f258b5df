// Real TCP connections, opened and closed. Private to dht.
#pragma once

#include "dht/asio_clock.hpp"
#include "dht/environment.hpp"

#include <memory>
#include <set>

namespace dmoe::dht {

class TcpDialler final : public Dialler, public std::enable_shared_from_this<TcpDialler> {
 public:
  explicit TcpDialler(AsioClock::Strand strand) : strand_(std::move(strand)) {}

  void dial(const Address& to, std::function<void(bool connected)> done) override;
  /// Closes what is open; nobody is told any more. On the strand.
  void stop();

 private:
  struct Attempt;
  void finish(const std::shared_ptr<Attempt>& attempt, bool connected);

  AsioClock::Strand strand_;
  std::set<std::shared_ptr<Attempt>> open_;
  bool stopped_ = false;
};

}  // namespace dmoe::dht
