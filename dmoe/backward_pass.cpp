#include "dmoe/backward_pass.hpp"

#include "dmoe/server_health.hpp"
#include "net/tensor_finite.hpp"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace dmoe {

using Clock = std::chrono::steady_clock;

BackwardPass::BackwardPass(Client& client, const BackwardLimits& limits, const MixtureAnswers& forward,
                           const at::Tensor& grad_outputs)
    : client_(client),
      forward_(forward),
      grad_outputs_(grad_outputs),
      pass_(client, {Clock::now() + limits.timeout, limits.after_k_min, limits.straggler_patience}),
      quorum_(quorum_of(forward, limits.k_min)),
      gradients_(forward.calls.empty() ? 0 : forward.calls.front().inputs.size()) {}

RowQuorum BackwardPass::quorum_of(const MixtureAnswers& forward, std::int64_t k_min) {
  std::vector<std::int64_t> needed(static_cast<std::size_t>(forward.rows), 0);
  for (const auto& call : forward.calls) {
    for (const auto place : call.places) ++needed[static_cast<std::size_t>(place / forward.k)];
  }
  for (auto& count : needed) count = std::min(count, k_min);
  return RowQuorum(std::move(needed));
}

std::vector<at::Tensor> BackwardPass::run() {
  launch();
  PassEvents events;
  events.on_answer = [this](std::size_t call, const auto& tensors) { return accept(call, tensors); };
  events.on_failure = [this](std::size_t call) {
    for (const auto place : forward_.calls[call].places) quorum_.fail(place / forward_.k);
  };
  pass_.run(quorum_, events);
  std::vector<at::Tensor> sums;
  for (const auto& gradient : gradients_) sums.push_back(gradient.defined() ? gradient.sum(1) : at::Tensor());
  return sums;
}

void BackwardPass::launch() {
  const auto grad_rows = grad_outputs_.flatten(0, 1);
  std::vector<ExpertCall> calls;
  for (const auto& answered : forward_.calls) {
    for (const auto place : answered.places) quorum_.expect(place / forward_.k);
    ExpertCall call;
    call.uid = answered.uid;
    call.server = answered.server;
    call.endpoint = client_.health().endpoint_of(*answered.server);
    call.inputs = answered.inputs;
    call.seed = forward_.seed;
    call.compression = answered.compression;
    const auto index = at::from_blob(const_cast<std::int64_t*>(answered.places.data()),
                                     {static_cast<std::int64_t>(answered.places.size())}, at::kLong);
    call.grad_outputs.push_back(grad_rows.index_select(0, index));
    calls.push_back(std::move(call));
  }
  pass_.send(std::move(calls));
}

Result<at::Tensor> BackwardPass::check_gradient(const at::Tensor& gradient, const at::Tensor& input) const {
  if (gradient.sizes() != input.sizes()) {
    std::ostringstream text;
    text << "answered with a gradient of shape " << gradient.sizes() << " for an input of shape " << input.sizes();
    return Error{Errc::kInternal, text.str(), {}};
  }
  const auto converted = gradient.to(input.scalar_type()).contiguous();
  if (!net::all_finite(converted)) return Error{Errc::kInternal, "answered with a gradient that is NaN or Inf", {}};
  return converted;
}

Result<void> BackwardPass::accept(std::size_t call, const std::vector<at::Tensor>& tensors) {
  const auto& answered = forward_.calls[call];
  if (tensors.size() != answered.inputs.size()) {
    return Error{Errc::kInternal,
                 "answered with " + std::to_string(tensors.size()) + " gradients for " +
                     std::to_string(answered.inputs.size()) + " inputs",
                 {}};
  }
  std::vector<at::Tensor> checked(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!answered.inputs[i].is_floating_point()) continue;
    // An input without a gradient travels as an empty tensor.
    if (tensors[i].numel() == 0 && answered.inputs[i].numel() > 0) continue;
    auto gradient = check_gradient(tensors[i], answered.inputs[i]);
    if (gradient.has_error()) return gradient.error();
    checked[i] = std::move(*gradient);
  }
  for (std::size_t i = 0; i < checked.size(); ++i) {
    if (!checked[i].defined()) continue;
    if (!gradients_[i].defined()) {
      auto shape = checked[i].sizes().vec();
      shape[0] = forward_.k;
      shape.insert(shape.begin(), forward_.rows);
      gradients_[i] = at::zeros(shape, checked[i].options());
    }
    const std::size_t row_bytes = checked[i].nbytes() / answered.places.size();
    const auto* source = static_cast<const char*>(checked[i].data_ptr());
    auto* target = static_cast<char*>(gradients_[i].data_ptr());
    for (std::size_t j = 0; j < answered.places.size(); ++j) {
      std::memcpy(target + static_cast<std::size_t>(answered.places[j]) * row_bytes, source + j * row_bytes, row_bytes);
    }
  }
  for (const auto place : answered.places) quorum_.answer(place / forward_.k);
  return {};
}

}  // namespace dmoe
