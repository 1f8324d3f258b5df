// Calls on loopback against raw TCP: latency and rate with 1, 16 and 64 in flight, and the bandwidth of large tensors.
#include "bench/copy_meter.hpp"
#include "bench/rpc_floor.hpp"
#include "bench/rpc_pair.hpp"
#include "bench/suite.hpp"

#include <algorithm>
#include <vector>

namespace dmoe::bench {
namespace {

constexpr std::size_t kRowBytes = 4UL * 1024;  ///< 1,024 float32.
constexpr std::size_t kBulkBytes = 64UL * 1024 * 1024;

/// Other programs disturb a machine for seconds at a time: floor and calls are measured by turns, and the median of the
/// rounds is reported.
constexpr int kRpcRounds = 5;

double median(std::vector<double> values) { return percentile(values, 0.5); }

void in_flight(std::size_t count, const Options& options, Reporter& reporter) {
  const Seconds duration = Seconds(options.seconds) / kRpcRounds;
  RpcPair pair;
  const auto row = payload_of(kRowBytes);
  std::vector<double> p50;
  std::vector<double> p99;
  std::vector<double> rate;
  std::vector<double> blocking;
  std::vector<double> floor_p50;
  std::vector<double> floor_p99;
  std::vector<double> floor_rate;
  std::vector<double> ratio;
  for (int round = 0; round < kRpcRounds; ++round) {
    const auto floor = tcp_echo(kRowBytes, count, duration);
    Chain chain(pair, row, count, duration);
    rate.push_back(chain.run());
    p50.push_back(percentile(chain.samples(), 0.5));
    p99.push_back(percentile(chain.samples(), 0.99));
    if (count == 1) blocking.push_back(median(blocking_calls(pair, "echo", row, duration)));
    floor_p50.push_back(floor.p50_us);
    floor_p99.push_back(floor.p99_us);
    floor_rate.push_back(floor.messages_per_s);
    ratio.push_back(p50.back() / floor.p50_us);
  }
  nlohmann::ordered_json fields{{"in_flight", count},
                                {"bytes", kRowBytes},
                                {"floor_p50_us", median(floor_p50)},
                                {"p50_us", median(p50)},
                                {"p99_us", median(p99)},
                                {"requests_per_s", median(rate)},
                                {"ratio", median(ratio)},
                                {"floor_p99_us", median(floor_p99)},
                                {"floor_requests_per_s", median(floor_rate)}};
  if (count == 1) fields["blocking_p50_us"] = median(blocking);  // The caller is a thread of its own, and sleeps.
  reporter.report("rpc", fields);
}

/// One direction of large tensors.
class BulkDirection {
 public:
  BulkDirection(RpcPair& pair, const char* uid, Payload payload)
      : pair_(pair), uid_(uid), payload_(std::move(payload)) {}

  void measure(double floor, Seconds duration) {
    const auto before = copied_bytes();
    auto samples = blocking_calls(pair_, uid_, payload_, duration);
    // One call more than samples: the first is not timed.
    const auto bytes = static_cast<double>(kBulkBytes * (samples.size() + 1));
    copies_.push_back(static_cast<double>(copied_bytes() - before) / bytes);
    rate_.push_back(static_cast<double>(kBulkBytes) / (percentile(samples, 0.5) * 1e3));
    ratio_.push_back(rate_.back() / floor);
  }
  double rate() const { return median(rate_); }
  double ratio() const { return median(ratio_); }
  double copies() const { return median(copies_); }

 private:
  RpcPair& pair_;
  const char* uid_;
  Payload payload_;
  std::vector<double> rate_;
  std::vector<double> ratio_;
  std::vector<double> copies_;
};

void bulk(const Options& options, Reporter& reporter) {
  const Seconds duration = Seconds(options.seconds) / kRpcRounds;
  RpcPairOptions pair_options;
  pair_options.bulk_bytes = kBulkBytes;
  RpcPair pair(pair_options);
  BulkDirection up(pair, "sink", pair.bulk());
  BulkDirection down(pair, "source", nullptr);
  // Chosen once: the best of several in each round would be the luckiest.
  const auto piece = best_stream_piece(kBulkBytes, Seconds(options.seconds));
  std::vector<double> floor;
  for (int round = 0; round < kRpcRounds; ++round) {
    floor.push_back(tcp_stream_gb_per_s(kBulkBytes, piece, duration));
    up.measure(floor.back(), duration);
    down.measure(floor.back(), duration);
  }
  reporter.report("rpc", {{"gb_per_s_64mib", std::min(up.rate(), down.rate())},
                          {"floor_gb_per_s_64mib", median(floor)},
                          {"floor_piece_bytes", piece},
                          {"copies_per_byte", std::max(up.copies(), down.copies())},
                          {"ratio", std::min(up.ratio(), down.ratio())},
                          {"up_gb_per_s", up.rate()},
                          {"up_ratio", up.ratio()},
                          {"up_copies_per_byte", up.copies()},
                          {"down_gb_per_s", down.rate()},
                          {"down_ratio", down.ratio()},
                          {"down_copies_per_byte", down.copies()}});
}

}  // namespace

void rpc_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  if (wanted("in_flight")) {
    for (const std::size_t count : {1, 16, 64}) in_flight(count, options, reporter);
  }
  if (wanted("bulk")) bulk(options, reporter);
}

}  // namespace dmoe::bench
