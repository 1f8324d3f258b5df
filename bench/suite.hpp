// The suites of dmoe-bench and what they share: options, and one JSON object per result.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::bench {

/// What the command line gave. A suite reads what it knows and has its own default for what is missing.
struct Options {
  std::uint64_t seed = 1;
  double seconds = 2.0;                          ///< How long one measurement runs.
  std::optional<std::size_t> nodes;              ///< `--nodes N`: dht, dht-sim.
  int compute_threads = 0;                       ///< `--compute-threads N`: layer. 0: the server's default.
  std::vector<std::vector<std::int64_t>> grids;  ///< `--grid 32,32`, repeatable: beam.
  std::string distribution = "exponential";      ///< `--distribution NAME`: latency. Of the delays.
  double shape = 1;                              ///< `--shape K`: latency. Of the Weibull distribution.
  std::optional<std::string> mode;               ///< `--mode forward`: run only this part of a suite.
  std::filesystem::path trace;                   ///< `--trace DIR`: latency. Where traces are written; empty: nowhere.
};

/// Prints results as they come: JSON lines with `--json`, else aligned "name value" lines for a person.
class Reporter {
 public:
  explicit Reporter(bool json) : json_(json) {}

  /// Prints one result of `suite`. `fields` is a JSON object; "suite" is added in front.
  void report(const std::string& suite, const nlohmann::ordered_json& fields);
  /// Progress for a person; nothing with `--json`.
  void note(const std::string& text);

 private:
  bool json_;
};

using Suite = std::function<void(const Options&, Reporter&)>;

// Each in its own file, <name>_bench.cpp. A suite measures its own baseline in the same run, and throws
// std::runtime_error when it cannot measure what its fields say.
void rpc_suite(const Options& options, Reporter& reporter);
void lossy_suite(const Options& options, Reporter& reporter);
void connections_suite(const Options& options, Reporter& reporter);
void server_suite(const Options& options, Reporter& reporter);
void batching_suite(const Options& options, Reporter& reporter);
void hosting_suite(const Options& options, Reporter& reporter);
void checkpoint_suite(const Options& options, Reporter& reporter);
void dht_suite(const Options& options, Reporter& reporter);
void dht_sim_suite(const Options& options, Reporter& reporter);
void beam_suite(const Options& options, Reporter& reporter);
void compression_suite(const Options& options, Reporter& reporter);
void layer_suite(const Options& options, Reporter& reporter);
void latency_suite(const Options& options, Reporter& reporter);
void failures_suite(const Options& options, Reporter& reporter);

/// The value below which `share` (0 to 1) of `samples` lie; sorts them. @pre !samples.empty()
double percentile(std::vector<double>& samples, double share);

}  // namespace dmoe::bench
