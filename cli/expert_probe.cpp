#include "cli/expert_probe.hpp"

#include "net/rpc_client.hpp"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace dmoe::cli {
namespace {

/// Shared with the calls in flight, which may answer after the wait ended.
struct Answers {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t outstanding = 0;
  std::set<ExpertUid> answered;
};

net::CallSpec info_call(const ExpertUid& uid, std::chrono::steady_clock::time_point deadline,
                        const std::shared_ptr<Answers>& answers) {
  net::CallSpec call;
  call.deadline = deadline;
  call.fill = [text = to_string(uid)](net::schema::Call::Builder builder, net::Attachments&) {
    builder.initInfo().setUid(text.c_str());
  };
  call.on_reply = [uid, answers](const Result<net::IncomingReply>& reply) {
    const std::lock_guard lock(answers->mutex);
    if (reply && reply->reader().isInfo()) answers->answered.insert(uid);
    --answers->outstanding;
    answers->changed.notify_all();
  };
  return call;
}

}  // namespace

std::set<ExpertUid> answering_experts(Client& client, const ExpertMap& experts, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto answers = std::make_shared<Answers>();
  std::map<net::Endpoint, std::vector<net::CallSpec>> by_server;
  for (const auto& [uid, servers] : experts) {
    if (servers.empty()) continue;
    by_server[servers.front()->endpoints.front()].push_back(info_call(uid, deadline, answers));
    ++answers->outstanding;
  }
  for (auto& [endpoint, calls] : by_server) client.rpc().start(endpoint, std::move(calls));
  std::unique_lock lock(answers->mutex);
  // The calls' own deadline ends the wait; on_reply runs exactly once for each.
  answers->changed.wait(lock, [&] { return answers->outstanding == 0; });
  return answers->answered;
}

}  // namespace dmoe::cli
