// What a search's choices say about the load of experts. Private to dmoe/.
#pragma once

#include "gating/beam_search.hpp"
#include "gating/product_key_gate.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace dmoe {

/// `logits` with the given rows of `other`; tensors of one device, gradients pass. No rows: `logits` themselves.
std::vector<at::Tensor> with_rows_of(std::vector<at::Tensor> logits, const std::vector<at::Tensor>& other,
                                     const std::vector<std::int64_t>& rows);

/// Rows that chose each expert, by its index in the result.
std::vector<std::uint64_t> chosen_rows(const gating::BeamResult& found);

/// Per dimension and coordinate: its share of all choices, and of all live experts.
std::vector<gating::CoordinateShares> coordinate_shares(const gating::BeamResult& found,
                                                        const std::vector<std::uint64_t>& chosen,
                                                        const std::vector<std::int64_t>& grid);

/// Summed over the rows: the entropy, in nats, of the softmax over the logits of the experts that a row chose.
/// @param logits as ForwardPass takes them, without bias.
double summed_entropy(const gating::BeamResult& found, const std::vector<at::Tensor>& logits);

/// [live experts, D] int64: their coordinates.
at::Tensor live_cells(const gating::BeamResult& found, std::size_t dimensions);

}  // namespace dmoe
