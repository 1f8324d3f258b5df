#include "expert_server/expert_backend.hpp"

#include "expert_server/architectures.hpp"
#include "expert_server/device.hpp"
#include "expert_server/invalid.hpp"

#include <torch/autograd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace dmoe::expert_server {
namespace {

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string spec_text(const TensorSpec& spec) {
  std::string text = std::string(c10::toString(spec.dtype)) + " [rows";
  for (const auto size : spec.shape) text += size < 0 ? ", any" : ", " + std::to_string(size);
  return text + "]";
}

bool fits(const at::Tensor& tensor, const TensorSpec& spec) {
  if (tensor.scalar_type() != spec.dtype) return false;
  if (tensor.dim() != static_cast<std::int64_t>(spec.shape.size()) + 1) return false;
  for (std::size_t i = 0; i < spec.shape.size(); ++i) {
    if (spec.shape[i] >= 0 && tensor.size(static_cast<std::int64_t>(i) + 1) != spec.shape[i]) return false;
  }
  return true;
}

std::vector<NamedTensor> trained(const ExpertModule& module) {
  std::vector<NamedTensor> found;
  for (auto& parameter : module.parameters()) {
    if (parameter.tensor.requires_grad()) found.push_back(std::move(parameter));
  }
  return found;
}

/// In the same memory, or on the host.
std::vector<NamedTensor> copies(const std::vector<NamedTensor>& tensors, bool on_host = false) {
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> all;
  all.reserve(tensors.size());
  for (const auto& item : tensors) {
    auto tensor = item.tensor.detach();
    const bool elsewhere = on_host && !tensor.device().is_cpu();
    all.push_back({item.name, elsewhere ? tensor.cpu().contiguous() : tensor.clone(at::MemoryFormat::Contiguous)});
  }
  return all;
}

Result<void> check_same(const std::vector<NamedTensor>& mine, const std::vector<NamedTensor>& theirs) {
  if (mine.size() != theirs.size()) {
    return invalid("it has " + std::to_string(theirs.size()) + " weight tensors, this expert " +
                   std::to_string(mine.size()));
  }
  for (const auto& item : mine) {
    const auto match = std::find_if(theirs.begin(), theirs.end(), [&](const auto& t) { return t.name == item.name; });
    if (match == theirs.end()) return invalid("it lacks " + item.name);
    if (match->tensor.sizes() != item.tensor.sizes() || match->tensor.scalar_type() != item.tensor.scalar_type()) {
      return invalid(item.name + " is " + c10::toString(match->tensor.scalar_type()) + " " +
                     shape_text(match->tensor.sizes()) + " there and " + c10::toString(item.tensor.scalar_type()) +
                     " " + shape_text(item.tensor.sizes()) + " here");
    }
  }
  return {};
}

const at::Tensor* find(const std::vector<NamedTensor>& tensors, const std::string& name) {
  for (const auto& item : tensors) {
    if (item.name == name) return &item.tensor;
  }
  return nullptr;
}

void copy_into(const std::vector<NamedTensor>& mine, const std::vector<NamedTensor>& theirs) {
  const at::NoGradGuard no_grad;
  for (const auto& item : mine) {
    if (const auto* other = find(theirs, item.name)) item.tensor.detach().copy_(*other);
  }
}

/// Like copy_into, but without a copy where the other's memory will do: nobody else has it.
void take_over(const std::vector<NamedTensor>& mine, const std::vector<NamedTensor>& theirs) {
  const at::NoGradGuard no_grad;
  for (const auto& item : mine) {
    const auto* other = find(theirs, item.name);
    if (other == nullptr) continue;
    if (item.tensor.device() == other->device() && other->is_contiguous() && item.tensor.is_contiguous()) {
      item.tensor.set_data(*other);
    } else {
      item.tensor.detach().copy_(*other);
    }
  }
}

void move_to(const std::vector<NamedTensor>& tensors, const c10::Device& device) {
  const at::NoGradGuard no_grad;
  for (const auto& item : tensors) item.tensor.set_data(item.tensor.detach().to(device));
}

/// What stands against a module; empty: nothing.
std::string unusable_parameter(const ExpertModule& module) {
  for (const auto& parameter : module.parameters()) {
    const auto& tensor = parameter.tensor;
    const bool trainable = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
    if (!tensor.is_contiguous() || !tensor.device().is_cpu()) return parameter.name + " is no contiguous CPU tensor";
    if (tensor.requires_grad() && !trainable) {
      return parameter.name + " is " + c10::toString(tensor.scalar_type()) +
             ", and only float32 and float64 are trained: convert it, or save it with requires_grad off";
    }
  }
  return {};
}

}  // namespace

/// Puts the buffers back on destruction unless kept.
class ExpertBackend::BufferGuard {
 public:
  explicit BufferGuard(const std::vector<NamedTensor>& live) : live_(live), saved_(copies(live)) {}
  ~BufferGuard() {
    if (!kept_) copy_into(live_, saved_);
  }
  BufferGuard(const BufferGuard&) = delete;
  BufferGuard& operator=(const BufferGuard&) = delete;
  void keep() noexcept { kept_ = true; }

 private:
  const std::vector<NamedTensor>& live_;
  std::vector<NamedTensor> saved_;
  bool kept_ = false;
};

Result<std::int64_t> check_tensors(const std::vector<at::Tensor>& tensors, const std::vector<TensorSpec>& specs,
                                   const char* what) {
  if (tensors.size() != specs.size()) {
    return invalid("the call has " + std::to_string(tensors.size()) + " " + what + " tensors, the expert takes " +
                   std::to_string(specs.size()));
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (!fits(tensors[i], specs[i])) {
      return invalid(std::string(what) + " " + std::to_string(i) + " is " + c10::toString(tensors[i].scalar_type()) +
                     " " + shape_text(tensors[i].sizes()) + ", the expert takes " + spec_text(specs[i]));
    }
    if (tensors[i].size(0) != tensors[0].size(0)) {
      return invalid(std::string(what) + " " + std::to_string(i) + " has " + std::to_string(tensors[i].size(0)) +
                     " rows, " + what + " 0 has " + std::to_string(tensors[0].size(0)));
    }
  }
  return tensors.empty() ? 0 : tensors[0].size(0);
}

Result<std::unique_ptr<ExpertBackend>> ExpertBackend::create(ExpertDescription description, OptimizerSettings optimizer,
                                                             std::int64_t max_batch_size,
                                                             std::optional<std::uint64_t> seed) {
  if (auto checked = check(optimizer); !checked) return checked.error();
  auto module = make_expert_module(description.architecture,
                                   ArchitectureArguments(description.hidden_dim, description.arguments), seed);
  if (!module) return module.error();
  if (const auto wrong = unusable_parameter(**module); !wrong.empty()) return invalid("parameter " + wrong);
  return std::make_unique<ExpertBackend>(std::move(description), std::move(*module), optimizer, max_batch_size);
}

ExpertBackend::ExpertBackend(ExpertDescription description, std::unique_ptr<ExpertModule> module,
                             OptimizerSettings optimizer, std::int64_t max_batch_size)
    : description_(std::move(description)),
      uid_text_(to_string(description_.uid)),
      schema_(module->schema()),
      one_task_at_a_time_(module->one_task_at_a_time()),
      runs_beside_others_(module->runs_beside_others()),
      optimizer_(optimizer, {}),
      generator_(make_generator(device_)),
      max_batch_size_(max_batch_size) {
  adopt_module(std::move(module));
}

void ExpertBackend::adopt_module(std::unique_ptr<ExpertModule> module) {
  module_ = std::move(module);
  if (!device_.is_cpu()) {
    move_to(module_->parameters(), device_);
    move_to(module_->buffers(), device_);
  }
  trained_ = trained(*module_);
  buffers_ = module_->buffers();
  optimizer_ = Optimizer(optimizer_.settings(), trained_);
  if (frozen_) freeze();
}

void ExpertBackend::place(const c10::Device& device) {
  if (device == device_) return;
  device_ = device;
  generator_ = make_generator(device_);
  move_to(module_->parameters(), device_);
  move_to(buffers_, device_);
  optimizer_.move_to(device_);
}

void ExpertBackend::freeze() {
  frozen_ = true;
  for (auto& parameter : trained_) parameter.tensor.requires_grad_(false);
}

Error ExpertBackend::failure(const char* direction, const std::exception& cause) const {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&cause);
  const std::string reason = torch_error != nullptr ? torch_error->what_without_backtrace() : cause.what();
  return {Errc::kInternal, std::string(direction) + " of expert " + uid_text_ + " failed: " + reason, {}};
}

Result<std::vector<at::Tensor>> ExpertBackend::checked(std::vector<at::Tensor> outputs, std::int64_t rows) const {
  const auto& specs = schema().outputs;
  bool right = outputs.size() == specs.size();
  for (std::size_t i = 0; right && i < specs.size(); ++i) {
    right = outputs[i].defined() && fits(outputs[i], specs[i]) && outputs[i].size(0) == rows;
  }
  if (!right) {
    return Error{Errc::kInternal, "expert " + uid_text_ + " returned other outputs than its schema says", {}};
  }
  return outputs;
}

Result<std::vector<at::Tensor>> ExpertBackend::forward(const std::vector<at::Tensor>& inputs, std::uint64_t rng_seed) {
  try {
    const at::NoGradGuard no_grad;
    const BufferGuard guard(buffers_);
    if (one_task_at_a_time()) generator_.set_current_seed(rng_seed);
    auto outputs = checked(module_->forward(to_device(inputs, device_), generator_), inputs[0].size(0));
    if (!outputs) return outputs;
    for (auto& output : *outputs) output = output.contiguous();
    return to_host(std::move(*outputs), device_);
  } catch (const std::exception& e) {
    return failure("forward", e);
  }
}

Result<std::vector<at::Tensor>> ExpertBackend::backward(const std::vector<at::Tensor>& inputs,
                                                        const std::vector<at::Tensor>& grad_outputs,
                                                        std::uint64_t rng_seed) {
  try {
    if (!frozen_) copy_snapshot(std::numeric_limits<std::size_t>::max());
    BufferGuard guard(buffers_);
    auto gradients = run_backward(inputs, grad_outputs, rng_seed);
    if (!gradients) return gradients;
    if (frozen_) return gradients;
    guard.keep();
    updates_.fetch_add(1, std::memory_order_relaxed);
    return gradients;
  } catch (const std::exception& e) {
    return failure("backward", e);
  }
}

Result<void> ExpertBackend::rehearse(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& grad_outputs,
                                     std::uint64_t rng_seed) {
  if (grad_outputs.empty()) {
    const auto outputs = forward(inputs, rng_seed);
    if (!outputs) return outputs.error();
    return {};
  }
  try {
    const BufferGuard guard(buffers_);
    const auto gradients = find_gradients(inputs, grad_outputs, rng_seed);
    if (!gradients) return gradients.error();
    if (frozen_) return {};
    const auto norm = optimizer_.norm(gradients->parameters);
    if (!norm) return norm.error();
    return {};
  } catch (const std::exception& e) {
    return failure("backward", e);
  }
}

/// One optimizer step, unless something is not finite: nothing changes then.
Result<std::vector<at::Tensor>> ExpertBackend::run_backward(const std::vector<at::Tensor>& inputs,
                                                            const std::vector<at::Tensor>& grad_outputs,
                                                            std::uint64_t rng_seed) {
  auto gradients = find_gradients(inputs, grad_outputs, rng_seed);
  if (!gradients) return gradients.error();
  if (!frozen_) {
    const auto norm = optimizer_.step(gradients->parameters, updates());
    if (!norm) return norm.error();
    gradient_norm_.store(*norm, std::memory_order_relaxed);
  }
  return to_host(std::move(gradients->inputs), device_);
}

/// By the module itself, or by autograd.
Result<ExpertGradients> ExpertBackend::find_gradients(const std::vector<at::Tensor>& inputs,
                                                      const std::vector<at::Tensor>& grad_outputs,
                                                      std::uint64_t rng_seed) {
  const auto x = to_device(inputs, device_);
  const auto back = to_device(grad_outputs, device_);
  ExpertGradients gradients;
  if (auto own = module_->backward(x, back, !frozen_)) {
    gradients = std::move(*own);
  } else {
    auto found = gradients_by_autograd(x, back, rng_seed);
    if (!found) return found;
    gradients = std::move(*found);
  }
  for (const auto& gradient : gradients.inputs) {
    if (!all_finite_on(gradient)) {
      return invalid("a gradient with respect to the inputs is not finite: NaN or Inf");
    }
  }
  return gradients;
}

Result<ExpertGradients> ExpertBackend::gradients_by_autograd(const std::vector<at::Tensor>& inputs,
                                                             const std::vector<at::Tensor>& grad_outputs,
                                                             std::uint64_t rng_seed) {
  const at::AutoGradMode with_grad(true);
  const auto& specs = schema().inputs;
  std::vector<at::Tensor> leaves;
  torch::autograd::variable_list targets;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    leaves.push_back(inputs[i].detach());
    if (!specs[i].requires_grad || !at::isFloatingType(inputs[i].scalar_type())) continue;
    leaves.back().requires_grad_(true);
    targets.push_back(leaves.back());
  }
  const auto input_targets = targets.size();
  if (!frozen_) {
    for (const auto& parameter : trained_) targets.push_back(parameter.tensor);
  }

  if (one_task_at_a_time()) generator_.set_current_seed(rng_seed);
  auto outputs = checked(module_->forward(leaves, generator_), inputs[0].size(0));
  if (!outputs) return outputs.error();
  torch::autograd::variable_list roots;
  torch::autograd::variable_list root_gradients;
  for (std::size_t i = 0; i < outputs->size(); ++i) {
    const auto& output = (*outputs)[i];
    if (output.sizes() != grad_outputs[i].sizes()) {
      return invalid("gradient " + std::to_string(i) + " is " + shape_text(grad_outputs[i].sizes()) +
                     ", the expert's output " + shape_text(output.sizes()));
    }
    if (!output.requires_grad()) continue;
    roots.push_back(output);
    root_gradients.push_back(grad_outputs[i]);
  }
  torch::autograd::variable_list found(targets.size());
  if (!roots.empty() && !targets.empty()) {
    found = torch::autograd::grad(roots, targets, root_gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                  /*allow_unused=*/true);
  }

  ExpertGradients gradients;
  std::size_t next = 0;
  for (const auto& leaf : leaves) {
    if (!leaf.requires_grad()) {
      gradients.inputs.push_back(at::empty({0}, at::kFloat));
      continue;
    }
    const auto& gradient = found[next++];
    gradients.inputs.push_back(gradient.defined() ? gradient.detach().contiguous() : at::zeros_like(leaf.detach()));
  }
  for (auto i = input_targets; i < found.size(); ++i) gradients.parameters.push_back({found[i], {}, {}});
  return gradients;
}

void ExpertBackend::evict() {
  pending_.reset();
  optimizer_ = Optimizer(optimizer_.settings(), {});
  trained_.clear();
  buffers_.clear();
  module_.reset();
}

Result<void> ExpertBackend::revive(ExpertSnapshot snapshot) {
  auto module = make_expert_module(description_.architecture,
                                   ArchitectureArguments(description_.hidden_dim, description_.arguments), {});
  if (!module) return module.error();
  adopt_module(std::move(*module));
  auto restored = restore(std::move(snapshot));
  if (!restored) evict();
  return restored;
}

ExpertSnapshot ExpertBackend::snapshot() const {
  return {description_,           optimizer_.settings(),           updates(), copies(module_->parameters(), true),
          copies(buffers_, true), copies(optimizer_.state(), true)};
}

std::shared_ptr<const ExpertSnapshot> ExpertBackend::reserve_snapshot() {
  pending_.reset();
  pending_ = Pending{std::make_shared<ExpertSnapshot>(), {}};
  reserve_pending();
  return pending_->snapshot;
}

void ExpertBackend::reserve_pending() {
  auto& [snapshot, copy] = *pending_;
  copy = SnapshotCopy();
  snapshot->parameters = copy.reserve(module_->parameters());
  snapshot->buffers = copy.reserve(buffers_);
  snapshot->optimizer_state = copy.reserve(optimizer_.state());
}

/// In the order in which they are reserved for.
std::vector<NamedTensor> ExpertBackend::live_tensors() const {
  auto tensors = module_->parameters();
  tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
  const auto state = optimizer_.state();
  tensors.insert(tensors.end(), state.begin(), state.end());
  return tensors;
}

void ExpertBackend::begin_snapshot() {
  if (!pending_) return;
  auto& snapshot = *pending_->snapshot;
  snapshot.description = description_;
  snapshot.optimizer = optimizer_.settings();
  snapshot.updates = updates();
  if (pending_->copy.begin(live_tensors())) return;
  reserve_pending();  // A first step made optimizer state meanwhile.
  pending_->copy.begin(live_tensors());
}

bool ExpertBackend::copy_snapshot(std::size_t bytes) {
  if (!pending_ || !pending_->copy.begun()) return true;
  if (!pending_->copy.advance(bytes)) return false;
  pending_.reset();
  return true;
}

Result<void> ExpertBackend::restore(ExpertSnapshot snapshot) {
  const auto& theirs = snapshot.description;
  if (theirs.uid != uid()) return invalid("it is of expert " + to_string(theirs.uid) + ", this one is " + uid_text_);
  if (theirs.architecture != description_.architecture) {
    return invalid("it is of architecture " + theirs.architecture + ", this expert is " + description_.architecture);
  }
  if (auto same = check_same(module_->parameters(), snapshot.parameters); !same) return same;
  if (auto same = check_same(buffers_, snapshot.buffers); !same) return same;
  if (auto loaded = optimizer_.load_state(std::move(snapshot.optimizer_state)); !loaded) return loaded;
  take_over(module_->parameters(), snapshot.parameters);
  copy_into(buffers_, snapshot.buffers);
  updates_.store(snapshot.updates, std::memory_order_relaxed);
  return {};
}

}  // namespace dmoe::expert_server
