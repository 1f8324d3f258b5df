// Two machines and a wire between them, as network namespaces of this one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::test {

/// Needs root and iproute2. The namespaces have this process's ID in their names and go with the object.
class TwoHosts {
 public:
  /// Why this machine does not allow it; nothing when it does.
  static std::optional<std::string> refusal();

  TwoHosts();  ///< Throws when a step fails.
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  static constexpr const char* kFirst = "10.77.0.1";
  static constexpr const char* kSecond = "10.77.0.2";

  /// `command` as a program and its arguments that run it on the first or second host.
  static std::filesystem::path program();
  std::vector<std::string> on_first(std::vector<std::string> command) const { return in(first_, std::move(command)); }
  std::vector<std::string> on_second(std::vector<std::string> command) const { return in(second_, std::move(command)); }

  /// A firewall before the first host: whoever connects to its TCP port waits in vain. UDP passes.
  void block_tcp(std::uint16_t port);
  void unblock_tcp();

 private:
  static std::vector<std::string> in(const std::string& host, std::vector<std::string> command);

  std::string first_;
  std::string second_;
};

}  // namespace dmoe::test
