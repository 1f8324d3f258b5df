#include "cli/advice.hpp"

#include "cli/announced_address.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <utility>

namespace dmoe::cli {
namespace {

/// Names that libraries give to what a flag of the same name sets.
constexpr std::array<std::string_view, 15> kSettings{
    "max_memory",   "max_connections", "max_resident_experts", "num_experts",    "reset_optimizer",
    "total_steps",  "warmup_steps",    "hidden_dim",           "max_batch_size", "learning_rate",
    "weight_decay", "clip_grad_norm",  "announcement_ttl",     "k_min",          "k_best"};

bool is_part_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-'; }

std::string with_flags(std::string text) {
  for (const std::string_view name : kSettings) {
    std::string flag = "--" + std::string(name);
    std::replace(flag.begin(), flag.end(), '_', '-');
    for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
      const std::size_t end = at + name.size();
      if ((at > 0 && is_part_of_word(text[at - 1])) || (end < text.size() && is_part_of_word(text[end]))) continue;
      text.replace(at, name.size(), flag);
      at += flag.size() - 1;
    }
  }
  return text;
}

std::string own_addresses() {
  std::string text;
  for (const std::string& address : candidate_addresses()) text += (text.empty() ? "" : ", ") + address;
  return text.empty() ? "it has 127.0.0.1" : "it has 127.0.0.1, " + text;
}

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::string next_step(const std::string& message) {
  const bool listening = has(message, "cannot listen on") || has(message, "UDP port");
  if (listening && has(message, "Cannot assign requested address")) {
    return "this machine has no such address (" + own_addresses() +
           "); give one of them, or --listen 0.0.0.0:PORT with --announce HOST:PORT";
  }
  if (listening && has(message, "Permission denied")) return "choose a port above 1023";
  constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kSteps{{
      {"cannot use the data directory", "name a directory that this user may write with --data-dir"},
      {"cannot create a file beside", "name a file in a directory that this user may write"},
      {"cannot make the folder", "name a file in a directory that this user may write"},
      {"is not a key file", "name one, or a new file for 'dmoe keygen' to make"},
      {"exists and is not replaced", "name another file, or move that one away"},
      {"no initial peer answered", "check these addresses ('dmoe dht ping HOST:PORT' asks one node)"},
      {"the expert takes", "give the --hidden-dim that the servers have"},
      {"names no TorchScript file", "give --expert-arg file=PATH"},
      {"unknown expert argument", "remove or correct this --expert-arg"},
  }};
  for (const auto& [part, step] : kSteps) {
    if (has(message, part)) return std::string(step);
  }
  return {};
}

}  // namespace

std::string advise(const Error& error) {
  const std::string step = next_step(error.message);
  return with_flags(error.message) + (step.empty() ? "" : "; " + step);
}

}  // namespace dmoe::cli
