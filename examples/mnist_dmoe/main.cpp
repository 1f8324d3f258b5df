// Trains a classifier of MNIST-like images whose middle layer lives on other people's machines.
//
//   mnist_dmoe HOST:PORT [STEPS [FOLDER]]
#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"

#include <torch/torch.h>
#include <zlib.h>

#include <cstdio>
#include <stdexcept>
#include <string>

/// An IDX file of bytes, plain or gzipped: [N] labels, or [N, height, width] pixels as [N, height * width].
torch::Tensor read_idx(const std::string& path) {
  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error("cannot open " + path);
  const auto number = [file] {  // Big-endian, 4 bytes.
    std::int64_t value = 0;
    for (int i = 0; i < 4; ++i) value = value * 256 + gzgetc(file);
    return value;
  };
  const auto dimensions = number() - 0x0800;  // 0x08: the elements are bytes.
  if (dimensions != 1 && dimensions != 3) throw std::runtime_error(path + " is not an IDX file of labels or images");
  const auto count = number();
  const auto size = dimensions == 3 ? number() * number() : 1;
  auto bytes = torch::empty({count, size}, torch::kUInt8);
  const auto got = gzread(file, bytes.data_ptr(), static_cast<unsigned>(bytes.numel()));
  gzclose(file);
  if (got != bytes.numel()) throw std::runtime_error(path + " ends early");
  return dimensions == 3 ? bytes : bytes.flatten().to(torch::kInt64);
}

struct Images {
  Images(const std::string& folder, const std::string& set)
      : pixels(read_idx(folder + "/" + set + "-images-idx3-ubyte.gz").to(torch::kFloat32) / 127.5 - 1),
        labels(read_idx(folder + "/" + set + "-labels-idx1-ubyte.gz")) {}
  torch::Tensor pixels, labels;
};

/// The experts' answers are added to what they were given, so that a row does not depend on them alone.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const std::shared_ptr<dmoe::Client>& client)
      : in(register_module("in", torch::nn::Linear(28 * 28, 64))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))),
        experts(register_module("experts", dmoe::DMoE(client, dmoe::DMoEOptions(64, {4, 4}, "ffn").k_best(4)))),
        out(register_module("out", torch::nn::Linear(64, 10))) {}

  torch::Tensor forward(const torch::Tensor& images) {
    const auto hidden = norm(torch::relu(in(images)));
    return out(hidden + experts(hidden));
  }

  torch::nn::Linear in;
  torch::nn::LayerNorm norm;
  dmoe::DMoE experts;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

int main(int argc, char** argv) try {
  if (argc < 2) throw std::invalid_argument("usage: mnist_dmoe HOST:PORT [STEPS [FOLDER]]");
  const int steps = argc > 2 ? std::stoi(argv[2]) : 500;
  const std::string folder = argc > 3 ? argv[3] : "/usr/share/datasets/fashion-mnist";

  torch::manual_seed(1);
  const Images train(folder, "train"), test(folder, "t10k");
  Net net(dmoe::Client::connect(dmoe::ClientOptions().initial_peers({argv[1]})));
  torch::optim::Adam optimizer(net->parameters(), 1e-3);  // Of what is here; the experts have theirs.
  for (int step = 1; step <= steps; ++step) {
    const auto rows = torch::randint(train.labels.size(0), {128}, torch::kInt64);
    optimizer.zero_grad();
    const auto loss =
        torch::cross_entropy_loss(net(train.pixels.index_select(0, rows)), train.labels.index_select(0, rows));
    loss.backward();
    optimizer.step();
    if (step % 100 == 0 || step == steps) std::printf("step %d  loss %.3f\n", step, loss.item<double>());
  }
  net->eval();
  const torch::NoGradGuard no_grad;
  const auto right = net(test.pixels).argmax(1).eq(test.labels).sum().item<double>();
  std::printf("test accuracy %.1f %%\n", 100 * right / static_cast<double>(test.labels.size(0)));
} catch (const std::exception& error) {
  std::fprintf(stderr, "mnist_dmoe: %s\n", error.what());
  return 1;
}
