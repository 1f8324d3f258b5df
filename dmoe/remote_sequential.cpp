#include "dmoe/remote_sequential.hpp"

#include <ostream>

namespace dmoe {

RemoteSequentialImpl::RemoteSequentialImpl(const std::shared_ptr<Client>& client, const std::vector<std::string>& uids,
                                           const RemoteExpertOptions& options)
    : client_(client), uids_(uids), options_(options) {
  if (uids.empty()) throw Exception({Errc::kInvalidArgument, "RemoteSequential: it needs at least one expert", {}});
  for (const auto& uid : uids) {
    stages_.push_back(register_module(std::to_string(stages_.size()), RemoteExpert(client, uid, options)));
  }
}

std::shared_ptr<torch::nn::Module> RemoteSequentialImpl::clone(const torch::optional<torch::Device>& /*device*/) const {
  auto copy = std::make_shared<RemoteSequentialImpl>(client_, uids_, options_);
  copy->train(is_training());
  return copy;
}

torch::Tensor RemoteSequentialImpl::forward(const torch::Tensor& input) {
  auto value = input;
  for (auto& stage : stages_) value = stage->forward(value);
  return value;
}

void RemoteSequentialImpl::pretty_print(std::ostream& stream) const {
  stream << "dmoe::RemoteSequential(" << stages_.size() << " stages)";
}

}  // namespace dmoe
