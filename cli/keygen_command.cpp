// `dmoe keygen`: makes a peer's key ahead of its first start.
#include "cli/command.hpp"

#include "net/identity.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <filesystem>
#include <memory>

namespace dmoe::cli {
namespace {

struct KeygenOptions {
  std::string file = "identity.pem";
};

Outcome make_key(const KeygenOptions& options) {
  if (options.file.empty()) return wrong_use("FILE is empty; name a new file for the key");
  std::error_code error;
  const std::filesystem::path file = std::filesystem::absolute(options.file, error);
  if (error) return failed("cannot make an absolute path of '" + options.file + "': " + error.message());
  const net::Identity identity = net::Identity::generate();
  if (const auto saved = identity.save_new(file); !saved) return failed("cannot save the key", saved.error());
  std::printf("identity  %s\npeer id   %s\n", file.c_str(), net::to_string(identity.peer_id()).c_str());
  return done();
}

}  // namespace

void add_keygen_command(CLI::App& app, Selection& selection) {
  auto options = std::make_shared<KeygenOptions>();
  CLI::App* command = app.add_subcommand("keygen", "Make the key file that names a peer and signs its DHT records");
  command->add_option("file,--file", options->file, "New file for the key (PEM, mode 0600); an existing one is kept")
      ->type_name("FILE")
      ->capture_default_str();
  command->footer("Example: dmoe keygen /var/lib/dmoe/identity.pem");
  command->callback([options, &selection] {
    selection.command = "keygen";
    selection.run = [options] { return make_key(*options); };
  });
}

}  // namespace dmoe::cli
