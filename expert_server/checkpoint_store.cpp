#include "expert_server/checkpoint_store.hpp"

#include "expert_server/invalid.hpp"
#include "expert_server/safetensors.hpp"

#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <map>
#include <string>
#include <system_error>
#include <utility>

namespace dmoe::expert_server {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kFormat = "dmoe-expert-1";
constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::size_t kDigits = 10;

std::string file_name(std::uint64_t number) {
  auto digits = std::to_string(number);
  digits.insert(0, digits.size() < kDigits ? kDigits - digits.size() : 0, '0');
  return std::string(kPrefix) + digits + std::string(kSuffix);
}

std::optional<std::uint64_t> number_of(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  const char* first = name.data() + kPrefix.size();
  const char* last = name.data() + name.size() - kSuffix.size();
  std::uint64_t number = 0;
  const auto [end, code] = std::from_chars(first, last, number);
  if (code != std::errc{} || end != last || first == last) return std::nullopt;
  return number;
}

/// Checkpoint files of one folder by number. A folder that cannot be read is an empty one.
std::map<std::uint64_t, fs::path> files_in(const fs::path& folder) {
  std::map<std::uint64_t, fs::path> files;
  std::error_code code;
  for (fs::directory_iterator at(folder, code), end; !code && at != end; at.increment(code)) {
    if (const auto number = number_of(at->path().filename().string())) files.emplace(*number, at->path());
  }
  return files;
}

void remove_temporaries(const fs::path& folder) {
  std::error_code code;
  std::vector<fs::path> found;
  for (fs::directory_iterator at(folder, code), end; !code && at != end; at.increment(code)) {
    if (is_temporary_name(at->path().filename().string())) found.push_back(at->path());
  }
  for (const auto& path : found) fs::remove(path, code);
}

/// A checkpoint that is not its expert's newest.
struct OldFile {
  fs::file_time_type time;
  std::uint64_t bytes = 0;
  fs::path path;
};

/// What a file of the snapshot takes at most.
std::uint64_t bytes_of(const ExpertSnapshot& snapshot) {
  constexpr std::uint64_t kHeader = 4'096;
  constexpr std::uint64_t kEntry = 256;
  std::uint64_t bytes = kHeader;
  for (const auto* list : {&snapshot.parameters, &snapshot.buffers, &snapshot.optimizer_state}) {
    for (const auto& item : *list) bytes += item.tensor.nbytes() + kEntry + item.name.size();
  }
  return bytes;
}

Json optimizer_json(const OptimizerSettings& settings) {
  return {{"kind", to_string(settings.kind)},
          {"learning_rate", settings.learning_rate},
          {"beta1", settings.beta1},
          {"beta2", settings.beta2},
          {"epsilon", settings.epsilon},
          {"amsgrad", settings.amsgrad},
          {"momentum", settings.momentum},
          {"nesterov", settings.nesterov},
          {"schedule", to_string(settings.schedule.kind)},
          {"warmup_steps", settings.schedule.warmup_steps},
          {"total_steps", settings.schedule.total_steps},
          {"weight_decay", settings.weight_decay},
          {"clip_grad_norm", settings.clip_grad_norm}};
}

SafetensorsContent content_of(const ExpertSnapshot& snapshot) {
  SafetensorsContent content;
  content.metadata = {{"format", kFormat},
                      {"uid", to_string(snapshot.description.uid)},
                      {"architecture", snapshot.description.architecture},
                      {"hidden_dim", std::to_string(snapshot.description.hidden_dim)},
                      {"arguments", Json(snapshot.description.arguments).dump()},
                      {"optimizer", optimizer_json(snapshot.optimizer).dump()},
                      {"updates", std::to_string(snapshot.updates)}};
  for (const auto& item : snapshot.parameters) content.tensors.push_back({"expert." + item.name, item.tensor});
  for (const auto& item : snapshot.buffers) content.tensors.push_back({"buffer." + item.name, item.tensor});
  for (const auto& item : snapshot.optimizer_state) content.tensors.push_back({"optimizer." + item.name, item.tensor});
  return content;
}

double number_in(const Json& json, const char* name, double fallback) {
  const auto found = json.find(name);
  return found != json.end() && found->is_number() ? found->get<double>() : fallback;
}

bool flag_in(const Json& json, const char* name, bool fallback) {
  const auto found = json.find(name);
  return found != json.end() && found->is_boolean() ? found->get<bool>() : fallback;
}

std::uint64_t count_in(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}

Result<OptimizerSettings> optimizer_from(const std::string& text) {
  const auto json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("kind") || !json["kind"].is_string()) return invalid("no optimizer in it");
  const auto kind = parse_optimizer(json["kind"].get<std::string>());
  if (!kind) return kind.error();
  OptimizerSettings settings;
  settings.kind = *kind;
  settings.learning_rate = number_in(json, "learning_rate", settings.learning_rate);
  settings.beta1 = number_in(json, "beta1", settings.beta1);
  settings.beta2 = number_in(json, "beta2", settings.beta2);
  settings.epsilon = number_in(json, "epsilon", settings.epsilon);
  settings.momentum = number_in(json, "momentum", settings.momentum);
  settings.weight_decay = number_in(json, "weight_decay", settings.weight_decay);
  settings.clip_grad_norm = number_in(json, "clip_grad_norm", settings.clip_grad_norm);
  settings.amsgrad = flag_in(json, "amsgrad", settings.amsgrad);
  settings.nesterov = flag_in(json, "nesterov", settings.nesterov);
  const auto name = json.find("schedule");
  const auto schedule = parse_schedule(name != json.end() && name->is_string() ? name->get<std::string>() : "constant");
  if (!schedule) return schedule.error();
  settings.schedule = {*schedule, count_in(json, "warmup_steps"), count_in(json, "total_steps")};
  if (auto checked = check(settings); !checked) return checked.error();
  return settings;
}

template <class T>
bool read_number(const std::string& text, T& value) {
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  return code == std::errc{} && stop == end;
}

Result<ExpertDescription> description_from(std::map<std::string, std::string>& metadata) {
  if (metadata["format"] != kFormat) return invalid("it is no checkpoint of this program");
  const auto uid = parse_expert_uid(metadata["uid"]);
  if (!uid) return uid.error();
  ExpertDescription description{*uid, metadata["architecture"], 0, {}};
  if (!read_number(metadata["hidden_dim"], description.hidden_dim)) return invalid("no hidden_dim in it");
  const auto arguments = Json::parse(metadata["arguments"], nullptr, /*allow_exceptions=*/false);
  if (!arguments.is_object()) return invalid("no arguments in it");
  for (const auto& [name, value] : arguments.items()) {
    if (!value.is_string()) return invalid("an argument in it is no text");
    description.arguments[name] = value.get<std::string>();
  }
  return description;
}

bool take(const NamedTensor& item, const std::string& prefix, std::vector<NamedTensor>& into) {
  if (!item.name.starts_with(prefix)) return false;
  into.push_back({item.name.substr(prefix.size()), item.tensor});
  return true;
}

Result<ExpertSnapshot> snapshot_from(SafetensorsContent content) {
  ExpertSnapshot snapshot;
  const auto description = description_from(content.metadata);
  if (!description) return description.error();
  const auto optimizer = optimizer_from(content.metadata["optimizer"]);
  if (!optimizer) return optimizer.error();
  if (!read_number(content.metadata["updates"], snapshot.updates)) return invalid("no update counter in it");
  snapshot.description = *description;
  snapshot.optimizer = *optimizer;
  for (const auto& item : content.tensors) {
    const bool known = take(item, "expert.", snapshot.parameters) || take(item, "buffer.", snapshot.buffers) ||
                       take(item, "optimizer.", snapshot.optimizer_state);
    if (!known) return invalid("tensor " + item.name + " has no place in an expert");
  }
  return snapshot;
}

}  // namespace

CheckpointStore::CheckpointStore(fs::path folder, std::size_t keep, std::uint64_t max_bytes)
    : folder_(std::move(folder)), keep_(std::max<std::size_t>(keep, 1)), max_bytes_(max_bytes) {}

std::vector<ExpertUid> CheckpointStore::stored() const {
  std::vector<ExpertUid> uids;
  std::error_code code;
  for (fs::directory_iterator at(folder_, code), end; !code && at != end; at.increment(code)) {
    const auto uid = parse_expert_uid(at->path().filename().string());
    if (uid && !files_in(at->path()).empty()) uids.push_back(*uid);
  }
  std::sort(uids.begin(), uids.end());
  return uids;
}

Result<void> CheckpointStore::save(const ExpertSnapshot& snapshot) {
  const auto folder = folder_ / to_string(snapshot.description.uid);
  std::error_code code;
  fs::create_directories(folder, code);
  if (code) {
    return Error{Errc::kUnavailable, "cannot make the folder " + folder.string() + ": " + code.message(), {}};
  }
  remove_temporaries(folder);
  if (auto room = make_room(bytes_of(snapshot)); !room) return room;
  auto files = files_in(folder);
  const auto number = files.empty() ? 1 : files.rbegin()->first + 1;
  const auto target = folder / file_name(number);
  if (auto written = write_safetensors(target, content_of(snapshot)); !written) return written;
  files.emplace(number, target);
  while (files.size() > keep_) {
    fs::remove(files.begin()->second, code);  // One that stays is tried again after the next save.
    files.erase(files.begin());
  }
  return {};
}

Result<void> CheckpointStore::make_room(std::uint64_t bytes) const {
  if (max_bytes_ == 0) return {};
  std::vector<OldFile> old;
  std::uint64_t total = bytes;
  std::error_code code;
  for (fs::directory_iterator at(folder_, code), end; !code && at != end; at.increment(code)) {
    const auto files = files_in(at->path());
    for (const auto& [number, path] : files) {
      std::error_code gone;
      const auto size = fs::file_size(path, gone);
      const auto time = fs::last_write_time(path, gone);
      if (gone) continue;
      total += size;
      if (number != files.rbegin()->first) old.push_back({time, size, path});
    }
  }
  std::sort(old.begin(), old.end(), [](const auto& left, const auto& right) { return left.time < right.time; });
  for (const auto& file : old) {
    if (total <= max_bytes_) break;
    if (fs::remove(file.path, code)) total -= file.bytes;
  }
  if (total <= max_bytes_) return {};
  const auto mib = [](std::uint64_t count) { return std::to_string((count + (1U << 20U) - 1) >> 20U) + " MiB"; };
  return Error{Errc::kUnavailable,
               "max_disk of " + mib(max_bytes_) + " leaves no room for a checkpoint of " + mib(bytes) +
                   " beside the newest ones of all experts; raise it to " + mib(total) + " at least",
               {}};
}

Result<std::optional<ExpertSnapshot>> CheckpointStore::load(const ExpertUid& uid) {
  const auto folder = folder_ / to_string(uid);
  remove_temporaries(folder);
  const auto files = files_in(folder);
  if (files.empty()) return std::optional<ExpertSnapshot>{};
  for (auto at = files.rbegin(); at != files.rend(); ++at) {
    auto snapshot = read_checkpoint(at->second);
    if (!snapshot) {
      spdlog::error("checkpoint of expert {} cannot be used, the one before it is tried: {}", to_string(uid),
                    snapshot.error().message);
      continue;
    }
    if (snapshot->description.uid != uid) {
      return invalid(at->second.string() + " is a checkpoint of expert " + to_string(snapshot->description.uid) +
                     ", not of " + to_string(uid) + ": move it back to its own folder");
    }
    if (snapshot->optimizer_state.empty() && snapshot->updates > 0) {
      spdlog::warn("{} holds no optimizer state: the optimizer starts afresh", at->second.string());
    }
    return std::optional<ExpertSnapshot>(std::move(*snapshot));
  }
  return invalid("all " + std::to_string(files.size()) + " checkpoints in " + folder.string() +
                 " are damaged; restore one from a backup, or move that folder away to start expert " + to_string(uid) +
                 " afresh. Nothing was changed");
}

bool is_checkpoint_name(const std::string& file_name) { return number_of(file_name).has_value(); }

Result<ExpertSnapshot> read_checkpoint(const fs::path& file) {
  auto content = read_safetensors(file);
  if (!content) return content.error();
  auto snapshot = snapshot_from(std::move(*content));
  if (!snapshot) return invalid(file.string() + ": " + snapshot.error().message);
  return snapshot;
}

}  // namespace dmoe::expert_server
