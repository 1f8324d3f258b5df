#include "cli/program.hpp"

int main(int argc, char** argv) { return dmoe::cli::run_program(argc, argv); }
