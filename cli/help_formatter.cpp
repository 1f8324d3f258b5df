#include "cli/help_formatter.hpp"

namespace dmoe::cli {

HelpFormatter::HelpFormatter() {
  constexpr std::size_t kOptionWidth = 42;
  column_width(kOptionWidth);
  label("SUBCOMMAND", "COMMAND");
}

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  std::string text;
  if (const std::string type = option->get_type_name(); option->get_type_size() != 0 && !type.empty()) {
    text += " " + type;
  }
  if (!option->get_default_str().empty()) text += " (default " + option->get_default_str() + ")";
  if (option->get_required()) text += " (required)";
  return text;
}

}  // namespace dmoe::cli
