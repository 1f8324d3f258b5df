// SHA-256 of bytes that arrive in pieces.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace dmoe::expert_server {

using Sha256Digest = std::array<std::uint8_t, 32>;

class Sha256Stream {
 public:
  Sha256Stream();
  void add(std::span<const std::uint8_t> bytes);
  Sha256Digest finish();  ///< Ends the stream.
  /// 64 lower-case hexadecimal digits. Ends the stream.
  std::string finish_hex();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace dmoe::expert_server
