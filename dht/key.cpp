#include "dht/key.hpp"

namespace dmoe::dht {

Key Key::of(std::string_view name) noexcept {
  return Key{net::sha256({reinterpret_cast<const std::uint8_t*>(name.data()), name.size()})};
}

}  // namespace dmoe::dht
