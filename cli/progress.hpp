// How far a long run is: a bar that redraws itself on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace dmoe::cli {

/// Not thread-safe.
class Progress {
 public:
  /// `stream` stays the caller's. On a terminal the bar is redrawn at most ten times a second.
  Progress(std::FILE* stream, std::int64_t total);
  /// For tests: says whether the stream counts as a terminal.
  Progress(std::FILE* stream, std::int64_t total, bool terminal);
  ~Progress();  ///< Ends the bar's line.
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` are finished; `note` is shown after the count. Elsewhere than on a terminal a line appears at
  /// the first call, at every tenth of the whole, and at the end.
  void show(std::int64_t done, const std::string& note);
  /// A line of its own, above the bar.
  void say(const std::string& line);

 private:
  void draw(std::int64_t done, const std::string& note);

  std::FILE* stream_;
  std::int64_t total_;
  bool terminal_;
  bool bar_drawn_ = false;
  std::string last_;  // The bar as it stands on the terminal.
  std::int64_t next_line_ = 1;
  std::chrono::steady_clock::time_point drawn_{};
};

/// Two columns, the first one padded, each row on a line of its own.
class Table {
 public:
  void row(std::string name, std::string value);
  void print(std::FILE* stream) const;

 private:
  std::vector<std::pair<std::string, std::string>> rows_;
};

/// "34.2" for 34.21: a number with `digits` decimals.
std::string rounded(double value, int digits);

}  // namespace dmoe::cli
