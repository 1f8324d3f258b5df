// How a command ended: what the process's exit status and its last line of stderr say.
#pragma once

#include "cli/advice.hpp"

#include "net/error.hpp"

#include <string>
#include <string_view>
#include <utility>

namespace dmoe::cli {

enum class ExitCode : int {
  kDone = 0,
  kFailed = 1,    ///< The command was understood, but something it needs failed.
  kWrongUse = 2,  ///< The command line or the configuration file is wrong; nothing was started.
};

/// The end of a command. `message` is one line for a person: what failed (flag, value) and what to do.
struct [[nodiscard]] Outcome {
  ExitCode code = ExitCode::kDone;
  std::string message;
};

inline Outcome done() { return {}; }
inline Outcome failed(std::string message) { return {ExitCode::kFailed, std::move(message)}; }
inline Outcome wrong_use(std::string message) { return {ExitCode::kWrongUse, std::move(message)}; }

/// "cannot start the DHT node: port 4040 is taken; …": the error's sentence, with advice, after what was being done.
inline Outcome failed(std::string_view doing, const Error& error) {
  return failed(std::string(doing) + ": " + advise(error));
}

}  // namespace dmoe::cli
