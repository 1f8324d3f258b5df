#include "tests/e2e/two_hosts.hpp"

#include "cli/child_process.hpp"
#include "tests/e2e/program_run.hpp"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace dmoe::test {
namespace {

/// Its exit status was 0.
bool ip(const std::vector<std::string>& arguments) {
  const auto directory = test_directory();
  cli::ChildOptions options;
  options.program = TwoHosts::program();
  options.arguments = arguments;
  options.log_file = directory.path() / "ip.log";
  auto child = cli::ChildProcess::spawn(options);
  if (!child) return false;
  const auto status = child->wait(patience_ends());
  return status && status->signal == 0 && status->code == 0;
}

void must(const std::vector<std::string>& arguments) {
  if (ip(arguments)) return;
  std::string text = "ip";
  for (const std::string& argument : arguments) text += " " + argument;
  throw std::runtime_error("failed: " + text);
}

}  // namespace

std::filesystem::path TwoHosts::program() {
  for (const char* path : {"/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip"}) {
    if (std::filesystem::exists(path)) return path;
  }
  return {};
}

std::optional<std::string> TwoHosts::refusal() {
  if (program().empty()) return "iproute2 is not installed";
  if (geteuid() != 0) return "network namespaces are made by root only";
  const std::string name = "dmoe" + std::to_string(getpid()) + "t";
  const bool made = ip({"netns", "add", name});
  if (made) ip({"netns", "del", name});
  if (!made) return "this machine lets nobody make network namespaces";
  return {};
}

TwoHosts::TwoHosts()
    : first_("dmoe" + std::to_string(getpid()) + "a"), second_("dmoe" + std::to_string(getpid()) + "b") {
  must({"netns", "add", first_});
  must({"netns", "add", second_});
  must({"link", "add", "wire", "netns", first_, "type", "veth", "peer", "name", "wire", "netns", second_});
  for (const auto& [host, address] : {std::pair(first_, kFirst), std::pair(second_, kSecond)}) {
    must({"-n", host, "addr", "add", std::string(address) + "/24", "dev", "wire"});
    must({"-n", host, "link", "set", "wire", "up"});
    must({"-n", host, "link", "set", "lo", "up"});
  }
}

TwoHosts::~TwoHosts() {
  ip({"netns", "del", first_});
  ip({"netns", "del", second_});
}

std::vector<std::string> TwoHosts::in(const std::string& host, std::vector<std::string> command) {
  command.insert(command.begin(), {"netns", "exec", host});
  return command;
}

/// What the port would answer is routed nowhere.
void TwoHosts::block_tcp(std::uint16_t port) {
  must({"-n", first_, "rule", "add", "ipproto", "tcp", "sport", std::to_string(port), "to", "10.77.0.0/24", "blackhole",
        "pref", "1"});
}

void TwoHosts::unblock_tcp() { must({"-n", first_, "rule", "del", "pref", "1"}); }

}  // namespace dmoe::test
