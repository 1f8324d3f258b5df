// What compression saves and costs: bytes, time of the codec, and how a model learns with it.
#include "bench/suite.hpp"
#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"
#include "expert_server/server.hpp"
#include "net/outgoing_frame.hpp"
#include "net/tensor_codec.hpp"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dmoe::bench {
namespace {

using CodecClock = std::chrono::steady_clock;

constexpr std::int64_t kCodedRows = 1'024;  ///< × 1,024 float32: 4 MiB, as a large call carries.
constexpr std::int64_t kInputs = 32;
constexpr std::int64_t kFeatures = 64;
constexpr std::int64_t kClasses = 10;
constexpr std::int64_t kExperts = 4;
constexpr std::int64_t kBatch = 64;
constexpr int kTrainingSteps = 400;
constexpr int kCurvePoints = 8;

template <class Run>
double median_seconds(double duration, Run run) {
  std::vector<double> samples;
  run();
  const auto end = CodecClock::now() + std::chrono::duration<double>(duration);
  while (samples.empty() || CodecClock::now() < end) {
    const auto before = CodecClock::now();
    run();
    samples.push_back(std::chrono::duration<double>(CodecClock::now() - before).count());
  }
  return percentile(samples, 0.5);
}

void codec(Compression compression, const Options& options, Reporter& reporter) {
  const auto tensor = torch::randn({kCodedRows, 1'024});
  const auto encode = [&](net::OutgoingFrame& frame) {
    const auto list = frame.root().initReplies(1)[0].initForward(1);
    net::encode_tensors({tensor}, list, frame.attachments(), compression).value();
    return list;
  };
  net::OutgoingFrame kept;
  const auto coded = encode(kept).asReader();
  const double bytes = static_cast<double>(tensor.nbytes());
  const double encoding = median_seconds(options.seconds / 2, [&] {
    net::OutgoingFrame frame;
    encode(frame);
  });
  const double decoding =
      median_seconds(options.seconds / 2, [&] { net::decode_tensors(coded, std::make_shared<int>()).value(); });
  const auto decoded = net::decode_tensors(coded, std::make_shared<int>()).value().front();
  nlohmann::ordered_json fields{{"part", "codec"},
                                {"compression", to_string(compression)},
                                {"bytes_per_value", static_cast<double>(net::wire_bytes(coded)) / (bytes / 4)},
                                {"relative_error", ((decoded - tensor).norm() / tensor.norm()).item<double>()}};
  if (compression != Compression::kNone) {  // What is sent as it lies costs nothing.
    fields["encode_gb_per_s"] = bytes / encoding / 1e9;
    fields["decode_gb_per_s"] = bytes / decoding / 1e9;
  }
  reporter.report("compression", fields);
}

template <class Make>
auto with_seed(std::uint64_t seed, Make make) {
  torch::manual_seed(seed);
  return make();
}

/// Points around the corners of a cube, a class a corner, noise between: learned in some hundred steps, never quite.
class Blobs {
 public:
  explicit Blobs(std::uint64_t seed) : centres_(with_seed(seed, [] { return torch::randn({kClasses, kInputs}); })) {}

  std::pair<torch::Tensor, torch::Tensor> batch(std::uint64_t step) const {
    return with_seed(step, [&] {
      const auto labels = torch::randint(kClasses, {kBatch}, torch::kInt64);
      return std::pair(centres_.index_select(0, labels) + 1.5 * torch::randn({kBatch, kInputs}), labels);
    });
  }

 private:
  torch::Tensor centres_;
};

std::unique_ptr<expert_server::Server> serve_experts(std::uint64_t seed) {
  expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "ffn.[0:" + std::to_string(kExperts) + "]";
  options.expert.hidden_dim = kFeatures;
  options.seed = seed;
  return expert_server::Server::start(std::move(options)).value();
}

std::uint64_t traffic(const std::vector<CallReport>& calls) {
  std::uint64_t bytes = 0;
  for (const auto& call : calls) bytes += call.bytes_sent + call.bytes_received;
  return bytes;
}

/// The same model, experts and batches each time; only the wire differs.
void learning(Compression compression, const Options& options, Reporter& reporter) {
  const auto server = serve_experts(options.seed);
  const auto client = Client::connect(ClientOptions().initial_peers({"127.0.0.1:" + std::to_string(server->port())}));
  const Blobs blobs(options.seed);
  torch::manual_seed(options.seed);
  torch::nn::Linear in(kInputs, kFeatures);
  torch::nn::Linear out(kFeatures, kClasses);
  DMoE experts(client, DMoEOptions(kFeatures, {kExperts}, "ffn").k_best(2).compression(compression));
  std::vector<torch::Tensor> parameters = in->parameters();
  for (const auto& more : {out->parameters(), experts->parameters()}) {
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(1e-3));

  std::uint64_t forward_bytes = 0;
  {
    const torch::NoGradGuard no_grad;
    const std::uint64_t plain = 2 * kBatch * 2 * kFeatures * 4;  // Every row to two experts and back.
    const auto end = CodecClock::now() + std::chrono::seconds(10);
    do {  // The first forwards go before the server said what it reads.
      experts->forward(torch::randn({kBatch, kFeatures}));
      forward_bytes = traffic(experts->last_call());
    } while (compression != Compression::kNone && forward_bytes == plain && CodecClock::now() < end);
    if (compression != Compression::kNone && forward_bytes == plain) {
      throw std::runtime_error("the server does not read " + std::string(to_string(compression)));
    }
  }

  std::vector<double> curve;
  double sum = 0;
  std::uint64_t step_bytes = 0;
  const auto begin = CodecClock::now();
  for (int step = 0; step < kTrainingSteps; ++step) {
    const auto [input, labels] = blobs.batch(static_cast<std::uint64_t>(step) + 1'000);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(out(experts(in(input).relu())), labels);
    loss.backward();
    optimizer.step();
    sum += loss.item<double>();
    step_bytes = traffic(experts->last_call());
    constexpr int kEach = kTrainingSteps / kCurvePoints;
    if ((step + 1) % kEach == 0) curve.push_back(std::exchange(sum, 0.0) / kEach);
  }
  const double seconds = std::chrono::duration<double>(CodecClock::now() - begin).count();
  reporter.report("compression", {{"part", "learning"},
                                  {"compression", to_string(compression)},
                                  {"bytes_per_forward", forward_bytes},
                                  {"bytes_per_step", step_bytes},
                                  {"steps", kTrainingSteps},
                                  {"steps_per_s", kTrainingSteps / seconds},
                                  {"loss_curve", curve},
                                  {"final_loss", curve.back()}});
}

}  // namespace

void compression_suite(const Options& options, Reporter& reporter) {
  const auto wanted = [&](const char* mode) { return !options.mode || *options.mode == mode; };
  for (const auto compression : kCompressions) {
    if (wanted("codec")) codec(compression, options, reporter);
  }
  for (const auto compression : kCompressions) {
    if (wanted("learning")) learning(compression, options, reporter);
  }
}

}  // namespace dmoe::bench
