// The registry of expert architectures, and the built-in ones.
#pragma once

#include "expert_server/expert_module.hpp"
#include "net/error.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace dmoe::expert_server {

/// What a factory is given: the width, and `--expert-arg` values by name.
class ArchitectureArguments {
 public:
  ArchitectureArguments(std::int64_t hidden_dim, std::map<std::string, std::string> values)
      : hidden_dim_(hidden_dim), values_(std::move(values)) {}

  std::int64_t hidden_dim() const noexcept { return hidden_dim_; }
  /// The value of `name`, or `fallback`. A text that is no number, or outside [least, most], is reported by `check`.
  std::int64_t integer(const std::string& name, std::int64_t fallback, std::int64_t least, std::int64_t most);
  double number(const std::string& name, double fallback, double least, double most);
  std::string text(const std::string& name, const std::string& fallback);
  /// kInvalidArgument naming the first bad value, or a name that no call asked for with the names that exist.
  Result<void> check() const;

 private:
  const std::string* find(const std::string& name);

  std::int64_t hidden_dim_;
  std::map<std::string, std::string> values_;
  std::set<std::string> asked_;
  std::string first_bad_;
};

/// Makes one expert with fresh weights drawn from the thread's current torch seed. May throw what torch throws.
using ArchitectureFactory = std::function<std::unique_ptr<ExpertModule>(ArchitectureArguments&)>;

/// Adds an architecture, before any server starts. Thread-safe. Replaces one of the same name.
void register_architecture(std::string name, ArchitectureFactory factory);

/// Makes an expert of a registered architecture with weights that depend on `seed` only. Without one they may be
/// anything: somebody is about to overwrite them.
/// kInvalidArgument: unknown name (with the known ones), bad argument, or a width the architecture cannot have.
Result<std::unique_ptr<ExpertModule>> make_expert_module(const std::string& architecture,
                                                         ArchitectureArguments arguments,
                                                         std::optional<std::uint64_t> seed);

}  // namespace dmoe::expert_server
