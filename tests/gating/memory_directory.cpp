#include "tests/gating/memory_directory.hpp"

namespace dmoe::test {

dht::ServerAddress server_address(std::uint8_t number, std::uint64_t announced, net::Endpoint endpoint) {
  dht::ServerAddress server;
  server.peer.bytes.fill(number);
  if (endpoint.host.empty()) endpoint = {"127.0.0.1", number};
  server.endpoints = {endpoint};
  server.announced = announced;
  return server;
}

MemoryDirectory::MemoryDirectory() : thread_([this] { answer_questions(); }) {}

MemoryDirectory::~MemoryDirectory() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void MemoryDirectory::add(const ExpertUid& uid, const dht::ServerAddress& server) {
  const std::lock_guard lock(mutex_);
  auto shared = std::make_shared<const dht::ServerAddress>(server);
  ExpertPrefix prefix{uid.grid, {}};
  for (const auto coordinate : uid.coordinates) {
    children_[prefix][coordinate][server.peer] = shared;
    prefix.coordinates.push_back(coordinate);
  }
}

void MemoryDirectory::remove(const ExpertUid& uid, bool prefixes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t length = uid.coordinates.size(); length-- > 0;) {
    const ExpertPrefix prefix{uid.grid, {uid.coordinates.begin(), uid.coordinates.begin() + std::ptrdiff_t(length)}};
    children_[prefix].erase(uid.coordinates[length]);
    if (!children_[prefix].empty() || !prefixes) return;
    children_.erase(prefix);
  }
}

void MemoryDirectory::forget(const ExpertPrefix& prefix, Coordinate coordinate) {
  const std::lock_guard lock(mutex_);
  children_[prefix].erase(coordinate);
}

std::vector<ExpertUid> MemoryDirectory::experts() const {
  const std::lock_guard lock(mutex_);
  std::vector<ExpertUid> uids;
  for (const auto& [prefix, children] : children_) {
    for (const auto& [coordinate, servers] : children) {
      ExpertUid uid{prefix.grid, prefix.coordinates};
      uid.coordinates.push_back(coordinate);
      const bool leaf = children_.find({uid.grid, uid.coordinates}) == children_.end();
      if (leaf) uids.push_back(std::move(uid));
    }
  }
  return uids;
}

void MemoryDirectory::expire_after(std::chrono::milliseconds time) {
  const std::lock_guard lock(mutex_);
  lifetime_ = time;
}

void MemoryDirectory::fail(const ExpertPrefix& prefix) {
  const std::lock_guard lock(mutex_);
  failing_.insert(prefix);
}

void MemoryDirectory::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void MemoryDirectory::release() {
  {
    const std::lock_guard lock(mutex_);
    held_ = false;
  }
  changed_.notify_all();
}

void MemoryDirectory::wait_for_questions(std::size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return calls_ >= count; });
}

std::size_t MemoryDirectory::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::size_t MemoryDirectory::lookups() const {
  const std::lock_guard lock(mutex_);
  return asked_.size();
}

std::multiset<ExpertPrefix> MemoryDirectory::asked() const {
  const std::lock_guard lock(mutex_);
  return asked_;
}

void MemoryDirectory::list(std::vector<ExpertPrefix> prefixes, std::chrono::steady_clock::time_point /*deadline*/,
                           Handler handler) {
  {
    const std::lock_guard lock(mutex_);
    ++calls_;
    asked_.insert(prefixes.begin(), prefixes.end());
    questions_.push_back({std::move(prefixes), std::move(handler)});
  }
  changed_.notify_all();
}

void MemoryDirectory::answer_questions() {
  for (;;) {
    Question question;
    std::vector<Result<dht::PrefixListing>> results;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopped_ || (!held_ && !questions_.empty()); });
      if (stopped_) return;
      question = std::move(questions_.front());
      questions_.pop_front();
      for (const auto& prefix : question.prefixes) results.push_back(look_up(prefix));
    }
    question.handler(std::move(results));
  }
}

Result<dht::PrefixListing> MemoryDirectory::look_up(const ExpertPrefix& prefix) const {
  if (failing_.contains(prefix)) return Error{Errc::kDeadlineExceeded, "no answer about " + to_string(prefix), {}};
  dht::PrefixListing listing;
  const auto now = std::chrono::steady_clock::now();
  const auto it = children_.find(prefix);
  if (it == children_.end() || it->second.empty()) {
    listing.expires = now;
    return listing;
  }
  for (const auto& [coordinate, servers] : it->second) {
    dht::PrefixListing::Child child{coordinate, {}};
    for (const auto& [peer, server] : servers) child.servers.push_back(server);
    listing.children.push_back(std::move(child));
  }
  listing.expires = now + lifetime_;
  return listing;
}

}  // namespace dmoe::test
