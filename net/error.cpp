#include "net/error.hpp"

#include <stdexcept>

namespace dmoe {

std::string_view to_string(Errc code) noexcept {
  switch (code) {
    case Errc::kNotFound: return "notFound";
    case Errc::kInvalidArgument: return "invalidArgument";
    case Errc::kOverloaded: return "overloaded";
    case Errc::kDeadlineExceeded: return "deadlineExceeded";
    case Errc::kUnauthorized: return "unauthorized";
    case Errc::kUnavailable: return "unavailable";
    case Errc::kInternal: return "internal";
    case Errc::kCancelled: return "cancelled";
    case Errc::kLost: return "lost";
  }
  return "internal";
}

std::string describe(const Error& error) {
  std::string text(to_string(error.code));
  text += ": ";
  text += error.message;
  return text;
}

void throw_exception_from_error(const Error& error, const boost::source_location& /*where*/) {
  throw std::runtime_error(describe(error));
}

}  // namespace dmoe
