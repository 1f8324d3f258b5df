#include "expert_server/expert_factory.hpp"

#include "expert_server/invalid.hpp"

#include <utility>

namespace dmoe::expert_server {
namespace {

std::string text_of(const std::map<std::string, std::string>& arguments) {
  std::string text;
  for (const auto& [name, value] : arguments) text += (text.empty() ? "" : " ") + name + "=" + value;
  return text.empty() ? "none" : text;
}

Result<void> check_same(const ExpertDescription& here, const ExpertDescription& there) {
  const auto differ = [&](const std::string& what, const std::string& left, const std::string& right) {
    return invalid("the checkpoint of expert " + to_string(here.uid) + " has " + what + " " + right + ", the options " +
                   left + ": start with the checkpoint's value, or with another data directory");
  };
  if (here.architecture != there.architecture) return differ("architecture", here.architecture, there.architecture);
  if (here.hidden_dim != there.hidden_dim) {
    return differ("hidden_dim", std::to_string(here.hidden_dim), std::to_string(there.hidden_dim));
  }
  auto mine = here.arguments;
  auto theirs = there.arguments;
  mine.erase("file");  // Where a script lies says nothing about what it is.
  theirs.erase("file");
  if (mine != theirs) return differ("arguments", text_of(here.arguments), text_of(there.arguments));
  return {};
}

/// The seed of one expert's weights: experts of one server differ, and do not depend on the order they are made in.
std::uint64_t weight_seed(std::uint64_t seed, const ExpertUid& uid) {
  return seed ^ (std::hash<ExpertUid>{}(uid)*0x9E3779B97F4A7C15ULL);
}

}  // namespace

Result<OptimizerSettings> optimizer_settings(const ExpertOptions& options, const OptimizerSettings* checkpoint) {
  OptimizerSettings settings = checkpoint != nullptr ? *checkpoint : OptimizerSettings{};
  if (options.optimizer) {
    const auto kind = parse_optimizer(*options.optimizer);
    if (!kind) return kind.error();
    settings.kind = *kind;
  }
  settings.learning_rate = options.learning_rate.value_or(settings.learning_rate);
  if (options.schedule) {
    const auto kind = parse_schedule(*options.schedule);
    if (!kind) return kind.error();
    settings.schedule.kind = *kind;
  }
  settings.schedule.warmup_steps = options.warmup_steps.value_or(settings.schedule.warmup_steps);
  settings.schedule.total_steps = options.total_steps.value_or(settings.schedule.total_steps);
  settings.amsgrad = options.amsgrad.value_or(settings.amsgrad);
  settings.nesterov = options.nesterov.value_or(settings.nesterov);
  settings.momentum = options.momentum.value_or(settings.momentum);
  settings.weight_decay = options.weight_decay.value_or(settings.weight_decay);
  settings.clip_grad_norm = options.clip_grad_norm.value_or(settings.clip_grad_norm);
  if (auto checked = check(settings); !checked) return checked.error();
  return settings;
}

Result<std::unique_ptr<ExpertBackend>> make_expert(const ExpertUid& uid, const ExpertOptions& options,
                                                   CheckpointStore* store, bool reset_optimizer, std::uint64_t seed,
                                                   bool* restored) {
  std::optional<ExpertSnapshot> snapshot;
  if (store != nullptr) {
    auto loaded = store->load(uid);
    if (!loaded) return loaded.error();
    snapshot = std::move(*loaded);
  }
  const ExpertDescription description{uid, options.architecture, options.hidden_dim, options.arguments};
  auto settings = optimizer_settings(options, snapshot ? &snapshot->optimizer : nullptr);
  if (!settings) return settings.error();
  if (snapshot) {
    if (auto same = check_same(description, snapshot->description); !same) return same.error();
    if (settings->kind != snapshot->optimizer.kind) {
      if (!reset_optimizer) {
        return invalid("the checkpoint of expert " + to_string(uid) + " was trained with optimizer " +
                       to_string(snapshot->optimizer.kind) + ", the options say " + to_string(settings->kind) +
                       ": use the checkpoint's, or accept the loss of its state with reset_optimizer");
      }
      snapshot->optimizer_state.clear();
    }
  }
  const auto drawn_from = snapshot ? std::nullopt : std::optional<std::uint64_t>(weight_seed(seed, uid));
  auto backend = ExpertBackend::create(description, *settings, options.max_batch_size, drawn_from);
  if (backend && options.frozen) (*backend)->freeze();
  if (restored != nullptr) *restored = snapshot.has_value();
  if (!backend || !snapshot) return backend;
  if (auto done = (*backend)->restore(std::move(*snapshot)); !done) {
    return invalid("the checkpoint of expert " + to_string(uid) + " does not fit: " + done.error().message);
  }
  return backend;
}

}  // namespace dmoe::expert_server
