#include "expert_server/sha256_stream.hpp"

#include <openssl/evp.h>

#include <stdexcept>

namespace dmoe::expert_server {
namespace {

void require(int outcome) {
  if (outcome != 1) throw std::runtime_error("OpenSSL has no SHA-256");
}

}  // namespace

void Sha256Stream::Free::operator()(evp_md_ctx_st* context) const noexcept { EVP_MD_CTX_free(context); }

Sha256Stream::Sha256Stream() : context_(EVP_MD_CTX_new()) {
  require(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256Stream::add(std::span<const std::uint8_t> bytes) {
  require(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}

Sha256Digest Sha256Stream::finish() {
  Sha256Digest digest{};
  require(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  return digest;
}

std::string Sha256Stream::finish_hex() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : finish()) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

}  // namespace dmoe::expert_server
