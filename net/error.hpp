// Failures that an unreliable network produces in normal operation, as values.
#pragma once

#include <boost/system/result.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

namespace dmoe {

/// What went wrong, from the caller's side: each value names the caller's next move.
/// The numbers travel in replies (net/schema/rpc.capnp), so they never change meaning.
enum class Errc {
  kNotFound = 1,          ///< No such expert or record here. Ask the DHT again, or use another expert.
  kInvalidArgument = 2,   ///< The caller's own fault: wrong shape, dtype, value. Do not retry; the peer is healthy.
  kOverloaded = 3,        ///< Queue full. Retry after Error::retry_after, or use another expert.
  kDeadlineExceeded = 4,  ///< No answer in time. Use another expert; the peer may only be slow.
  kUnauthorized = 5,      ///< The peer refuses this caller.
  kUnavailable = 6,       ///< Refused, reset or unreachable. Use another expert and skip this peer for a while.
  kInternal = 7,          ///< The peer, or this process, failed in a way that is a bug or a broken machine.
  kCancelled = 8,         ///< The caller itself gave up.
  kLost = 9,              ///< The call or its answer was lost on the way; the peer is fine. Use another expert, or call
                          ///< again what may run twice.
};

/// The code's name in the style of the design: "notFound", "deadlineExceeded", …
std::string_view to_string(Errc code) noexcept;

/// An error value: a code to act on and one sentence for a person (who, what, how long, what to do).
struct Error {
  Errc code = Errc::kInternal;
  std::string message;
  std::optional<std::chrono::milliseconds> retry_after;  ///< Only with kOverloaded.
};

/// "deadlineExceeded: forward ffn.3.7 on 10.0.0.4:7000 gave no answer in 250 ms"
std::string describe(const Error& error);

/// A value, or the Error that took its place. Functions that return it do not throw for what a peer did.
template <class T>
using Result = boost::system::result<T, Error>;

/// `Result::value()` on a failure ends here: it throws std::runtime_error(describe(error)).
/// For `main`, tests and libtorch call sites; component code checks `has_value()`.
[[noreturn]] void throw_exception_from_error(const Error& error, const boost::source_location& where);

}  // namespace dmoe
