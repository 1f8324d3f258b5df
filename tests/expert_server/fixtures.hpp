// Experts with known faults, and replies that are kept.
#pragma once

#include "expert_server/expert_backend.hpp"
#include "expert_server/runtime.hpp"
#include "tests/support/temporary_folder.hpp"

#include <torch/types.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace dmoe::expert_server::test {

using Tensors = std::vector<at::Tensor>;
using Outcome = Result<Tensors>;
using dmoe::test::TemporaryFolder;

/// An expert made of a function and some parameters: [rows, width] float32 in and out.
class FunctionExpert final : public ExpertModule {
 public:
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  FunctionExpert(std::int64_t width, Function function, std::vector<NamedTensor> parameters = {},
                 std::vector<NamedTensor> buffers = {});

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) override;
  const ExpertSchema& schema() const override { return schema_; }
  std::vector<NamedTensor> parameters() const override { return parameters_; }
  std::vector<NamedTensor> buffers() const override { return buffers_; }

 private:
  Function function_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  ExpertSchema schema_;
};

ExpertUid uid(const std::string& text);

/// A backend around a module: SGD with rate 0.1 and no clipping unless told otherwise.
std::unique_ptr<ExpertBackend> backend_of(std::unique_ptr<ExpertModule> module, const std::string& name = "test.0",
                                          std::int64_t max_batch_size = 1'024);
OptimizerSettings plain_sgd(double learning_rate = 0.1);

/// A backend of a built-in architecture.
std::unique_ptr<ExpertBackend> builtin(const std::string& architecture, std::int64_t hidden_dim,
                                       const OptimizerSettings& optimizer, std::uint64_t seed = 1,
                                       const std::map<std::string, std::string>& arguments = {});

/// One wait for many answers.
class Answers {
 public:
  explicit Answers(std::size_t count) : outcomes_(count) {}

  /// A task whose answer becomes number `index`.
  Task task(std::size_t index, Tensors inputs, Tensors grad_outputs = {});
  void cancel() { cancelled_ = true; }

  bool wait_all(std::chrono::seconds limit = std::chrono::seconds{60});
  const Outcome& operator[](std::size_t index) const { return *outcomes_.at(index); }
  bool has(std::size_t index);
  /// Indices in the order of their answers.
  std::vector<std::size_t> order();

 private:
  class Reply;
  void set(std::size_t index, Outcome outcome);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<Outcome>> outcomes_;
  std::vector<std::size_t> order_;
  std::atomic<bool> cancelled_{false};
};

/// Same dtype, shape and bits.
bool same_bits(const at::Tensor& left, const at::Tensor& right);
/// Same names and bits, in order.
bool same_bits(const std::vector<NamedTensor>& left, const std::vector<NamedTensor>& right);

}  // namespace dmoe::expert_server::test
