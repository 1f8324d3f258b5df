// Calls on loopback against raw TCP: the time of one row, the rate of many in flight, the bandwidth of large tensors.
#include "bench/rpc_floor.hpp"
#include "bench/suite.hpp"
#include "net/rpc_client.hpp"
#include "net/rpc_server.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
using net::schema::DType;

constexpr std::size_t kRowBytes = 4UL * 1024;  ///< 1,024 float32.
constexpr std::size_t kBulkBytes = 64UL * 1024 * 1024;
constexpr std::size_t kInFlight = 64;

class IoThread {
 public:
  IoThread() : work_(boost::asio::make_work_guard(io_)), thread_([this] { io_.run(); }) {}
  ~IoThread() {
    work_.reset();
    io_.stop();
    thread_.join();
  }
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;
  boost::asio::io_context& io() { return io_; }

 private:
  boost::asio::io_context io_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  std::thread thread_;
};

using Payload = std::shared_ptr<const std::vector<std::uint64_t>>;

Payload payload_of(std::size_t bytes) { return std::make_shared<std::vector<std::uint64_t>>(bytes / 8, 1); }

/// What the tensor codec does, without torch: the message points at the bytes, nothing is copied.
void write_tensor(net::schema::Tensor::Builder tensor, const void* bytes, std::size_t size) {
  tensor.setDtype(DType::UINT8);
  tensor.initShape(1).set(0, static_cast<std::int64_t>(size));
  const auto data = kj::arrayPtr(static_cast<const kj::byte*>(bytes), size);
  tensor.adoptData(capnp::Orphanage::getForMessageContaining(tensor).referenceExternalData(data));
}

/// Answers by uid: "echo" with the input, "sink" with nothing, "source" with `payload`.
void answer(net::IncomingCall call, const Payload& payload) {
  call.reply([&](net::schema::Reply::Builder reply, net::Attachments& attachments) {
    const auto request = call.reader().getForward();
    const std::string_view uid(request.getUid().cStr());
    if (uid == "sink") {
      reply.initForward(0);
    } else if (uid == "source") {
      attachments.keep(payload);
      write_tensor(reply.initForward(1)[0], payload->data(), payload->size() * 8);
    } else {
      attachments.keep(call.frame());
      const auto input = request.getInputs()[0].getData();
      write_tensor(reply.initForward(1)[0], input.begin(), input.size());
    }
  });
}

/// A server on one thread, a client on another.
class Pair {
 public:
  Pair()
      : bulk_(payload_of(kBulkBytes)),
        server_(server_io_.io(), {}, [this](net::IncomingCall call) { answer(std::move(call), bulk_); }),
        client_(client_io_.io().get_executor()) {
    server_.listen().value();
  }

  using OnReply = std::function<void(Result<net::IncomingReply>)>;

  void start(const char* uid, const Payload& payload, OnReply on_reply) {
    std::vector<net::CallSpec> calls;
    calls.push_back({[&](net::schema::Call::Builder call, net::Attachments& attachments) {
                       auto forward = call.initForward();
                       forward.setUid(uid);
                       if (!payload) return;
                       attachments.keep(payload);
                       write_tensor(forward.initInputs(1)[0], payload->data(), payload->size() * 8);
                     },
                     Clock::now() + std::chrono::seconds(30), std::move(on_reply)});
    client_.start({"127.0.0.1", server_.port()}, std::move(calls));
  }

  boost::asio::io_context& client_io() { return client_io_.io(); }
  const Payload& bulk() const { return bulk_; }

 private:
  Payload bulk_;
  IoThread server_io_;
  IoThread client_io_;
  net::RpcServer server_;
  net::RpcClient client_;
};

/// The caller blocks until its reply, as a training thread does.
void call_and_wait(Pair& pair, const char* uid, const Payload& payload) {
  std::binary_semaphore answered(0);
  std::string failure;
  pair.start(uid, payload, [&](const Result<net::IncomingReply>& reply) {
    if (reply.has_error()) failure = describe(reply.error());
    answered.release();
  });
  answered.acquire();
  if (!failure.empty()) throw std::runtime_error(failure);
}

std::vector<double> blocking_calls(Pair& pair, const char* uid, const Payload& payload, Seconds duration) {
  std::vector<double> samples;
  call_and_wait(pair, uid, payload);
  const auto end = Clock::now() + duration;
  for (auto before = Clock::now(); before < end || samples.empty();) {
    call_and_wait(pair, uid, payload);
    const auto after = Clock::now();
    samples.push_back(std::chrono::duration<double, std::micro>(after - before).count());
    before = after;
  }
  return samples;
}

/// Calls started from the reply of the one before, `in_flight` at a time.
class Chain {
 public:
  Chain(Pair& pair, Payload payload, std::size_t in_flight, Seconds duration)
      : pair_(pair),
        payload_(std::move(payload)),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(duration)),
        running_(in_flight) {}

  /// @return calls per second.
  double run() {
    const auto begin = Clock::now();
    const std::size_t in_flight = running_;
    for (std::size_t i = 0; i < in_flight; ++i) start();
    finished_.acquire();
    if (!failure_.empty()) throw std::runtime_error(failure_);
    return static_cast<double>(answered_) / Seconds(Clock::now() - begin).count();
  }
  std::vector<double>& samples() { return samples_; }

 private:
  void start() {
    pair_.start("echo", payload_,
                [this, before = Clock::now()](const Result<net::IncomingReply>& reply) { on_reply(before, reply); });
  }

  // On the client's strand: one at a time.
  void on_reply(Clock::time_point before, const Result<net::IncomingReply>& reply) {
    if (reply.has_error()) failure_ = describe(reply.error());
    ++answered_;
    const auto now = Clock::now();
    samples_.push_back(std::chrono::duration<double, std::micro>(now - before).count());
    if (failure_.empty() && now < end_) return start();
    if (--running_ == 0) finished_.release();
  }

  Pair& pair_;
  Payload payload_;
  Clock::time_point end_;
  std::size_t running_;
  std::size_t answered_ = 0;
  std::string failure_;
  std::vector<double> samples_;
  std::binary_semaphore finished_{0};
};

/// Other programs disturb a machine for seconds at a time: floor and calls are measured by turns, and the median of the
/// rounds is reported.
constexpr int kRpcRounds = 5;

double median(std::vector<double> values) { return percentile(values, 0.5); }

void one_row(const Options& options, Reporter& reporter) {
  const Seconds duration = Seconds(options.seconds) / kRpcRounds;
  Pair pair;
  const auto row = payload_of(kRowBytes);
  std::vector<double> p50;
  std::vector<double> p99;
  std::vector<double> callback;
  std::vector<double> floor_p50;
  std::vector<double> floor_p99;
  std::vector<double> ratio;
  for (int round = 0; round < kRpcRounds; ++round) {
    const auto floor = tcp_echo(kRowBytes, duration);
    auto blocking = blocking_calls(pair, "echo", row, duration);
    Chain chain(pair, row, 1, duration);
    chain.run();
    floor_p50.push_back(floor.p50_us);
    floor_p99.push_back(floor.p99_us);
    p50.push_back(percentile(blocking, 0.5));
    p99.push_back(percentile(blocking, 0.99));
    callback.push_back(percentile(chain.samples(), 0.5));
    ratio.push_back(p50.back() / floor.p50_us);
  }
  reporter.report("rpc", {{"mode", "one_row"},
                          {"bytes", kRowBytes},
                          {"p50_us", median(p50)},
                          {"p99_us", median(p99)},
                          {"callback_p50_us", median(callback)},
                          {"floor_p50_us", median(floor_p50)},
                          {"floor_p99_us", median(floor_p99)},
                          {"ratio", median(ratio)}});
}

void in_flight(const Options& options, Reporter& reporter) {
  Pair pair;
  Chain chain(pair, payload_of(kRowBytes), kInFlight, Seconds(options.seconds));
  const double rate = chain.run();
  reporter.report("rpc", {{"mode", "in_flight"},
                          {"bytes", kRowBytes},
                          {"in_flight", kInFlight},
                          {"calls_per_s", rate},
                          {"p50_us", percentile(chain.samples(), 0.5)},
                          {"p99_us", percentile(chain.samples(), 0.99)}});
}

void bulk(const Options& options, Reporter& reporter) {
  const Seconds duration = Seconds(options.seconds) / kRpcRounds;
  Pair pair;
  const auto rate = [&](const char* uid, const Payload& payload) {
    return static_cast<double>(kBulkBytes) / (median(blocking_calls(pair, uid, payload, duration)) * 1e3);
  };
  std::vector<double> floor;
  std::vector<double> up;
  std::vector<double> down;
  std::vector<double> up_ratio;
  std::vector<double> down_ratio;
  for (int round = 0; round < kRpcRounds; ++round) {
    floor.push_back(tcp_stream_gb_per_s(kBulkBytes, duration));
    up.push_back(rate("sink", pair.bulk()));
    down.push_back(rate("source", nullptr));
    up_ratio.push_back(up.back() / floor.back());
    down_ratio.push_back(down.back() / floor.back());
  }
  reporter.report("rpc", {{"mode", "bulk"},
                          {"bytes", kBulkBytes},
                          {"up_gb_per_s", median(up)},
                          {"down_gb_per_s", median(down)},
                          {"floor_gb_per_s", median(floor)},
                          {"up_ratio", median(up_ratio)},
                          {"down_ratio", median(down_ratio)}});
}

}  // namespace

void rpc_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("one_row")) one_row(options, reporter);
  if (wanted("in_flight")) in_flight(options, reporter);
  if (wanted("bulk")) bulk(options, reporter);
}

}  // namespace dmoe::bench
