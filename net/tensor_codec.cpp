#include "net/tensor_codec.hpp"

#include "net/tensor_compression.hpp"

#include <ATen/ATen.h>

#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace dmoe::net {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes travel in little-endian order as they lie");

constexpr std::size_t kWordBytes = sizeof(capnp::word);

Error invalid(std::string text) { return {Errc::kInvalidArgument, std::move(text), {}}; }

/// Whether the socket may read this memory as whole Cap'n Proto words.
bool is_whole_words(const at::Tensor& tensor) {
  return tensor.nbytes() % kWordBytes == 0 && reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % kWordBytes == 0;
}

/// The first `size` bytes of the tensor; the word that they end in is readable.
void reference_bytes(const at::Tensor& tensor, std::size_t size, schema::Tensor::Builder builder,
                     Attachments& attachments) {
  attachments.keep(std::make_shared<const at::Tensor>(tensor));
  const auto bytes = kj::arrayPtr(static_cast<const kj::byte*>(tensor.data_ptr()), size);
  builder.adoptData(capnp::Orphanage::getForMessageContaining(builder).referenceExternalData(bytes));
}

void copy_bytes(const at::Tensor& tensor, schema::Tensor::Builder builder) {
  auto data = builder.initData(static_cast<unsigned>(tensor.nbytes()));
  std::memcpy(data.begin(), tensor.data_ptr(), tensor.nbytes());
}

/// Number of elements, or nothing when a size is negative or the product overflows.
std::optional<std::uint64_t> element_count(const std::vector<std::int64_t>& sizes) {
  // A zero makes the tensor empty, but torch still multiplies the other sizes: they must not overflow either.
  std::uint64_t product = 1;
  bool empty = false;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      empty = true;
      continue;
    }
    const auto factor = static_cast<std::uint64_t>(size);
    if (product > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) / factor) return std::nullopt;
    product *= factor;
  }
  return empty ? 0 : product;
}

std::string shape_text(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Result<std::vector<std::int64_t>> read_sizes(capnp::List<std::int64_t>::Reader shape) {
  if (shape.size() > kMaxTensorDimensions) {
    return invalid("a tensor of " + std::to_string(shape.size()) + " dimensions is over the limit of " +
                   std::to_string(kMaxTensorDimensions));
  }
  std::vector<std::int64_t> sizes;
  sizes.reserve(shape.size());
  for (const auto size : shape) sizes.push_back(size);
  return sizes;
}

}  // namespace

Result<schema::DType> to_wire(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return schema::DType::FLOAT32;
    case at::kHalf: return schema::DType::FLOAT16;
    case at::kBFloat16: return schema::DType::BFLOAT16;
    case at::kDouble: return schema::DType::FLOAT64;
    case at::kLong: return schema::DType::INT64;
    case at::kInt: return schema::DType::INT32;
    case at::kByte: return schema::DType::UINT8;
    case at::kBool: return schema::DType::BOOL;
    default:
      return invalid(std::string("tensors of type ") + c10::toString(dtype) +
                     " cannot be sent; convert to float32, float16, bfloat16, float64, int64, int32, uint8 or bool");
  }
}

Result<at::ScalarType> from_wire(schema::DType dtype) {
  switch (dtype) {
    case schema::DType::FLOAT32: return at::kFloat;
    case schema::DType::FLOAT16: return at::kHalf;
    case schema::DType::BFLOAT16: return at::kBFloat16;
    case schema::DType::FLOAT64: return at::kDouble;
    case schema::DType::INT64: return at::kLong;
    case schema::DType::INT32: return at::kInt;
    case schema::DType::UINT8: return at::kByte;
    case schema::DType::BOOL: return at::kBool;
  }
  return invalid("a tensor of unknown type " + std::to_string(static_cast<unsigned>(dtype)) +
                 "; the peer may be newer than this program");
}

Result<void> encode_tensor(const at::Tensor& tensor, schema::Tensor::Builder builder, Attachments& attachments,
                           Compression compression) {
  if (!tensor.defined()) return invalid("an undefined tensor cannot be sent");
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) {
    return invalid("only dense, unquantized tensors can be sent; call to_dense() or dequantize() first");
  }
  if (std::cmp_greater(tensor.dim(), kMaxTensorDimensions)) {
    return invalid("a tensor of " + std::to_string(tensor.dim()) + " dimensions is over the limit of " +
                   std::to_string(kMaxTensorDimensions));
  }
  const auto dtype = to_wire(tensor.scalar_type());
  if (dtype.has_error()) return dtype.error();
  // Cap'n Proto counts a list's bytes in 29 bits.
  constexpr std::size_t kMostBytes = (std::size_t{1} << 29U) - 1;
  if (tensor.nbytes() > kMostBytes) {
    return invalid("a tensor of " + std::to_string(tensor.nbytes()) +
                   " bytes is over the wire's limit of 512 MiB; "
                   "send fewer rows");
  }
  builder.setDtype(*dtype);
  const auto sizes = tensor.sizes();
  auto shape = builder.initShape(static_cast<unsigned>(sizes.size()));
  for (unsigned i = 0; i < sizes.size(); ++i) shape.set(i, sizes[i]);
  if (tensor.numel() == 0) return {};
  // Both are no-ops for a contiguous CPU tensor; resolve_neg/conj because lazy views share bytes with another value.
  const at::Tensor dense = tensor.detach().resolve_neg().to(at::kCPU).contiguous();
  if (const auto coded = compress(dense, compression); coded.defined()) {
    builder.setCompression(to_wire(compression));
    reference_bytes(coded, compressed_size(compression, static_cast<std::size_t>(dense.numel())), builder, attachments);
  } else if (is_whole_words(dense)) {
    reference_bytes(dense, dense.nbytes(), builder, attachments);
  } else {
    copy_bytes(dense, builder);
  }
  return {};
}

Result<at::Tensor> decode_tensor(schema::Tensor::Reader reader, std::shared_ptr<const void> frame) {
  const auto dtype = from_wire(reader.getDtype());
  if (dtype.has_error()) return dtype.error();
  const auto sizes = read_sizes(reader.getShape());
  if (sizes.has_error()) return sizes.error();
  const auto compression = from_wire(reader.getCompression());
  if (compression.has_error()) return compression.error();
  const auto data = reader.getData();
  const auto count = element_count(*sizes);
  if (*compression != Compression::kNone) {
    if (*dtype != at::kFloat || !count) return invalid("compressed values that are not float32, or of no shape");
    return decompress({data.begin(), data.size()}, *compression, *sizes, *count);
  }
  const std::size_t item = c10::elementSize(*dtype);
  if (!count || data.size() % item != 0 || *count != data.size() / item) {
    return invalid("a tensor of shape " + shape_text(*sizes) + " and type " + c10::toString(*dtype) + " came with " +
                   std::to_string(data.size()) + " bytes");
  }
  const auto options = at::TensorOptions().dtype(*dtype);
  if (*count == 0) return at::empty(*sizes, options);
  // Nothing writes through this pointer: see the header.
  void* bytes = const_cast<kj::byte*>(data.begin());
  return at::from_blob(
      bytes, *sizes, [frame = std::move(frame)](void*) {}, options);
}

Result<void> encode_tensors(const std::vector<at::Tensor>& tensors, capnp::List<schema::Tensor>::Builder builder,
                            Attachments& attachments, Compression compression) {
  if (tensors.size() > kMaxTensorsPerCall || tensors.size() != builder.size()) {
    return invalid(std::to_string(tensors.size()) + " tensors do not fit a list of " + std::to_string(builder.size()) +
                   " (at most " + std::to_string(kMaxTensorsPerCall) + " in one call)");
  }
  for (unsigned i = 0; i < tensors.size(); ++i) {
    const auto encoded = encode_tensor(tensors[i], builder[i], attachments, compression);
    if (encoded.has_error()) return encoded.error();
  }
  return {};
}

std::uint64_t wire_bytes(capnp::List<schema::Tensor>::Reader reader) {
  std::uint64_t bytes = 0;
  for (const auto tensor : reader) bytes += tensor.getData().size();
  return bytes;
}

std::uint64_t expanded_bytes(capnp::List<schema::Tensor>::Reader reader) {
  constexpr std::uint64_t kMostExpansion = 4;
  std::uint64_t bytes = 0;
  for (const auto tensor : reader) {
    if (tensor.getCompression() != schema::Compression::NONE) bytes += kMostExpansion * tensor.getData().size();
  }
  return bytes;
}

Result<std::vector<at::Tensor>> decode_tensors(capnp::List<schema::Tensor>::Reader reader,
                                               const std::shared_ptr<const void>& frame) {
  if (reader.size() > kMaxTensorsPerCall) {
    return invalid(std::to_string(reader.size()) + " tensors in one call are over the limit of " +
                   std::to_string(kMaxTensorsPerCall));
  }
  std::vector<at::Tensor> tensors;
  tensors.reserve(reader.size());
  for (const auto item : reader) {
    auto tensor = decode_tensor(item, frame);
    if (tensor.has_error()) return tensor.error();
    tensors.push_back(std::move(*tensor));
  }
  return tensors;
}

}  // namespace dmoe::net
