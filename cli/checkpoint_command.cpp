// `dmoe checkpoint`: what lies in checkpoint files, without a server.
#include "cli/command.hpp"

#include "expert_server/checkpoint_files.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <memory>

namespace dmoe::cli {
namespace {

namespace fs = std::filesystem;

struct CheckpointOptions {
  std::string path;
  std::string to;
  bool json = false;
};

std::string value_of(const expert_server::CheckpointSummary& summary, const std::string& key) {
  const auto found = summary.metadata.find(key);
  return found == summary.metadata.end() ? "unknown" : found->second;
}

void print_summary(const expert_server::CheckpointSummary& summary) {
  std::printf("%s\n  expert %s, %s, hidden_dim %s, %s updates, %.1f MB\n  optimizer %s\n", summary.file.c_str(),
              value_of(summary, "uid").c_str(), value_of(summary, "architecture").c_str(),
              value_of(summary, "hidden_dim").c_str(), value_of(summary, "updates").c_str(),
              static_cast<double>(summary.bytes) / 1e6, value_of(summary, "optimizer").c_str());
}

/// A damaged file is told on its own line; the others are looked at all the same.
Outcome for_each_file(const CheckpointOptions& options, const char* what,
                      const std::function<Result<void>(const fs::path&)>& look) {
  const auto files = expert_server::find_checkpoints(options.path);
  if (!files) return failed(what, files.error());
  std::size_t bad = 0;
  Error first;
  for (const auto& file : *files) {
    const auto looked = look(file);
    if (looked) continue;
    if (bad++ == 0) first = looked.error();
    if (options.json) {
      std::puts(nlohmann::ordered_json{{"file", file.string()}, {"ok", false}, {"error", looked.error().message}}
                    .dump()
                    .c_str());
    } else {
      std::printf("DAMAGED  %s: %s\n", file.c_str(), looked.error().message.c_str());
    }
  }
  if (bad == 0) return done();
  first.message = std::to_string(bad) + " of " + std::to_string(files->size()) + " files are damaged: " + first.message;
  return failed(what, first);
}

Outcome show(const CheckpointOptions& options) {
  return for_each_file(options, "cannot show the checkpoints", [&](const fs::path& file) -> Result<void> {
    const auto summary = expert_server::show_checkpoint(file);
    if (!summary) return summary.error();
    if (options.json) {
      nlohmann::ordered_json line{{"file", summary->file.string()}, {"bytes", summary->bytes}};
      for (const auto& [key, value] : summary->metadata) line[key] = value;
      std::puts(line.dump().c_str());
    } else {
      print_summary(*summary);
    }
    return {};
  });
}

Outcome verify(const CheckpointOptions& options) {
  return for_each_file(options, "cannot trust the checkpoints", [&](const fs::path& file) -> Result<void> {
    const auto verified = expert_server::verify_checkpoint(file);
    if (!verified) return verified;
    if (options.json) {
      std::puts(nlohmann::ordered_json{{"file", file.string()}, {"ok", true}}.dump().c_str());
    } else {
      std::printf("ok       %s\n", file.c_str());
    }
    return {};
  });
}

Outcome export_newest(const CheckpointOptions& options) {
  const auto files = expert_server::find_checkpoints(options.path);
  if (!files) return failed("cannot export", files.error());
  const auto& newest = files->back();
  if (newest.parent_path() != files->front().parent_path()) {
    return wrong_use("PATH: " + options.path + " has the checkpoints of several experts; name one expert's folder, " +
                     "for example " + newest.parent_path().string());
  }
  if (auto exported = expert_server::export_checkpoint(newest, options.to); !exported) {
    return failed("cannot export " + newest.string(), exported.error());
  }
  std::printf("wrote the weights of %s to %s\n", newest.c_str(), options.to.c_str());
  return done();
}

void add_path(CLI::App& command, CheckpointOptions& options) {
  command
      .add_option("path", options.path,
                  "A checkpoint file, an expert's folder, or a server's data directory (--data-dir)")
      ->type_name("PATH")
      ->required();
}

CLI::App* add_part(CLI::App& parent, Selection& selection, const char* name, const char* what,
                   const std::shared_ptr<CheckpointOptions>& options, Outcome (*run)(const CheckpointOptions&)) {
  CLI::App* command = parent.add_subcommand(name, what);
  add_path(*command, *options);
  command->callback([options, &selection, run, full = std::string("checkpoint ") + name] {
    selection.command = full;
    selection.run = [options, run] { return run(*options); };
  });
  return command;
}

}  // namespace

void add_checkpoint_command(CLI::App& app, Selection& selection) {
  CLI::App* command = app.add_subcommand("checkpoint", "Look at the checkpoints of experts, without a server");
  command->require_subcommand(1);
  const auto options = std::make_shared<CheckpointOptions>();
  add_part(*command, selection, "show", "Print what each file holds, from its header", options, show)
      ->add_flag("--json", options->json, "One JSON object per file");
  add_part(*command, selection, "verify", "Read each file whole and compare its checksum; exit 1 if one is damaged",
           options, verify)
      ->add_flag("--json", options->json, "One JSON object per file");
  add_part(*command, selection, "export", "Write the weights of an expert's newest checkpoint for other programs",
           options, export_newest)
      ->add_option("--to", options->to, "The safetensors file to make; it must not exist")
      ->type_name("FILE")
      ->required();
  command->footer("Example: dmoe checkpoint verify ~/.local/share/dmoe");
}

}  // namespace dmoe::cli
