// A trace is JSON at every moment, bounded, and says what was added.
#include "net/trace_file.hpp"

#include "tests/support/catch.hpp"
#include "tests/support/temporary_folder.hpp"

#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <fstream>
#include <iterator>
#include <set>
#include <thread>

namespace dmoe::net {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

nlohmann::json read(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return nlohmann::json::parse(std::string(std::istreambuf_iterator<char>(stream), {}));
}

TraceSpan span(std::uint64_t call, std::string name = "forward ffn.0.1") {
  const auto now = Clock::now();
  return {std::move(name), call, now - 5ms, now, {{"rows", "12"}}};
}

TEST_CASE("a trace holds each span's beginning and end with its call's id", "[trace]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  const auto before = std::chrono::duration<double, std::micro>(std::chrono::system_clock::now().time_since_epoch());
  {
    const auto trace = *TraceFile::create({file, "trainer"});
    trace->add(span(0xfeedULL));
    trace->flush();
    CHECK(read(file).size() == 3);  // Complete while it is open.
    trace->add(span(2, "quote \" and \n and \xff"));
  }
  const auto events = read(file);
  REQUIRE(events.size() == 5);
  CHECK(events[0]["name"] == "process_name");
  CHECK(events[0]["args"]["name"] == "trainer");
  CHECK(events[1]["ph"] == "b");
  CHECK(events[1]["id2"]["global"] == "0xfeed");
  CHECK(events[1]["name"] == "forward ffn.0.1");
  CHECK(events[1]["args"]["rows"] == "12");
  CHECK(events[2]["ph"] == "e");
  CHECK(events[2]["id2"] == events[1]["id2"]);
  CHECK(events[2]["cat"] == events[1]["cat"]);
  CHECK(events[2]["ts"].get<double>() - events[1]["ts"].get<double>() == Approx(5'000).margin(1));
  CHECK(std::abs(events[2]["ts"].get<double>() - before.count()) < 60e6);  // The wall clock.
  CHECK(events[3]["name"] == "quote \" and ? and ?");
}

TEST_CASE("traces of one machine put the same moment at the same place", "[trace]") {
  const test::TemporaryFolder folder;
  const auto same = span(1);
  double first = 0;
  for (int i = 0; i < 20; ++i) {
    const auto file = folder.path() / ("trace" + std::to_string(i) + ".json");
    (*TraceFile::create({file, "trainer"}))->add(same);
    const auto begin = read(file).at(1)["ts"].get<double>();
    if (i == 0) first = begin;
    CHECK(std::abs(begin - first) < 1'000);  // Microseconds.
  }
}

TEST_CASE("a trace begins anew before it is too large and keeps the one before", "[trace]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  const auto old = folder.path() / "trace.json.old";
  TraceOptions options{file, "server"};
  options.max_bytes = TraceFile::kLeastBytes;
  const auto trace = *TraceFile::create(options);
  std::uint64_t added = 0;
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 1'000; ++j) trace->add(span(++added));
    trace->flush();
    CHECK(std::filesystem::file_size(file) <= options.max_bytes / 2);
    if (std::filesystem::exists(old)) CHECK(std::filesystem::file_size(old) <= options.max_bytes / 2);
  }
  CHECK(trace->dropped() == 0);
  REQUIRE(std::filesystem::exists(old));
  std::set<std::string> calls;
  for (const auto& part : {read(old), read(file)}) {
    for (const auto& event : part) {
      if (event["ph"] == "b") calls.insert(event["id2"]["global"].get<std::string>());
    }
  }
  char last[32];
  std::snprintf(last, sizeof(last), "0x%llx", static_cast<unsigned long long>(added));
  CHECK(calls.count(last) == 1);
  CHECK(calls.size() >= 1'000);
}

TEST_CASE("what does not fit before it is written is dropped and counted", "[trace]") {
  const test::TemporaryFolder folder;
  TraceOptions options{folder.path() / "trace.json", "server"};
  options.max_waiting = 10;
  const auto trace = *TraceFile::create(options);
  for (int i = 0; i < 5'000; ++i) trace->add(span(1));
  trace->flush();
  const auto events = read(options.file);
  CHECK((events.size() - 1) / 2 + trace->dropped() == 5'000);
}

TEST_CASE("a trace of a process that was killed is complete JSON", "[trace]") {
  const test::TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const auto trace = *TraceFile::create({file, "server"});
    for (std::uint64_t i = 0; i < 500; ++i) trace->add(span(i));
    trace->flush();
    trace->add(span(500));
    (void)!write(ready[1], "x", 1);
    for (;;) pause();
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
  CHECK(read(file).size() >= 1'001);
}

TEST_CASE("a trace that cannot be written is refused with the reason", "[trace]") {
  const test::TemporaryFolder folder;
  const auto nowhere = TraceFile::create({folder.path() / "none" / "trace.json", "x"});
  REQUIRE_FALSE(nowhere.has_value());
  CHECK(nowhere.error().code == Errc::kUnavailable);
  CHECK(nowhere.error().message.find("trace.json: No such file") != std::string::npos);
  TraceOptions small{folder.path() / "trace.json", "x"};
  small.max_bytes = 100;
  CHECK(TraceFile::create(small).error().code == Errc::kInvalidArgument);

  // A full disk ends the trace, not the process.
  const auto full = TraceFile::create({"/dev/full", "x"});
  CHECK_FALSE(full.has_value());
}

TEST_CASE("ids tell the calls of a pass apart and are the same on both sides", "[trace]") {
  CHECK(trace_id(7, "ffn.0.1", false) == trace_id(7, "ffn.0.1", false));
  std::set<std::uint64_t> ids;
  for (const std::uint64_t seed : {7, 8}) {
    for (const char* uid : {"ffn.0.1", "ffn.0.2", "ffn.1.0"}) {
      for (const bool backward : {false, true}) ids.insert(trace_id(seed, uid, backward));
    }
  }
  CHECK(ids.size() == 12);
}

}  // namespace
}  // namespace dmoe::net
