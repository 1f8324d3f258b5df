// Large tensors over a line with 100 ms of round trip and 1 % of packets lost: in how many calls they should travel.
#include "bench/lossy_wire.hpp"
#include "bench/rpc_pair.hpp"
#include "bench/suite.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <vector>

namespace dmoe::bench {
namespace {

using LineClock = std::chrono::steady_clock;

constexpr int kLineRounds = 5;

/// Seconds from the start of the first call to the last answer when `bytes` travel in calls of `chunk`, all begun at
/// once, as a layer's calls are.
double seconds_in_chunks(RpcPair& pair, std::size_t bytes, std::size_t chunk) {
  const auto payload = payload_of(chunk);
  const auto count = static_cast<std::ptrdiff_t>(bytes / chunk);
  std::counting_semaphore<> answered(0);
  std::atomic<bool> failed{false};
  const auto start = LineClock::now();
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    pair.start(0, "sink", payload, [&](const Result<net::IncomingReply>& reply) {
      if (reply.has_error()) failed = true;
      answered.release();
    });
  }
  for (std::ptrdiff_t i = 0; i < count; ++i) answered.acquire();
  if (failed) throw std::runtime_error("a call over the lossy wire failed");
  return Seconds(LineClock::now() - start).count();
}

/// The rate in calls of several sizes, by turns. The whole tensor in one call is what a layer does.
void measure_line(const std::string& congestion, std::size_t bytes, const Options& options, Reporter& reporter) {
  WireConditions conditions;
  conditions.congestion = congestion;
  conditions.seed = options.seed;
  const LossyWire wire(conditions);
  std::map<std::size_t, std::vector<double>> rates;
  {
    RpcPairOptions pair_options;
    pair_options.address = LossyWire::kServerAddress;
    pair_options.patience = std::chrono::minutes(5);
    std::optional<LossyWire::Stay> stay;
    pair_options.before_server = [&] { stay.emplace(wire, LossyWire::Host::kServer); };
    pair_options.before_clients = [&] {
      stay.reset();
      stay.emplace(wire, LossyWire::Host::kClient);
    };
    RpcPair pair(pair_options);
    stay.reset();
    seconds_in_chunks(pair, bytes, bytes);  // Connections are open, and know the line.
    for (int round = 0; round < kLineRounds; ++round) {
      for (std::size_t chunk = bytes; chunk >= 64UL * 1024; chunk /= 4) {
        rates[chunk].push_back(static_cast<double>(bytes) / seconds_in_chunks(pair, bytes, chunk) / 1e6);
      }
    }
  }
  double best = 0;
  for (auto& [chunk, samples] : rates) best = std::max(best, percentile(samples, 0.5));
  for (auto& [chunk, samples] : rates) {
    const double rate = percentile(samples, 0.5);
    reporter.report("lossy", {{"congestion", congestion},
                              {"round_trip_ms", 100},
                              {"loss", conditions.loss},
                              {"bytes", bytes},
                              {"call_bytes", chunk},
                              {"mb_per_s", rate},
                              {"to_best", rate / best},
                              {"default", chunk == bytes}});
  }
}

}  // namespace

void lossy_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("bbr")) measure_line("bbr", 16UL << 20U, options, reporter);
  if (wanted("reno")) measure_line("reno", 1UL << 20U, options, reporter);  // Each loss halves its rate.
}

}  // namespace dmoe::bench
