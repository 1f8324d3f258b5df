#include "expert_server/device.hpp"

#include "net/tensor_finite.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <charconv>
#include <string_view>
#include <utility>

namespace dmoe::expert_server {
namespace {

Error no_device(std::string message) { return {Errc::kInvalidArgument, std::move(message), {}}; }

Result<c10::Device> cuda_device(c10::DeviceIndex index) {
  if (!at::hasCUDA()) {
    return no_device(
        "device cuda: this program is linked with a libtorch without CUDA, as Debian's is; build it against a CUDA "
        "build "
        "of libtorch (cmake -DCMAKE_PREFIX_PATH=/path/to/libtorch), or use cpu");
  }
  const auto count = torch::cuda::device_count();
  if (static_cast<std::size_t>(index) < count) return c10::Device(c10::kCUDA, index);
  return no_device("device cuda:" + std::to_string(index) + ": this machine has " + std::to_string(count) +
                   " CUDA devices, counted from 0; see nvidia-smi, or use cpu");
}

}  // namespace

Result<c10::Device> parse_device(const std::string& text) {
  if (text == "cpu") return c10::Device(c10::kCPU);
  if (text == "cuda") return cuda_device(0);
  constexpr std::string_view kIndexed = "cuda:";
  if (text.starts_with(kIndexed)) {
    const char* end = text.data() + text.size();
    int index = 0;
    const auto [stop, code] = std::from_chars(text.data() + kIndexed.size(), end, index);
    if (code == std::errc{} && stop == end && index >= 0 && index < 128) {
      return cuda_device(static_cast<c10::DeviceIndex>(index));
    }
  }
  return no_device("device " + text + " is not one of cpu, cuda, cuda:0, cuda:1, …");
}

at::Generator make_generator(const c10::Device& device) {
  if (device.is_cpu()) return at::make_generator<at::CPUGeneratorImpl>();
  return at::globalContext().defaultGenerator(device).clone();
}

at::Tensor empty_for_copies(at::IntArrayRef sizes, at::ScalarType dtype, const c10::Device& device) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(device.is_cuda()));
}

std::vector<at::Tensor> to_device(const std::vector<at::Tensor>& tensors, const c10::Device& device) {
  if (device.is_cpu()) return tensors;
  std::vector<at::Tensor> there;
  there.reserve(tensors.size());
  for (const auto& tensor : tensors) there.push_back(tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true));
  return there;
}

std::vector<at::Tensor> to_host(std::vector<at::Tensor> tensors, const c10::Device& device) {
  if (device.is_cpu()) return tensors;
  for (auto& tensor : tensors) {
    if (tensor.device().is_cpu()) continue;
    auto here = empty_for_copies(tensor.sizes(), tensor.scalar_type(), device);
    here.copy_(tensor, /*non_blocking=*/true);
    tensor = std::move(here);
  }
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  return tensors;
}

bool all_finite_on(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return net::all_finite(tensor);
  return !at::isFloatingType(tensor.scalar_type()) || at::isfinite(tensor).all().item<bool>();
}

}  // namespace dmoe::expert_server
