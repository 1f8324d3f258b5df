// A server of an architecture of one's own: a gated linear unit, y = x + W2 (sigmoid(Wg x) * (W1 x)).
//
//   custom_expert [--port PORT] [--pattern PATTERN] [--hidden-dim H] [--data-dir FOLDER] [--initial-peer HOST:PORT]
//
// It prints its port when its experts can be called, and serves until its standard input ends.
#include "expert_server/architectures.hpp"
#include "expert_server/expert_module.hpp"
#include "expert_server/server.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using dmoe::expert_server::ArchitectureArguments;
using dmoe::expert_server::ExpertModule;
using dmoe::expert_server::ExpertSchema;
using dmoe::expert_server::NamedTensor;

class GatedUnit final : public ExpertModule {
 public:
  GatedUnit(std::int64_t width, std::int64_t inner) : value_(width, inner), gate_(width, inner), out_(inner, width) {
    schema_.inputs = schema_.outputs = {{at::kFloat, {width}}};  // Rows of `width` floats in, the same out.
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) override {
    const auto& x = inputs[0];
    return {x + out_(torch::sigmoid(gate_(x)) * value_(x))};
  }

  const ExpertSchema& schema() const override { return schema_; }

  // What is trained, checkpointed and restored, by names that stay the same.
  std::vector<NamedTensor> parameters() const override {
    return {{"value.weight", value_->weight}, {"value.bias", value_->bias}, {"gate.weight", gate_->weight},
            {"gate.bias", gate_->bias},       {"out.weight", out_->weight}, {"out.bias", out_->bias}};
  }

  // It shares nothing with other experts, so small batches of several may be computed at once.
  bool runs_beside_others() const override { return true; }

 private:
  torch::nn::Linear value_, gate_, out_;
  ExpertSchema schema_;
};

dmoe::net::Endpoint endpoint_of(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon == std::string::npos) throw std::invalid_argument("'" + text + "' is no HOST:PORT");
  return {text.substr(0, colon), static_cast<std::uint16_t>(std::stoul(text.substr(colon + 1)))};
}

dmoe::expert_server::ServerOptions options_from(const std::vector<std::string>& words) {
  dmoe::expert_server::ServerOptions options;
  options.listen = {"127.0.0.1", 0};
  options.expert_pattern = "gated.[0:2]";
  options.expert.architecture = "gated_unit";
  options.expert.hidden_dim = 32;
  options.expert.arguments["inner"] = "48";
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) {
    const auto& value = words[i + 1];
    if (words[i] == "--port") {
      options.listen.port = static_cast<std::uint16_t>(std::stoul(value));
    } else if (words[i] == "--pattern") {
      options.expert_pattern = value;
    } else if (words[i] == "--hidden-dim") {
      options.expert.hidden_dim = std::stoll(value);
    } else if (words[i] == "--data-dir") {
      options.data_dir = value;
    } else if (words[i] == "--initial-peer") {
      options.initial_peers.push_back(endpoint_of(value));
    } else {
      throw std::invalid_argument("unknown option " + words[i]);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    // Before a server starts. The factory draws the weights; `inner` is what `--expert-arg inner=48` would give.
    dmoe::expert_server::register_architecture("gated_unit", [](ArchitectureArguments& arguments) {
      const auto width = arguments.hidden_dim();
      return std::unique_ptr<ExpertModule>(
          std::make_unique<GatedUnit>(width, arguments.integer("inner", 2 * width, 1, 65'536)));
    });
    auto server = dmoe::expert_server::Server::start(options_from({argv + 1, argv + argc}));
    if (!server) {
      std::fprintf(stderr, "cannot serve: %s\n", server.error().message.c_str());
      return 1;
    }
    std::printf("serving on port %u\n", unsigned{(*server)->port()});
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
    (*server)->stop();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "custom_expert: %s\n", error.what());
    return 2;
  }
}
