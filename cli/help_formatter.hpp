// How `--help` shows options: "--steps COUNT (default 1000)".
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace dmoe::cli {

/// CLI11's own layout, with the default said in words and nothing repeated: our type names already list the choices.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_option_opts(const CLI::Option* option) const override;
};

}  // namespace dmoe::cli
