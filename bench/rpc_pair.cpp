#include "bench/rpc_pair.hpp"

#include <prometheus/gauge.h>

#include <stdexcept>
#include <string_view>
#include <utility>

namespace dmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

double micros(Clock::duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

/// What the tensor codec does, without torch: the message points at the bytes, nothing is copied.
void write_tensor(net::schema::Tensor::Builder tensor, const void* bytes, std::size_t size) {
  tensor.setDtype(net::schema::DType::UINT8);
  tensor.initShape(1).set(0, static_cast<std::int64_t>(size));
  const auto data = kj::arrayPtr(static_cast<const kj::byte*>(bytes), size);
  tensor.adoptData(capnp::Orphanage::getForMessageContaining(tensor).referenceExternalData(data));
}

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

}  // namespace

Payload payload_of(std::size_t bytes) { return std::make_shared<std::vector<std::uint64_t>>(bytes / 8, 1); }

RpcPair::RpcPair(const RpcPairOptions& options)
    : address_{options.address, 0}, patience_(options.patience), bulk_(payload_of(options.bulk_bytes)) {
  if (options.before_server) options.before_server();
  server_io_ = std::make_unique<IoThreads>(options.threads);
  net::RpcServerOptions server_options;
  server_options.listen = address_;
  server_options.idle_timeout = options.idle_timeout;
  if (options.count_connections) server_options.metrics = &metrics_;
  server_ = std::make_unique<net::RpcServer>(server_io_->io(), server_options,
                                             [this](net::IncomingCall call) { answer(std::move(call), bulk_); });
  server_->listen().value();
  if (options.before_clients) options.before_clients();
  client_io_ = std::make_unique<IoThreads>(options.threads);
  for (std::size_t i = 0; i < options.clients; ++i) clients_.emplace_back(client_io_->io().get_executor());
}

std::size_t RpcPair::server_connections() {
  return static_cast<std::size_t>(metrics_.gauge("dmoe_rpc_connections", "").Value());
}

void RpcPair::start(std::size_t client, const char* uid, const Payload& payload, OnReply on_reply) {
  std::vector<net::CallSpec> calls;
  calls.push_back({[&](net::schema::Call::Builder call, net::Attachments& attachments) {
                     auto forward = call.initForward();
                     forward.setUid(uid);
                     if (!payload) return;
                     attachments.keep(payload);
                     write_tensor(forward.initInputs(1)[0], payload->data(), payload->size() * 8);
                   },
                   Clock::now() + patience_, std::move(on_reply)});
  clients_[client].start({address_.host, server_->port()}, std::move(calls));
}

void RpcPair::call_and_wait(std::size_t client, const char* uid, const Payload& payload) {
  std::binary_semaphore answered(0);
  std::string failure;
  start(client, uid, payload, [&](const Result<net::IncomingReply>& reply) {
    if (reply.has_error()) failure = describe(reply.error());
    answered.release();
  });
  answered.acquire();
  if (!failure.empty()) throw std::runtime_error(failure);
}

std::vector<double> blocking_calls(RpcPair& pair, const char* uid, const Payload& payload, Seconds duration) {
  std::vector<double> samples;
  pair.call_and_wait(0, uid, payload);
  const auto end = Clock::now() + duration;
  for (auto before = Clock::now(); before < end || samples.empty();) {
    pair.call_and_wait(0, uid, payload);
    const auto after = Clock::now();
    samples.push_back(micros(after - before));
    before = after;
  }
  return samples;
}

Chain::Chain(RpcPair& pair, Payload payload, std::size_t in_flight, Seconds duration)
    : pair_(pair),
      payload_(std::move(payload)),
      in_flight_(in_flight),
      end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(duration)),
      running_(in_flight) {}

double Chain::run() {
  const auto begin = Clock::now();
  for (std::size_t i = 0; i < in_flight_; ++i) start();
  finished_.acquire();
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw std::runtime_error(failure_);
  return static_cast<double>(answered_) / Seconds(Clock::now() - begin).count();
}

void Chain::start() {
  std::size_t client = 0;
  {
    const std::lock_guard lock(mutex_);
    client = next_client_++ % pair_.clients();
  }
  pair_.start(client, "echo", payload_,
              [this, before = Clock::now()](const Result<net::IncomingReply>& reply) { on_reply(before, reply); });
}

void Chain::on_reply(Clock::time_point before, const Result<net::IncomingReply>& reply) {
  const auto now = Clock::now();
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    if (reply.has_error()) failure_ = describe(reply.error());
    ++answered_;
    samples_.push_back(micros(now - before));
    const bool over = !failure_.empty() || now >= end_;
    if (over) last = --running_ == 0;
    if (over && !last) return;
  }
  if (last) return finished_.release();
  start();
}

}  // namespace dmoe::bench
