// What many open connections cost a call, also such as say nothing more, and whether large tensors gain from several.
#include "bench/rpc_floor.hpp"
#include "bench/rpc_pair.hpp"
#include "bench/suite.hpp"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/write.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmoe::bench {
namespace {

constexpr std::size_t kEchoBytes = 4UL * 1024;
constexpr std::size_t kTensorBytes = 4UL * 1024 * 1024;
constexpr std::size_t kCallsInFlight = 64;
constexpr int kConnectionRounds = 3;

double median_of(std::vector<double> values) { return percentile(values, 0.5); }

void allow_open_files(std::size_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("the limit of open files is not known");
  if (limit.rlim_max < wanted) {
    throw std::runtime_error("this needs " + std::to_string(wanted) + " open files; the limit is " +
                             std::to_string(limit.rlim_max) + " (ulimit -Hn)");
  }
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, wanted);
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

/// One connection a client, all of them open; then calls one at a time, and 64 at a time, each on the next connection.
void call_over_many(std::size_t count, const Options& options, Reporter& reporter) {
  allow_open_files(2 * count + 64);
  RpcPairOptions pair_options;
  pair_options.clients = count;
  RpcPair pair(pair_options);
  const auto row = payload_of(kEchoBytes);
  for (std::size_t i = 0; i < count; ++i) pair.call_and_wait(i, "echo", row);
  const Seconds duration = Seconds(options.seconds) / (2 * kConnectionRounds);
  std::vector<double> p50;
  std::vector<double> p99;
  std::vector<double> rate;
  std::vector<double> busy_p50;
  std::vector<double> busy_p99;
  for (int round = 0; round < kConnectionRounds; ++round) {
    Chain alone(pair, row, 1, duration);
    alone.run();
    p50.push_back(percentile(alone.samples(), 0.5));
    p99.push_back(percentile(alone.samples(), 0.99));
    Chain busy(pair, row, kCallsInFlight, duration);
    rate.push_back(busy.run());
    busy_p50.push_back(percentile(busy.samples(), 0.5));
    busy_p99.push_back(percentile(busy.samples(), 0.99));
  }
  reporter.report("connections", {{"connections", count},
                                  {"p50_us", median_of(p50)},
                                  {"p99_us", median_of(p99)},
                                  {"p50_us_64_in_flight", median_of(busy_p50)},
                                  {"p99_us_64_in_flight", median_of(busy_p99)},
                                  {"requests_per_s_64_in_flight", median_of(rate)}});
}

/// Tensors of 4 MiB echoed over `connections`, two in flight on each.
void tensors_over_many(std::size_t connections, int threads, const Options& options, Reporter& reporter) {
  RpcPairOptions pair_options;
  pair_options.clients = connections;
  pair_options.threads = threads;
  RpcPair pair(pair_options);
  const auto tensor = payload_of(kTensorBytes);
  for (std::size_t i = 0; i < connections; ++i) pair.call_and_wait(i, "echo", tensor);
  std::vector<double> rate;
  for (int round = 0; round < kConnectionRounds; ++round) {
    Chain chain(pair, tensor, 2 * connections, Seconds(options.seconds) / kConnectionRounds);
    rate.push_back(chain.run() * 2 * static_cast<double>(kTensorBytes) / 1e9);
  }
  reporter.report("connections", {{"tensor_bytes", kTensorBytes},
                                  {"connections", connections},
                                  {"io_threads", threads},
                                  {"gb_per_s", median_of(rate)}});
}

/// A connection that has sent its handshake and half a frame, and then nothing more.
class HalfFrame {
 public:
  explicit HalfFrame(std::uint16_t port) : socket_(io_) {
    namespace asio = boost::asio;
    socket_.connect({asio::ip::make_address("127.0.0.1"), port});
    const std::string hello =
        "GET /rpc HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Protocol: dmoe.1\r\n\r\n";
    asio::write(socket_, asio::buffer(hello));
    std::string answer;
    asio::read_until(socket_, asio::dynamic_buffer(answer), "\r\n\r\n");
    if (answer.find(" 101 ") == std::string::npos) throw std::runtime_error("the server refused a WebSocket");
    std::string half("\x82\xFE\x10\x00\x00\x00\x00\x00", 8);  // 4,096 bytes, masked with zeros …
    half.append(2'048, '\0');
    asio::write(socket_, asio::buffer(half));
  }

 private:
  boost::asio::io_context io_;
  boost::asio::ip::tcp::socket socket_;
};

/// One caller's latencies before, while 200 others lie there with half a frame each, and after they were let go.
void beside_half_frames(const Options& options, Reporter& reporter) {
  constexpr std::size_t kSilent = 200;
  allow_open_files(2 * kSilent + 64);
  RpcPairOptions pair_options;
  pair_options.idle_timeout = std::chrono::seconds(2);
  pair_options.count_connections = true;
  RpcPair pair(pair_options);
  const auto row = payload_of(kEchoBytes);
  pair.call_and_wait(0, "echo", row);
  const Seconds duration = Seconds(options.seconds) / kConnectionRounds;
  std::vector<double> before;
  std::vector<double> during;
  std::vector<double> after;
  const auto p95 = [&](std::vector<double>& samples) {
    auto round = blocking_calls(pair, "echo", row, duration);
    samples.push_back(percentile(round, 0.95));
  };
  double let_go_s = 0;
  for (int round = 0; round < kConnectionRounds; ++round) {
    p95(before);
    const auto open = pair.server_connections();
    std::deque<HalfFrame> silent;
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < kSilent; ++i) silent.emplace_back(pair.port());
    p95(during);
    while (pair.server_connections() > open) pair.call_and_wait(0, "echo", row);
    let_go_s = std::max(let_go_s, Seconds(std::chrono::steady_clock::now() - began).count());
    silent.clear();
    p95(after);
  }
  reporter.report("connections", {{"half_frames", kSilent},
                                  {"idle_timeout_s", 2},
                                  {"all_let_go_s", let_go_s},
                                  {"p95_us_before", median_of(before)},
                                  {"p95_us_during", median_of(during)},
                                  {"p95_us_after", median_of(after)}});
}

}  // namespace

void connections_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("open")) {
    for (const std::size_t count : {1, 64, 256, 512, 1'024}) call_over_many(count, options, reporter);
  }
  if (wanted("half_frames")) beside_half_frames(options, reporter);
  if (wanted("large")) {
    for (const int threads : {1, 2}) {
      for (const std::size_t count : {1, 2, 4, 8}) tensors_over_many(count, threads, options, reporter);
    }
  }
}

}  // namespace dmoe::bench
