// Rows of many callers in one batch against one row at a time, and small batches of many experts at once against one
// expert after another.
#include "bench/served_expert.hpp"
#include "bench/suite.hpp"
#include "expert_server/compute_threads.hpp"

#include <torch/types.h>

#include <array>
#include <atomic>
#include <functional>
#include <semaphore>
#include <thread>

namespace dmoe::bench {
namespace {

constexpr int kCallers = 64;
constexpr int kBatchingRounds = 3;

/// A server and what `kCallers` threads do to it, again and again.
class Setting {
 public:
  Setting(ClientThread& thread, expert_server::ExpertOptions expert, int experts, bool grouped)
      : server_(serve(std::move(expert), "ffn.[0:" + std::to_string(experts) + "]",
                      expert_server::effective_compute_threads(0), grouped)),
        experts_(experts) {
    for (int i = 0; i < kCallers; ++i) clients_.push_back(std::make_unique<ExpertClient>(thread, server_->port()));
  }

  void forward(int caller, const at::Tensor& x) { client(caller).forward(uid(caller), x); }
  void backward(int caller, const at::Tensor& x, const at::Tensor& gradient) {
    client(caller).backward(uid(caller), x, gradient);
  }

 private:
  ExpertClient& client(int caller) { return *clients_[static_cast<std::size_t>(caller)]; }
  std::string uid(int caller) const { return "ffn." + std::to_string(caller % experts_); }

  std::unique_ptr<expert_server::Server> server_;
  int experts_;
  std::vector<std::unique_ptr<ExpertClient>> clients_;
};

/// The rates of several settings under the same load, measured by turns: a noisy neighbour meets all of them.
template <std::size_t kCount>
std::array<double, kCount> rates(const std::array<Setting*, kCount>& settings, std::int64_t rows, double seconds,
                                 const std::function<void(Setting&, int)>& step) {
  std::array<double, kCount> sums{};
  for (int round = -1; round < kBatchingRounds; ++round) {
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto rate = rate_of_callers(
          kCallers, [&](int caller) { step(*settings[i], caller); }, rows, round < 0 ? 0 : seconds);
      if (round >= 0) sums[i] += rate / kBatchingRounds;
    }
  }
  return sums;
}

/// `unbatched`: max_batch_size 1, products by torch; `unbatched_few_rows`: by the kernel for few rows.
void measure_batching(const Options& options, Reporter& reporter, std::int64_t hidden) {
  ClientThread thread;
  expert_server::ExpertOptions expert;
  expert.hidden_dim = hidden;
  Setting batched(thread, expert, 1, true);
  expert.max_batch_size = 1;
  Setting unbatched(thread, expert, 1, false);
  Setting few_rows(thread, expert, 1, true);
  const auto x = torch::randn({1, hidden});
  const std::array<Setting*, 3> settings{&batched, &unbatched, &few_rows};
  const auto found = rates<3>(settings, 1, options.seconds, [&](Setting& s, int caller) { s.forward(caller, x); });
  reporter.report("batching", {{"mode", "batched"},
                               {"clients", kCallers},
                               {"rows", 1},
                               {"hidden", hidden},
                               {"batched_rows_per_s", found[0]},
                               {"unbatched_rows_per_s", found[1]},
                               {"unbatched_few_rows_per_s", found[2]},
                               {"ratio", found[0] / found[1]}});
}

void measure_grouping(const Options& options, Reporter& reporter, std::int64_t rows, std::int64_t hidden) {
  ClientThread thread;
  expert_server::ExpertOptions expert;
  expert.hidden_dim = hidden;
  Setting grouped(thread, expert, kCallers, true);
  Setting separate(thread, expert, kCallers, false);
  const auto x = torch::randn({rows, hidden});
  const auto gradient = torch::randn({rows, hidden}) / static_cast<double>(rows);
  const std::array<Setting*, 2> settings{&grouped, &separate};
  const auto report = [&](const char* direction, const std::array<double, 2>& found) {
    reporter.report("batching", {{"mode", "grouped"},
                                 {"direction", direction},
                                 {"experts", kCallers},
                                 {"rows", rows},
                                 {"hidden", hidden},
                                 {"grouped_rows_per_s", found[0]},
                                 {"separate_rows_per_s", found[1]},
                                 {"ratio", found[0] / found[1]}});
  };
  report("forward", rates<2>(settings, rows, options.seconds, [&](Setting& s, int caller) { s.forward(caller, x); }));
  report("forward_backward",
         rates<2>(settings, rows, options.seconds, [&](Setting& s, int caller) { s.backward(caller, x, gradient); }));
}

/// A client with a connection of its own that calls again as soon as it is answered, without a thread of its own: on
/// two cores the threads of many clients would take as much time as the server.
class RestlessClient {
 public:
  RestlessClient(ClientThread& thread, std::uint16_t port, at::Tensor x, bool backward)
      : client_(thread.executor()), endpoint_{"127.0.0.1", port}, x_(std::move(x)), backward_(backward) {}

  void start() {
    running_ = true;
    call();
  }
  void stop() {
    running_ = false;
    ended_.acquire();
  }
  std::int64_t rows() const { return rows_; }  ///< Of whole steps.

 private:
  void call() {
    const bool back = backward_ && odd_;
    std::vector<net::CallSpec> calls;
    calls.push_back({[this, back](net::schema::Call::Builder call, net::Attachments& attachments) {
                       const auto fill = [&](auto request) {
                         request.setUid("ffn.0");
                         net::encode_tensors({x_}, request.initInputs(1), attachments).value();
                       };
                       if (!back) return fill(call.initForward());
                       auto request = call.initBackward();
                       fill(request);
                       net::encode_tensors({x_}, request.initGradOutputs(1), attachments).value();
                     },
                     std::chrono::steady_clock::now() + std::chrono::minutes(2),
                     [this](const Result<net::IncomingReply>& reply) { answered(reply); }});
    client_.start(endpoint_, std::move(calls));
  }

  void answered(const Result<net::IncomingReply>& reply) {
    if (reply.has_error()) throw std::runtime_error(describe(reply.error()));
    odd_ = !odd_;
    if (!backward_ || !odd_) ++rows_;
    if (running_) return call();
    ended_.release();
  }

  net::RpcClient client_;
  net::Endpoint endpoint_;
  at::Tensor x_;
  bool backward_;
  bool odd_ = false;
  std::atomic<bool> running_{false};
  std::atomic<std::int64_t> rows_{0};
  std::binary_semaphore ended_{0};
};

double restless_rate(std::uint16_t port, const at::Tensor& x, bool backward, double seconds) {
  constexpr int kFewCallers = 16;
  ClientThread thread;
  std::vector<std::unique_ptr<RestlessClient>> clients;
  for (int i = 0; i < kFewCallers; ++i) {
    clients.push_back(std::make_unique<RestlessClient>(thread, port, x, backward));
  }
  const auto rows = [&] {
    std::int64_t sum = 0;
    for (const auto& client : clients) sum += client->rows();
    return sum;
  };
  for (const auto& client : clients) client->start();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // Until batches have their usual size.
  const auto before = rows();
  const auto start = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const auto counted = rows() - before;
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& client : clients) client->stop();
  return static_cast<double>(counted) / took;
}

/// One row a call and 16 callers of one expert: forward, and a forward followed by its backward.
void measure_callers(const Options& options, Reporter& reporter, std::int64_t hidden) {
  expert_server::ExpertOptions expert;
  expert.hidden_dim = hidden;
  const auto server = serve(expert, "ffn.[0:1]", expert_server::effective_compute_threads(0));
  const auto x = torch::randn({1, hidden});
  const auto forward_rate = restless_rate(server->port(), x, false, options.seconds);
  const auto both_rate = restless_rate(server->port(), x, true, options.seconds);
  reporter.report("batching", {{"mode", "callers"},
                               {"clients", 16},
                               {"rows", 1},
                               {"hidden", hidden},
                               {"forward_rows_per_s", forward_rate},
                               {"forward_backward_rows_per_s", both_rate}});
}

}  // namespace

void batching_suite(const Options& options, Reporter& reporter) {
  if (!options.mode || *options.mode == "batched") measure_batching(options, reporter, 1'024);
  if (!options.mode || *options.mode == "grouped") measure_grouping(options, reporter, 4, 256);
  if (options.mode && *options.mode != "callers") return;
  measure_callers(options, reporter, 64);
  measure_callers(options, reporter, 1'024);
}

}  // namespace dmoe::bench
