// A character language model of any text file, whose layers are transformer blocks on other people's machines.
//
//   text_transformer HOST:PORT FILE [STEPS]
#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

constexpr std::int64_t kWidth = 64;   // Features of a character: `--hidden-dim` of the servers.
constexpr std::int64_t kWindow = 32;  // Characters that the next one is told from.
constexpr std::int64_t kBatch = 64;

/// The file as numbers of its characters, and back.
struct Text {
  explicit Text(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    if (bytes.size() <= kWindow) throw std::runtime_error(path + " cannot be read, or is shorter than a window");
    alphabet = bytes;
    std::sort(alphabet.begin(), alphabet.end());
    alphabet.erase(std::unique(alphabet.begin(), alphabet.end()), alphabet.end());
    characters = torch::empty(static_cast<std::int64_t>(bytes.size()), torch::kInt64);
    auto* number = characters.data_ptr<std::int64_t>();
    for (const char c : bytes) *number++ = static_cast<std::int64_t>(alphabet.find(c));
  }
  std::int64_t letters() const { return static_cast<std::int64_t>(alphabet.size()); }

  torch::Tensor characters;
  std::string alphabet;
};

/// [rows, window] characters → [rows, letters] logits of the character that follows. Experts and gate see the whole
/// window of a row, so only what comes after it may be asked for.
struct NetImpl : torch::nn::Module {
  NetImpl(const std::shared_ptr<dmoe::Client>& client, std::int64_t letters)
      : letter(register_module("letter", torch::nn::Embedding(letters, kWidth))),
        place(register_module("place", torch::nn::Embedding(kWindow, kWidth))),
        low(register_module("low", layer(client, "low"))),
        high(register_module("high", layer(client, "high"))),
        out(register_module("out", torch::nn::Linear(kWidth, letters))) {}

  // One gate for all of a row: its experts get the whole sequence, as attention needs it.
  static dmoe::DMoE layer(const std::shared_ptr<dmoe::Client>& client, const char* grid) {
    return dmoe::DMoE(client, dmoe::DMoEOptions(kWidth, {4}, grid).k_best(2).per_token(false));
  }

  torch::Tensor forward(const torch::Tensor& windows) {
    const auto tokens = letter(windows) + place(torch::arange(kWindow));
    return out(high(low(tokens)).select(1, -1));
  }

  torch::nn::Embedding letter, place;
  dmoe::DMoE low, high;
  torch::nn::Linear out;
};
TORCH_MODULE(Net);

/// What the model would write on, a character at a time.
std::string written(Net& net, const Text& text, int length) {
  const torch::NoGradGuard no_grad;
  auto window = text.characters.narrow(0, 0, kWindow).unsqueeze(0);
  std::string result;
  for (int i = 0; i < length; ++i) {
    const auto next = net(window).softmax(1).multinomial(1);
    result += text.alphabet[static_cast<std::size_t>(next.item<std::int64_t>())];
    window = torch::cat({window.narrow(1, 1, kWindow - 1), next}, 1);
  }
  return result;
}

int main(int argc, char** argv) try {
  if (argc < 3) throw std::invalid_argument("usage: text_transformer HOST:PORT FILE [STEPS]");
  const int steps = argc > 3 ? std::stoi(argv[3]) : 1000;
  torch::manual_seed(1);
  const Text text(argv[2]);
  Net net(dmoe::Client::connect(dmoe::ClientOptions().initial_peers({argv[1]})), text.letters());
  torch::optim::Adam optimizer(net->parameters(), 3e-3);  // Of what is here; the experts have theirs.
  double usual = 0;
  for (int step = 1; step <= steps; ++step) {
    const auto starts = torch::randint(text.characters.size(0) - kWindow, {kBatch, 1}, torch::kInt64);
    const auto windows = text.characters.take(starts + torch::arange(kWindow));
    const auto next = text.characters.take(starts.squeeze(1) + kWindow);
    optimizer.zero_grad();
    const auto loss = torch::cross_entropy_loss(net(windows), next);
    loss.backward();
    optimizer.step();
    usual += (loss.item<double>() - usual) * (step == 1 ? 1.0 : 0.05);
    if (step % 50 == 0 || step == steps) std::printf("step %d  loss %.3f\n", step, usual);
  }
  net->eval();
  std::printf("it writes: %s\n", written(net, text, 200).c_str());
} catch (const std::exception& error) {
  std::fprintf(stderr, "text_transformer: %s\n", error.what());
  return 1;
}
