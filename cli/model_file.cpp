#include "cli/model_file.hpp"

#include <torch/serialize/archive.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <map>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace dmoe::cli {
namespace {

Error cannot_save(const std::filesystem::path& file, int number) {
  return {Errc::kUnavailable,
          "cannot write --save '" + file.string() + "': " + std::generic_category().message(number) +
              "; name a file in a directory that exists, has room and that this user may write",
          {}};
}

/// A new file beside the one to be written; removed unless it was given that one's name.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& beside) : name_(beside.string() + ".XXXXXX") {
    descriptor_ = ::mkostemp(name_.data(), O_CLOEXEC);
    error_ = descriptor_ < 0 ? errno : 0;
  }
  ~TemporaryFile() {
    if (descriptor_ < 0) return;
    ::close(descriptor_);
    if (!renamed_) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  /// 0, or errno of the first thing that failed.
  int error() const noexcept { return error_; }
  void write(const std::string& bytes) {
    for (std::size_t done = 0; error_ == 0 && done < bytes.size();) {
      const ssize_t put = ::write(descriptor_, bytes.data() + done, bytes.size() - done);
      if (put >= 0) {
        done += static_cast<std::size_t>(put);
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
  }
  void publish_as(const std::filesystem::path& file) {
    if (error_ == 0 && ::fsync(descriptor_) != 0) error_ = errno;
    if (error_ != 0) return;
    renamed_ = ::rename(name_.c_str(), file.c_str()) == 0;
    if (!renamed_) error_ = errno;
  }

 private:
  std::string name_;
  int descriptor_ = -1;
  int error_ = 0;
  bool renamed_ = false;
};

/// A new name survives a power cut only once its directory is on the disk, too.
void sync_directory_of(const std::filesystem::path& file) {
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

using Shapes = std::map<std::string, std::vector<std::int64_t>>;

Shapes shapes_of(const torch::nn::Module& model) {
  Shapes shapes;
  for (const auto& item : model.named_parameters()) shapes[item.key()] = item.value().sizes().vec();
  for (const auto& item : model.named_buffers()) shapes[item.key()] = item.value().sizes().vec();
  return shapes;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

Result<void> check_can_save(const std::filesystem::path& file) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file, ignored)) return cannot_save(file, EISDIR);
  const TemporaryFile trial(file);
  if (trial.error() != 0) return cannot_save(file, trial.error());
  return {};
}

Result<void> save_model(const torch::nn::Module& model, const std::filesystem::path& file) {
  std::string bytes;
  try {
    torch::serialize::OutputArchive archive;
    model.save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    bytes = std::move(stream).str();
  } catch (const std::exception& error) {
    return Error{Errc::kInternal, "cannot turn the model into a file: " + first_line(error), {}};
  }
  TemporaryFile temporary(file);
  temporary.write(bytes);
  temporary.publish_as(file);
  if (temporary.error() != 0) return cannot_save(file, temporary.error());
  sync_directory_of(file);
  return {};
}

Result<void> load_model(torch::nn::Module& model, const std::filesystem::path& file) {
  if (::access(file.c_str(), R_OK) != 0) {
    const int number = errno;
    return Error{number == ENOENT ? Errc::kNotFound : Errc::kUnavailable,
                 "cannot read --load '" + file.string() + "': " + std::generic_category().message(number) +
                     "; name a file that 'dmoe train --save' wrote",
                 {}};
  }
  const Shapes wanted = shapes_of(model);
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(file.string());
    model.load(archive);
  } catch (const std::exception& error) {
    return Error{
        Errc::kInvalidArgument,
        "--load '" + file.string() + "' is damaged, or no model that 'dmoe train --save' wrote: " + first_line(error),
        {}};
  }
  for (const auto& [name, shape] : shapes_of(model)) {
    const auto here = wanted.find(name);
    if (here != wanted.end() && here->second == shape) continue;
    return Error{Errc::kInvalidArgument,
                 "--load '" + file.string() + "': " + name + " is " + shape_text(shape) + " there and " +
                     (here == wanted.end() ? "missing" : shape_text(here->second)) +
                     " here; give the --hidden-dim and --grid-size that it was saved with",
                 {}};
  }
  return {};
}

}  // namespace dmoe::cli
