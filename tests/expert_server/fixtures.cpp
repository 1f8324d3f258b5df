#include "tests/expert_server/fixtures.hpp"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace dmoe::expert_server::test {

FunctionExpert::FunctionExpert(std::int64_t width, Function function, std::vector<NamedTensor> parameters,
                               std::vector<NamedTensor> buffers)
    : function_(std::move(function)), parameters_(std::move(parameters)), buffers_(std::move(buffers)) {
  schema_.inputs = schema_.outputs = {{at::kFloat, {width}}};
}

std::vector<at::Tensor> FunctionExpert::forward(const std::vector<at::Tensor>& inputs, at::Generator& /*generator*/) {
  return {function_(inputs[0])};
}

ExpertUid uid(const std::string& text) { return parse_expert_uid(text).value(); }

OptimizerSettings plain_sgd(double learning_rate) {
  OptimizerSettings settings;
  settings.kind = OptimizerKind::kSgd;
  settings.learning_rate = learning_rate;
  settings.clip_grad_norm = 0;
  return settings;
}

std::unique_ptr<ExpertBackend> backend_of(std::unique_ptr<ExpertModule> module, const std::string& name,
                                          std::int64_t max_batch_size) {
  const ExpertDescription description{uid(name), "test", 0, {}};
  return std::make_unique<ExpertBackend>(description, std::move(module), plain_sgd(), max_batch_size);
}

std::unique_ptr<ExpertBackend> builtin(const std::string& architecture, std::int64_t hidden_dim,
                                       const OptimizerSettings& optimizer, std::uint64_t seed,
                                       const std::map<std::string, std::string>& arguments) {
  const ExpertDescription description{uid(architecture + ".0"), architecture, hidden_dim, arguments};
  return ExpertBackend::create(description, optimizer, 1'024, seed).value();
}

class Answers::Reply final : public TaskReply {
 public:
  Reply(Answers& answers, std::size_t index) : answers_(answers), index_(index) {}
  void succeed(std::vector<at::Tensor> tensors) override { answers_.set(index_, std::move(tensors)); }
  void fail(const Error& error) override { answers_.set(index_, error); }
  bool cancelled() const override { return answers_.cancelled_; }

 private:
  Answers& answers_;
  std::size_t index_;
};

Task Answers::task(std::size_t index, Tensors inputs, Tensors grad_outputs) {
  Task task;
  task.rows = inputs[0].size(0);
  task.inputs = std::move(inputs);
  task.grad_outputs = std::move(grad_outputs);
  task.arrived = std::chrono::steady_clock::now();
  task.reply = std::make_unique<Reply>(*this, index);
  return task;
}

void Answers::set(std::size_t index, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  if (outcomes_.at(index)) throw std::logic_error("answered twice");
  outcomes_.at(index) = std::move(outcome);
  order_.push_back(index);
  changed_.notify_all();
}

bool Answers::wait_all(std::chrono::seconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return order_.size() == outcomes_.size(); });
}

bool Answers::has(std::size_t index) {
  const std::lock_guard lock(mutex_);
  return outcomes_.at(index).has_value();
}

std::vector<std::size_t> Answers::order() {
  const std::lock_guard lock(mutex_);
  return order_;
}

bool same_bits(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != right.scalar_type() || left.sizes() != right.sizes()) return false;
  const auto a = left.contiguous();
  const auto b = right.contiguous();
  return a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

bool same_bits(const std::vector<NamedTensor>& left, const std::vector<NamedTensor>& right) {
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i].name != right[i].name || !same_bits(left[i].tensor, right[i].tensor)) return false;
  }
  return true;
}

}  // namespace dmoe::expert_server::test
