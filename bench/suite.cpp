#include "bench/suite.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>

namespace dmoe::bench {

void Reporter::report(const std::string& suite, const nlohmann::ordered_json& fields) {
  if (json_) {
    nlohmann::ordered_json line{{"suite", suite}};
    line.update(fields);
    std::cout << line.dump() << '\n' << std::flush;
    return;
  }
  std::size_t widest = 0;
  for (const auto& [name, value] : fields.items()) widest = std::max(widest, name.size());
  std::cout << suite << '\n';
  for (const auto& [name, value] : fields.items()) {
    std::cout << "  " << name << std::string(widest - name.size() + 2, ' ') << value.dump() << '\n';
  }
  std::cout << std::flush;
}

void Reporter::note(const std::string& text) {
  if (!json_) std::cout << text << '\n' << std::flush;
}

double percentile(std::vector<double>& samples, double share) {
  std::sort(samples.begin(), samples.end());
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(samples.size())));
  return samples[std::clamp<std::size_t>(rank, 1, samples.size()) - 1];
}

}  // namespace dmoe::bench
