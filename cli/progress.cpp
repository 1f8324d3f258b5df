#include "cli/progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>

namespace dmoe::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kRedrawPeriod{100};
constexpr std::int64_t kLines = 10;

}  // namespace

Progress::Progress(std::FILE* stream, std::int64_t total) : Progress(stream, total, isatty(fileno(stream)) == 1) {}

Progress::Progress(std::FILE* stream, std::int64_t total, bool terminal)
    : stream_(stream), total_(std::max<std::int64_t>(total, 1)), terminal_(terminal) {}

Progress::~Progress() {
  if (bar_drawn_) std::fprintf(stream_, "\n");
  std::fflush(stream_);
}

void Progress::show(std::int64_t done, const std::string& note) {
  const auto now = std::chrono::steady_clock::now();
  if (terminal_) {
    if (done < total_ && now - drawn_ < kRedrawPeriod) return;
    drawn_ = now;
    draw(done, note);
    return;
  }
  if (done < next_line_ && done < total_) return;
  next_line_ = std::max((done * kLines / total_ + 1) * total_ / kLines, done + 1);
  std::fprintf(stream_, "%lld/%lld %s\n", static_cast<long long>(done), static_cast<long long>(total_), note.c_str());
  std::fflush(stream_);
}

void Progress::draw(std::int64_t done, const std::string& note) {
  const int filled = static_cast<int>(std::min(done, total_) * kBarWidth / total_);
  last_ = "[" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "] " + std::to_string(done) + "/" +
          std::to_string(total_) + " " + note;
  std::fprintf(stream_, "\r%s\033[K", last_.c_str());
  std::fflush(stream_);
  bar_drawn_ = true;
}

void Progress::say(const std::string& line) {
  if (bar_drawn_) {
    std::fprintf(stream_, "\r\033[K%s\n%s", line.c_str(), last_.c_str());
  } else {
    std::fprintf(stream_, "%s\n", line.c_str());
  }
  std::fflush(stream_);
}

void Table::row(std::string name, std::string value) { rows_.emplace_back(std::move(name), std::move(value)); }

void Table::print(std::FILE* stream) const {
  std::size_t width = 0;
  for (const auto& [name, value] : rows_) width = std::max(width, name.size());
  for (const auto& [name, value] : rows_) {
    std::fprintf(stream, "%-*s  %s\n", static_cast<int>(width), name.c_str(), value.c_str());
  }
}

std::string rounded(double value, int digits) {
  std::array<char, 64> text{};
  (void)std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

}  // namespace dmoe::cli
