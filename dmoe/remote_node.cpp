#include "dmoe/remote_node.hpp"

#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <mutex>
#include <stdexcept>

namespace dmoe {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

edge_list edges_of(const variable_list& tensors) {
  edge_list edges;
  for (const auto& tensor : tensors) {
    const bool wanted = tensor.defined() && tensor.requires_grad();
    edges.push_back(wanted ? torch::autograd::impl::gradient_edge(tensor) : Edge());
  }
  return edges;
}

/// Stands behind gradients that came from another machine: nothing can be known about their own derivative.
class RefusedBackward final : public Node {
 public:
  RefusedBackward(std::string layer, edge_list edges) : Node(std::move(edges)), layer_(std::move(layer)) {}

  variable_list apply(variable_list&& /*grads*/) override {
    throw std::runtime_error("double backward through " + layer_ +
                             " is not supported: its experts run on other machines, which return first gradients only");
  }
  std::string name() const override { return "RefusedBackward"; }

 private:
  const std::string layer_;
};

class RemoteNode final : public Node {
 public:
  RemoteNode(std::string layer, edge_list edges, std::vector<torch::Tensor> inputs, RemoteBackward backward)
      : Node(std::move(edges)), layer_(std::move(layer)), backward_(std::move(backward)) {
    for (const auto& input : inputs) input_options_.push_back(input.options());
  }

  /// Remembers what an undefined gradient of this output stands for.
  void add_output(const torch::Tensor& output) { output_like_.push_back({output.sizes().vec(), output.options()}); }

  variable_list apply(variable_list&& grads) override {
    const bool twice = torch::GradMode::is_enabled();
    auto gradients = run(grads);
    if (!twice) return gradients;
    // Only an error if somebody does differentiate them; create_graph alone may be for other parts of the model.
    auto node = std::shared_ptr<Node>(new RefusedBackward(layer_, edges_of(grads)), torch::autograd::deleteNode);
    for (auto& gradient : gradients) {
      if (gradient.defined()) torch::autograd::create_gradient_edge(gradient, node);
    }
    return gradients;
  }

  void release_variables() override {
    const std::lock_guard lock(released_mutex_);
    backward_ = nullptr;
  }
  std::string name() const override { return layer_ + "Backward"; }

 private:
  struct Like {
    std::vector<std::int64_t> sizes;
    torch::TensorOptions options;
  };

  variable_list run(const variable_list& grads) {
    const torch::NoGradGuard no_grad;
    RemoteBackward backward;
    {
      const std::lock_guard lock(released_mutex_);
      backward = backward_;  // A copy: several threads may go backward through one retained graph.
    }
    if (!backward) {
      throw std::runtime_error("backward through " + layer_ +
                               " a second time: pass retain_graph=true to the first backward to keep what it needs");
    }
    std::vector<torch::Tensor> dense;
    for (std::size_t i = 0; i < grads.size(); ++i) {
      dense.push_back(grads[i].defined() ? grads[i].detach().to(torch::kCPU).contiguous()
                                         : torch::zeros(output_like_[i].sizes, output_like_[i].options));
    }
    auto gradients = backward(dense);
    gradients.resize(input_options_.size());
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!task_should_compute_output(i)) {
        gradients[i] = torch::Tensor();
      } else if (gradients[i].defined()) {
        gradients[i] = gradients[i].to(input_options_[i]);
      }
    }
    return gradients;
  }

  const std::string layer_;
  std::vector<torch::TensorOptions> input_options_;
  std::vector<Like> output_like_;
  std::mutex released_mutex_;
  RemoteBackward backward_;  // Guarded by released_mutex_.
};

}  // namespace

void record_remote(const std::string& name, std::vector<torch::Tensor>& outputs,
                   const std::vector<torch::Tensor>& inputs, RemoteBackward backward) {
  if (!torch::GradMode::is_enabled()) return;
  const auto node = std::shared_ptr<RemoteNode>(new RemoteNode(name, edges_of(inputs), inputs, std::move(backward)),
                                                torch::autograd::deleteNode);
  for (auto& output : outputs) {
    node->add_output(output);
    if (output.is_floating_point()) {
      torch::autograd::create_gradient_edge(output, node);
    } else {
      node->add_input_metadata(Node::undefined_input());  // Keeps the numbering of outputs.
    }
  }
}

}  // namespace dmoe
