// The `dmoe` program as a function: everything but `main` itself.
#pragma once

namespace dmoe::cli {

/// Reads the command line and the configuration file, prepares the process (file limit, signals, log) and runs the
/// chosen command. Never throws. @return the exit status: 0, 1 (failed run) or 2 (wrong use); see cli/outcome.hpp.
int run_program(int argc, char** argv);

}  // namespace dmoe::cli
