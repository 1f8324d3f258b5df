// Torch tensors in and out of Cap'n Proto messages. Target: dmoe::net_tensor, the one part of net that knows torch.
#pragma once

#include "net/compression.hpp"
#include "net/error.hpp"
#include "net/rpc_message.hpp"
#include "net/schema/tensor.capnp.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace dmoe::net {

inline constexpr std::size_t kMaxTensorDimensions = 16;
inline constexpr std::size_t kMaxTensorsPerCall = 64;

/// Writes `tensor` (dense, any device and strides, rank 0 to 16, one of the wire's dtypes).
/// Its bytes are referenced, not copied, when it is a contiguous CPU tensor of a multiple of 8 bytes; the storage is
/// then kept in `attachments`. `compression` is used where it can be, see Compression.
/// @return kInvalidArgument naming a dtype or layout that the wire does not have.
Result<void> encode_tensor(const at::Tensor& tensor, schema::Tensor::Builder builder, Attachments& attachments,
                           Compression compression = Compression::kNone);

/// A CPU tensor over the frame's own bytes (no copy); `frame` stays alive as long as the tensor's storage. What came
/// compressed gets memory of its own, at most four times the bytes that came.
/// The tensor must not be written to when several tensors or readers share the frame.
/// @return kInvalidArgument when dtype, rank, sizes or byte count do not fit together.
Result<at::Tensor> decode_tensor(schema::Tensor::Reader reader, std::shared_ptr<const void> frame);

Result<void> encode_tensors(const std::vector<at::Tensor>& tensors, capnp::List<schema::Tensor>::Builder builder,
                            Attachments& attachments, Compression compression = Compression::kNone);
Result<std::vector<at::Tensor>> decode_tensors(capnp::List<schema::Tensor>::Reader reader,
                                               const std::shared_ptr<const void>& frame);

/// Bytes of the tensors as they travel.
std::uint64_t wire_bytes(capnp::List<schema::Tensor>::Reader reader);
/// At least what decoding them allocates.
std::uint64_t expanded_bytes(capnp::List<schema::Tensor>::Reader reader);

/// The wire's number of a torch dtype, and back. kInvalidArgument for a dtype the wire does not have.
Result<schema::DType> to_wire(at::ScalarType dtype);
Result<at::ScalarType> from_wire(schema::DType dtype);

}  // namespace dmoe::net
