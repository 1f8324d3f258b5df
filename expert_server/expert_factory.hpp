// From options and checkpoints to experts.
#pragma once

#include "expert_server/checkpoint_store.hpp"
#include "expert_server/expert_backend.hpp"
#include "expert_server/server.hpp"

#include <memory>

namespace dmoe::expert_server {

/// The optimizer's settings: a value that `options` sets, else that of `checkpoint`, else the default.
Result<OptimizerSettings> optimizer_settings(const ExpertOptions& options, const OptimizerSettings* checkpoint);

/// Makes expert `uid`, from its newest intact checkpoint if `store` (may be null) has one.
/// kInvalidArgument: options that do not fit, or a checkpoint of another architecture, width, arguments or (unless
/// `reset_optimizer`) optimizer: the message has both values. `restored` (may be null): whether there was one.
Result<std::unique_ptr<ExpertBackend>> make_expert(const ExpertUid& uid, const ExpertOptions& options,
                                                   CheckpointStore* store, bool reset_optimizer, std::uint64_t seed,
                                                   bool* restored = nullptr);

}  // namespace dmoe::expert_server
