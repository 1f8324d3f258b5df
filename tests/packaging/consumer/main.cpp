#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"

#include <iostream>

/// Puts a layer into a model; nobody is there to be called, which is said.
int main(int argc, char* argv[]) {
  if (argc != 2) return 2;
  const auto client = dmoe::Client::try_connect(dmoe::ClientOptions().initial_peers({argv[1]}));
  if (client.has_error()) {
    std::cout << describe(client.error()) << '\n';
    return 3;
  }
  dmoe::DMoE layer(*client, dmoe::DMoEOptions(8, {2, 2}, "ffn"));
  std::cout << layer->forward(torch::ones({1, 8})).sizes() << '\n';
}
