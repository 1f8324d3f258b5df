// What log lines look like.
#include "cli/log_format.hpp"
#include "tests/support/catch.hpp"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <nlohmann/json.hpp>

#include <sstream>

using namespace dmoe;
using namespace dmoe::cli;

TEST_CASE("a log line in JSON is one object whatever the message holds", "[cli]") {
  std::ostringstream stream;
  spdlog::logger logger("server", std::make_shared<spdlog::sinks::ostream_sink_mt>(stream));
  CHECK(parse_log_format("xml").error().code == Errc::kInvalidArgument);
  set_log_format(logger, parse_log_format("json").value());
  logger.warn("a \"quoted\"\nsecond line \xff");
  logger.info("plain");
  std::istringstream lines(stream.str());
  std::string line;
  REQUIRE(std::getline(lines, line));
  const auto first = nlohmann::json::parse(line);
  CHECK(first.at("level") == "warning");
  CHECK(first.at("logger") == "server");
  CHECK(first.at("message") == "a \"quoted\"\nsecond line \xEF\xBF\xBD");
  const auto time = first.at("time").get<std::string>();
  CHECK(time.size() == 24);
  CHECK(time.back() == 'Z');
  REQUIRE(std::getline(lines, line));
  CHECK(nlohmann::json::parse(line).at("message") == "plain");
  CHECK_FALSE(std::getline(lines, line));
  stream.str("");
  set_log_format(logger, LogFormat::kText);
  logger.info("for people");
  CHECK(stream.str().find("info for people") != std::string::npos);
}
