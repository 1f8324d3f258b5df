#include "dmoe/remote_sequential.hpp"

#include <ostream>

namespace dmoe {

RemoteSequentialImpl::RemoteSequentialImpl(const std::shared_ptr<Client>& client, const std::vector<std::string>& uids,
                                           const RemoteExpertOptions& options) {
  if (uids.empty()) throw Exception({Errc::kInvalidArgument, "RemoteSequential: it needs at least one expert", {}});
  for (const auto& uid : uids) {
    stages_.push_back(register_module(std::to_string(stages_.size()), RemoteExpert(client, uid, options)));
  }
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
