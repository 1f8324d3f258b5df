#include "expert_server/architectures.hpp"

#include "expert_server/builtin_experts.hpp"
#include "expert_server/fresh_weights.hpp"
#include "expert_server/script_expert.hpp"
#include "expert_server/server.hpp"

#include <torch/types.h>

#include <charconv>
#include <mutex>
#include <utility>

namespace dmoe::expert_server {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, ArchitectureFactory> factories{{"det_dropout", make_det_dropout_expert},
                                                       {"ffn", make_ffn_expert},
                                                       {"lstm", make_lstm_expert},
                                                       {"nop", make_nop_expert},
                                                       {"script", make_script_expert},
                                                       {"transformer", make_transformer_expert}};
};

Registry& registry() {
  static Registry instance;
  return instance;
}

template <class T>
bool parse_whole(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  return code == std::errc{} && stop == end;
}

template <class T>
T bounded(const std::string& name, const std::string& text, T fallback, T least, T most, std::string& first_bad) {
  T value = fallback;
  if (parse_whole(text, value) && value >= least && value <= most) return value;
  if (first_bad.empty()) {
    first_bad = "expert argument " + name + "=" + text + ": expected a number from " + std::to_string(least) + " to " +
                std::to_string(most);
  }
  return fallback;
}

std::string joined(const auto& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

/// Torch's default generator is process-wide: weights are drawn under one lock, and its state is put back.
std::unique_ptr<ExpertModule> make_seeded(const ArchitectureFactory& factory, ArchitectureArguments& arguments,
                                          std::uint64_t seed) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto before = generator.get_state();
  generator.set_current_seed(seed);
  auto module = factory(arguments);
  generator.set_state(before);
  return module;
}

}  // namespace

const std::string* ArchitectureArguments::find(const std::string& name) {
  asked_.insert(name);
  const auto found = values_.find(name);
  return found == values_.end() ? nullptr : &found->second;
}

std::int64_t ArchitectureArguments::integer(const std::string& name, std::int64_t fallback, std::int64_t least,
                                            std::int64_t most) {
  const auto* text = find(name);
  return text == nullptr ? fallback : bounded(name, *text, fallback, least, most, first_bad_);
}

double ArchitectureArguments::number(const std::string& name, double fallback, double least, double most) {
  const auto* text = find(name);
  return text == nullptr ? fallback : bounded(name, *text, fallback, least, most, first_bad_);
}

std::string ArchitectureArguments::text(const std::string& name, const std::string& fallback) {
  const auto* given = find(name);
  return given == nullptr ? fallback : *given;
}

Result<void> ArchitectureArguments::check() const {
  if (!first_bad_.empty()) return Error{Errc::kInvalidArgument, first_bad_, {}};
  for (const auto& [name, value] : values_) {
    if (asked_.contains(name)) continue;
    return Error{
        Errc::kInvalidArgument, "unknown expert argument " + name + "; this architecture has: " + joined(asked_), {}};
  }
  return {};
}

void register_architecture(std::string name, ArchitectureFactory factory) {
  auto& known = registry();
  const std::lock_guard lock(known.mutex);
  known.factories[std::move(name)] = std::move(factory);
}

std::vector<std::string> architectures() {
  auto& known = registry();
  const std::lock_guard lock(known.mutex);
  std::vector<std::string> names;
  for (const auto& entry : known.factories) names.push_back(entry.first);
  return names;
}

Result<std::unique_ptr<ExpertModule>> make_expert_module(const std::string& architecture,
                                                         ArchitectureArguments arguments,
                                                         std::optional<std::uint64_t> seed) {
  ArchitectureFactory factory;
  {
    auto& known = registry();
    const std::lock_guard lock(known.mutex);
    if (const auto found = known.factories.find(architecture); found != known.factories.end()) factory = found->second;
  }
  if (!factory) {
    return Error{Errc::kInvalidArgument,
                 "unknown expert architecture " + architecture + "; known: " + joined(architectures()),
                 {}};
  }
  if (arguments.hidden_dim() < 1 || arguments.hidden_dim() > 65'536) {
    return Error{
        Errc::kInvalidArgument, "hidden_dim " + std::to_string(arguments.hidden_dim()) + " is outside 1 to 65536", {}};
  }
  try {
    std::optional<WithoutFreshWeights> undrawn;
    if (!seed) undrawn.emplace();
    auto module = make_seeded(factory, arguments, seed.value_or(0));
    if (auto checked = arguments.check(); !checked) return checked.error();
    return module;
  } catch (const std::exception& e) {
    return Error{Errc::kInvalidArgument, "cannot make an expert of architecture " + architecture + ": " + e.what(), {}};
  }
}

}  // namespace dmoe::expert_server
