// Experts from TorchScript files.
#pragma once

#include "expert_server/architectures.hpp"

#include <memory>

namespace dmoe::expert_server {

/// A module saved by torch.jit.save. Its parameters that require grad are trained. Arguments:
/// - `file`: the path; it is not compared with a checkpoint's.
/// - `inputs`: what forward takes, "float32:64;bool:-1x64": dtype and sizes of each input without the batch row, -1 for
///   any size. Default: float32 of hidden_dim.
/// - `stochastic`: 1 when forward draws random numbers; they come from torch's default generator, seeded per call, and
///   calls are computed one by one. Default 0.
///
/// What forward returns (a tensor, or a tuple or list of tensors) is found by calling it with zeros.
std::unique_ptr<ExpertModule> make_script_expert(ArchitectureArguments& arguments);

}  // namespace dmoe::expert_server
