// The architectures that every server knows.
#pragma once

#include "expert_server/architectures.hpp"

#include <memory>

namespace dmoe::expert_server {

/// [rows, h] → [rows, h]: Linear h→4h, LayerNorm, ReLU, Linear 4h→4h, LayerNorm, ReLU, Linear 4h→h, plus the input.
/// Source: Learning@home (arXiv 2002.04013), §4.1, the feed-forward expert block.
std::unique_ptr<ExpertModule> make_ffn_expert(ArchitectureArguments& arguments);

/// [rows, tokens, h] → the same: one post-norm encoder layer (Vaswani et al. 2017), GELU, inner width 4h. Arguments:
/// `heads` (default: the largest divisor of h up to 16), `feedforward` (4h), `dropout` (0), and `padding_mask` = 1 for
/// a second input, bool [rows, tokens], true where a token is padding.
std::unique_ptr<ExpertModule> make_transformer_expert(ArchitectureArguments& arguments);

/// [rows, h] and a mask, bool [rows, h], true where a feature is kept → [rows, h]: the caller chooses the dropout mask,
/// so that forward and backward agree whoever computes them. Masked input, Linear h→2h, ReLU, Linear 2h→h. Argument:
/// `dropout` (0.2), by whose complement the kept features are divided.
std::unique_ptr<ExpertModule> make_det_dropout_expert(ArchitectureArguments& arguments);

/// [rows, tokens, h] → the same: one LSTM layer (Hochreiter and Schmidhuber 1997) from a zero state, each row its own
/// sequence.
std::unique_ptr<ExpertModule> make_lstm_expert(ArchitectureArguments& arguments);

/// [rows, h] → the input itself. Has no parameters: measures everything around an expert.
std::unique_ptr<ExpertModule> make_nop_expert(ArchitectureArguments& arguments);

}  // namespace dmoe::expert_server
