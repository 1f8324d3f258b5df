// When calls began and ended, in a file that Perfetto and chrome://tracing open.
#pragma once

#include "net/error.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dmoe::net {

/// Something that took a while.
struct TraceSpan {
  std::string name;        ///< Such as "forward ffn.3.17".
  std::uint64_t call = 0;  ///< See trace_id. Spans of one call are shown together, whoever wrote them.
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
  std::vector<std::pair<std::string, std::string>> details;
};

/// The same on the caller's side and on the server's, without a field on the wire for it: `seed`, 64 random bits that
/// travel with every call, is drawn anew for each pass of a layer, in which an expert has one call per direction, but
/// for hedges and very many rows.
std::uint64_t trace_id(std::uint64_t seed, std::string_view uid, bool backward);

struct TraceOptions {
  std::filesystem::path file;                    ///< Replaced when it exists.
  std::string process;                           ///< A name for this process, such as "trainer".
  std::uint64_t max_bytes = 64UL * 1024 * 1024;  ///< Of `file` and of the older `file`.old together.
  std::size_t max_waiting = 16'384;              ///< Spans not written yet; beyond it new ones are dropped.
};

/// A Chrome trace: a JSON array of nestable asynchronous events, whose times are microseconds of the wall clock. The
/// file is complete JSON after every write, so also when the process is killed. At half of max_bytes it becomes
/// `file`.old, in place of the one before, and a new one begins.
///
/// Traces of several processes are shown as one when their arrays are joined: `jq -s add trainer.json server.json`.
/// Thread-safe. A thread of its own writes, ten times a second at most.
class TraceFile {
 public:
  static constexpr std::uint64_t kLeastBytes = 1UL << 20;

  /// kInvalidArgument: max_bytes is below kLeastBytes. kUnavailable: the file cannot be written; the message says why.
  static Result<std::shared_ptr<TraceFile>> create(TraceOptions options);
  ~TraceFile();  ///< Writes what waits.
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  /// Never waits for the disk.
  void add(TraceSpan span);
  /// Waits until everything added so far is written, or dropped because the disk refused it.
  void flush();
  /// Spans that are missing in the file.
  std::uint64_t dropped() const;

 private:
  class Writer;
  explicit TraceFile(std::unique_ptr<Writer> writer);
  std::unique_ptr<Writer> writer_;
};

}  // namespace dmoe::net
