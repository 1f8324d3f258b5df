#include "dht/listing.hpp"

#include "dht/record.hpp"

#include <algorithm>
#include <limits>

namespace dmoe::dht {
namespace {

constexpr std::uint8_t kListingFormat = 1;

void put_varint(std::vector<std::uint8_t>& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7U) out.push_back(static_cast<std::uint8_t>(value | 0x80U));
  out.push_back(static_cast<std::uint8_t>(value));
}

class Cursor {
 public:
  explicit Cursor(std::span<const std::uint8_t> in) : in_(in) {}
  bool ok() const { return ok_; }
  std::size_t left() const { return in_.size(); }
  std::uint8_t byte() {
    if (in_.empty()) {
      ok_ = false;
      return 0;
    }
    const std::uint8_t value = in_.front();
    in_ = in_.subspan(1);
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
      const std::uint8_t next = byte();
      value |= std::uint64_t{next & 0x7FU} << shift;
      if ((next & 0x80U) == 0) return value;
    }
    ok_ = false;
    return 0;
  }
  std::string text(std::size_t size) {
    if (size > in_.size()) {
      ok_ = false;
      return {};
    }
    std::string value(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(size));
    in_ = in_.subspan(size);
    return value;
  }

 private:
  std::span<const std::uint8_t> in_;
  bool ok_ = true;
};

bool is_host(const std::string& host) {
  if (host.empty() || host.size() > kMaxHostBytes) return false;
  return std::all_of(host.begin(), host.end(), [](unsigned char c) { return c > ' ' && c < 0x7F; });
}

Error invalid(std::string message) { return {Errc::kInvalidArgument, std::move(message), {}}; }

}  // namespace

Result<std::vector<std::uint8_t>> write_listing(const Listing& listing) {
  if (listing.endpoints.empty() || listing.endpoints.size() > kMaxEndpoints) {
    return invalid("a server announces 1 to " + std::to_string(kMaxEndpoints) + " endpoints, not " +
                   std::to_string(listing.endpoints.size()));
  }
  std::vector<std::uint8_t> out{kListingFormat, static_cast<std::uint8_t>(listing.endpoints.size())};
  for (const net::Endpoint& endpoint : listing.endpoints) {
    if (!is_host(endpoint.host) || endpoint.port == 0) {
      return invalid("endpoint " + net::to_string(endpoint) + " cannot be announced: it needs a host name and a port");
    }
    out.push_back(static_cast<std::uint8_t>(endpoint.host.size()));
    out.insert(out.end(), endpoint.host.begin(), endpoint.host.end());
    out.push_back(static_cast<std::uint8_t>(endpoint.port >> 8U));
    out.push_back(static_cast<std::uint8_t>(endpoint.port));
  }
  put_varint(out, listing.children.size());
  Coordinate previous = 0;
  for (const Coordinate child : listing.children) {
    put_varint(out, child - previous);
    previous = child;
  }
  if (out.size() > kMaxValueBytes) {
    return invalid("a listing of " + std::to_string(listing.children.size()) + " coordinates takes " +
                   std::to_string(out.size()) + " bytes, over the DHT's " + std::to_string(kMaxValueBytes) +
                   ": host fewer experts below one prefix");
  }
  return out;
}

Result<Listing> read_listing(std::span<const std::uint8_t> bytes) {
  Cursor in(bytes);
  Listing listing;
  if (in.byte() != kListingFormat) return invalid("a directory record of an unknown format");
  const std::uint8_t endpoints = in.byte();
  if (endpoints == 0 || endpoints > kMaxEndpoints) return invalid("a directory record without usable endpoints");
  for (unsigned i = 0; i < endpoints; ++i) {
    net::Endpoint endpoint;
    endpoint.host = in.text(in.byte());
    const unsigned high = in.byte();
    endpoint.port = static_cast<std::uint16_t>(high << 8U | in.byte());
    if (!in.ok() || !is_host(endpoint.host) || endpoint.port == 0)
      return invalid("a directory record with a bad endpoint");
    listing.endpoints.push_back(std::move(endpoint));
  }
  const std::uint64_t children = in.varint();
  if (!in.ok() || children > in.left()) return invalid("a directory record with a bad count");  // A child takes a byte.
  listing.children.reserve(children);
  std::uint64_t coordinate = 0;
  for (std::uint64_t i = 0; i < children; ++i) {
    const std::uint64_t step = in.varint();
    coordinate += step;
    if (!in.ok() || (i != 0 && step == 0) || coordinate > std::numeric_limits<Coordinate>::max()) {
      return invalid("a directory record with bad coordinates");
    }
    listing.children.push_back(static_cast<Coordinate>(coordinate));
  }
  if (in.left() != 0) return invalid("a directory record with bytes left over");
  return listing;
}

}  // namespace dmoe::dht
