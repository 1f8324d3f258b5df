// Where an expert is computed, and the way of its tensors there and back.
#pragma once

#include "net/error.hpp"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace dmoe::expert_server {

/// "cpu", "cuda" (the first) or "cuda:1".
/// kInvalidArgument, saying what to do: something else, or a device that this machine or this build of libtorch lacks.
Result<c10::Device> parse_device(const std::string& text);

/// A generator of random numbers of a device, for one user.
at::Generator make_generator(const c10::Device& device);

/// An empty tensor in memory of the host from and to which the device copies without waiting.
at::Tensor empty_for_copies(at::IntArrayRef sizes, at::ScalarType dtype, const c10::Device& device);

/// Tensors of the host, on the device. Copies are queued there, not waited for: the host's memory must stay as it is
/// until a later `to_host` returned. On the CPU: the same tensors.
std::vector<at::Tensor> to_device(const std::vector<at::Tensor>& tensors, const c10::Device& device);

/// Tensors of the device, contiguous on the host. Waits until everything that is queued on the device is done. On the
/// CPU: the same tensors.
std::vector<at::Tensor> to_host(std::vector<at::Tensor> tensors, const c10::Device& device);

/// Whether all values are finite; an integer always is.
bool all_finite_on(const at::Tensor& tensor);

}  // namespace dmoe::expert_server
