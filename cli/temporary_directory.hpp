// A directory that exists as long as its object.
#pragma once

#include "net/error.hpp"

#include <filesystem>
#include <string>

namespace dmoe::cli {

class TemporaryDirectory {
 public:
  /// `<system's temporary directory>/<name>-XXXXXX`, mode 0700. kUnavailable names the directory and the reason.
  static Result<TemporaryDirectory> make(const std::string& name);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept;
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory();  ///< Removes it with all it holds, unless kept.

  const std::filesystem::path& path() const noexcept { return path_; }
  void keep() noexcept { kept_ = true; }

 private:
  explicit TemporaryDirectory(std::filesystem::path path) : path_(std::move(path)) {}

  std::filesystem::path path_;
  bool kept_ = false;
};

}  // namespace dmoe::cli
