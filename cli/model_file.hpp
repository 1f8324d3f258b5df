// A trained model in a file: what `dmoe train --save` writes and `--load` reads.
#pragma once

#include "net/error.hpp"

#include <torch/nn/module.h>

#include <filesystem>

namespace dmoe::cli {

/// Whether a file can be made beside `file`; asked before a long run, not after it. kUnavailable with the reason and
/// what to do.
Result<void> check_can_save(const std::filesystem::path& file);

/// Writes the parameters and buffers as torch::save does. `file` has either its old content or all of the new one,
/// whatever happens: a temporary file beside it is written, flushed to the disk and renamed. kUnavailable: the disk
/// refused.
Result<void> save_model(const torch::nn::Module& model, const std::filesystem::path& file);

/// Replaces the parameters and buffers by those of a file that save_model, or torch::save of such a module, wrote.
/// kNotFound, kUnavailable: it cannot be read; kInvalidArgument: it is damaged, or a tensor is missing or of another
/// shape; the message names it. After an error the model is in no defined state.
Result<void> load_model(torch::nn::Module& model, const std::filesystem::path& file);

}  // namespace dmoe::cli
