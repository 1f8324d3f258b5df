// Remote computation as a step of autograd. Private to dmoe/.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/types.h>

#include <functional>
#include <string>
#include <vector>

namespace dmoe {

/// What backward does: gradients of the outputs (defined, contiguous, CPU) in; one gradient per input out, undefined
/// for an input without one.
using RemoteBackward = std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>& grad_outputs)>;

/// Makes `outputs`, which another machine computed from `inputs`, part of the graph: `backward` runs when gradients
/// reach them. Unless grad mode is off, they require a gradient even when no input does, because backward is also how
/// experts learn. Strided, broadcast and missing output gradients are made dense before `backward` sees them. Backward
/// through the backward is refused with an error that says `name`.
///
/// `backward` runs on the thread that called backward(), under no_grad, once per backward through the graph; what it
/// captured is released with the graph's other saved tensors.
void record_remote(const std::string& name, std::vector<torch::Tensor>& outputs,
                   const std::vector<torch::Tensor>& inputs, RemoteBackward backward);

}  // namespace dmoe
