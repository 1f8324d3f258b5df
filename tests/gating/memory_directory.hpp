// A directory in memory that counts what it is asked, answers on its own thread, and can be told to be slow or broken.
#pragma once

#include "dht/prefix_resolver.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace dmoe::test {

/// The address of a made-up server; equal numbers are the same peer.
dht::ServerAddress server_address(std::uint8_t number, std::uint64_t announced = 1, net::Endpoint endpoint = {});

class MemoryDirectory final : public dht::PrefixResolver {
 public:
  MemoryDirectory();
  ~MemoryDirectory() override;

  void add(const ExpertUid& uid, const dht::ServerAddress& server = server_address(1));
  /// Removes the leaf only, or with `prefixes` also what leads to nothing else.
  void remove(const ExpertUid& uid, bool prefixes = true);
  /// Leaves `coordinate` out of the listing of `prefix`, as when its record has not arrived everywhere.
  void forget(const ExpertPrefix& prefix, Coordinate coordinate);
  std::vector<ExpertUid> experts() const;

  /// How long listings are good for, from when they are answered.
  void expire_after(std::chrono::milliseconds time);
  void fail(const ExpertPrefix& prefix);  ///< Answer with kDeadlineExceeded from now on.
  void hold();                            ///< Keep questions unanswered …
  void release();                         ///< … until now.
  void wait_for_questions(std::size_t count);

  std::size_t calls() const;    ///< Of `list`.
  std::size_t lookups() const;  ///< Prefixes asked for.
  std::multiset<ExpertPrefix> asked() const;

  void list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point deadline,
            Handler handler) override;

 private:
  struct Question {
    std::vector<ExpertPrefix> prefixes;
    Handler handler;
  };
  using Servers = std::map<net::PeerId, std::shared_ptr<const dht::ServerAddress>>;

  void answer_questions();
  Result<dht::PrefixListing> look_up(const ExpertPrefix& prefix) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<ExpertPrefix, std::map<Coordinate, Servers>> children_;
  std::set<ExpertPrefix> failing_;
  std::chrono::milliseconds lifetime_{60'000};
  std::deque<Question> questions_;
  std::size_t calls_ = 0;
  std::multiset<ExpertPrefix> asked_;
  bool held_ = false;
  bool stopped_ = false;
  std::thread thread_;  // Answers, as a real resolver's own thread would. Last: uses the members above.
};

}  // namespace dmoe::test
