#include "net/trace_file.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

namespace dmoe::net {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kWritePeriod{100};
constexpr std::size_t kMostAtOnce = 256;  ///< Spans of one write: bounds its size.
constexpr std::size_t kMostText = 300;    ///< Bytes of one name or detail.
constexpr std::string_view kEnd = "\n]\n";

/// A JSON string. What is not printable ASCII becomes '?': names and messages may hold a peer's bytes.
void append_text(std::string& json, std::string_view text) {
  json += '"';
  for (const char c : text.substr(0, kMostText)) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else {
      json += c >= 0x20 && c < 0x7f ? c : '?';
    }
  }
  json += '"';
}

Error disk_error(const std::filesystem::path& file) {
  return {Errc::kUnavailable, "cannot write the trace " + file.string() + ": " + std::strerror(errno), {}};
}

/// One open file that ends with `kEnd` after every write.
class TraceOutput {
 public:
  ~TraceOutput() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  TraceOutput() = default;
  TraceOutput(const TraceOutput&) = delete;
  TraceOutput& operator=(const TraceOutput&) = delete;

  Result<void> open(const std::filesystem::path& file, const std::string& process) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    end_ = 0;
    if (descriptor_ < 0) return disk_error(file);
    std::string json =
        "[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + std::to_string(::getpid()) + ",\"args\":{\"name\":";
    append_text(json, process);
    return write(file, json + "}}");
  }

  /// Puts `json` where the end was.
  Result<void> write(const std::filesystem::path& file, std::string json) {
    const auto bytes = json.size();
    json += kEnd;
    std::size_t written = 0;
    while (written < json.size()) {
      const auto count =
          ::pwrite(descriptor_, json.data() + written, json.size() - written, static_cast<off_t>(end_ + written));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        const auto error = disk_error(file);
        // What was complete stays complete.
        (void)!::ftruncate(descriptor_, static_cast<off_t>(end_));
        if (end_ > 0) (void)!::pwrite(descriptor_, kEnd.data(), kEnd.size(), static_cast<off_t>(end_));
        return error;
      }
      written += static_cast<std::size_t>(count);
    }
    end_ += bytes;
    return {};
  }

  std::uint64_t bytes() const noexcept { return end_ + kEnd.size(); }

 private:
  int descriptor_ = -1;
  std::uint64_t end_ = 0;  ///< Where `kEnd` begins.
};

}  // namespace

std::uint64_t trace_id(std::uint64_t seed, std::string_view uid, bool backward) {
  // FNV-1a, begun with the seed: its bits are random, the rest only has to tell a pass's calls apart.
  std::uint64_t hash = seed ^ 0xcbf29ce484222325ULL;
  const auto mix = [&hash](unsigned char byte) { hash = (hash ^ byte) * 0x100000001b3ULL; };
  for (const char c : uid) mix(static_cast<unsigned char>(c));
  mix(backward ? 1 : 0);
  return hash;
}

class TraceFile::Writer {
 public:
  explicit Writer(TraceOptions options) : options_(std::move(options)) { read_clocks(); }

  ~Writer() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  Result<void> start() {
    auto opened = output_.open(options_.file, options_.process);
    if (opened) thread_ = std::thread([this] { run(); });
    return opened;
  }

  void add(TraceSpan span) {
    {
      const std::lock_guard lock(mutex_);
      if (failed_ || waiting_.size() >= options_.max_waiting) {
        ++dropped_;
        return;
      }
      waiting_.push_back(std::move(span));
      ++added_;
      if (waiting_.size() > 1) return;  // The writer knows.
    }
    wake_.notify_one();
  }

  void flush() {
    std::unique_lock lock(mutex_);
    const auto until = added_;
    ++flushing_;
    wake_.notify_one();
    written_.wait(lock, [&] { return done_ >= until; });
    --flushing_;
  }

  std::uint64_t dropped() const {
    const std::lock_guard lock(mutex_);
    return dropped_;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      // More may come: one write for all of them.
      wake_.wait_for(lock, kWritePeriod, [this] { return stopping_ || flushing_ > 0; });
      auto spans = std::exchange(waiting_, {});
      const bool give_up = failed_;
      lock.unlock();
      const auto lost = give_up ? spans.size() : write(spans);
      lock.lock();
      dropped_ += lost;
      failed_ = failed_ || lost > 0;
      done_ += spans.size();
      written_.notify_all();
    }
  }

  /// Both clocks at one moment, or traces of one machine would not fit together: of some tries the one in which this
  /// thread was held up least in between.
  void read_clocks() {
    auto least = Clock::duration::max();
    for (int i = 0; i < 16; ++i) {
      const auto before = Clock::now();
      const auto wall = std::chrono::system_clock::now().time_since_epoch();
      const auto passed = Clock::now() - before;
      if (passed >= least) continue;
      least = passed;
      wall_ = wall;
      steady_ = before + passed / 2;
    }
  }

  /// @return how many could not be written.
  std::size_t write(const std::vector<TraceSpan>& spans) {
    std::string json;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      append(json, spans[i]);
      if ((i + 1) % kMostAtOnce != 0 && i + 1 < spans.size()) continue;
      if (const auto written = write(std::exchange(json, {})); !written) {
        spdlog::warn("{}; no more of it is kept", written.error().message);
        return spans.size() - i / kMostAtOnce * kMostAtOnce;
      }
    }
    return 0;
  }

  Result<void> write(std::string json) {
    if (output_.bytes() + json.size() > options_.max_bytes / 2) {
      auto old = options_.file;
      old += ".old";
      std::error_code error;
      std::filesystem::rename(options_.file, old, error);
      if (auto opened = output_.open(options_.file, options_.process); !opened) return opened;
    }
    return output_.write(options_.file, std::move(json));
  }

  void append(std::string& json, const TraceSpan& span) const {
    append_event(json, span, 'b', span.begin);
    append_event(json, span, 'e', span.end);
  }

  void append_event(std::string& json, const TraceSpan& span, char phase, Clock::time_point time) const {
    const auto since = std::chrono::duration<double, std::micro>(wall_ + (time - steady_)).count();
    std::array<char, 192> text{};
    std::snprintf(text.data(), text.size(),
                  ",\n{\"ph\":\"%c\",\"cat\":\"call\",\"id2\":{\"global\":\"0x%llx\"},\"pid\":%d,\"tid\":1,\"ts\":%.3f,"
                  "\"name\":",
                  phase, static_cast<unsigned long long>(span.call), static_cast<int>(::getpid()), since);
    json += text.data();
    append_text(json, span.name);
    if (phase == 'b' && !span.details.empty()) {
      json += ",\"args\":{";
      for (std::size_t i = 0; i < span.details.size(); ++i) {
        if (i > 0) json += ',';
        append_text(json, span.details[i].first);
        json += ':';
        append_text(json, span.details[i].second);
      }
      json += '}';
    }
    json += '}';
  }

  const TraceOptions options_;
  std::chrono::system_clock::duration wall_{};  ///< The wall clock's time at `steady_`.
  Clock::time_point steady_;
  TraceOutput output_;  ///< Of the writing thread, once it runs.
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable written_;
  std::vector<TraceSpan> waiting_;  ///< Guarded by mutex_, as are all below.
  std::uint64_t added_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t dropped_ = 0;
  int flushing_ = 0;
  bool failed_ = false;
  bool stopping_ = false;
  std::thread thread_;  ///< Last: uses the members above.
};

Result<std::shared_ptr<TraceFile>> TraceFile::create(TraceOptions options) {
  if (options.max_bytes < kLeastBytes) {
    return Error{Errc::kInvalidArgument,
                 "a trace needs room for at least 1 MiB, not " + std::to_string(options.max_bytes) + " bytes",
                 {}};
  }
  auto writer = std::make_unique<Writer>(std::move(options));
  if (auto started = writer->start(); !started) return started.error();
  return std::shared_ptr<TraceFile>(new TraceFile(std::move(writer)));
}

TraceFile::TraceFile(std::unique_ptr<Writer> writer) : writer_(std::move(writer)) {}
TraceFile::~TraceFile() = default;
void TraceFile::add(TraceSpan span) { writer_->add(std::move(span)); }
void TraceFile::flush() { writer_->flush(); }
std::uint64_t TraceFile::dropped() const { return writer_->dropped(); }

}  // namespace dmoe::net
