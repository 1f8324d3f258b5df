#include "testbed/weather.hpp"

#include <cmath>

namespace dmoe::testbed {
namespace {

using Milliseconds = std::chrono::duration<double, std::milli>;

}  // namespace

void Weather::set(const LinkConditions& conditions) {
  const std::lock_guard lock(mutex_);
  conditions_ = conditions;
}

Weather::Fate Weather::draw(bool reply) {
  const std::lock_guard lock(mutex_);
  ++counts_.messages;
  const bool lost = reply && std::uniform_real_distribution<>()(random_) < conditions_.lost_replies;
  counts_.lost += lost ? 1U : 0U;
  return {std::chrono::duration_cast<Duration>(Milliseconds(draw_delay_ms())), lost};
}

double Weather::draw_delay_ms() {
  const double mean = conditions_.delay_ms;
  if (mean <= 0) return 0;
  switch (conditions_.law) {
    case DelayLaw::kConstant: return mean;
    case DelayLaw::kExponential: return std::exponential_distribution<>(1 / mean)(random_);
    case DelayLaw::kWeibull: break;
  }
  const double scale = mean / std::tgamma(1 + 1 / conditions_.shape);
  return std::weibull_distribution<>(conditions_.shape, scale)(random_);
}

std::chrono::milliseconds Weather::cut_after() const {
  const std::lock_guard lock(mutex_);
  return conditions_.cut_after;
}

void Weather::opened() {
  const std::lock_guard lock(mutex_);
  ++counts_.connections;
}

void Weather::cut() {
  const std::lock_guard lock(mutex_);
  ++counts_.cut;
}

Weather::Duration Weather::arrived(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  counts_.bytes += bytes;
  if (conditions_.bytes_per_second == 0) return {};
  const std::chrono::duration<double> taken(static_cast<double>(bytes) /
                                            static_cast<double>(conditions_.bytes_per_second));
  return std::chrono::duration_cast<Duration>(taken);
}

void Weather::control_frame() {
  const std::lock_guard lock(mutex_);
  ++counts_.control;
}

void Weather::delivered(Duration delay) {
  const std::lock_guard lock(mutex_);
  ++delivered_;
  delay_sum_ms_ += Milliseconds(delay).count();
}

RelayCounts Weather::counts() const {
  const std::lock_guard lock(mutex_);
  auto counts = counts_;
  if (delivered_ > 0) counts.mean_delay_ms = delay_sum_ms_ / static_cast<double>(delivered_);
  return counts;
}

void Weather::reset_counts() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
  delivered_ = 0;
  delay_sum_ms_ = 0;
}

}  // namespace dmoe::testbed
