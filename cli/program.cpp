#include "cli/program.hpp"

#include "cli/command.hpp"
#include "cli/help_formatter.hpp"
#include "cli/log_format.hpp"
#include "cli/options.hpp"
#include "cli/process_setup.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <CLI/CLI.hpp>

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace dmoe::cli {
namespace {

struct GlobalOptions {
  std::string config;
  std::string log_level = "info";
  std::string log_format = "text";
};

constexpr const char* kAbout =
    "Trains and serves mixture-of-experts layers whose experts live on many unreliable machines.\n"
    "Start with 'dmoe demo'; 'dmoe COMMAND --help' explains one command.";

void add_global_options(CLI::App& app, GlobalOptions& options) {
  app.set_version_flag("--version", "dmoe " DMOE_VERSION, "Print the version and exit")->configurable(false);
  app.set_help_flag("-h,--help", "Print this help and exit")->configurable(false);
  app.set_config("--config", "", "Read options from a TOML file; a command's options go in a section [COMMAND]")
      ->type_name("FILE");
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.add_option("--log-level", options.log_level, "Least severe message that is logged")
      ->type_name("debug|info|warn|error|off")
      ->capture_default_str()
      ->check(one_of({"debug", "info", "warn", "error", "off"}));
  app.add_option("--log-format", options.log_format, "Form of log lines on stderr")
      ->type_name("text|json")
      ->capture_default_str()
      ->check(one_of({"text", "json"}));
  app.formatter(std::make_shared<HelpFormatter>());
  app.fallthrough();  // Before the commands are added: they inherit it, so that global options may follow a command.
  app.footer("Example: dmoe demo --steps 200");
}

/// The commands on the line, "dht run", or an empty text.
std::string chosen_command(const CLI::App& app) {
  std::string name;
  const CLI::App* level = &app;
  while (!level->get_subcommands().empty()) {
    level = level->get_subcommands().front();
    name += (name.empty() ? "" : " ") + level->get_name();
  }
  return name;
}

/// CLI11 reports "INI was not able to parse serve.wrong-key"; this is "serve.wrong-key", or the section's name.
std::string unknown_key(const std::string& message) {
  std::string key = message.substr(message.rfind(' ') + 1);
  if (key.ends_with(".++") || key.ends_with(".--")) key = "[" + key.substr(0, key.size() - 3) + "]";
  return key;
}

bool flag_on_line(const std::string& message, const std::vector<std::string>& arguments) {
  const std::string flag = message.substr(0, message.find_first_of(": "));
  for (const std::string& argument : arguments) {
    if (argument == flag || argument.starts_with(flag + "=")) return true;
  }
  return false;
}

/// One line that names the flag or key, its value and the fix.
std::string explain(const CLI::ParseError& error, const std::string& config,
                    const std::vector<std::string>& arguments) {
  std::string text = error.what();
  if (text.starts_with("INI was not able to parse")) {
    return config + ": unknown key " + unknown_key(text) + "; remove it or correct its spelling";
  }
  if (dynamic_cast<const CLI::FileError*>(&error) != nullptr) {
    return "--config " + config + ": cannot read this file; check the path and its permissions";
  }
  if (dynamic_cast<const CLI::ConfigError*>(&error) != nullptr) return config + ": " + text;
  if (!config.empty() && !flag_on_line(text, arguments)) text += " (in " + config + ")";
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

std::string config_file_of(const CLI::App& app) {
  const CLI::Option* option = app.get_option_no_throw("--config");
  return option != nullptr && option->count() > 0 ? option->results().front() : std::string{};
}

void set_up_log(const GlobalOptions& options) {
  // stderr: stdout carries results that programs read.
  auto log = std::make_shared<spdlog::logger>("dmoe", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  log->set_level(spdlog::level::from_str(options.log_level));
  // On a terminal a line first wipes the progress bar that may stand there; the bar draws itself anew.
  log->set_pattern(std::string(isatty(STDERR_FILENO) == 1 ? "\r\033[K" : "") + "%Y-%m-%d %H:%M:%S.%e %l %v");
  if (options.log_format == "json") set_log_format(*log, LogFormat::kJson);
  log->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(log));
}

void complain(const std::string& command, const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "dmoe%s%s: %s\n", command.empty() ? "" : " ", command.c_str(), message.c_str());
}

int parse_and_run(int argc, char** argv) {
  GlobalOptions global;
  Selection selection;
  CLI::App app(kAbout, "dmoe");
  add_global_options(app, global);
  add_serve_command(app, selection);
  add_dht_command(app, selection);
  add_experts_command(app, selection);
  add_train_command(app, selection);
  add_demo_command(app, selection);
  add_checkpoint_command(app, selection);
  add_keygen_command(app, selection);
  for (CLI::App* command : app.get_subcommands({})) command->group("Commands");
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help_or_version) {
    return app.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    const std::string command = chosen_command(app);
    const std::string help = command.empty() ? "dmoe --help" : "dmoe " + command + " --help";
    complain(command, explain(error, config_file_of(app), arguments) + "; see '" + help + "'");
    return static_cast<int>(ExitCode::kWrongUse);
  }
  if (!selection.run) {
    complain("", "no command was given; start with 'dmoe demo', or see 'dmoe --help'");
    return static_cast<int>(ExitCode::kWrongUse);
  }
  set_up_log(global);
  const Outcome outcome = selection.run();
  if (!outcome.message.empty()) complain(selection.command, outcome.message);
  return static_cast<int>(outcome.code);
}

}  // namespace

int run_program(int argc, char** argv) {
  ignore_broken_pipes();
  raise_file_limit();
  try {
    return parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    complain("", std::string("an error that should not happen: ") + error.what() +
                     "; please report it with the command line that led to it");
  } catch (...) {
    complain("", "an unknown error that should not happen; please report it with the command line that led to it");
  }
  return static_cast<int>(ExitCode::kFailed);
}

}  // namespace dmoe::cli
