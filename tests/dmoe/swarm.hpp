// Several hosts of small experts, a directory that lists them, and a client over both.
#pragma once

#include "dmoe/client.hpp"
#include "dmoe/dmoe.hpp"
#include "tests/dmoe/expert_host.hpp"
#include "tests/gating/memory_directory.hpp"

#include <torch/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <vector>

namespace dmoe::test {

/// A grid "ffn" of float64 experts tanh(x W): smooth, so that finite differences are exact to many digits. Expert
/// (i, j, …) lives on host number i modulo the number of hosts.
class Swarm {
 public:
  Swarm(std::size_t hosts, std::vector<std::int64_t> grid, std::int64_t features,
        std::chrono::milliseconds ban_time = std::chrono::minutes(1));

  ExpertHost& host(std::size_t index) { return *hosts_.at(index); }
  ExpertHost& host_of(const ExpertUid& uid) { return host(uid.coordinates.front() % hosts_.size()); }
  const std::vector<ExpertUid>& experts() const { return uids_; }
  std::size_t hosts() const { return hosts_.size(); }
  MemoryDirectory& directory() { return *directory_; }
  const std::shared_ptr<Client>& client() { return client_; }
  std::size_t frames() const;
  std::size_t calls() const;

  /// The expert's function, run here.
  torch::Tensor local(const ExpertUid& uid, const torch::Tensor& input) const;

  /// Options with short limits and float64.
  DMoEOptions options() const;
  /// A layer with a float64 gate.
  DMoE layer(const DMoEOptions& options);

 private:
  std::vector<std::int64_t> grid_;
  std::int64_t features_;
  std::vector<std::unique_ptr<ExpertHost>> hosts_;
  std::vector<ExpertUid> uids_;
  std::map<ExpertUid, torch::Tensor> weights_;
  std::shared_ptr<MemoryDirectory> directory_;
  std::shared_ptr<Client> client_;
};

/// The UIDs that a layer's gate ranks best for one row, best first.
std::vector<ExpertUid> ranked(DMoE& layer, const torch::Tensor& row, std::vector<ExpertUid> experts);

/// What the layer should give: per row the mixture over `experts(row)`, run here and differentiable.
/// @param detached experts whose output counts as a constant (they fail in backward).
torch::Tensor reference(Swarm& swarm, DMoE& layer, const torch::Tensor& input,
                        const std::vector<std::vector<ExpertUid>>& experts,
                        const std::vector<ExpertUid>& detached = {});

/// Double-precision normal rows, the same in every call of a run: from the run's seed.
torch::Tensor random_input(std::int64_t rows, std::int64_t features);

}  // namespace dmoe::test
