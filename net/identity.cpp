#include "net/identity.hpp"

#include "net/identity_file.hpp"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sodium.h>

#include <new>
#include <optional>
#include <stdexcept>

namespace dmoe::net {
namespace {

struct Free {
  void operator()(EVP_PKEY* key) const noexcept { EVP_PKEY_free(key); }
  void operator()(BIO* bio) const noexcept { BIO_free(bio); }
};
using KeyPtr = std::unique_ptr<EVP_PKEY, Free>;
using BioPtr = std::unique_ptr<BIO, Free>;

/// Before anything else of libsodium; cannot fail twice, and a failure (no random source) shows again where keys are
/// made.
[[maybe_unused]] const int kSodiumReady = sodium_init();

char hex_digit(unsigned value) noexcept { return "0123456789abcdef"[value & 0xFU]; }

std::string hex(std::span<const std::uint8_t> bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const auto byte : bytes) {
    text += hex_digit(byte >> 4U);
    text += hex_digit(byte);
  }
  return text;
}

std::optional<std::uint8_t> nibble(char c) noexcept {
  if (c >= '0' && c <= '9') return static_cast<std::uint8_t>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<std::uint8_t>(c - 'a' + 10);
  return std::nullopt;
}

/// A protected key would make OpenSSL ask on the terminal; a daemon has none.
int refuse_passphrase(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*user*/) { return -1; }

std::string to_pem(EVP_PKEY* key) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  if (!bio || PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    throw std::bad_alloc();  // A valid key in memory: nothing but memory can be missing.
  }
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<std::size_t>(size)};
}

KeyPtr from_pem(const std::string& pem) {
  const BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  if (!bio) throw std::bad_alloc();
  KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, refuse_passphrase, nullptr));
  if (key && EVP_PKEY_get_base_id(key.get()) != EVP_PKEY_ED25519) key.reset();
  return key;
}

}  // namespace

PeerId peer_id_of(const PublicKey& key) noexcept { return PeerId{sha256(key)}; }

std::array<std::uint8_t, 32> sha256(Bytes data) noexcept {
  std::array<std::uint8_t, 32> digest{};
  SHA256(data.data(), data.size(), digest.data());
  return digest;
}

std::string to_string(const PeerId& id) { return hex(id.bytes); }
std::string short_string(const PeerId& id) { return hex(std::span(id.bytes).first(4)); }

Result<PeerId> parse_peer_id(std::string_view text) {
  PeerId id;
  bool good = text.size() == 2 * id.bytes.size();
  for (std::size_t i = 0; good && i < id.bytes.size(); ++i) {
    const auto high = nibble(text[2 * i]);
    const auto low = nibble(text[2 * i + 1]);
    good = high && low;
    if (good) id.bytes[i] = static_cast<std::uint8_t>((*high << 4U) | *low);
  }
  if (good) return id;
  return Error{Errc::kInvalidArgument,
               "'" + std::string(text.substr(0, 80)) + "' is not a peer ID; write its 64 lower-case hexadecimal digits",
               {}};
}

bool verify(const PublicKey& key, Bytes message, const Signature& signature) noexcept {
  return crypto_sign_verify_detached(signature.data(), message.data(), message.size(), key.data()) == 0;
}

/// Kept in files as OpenSSL writes it; used by libsodium, which signs and verifies in under half of OpenSSL's time.
struct Identity::Key {
  explicit Key(KeyPtr secret_key) : secret(std::move(secret_key)) {
    std::array<std::uint8_t, crypto_sign_SEEDBYTES> seed{};
    std::size_t size = seed.size();
    if (!secret || EVP_PKEY_get_raw_private_key(secret.get(), seed.data(), &size) != 1) throw std::bad_alloc();
    crypto_sign_seed_keypair(public_key.data(), signing_key.data(), seed.data());
    sodium_memzero(seed.data(), seed.size());
    id = peer_id_of(public_key);
  }
  ~Key() { sodium_memzero(signing_key.data(), signing_key.size()); }
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  KeyPtr secret;
  std::array<std::uint8_t, crypto_sign_SECRETKEYBYTES> signing_key{};
  PublicKey public_key{};
  PeerId id;
};

Identity::Identity(std::shared_ptr<const Key> key) : key_(std::move(key)) {}

Identity Identity::generate() {
  std::array<std::uint8_t, 32> seed{};
  if (RAND_priv_bytes(seed.data(), static_cast<int>(seed.size())) != 1) {
    throw std::runtime_error("the operating system gave no random bytes for a key");
  }
  return from_seed(seed);
}

Identity Identity::from_seed(const std::array<std::uint8_t, 32>& seed) {
  KeyPtr key(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed.data(), seed.size()));
  return Identity(std::make_shared<const Key>(std::move(key)));
}

Result<Identity> Identity::load(const std::filesystem::path& file) {
  auto pem = read_secret_file(file);
  if (pem.has_error()) return pem.error();
  KeyPtr key = from_pem(*pem);
  if (!key) {
    return Error{Errc::kInvalidArgument,
                 "'" + file.string() +
                     "' is not an unencrypted Ed25519 private key in PEM; restore it from a backup, or move it away "
                     "and a new identity is made",
                 {}};
  }
  return Identity(std::make_shared<const Key>(std::move(key)));
}

Result<Identity> Identity::load_or_create(const std::filesystem::path& file) {
  auto loaded = load(file);
  if (loaded.has_value() || loaded.error().code != Errc::kNotFound) return loaded;
  const Identity fresh = generate();
  const auto saved = write_new_secret_file(file, to_pem(fresh.key_->secret.get()));
  if (saved.has_value()) return fresh;
  // Another process of the same machine made the key between our look and our rename: its key is the identity.
  if (saved.error().code == Errc::kInvalidArgument) return load(file);
  return saved.error();
}

Result<void> Identity::save_new(const std::filesystem::path& file) const {
  return write_new_secret_file(file, to_pem(key_->secret.get()));
}

const PublicKey& Identity::public_key() const noexcept { return key_->public_key; }
const PeerId& Identity::peer_id() const noexcept { return key_->id; }

Signature Identity::sign(Bytes message) const {
  Signature signature{};
  crypto_sign_detached(signature.data(), nullptr, message.data(), message.size(), key_->signing_key.data());
  return signature;
}

}  // namespace dmoe::net
