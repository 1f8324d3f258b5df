// How many threads libtorch computes with on the calling thread. Private to dmoe/.
#pragma once

namespace dmoe {

/// Of intra-op loops that the calling thread starts; other threads keep their number. Compiled apart because only
/// OpenMP can say it for one thread: torch::set_num_threads changes what all later threads begin with.
void set_compute_team(int threads);

}  // namespace dmoe
