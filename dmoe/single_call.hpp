// One call, waited for. Private to dmoe/.
#pragma once

#include "dmoe/call_batch.hpp"
#include "dmoe/client.hpp"
#include "dmoe/remote_expert.hpp"

#include <vector>

namespace dmoe {

/// Sends `call` and waits for its answer, at most until `deadline` (kDeadlineExceeded); says so to the client's
/// ServerHealth when it fails.
Result<std::vector<at::Tensor>> call_expert(Client& client, ExpertCall call, CallBatch::TimePoint deadline);

/// The expert's `info`.
Result<ExpertInfo> fetch_info(Client& client, const ExpertUid& uid, const net::Endpoint& endpoint,
                              CallBatch::TimePoint deadline);

}  // namespace dmoe
