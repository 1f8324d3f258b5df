// The one exception of the trainer's API.
#pragma once

#include "net/error.hpp"

#include <stdexcept>

namespace dmoe {

/// Thrown on the trainer's own thread, and only there, by what a model author calls (`Client::connect`, `DMoE::forward`
/// and its backward, `RemoteExpert::forward`): libtorch code reports failure by exception. Everything below returns
/// Result. `what()` is one sentence that says what failed and what to do.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(describe(error)), error_(std::move(error)) {}

  Errc code() const noexcept { return error_.code; }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

}  // namespace dmoe
