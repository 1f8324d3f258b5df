#include "dmoe/async_trainer.hpp"

#include "dmoe/compute_team.hpp"
#include "dmoe/dmoe.hpp"
#include "dmoe/exception.hpp"
#include "dmoe/staleness_bound.hpp"

#include <torch/utils.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace dmoe {
namespace {

using Tensors = std::vector<torch::Tensor>;

[[noreturn]] void refuse_trainer(const std::string& message) { throw Exception({Errc::kInvalidArgument, message, {}}); }

/// One version of the weights. Immutable: replicas read the parameters where they lie.
struct Weights {
  std::uint64_t version = 0;
  Tensors parameters;
  Tensors buffers;
};

/// A step that has been computed, or has failed.
struct Computed {
  std::promise<TrainedStep> promise;
  std::uint64_t seen = 0;
  TrainedStep result;
  Tensors gradients;
  Tensors buffers;
  std::exception_ptr failure;
};

std::string failure_text(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something that is not a std::exception";
  }
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

void check_alike(const torch::OrderedDict<std::string, torch::Tensor>& model,
                 const torch::OrderedDict<std::string, torch::Tensor>& replica, const char* kind) {
  bool alike = model.size() == replica.size();
  for (std::size_t i = 0; alike && i < model.size(); ++i) {
    alike = model[i].key() == replica[i].key() && model[i].value().sizes() == replica[i].value().sizes() &&
            model[i].value().options().type_equal(replica[i].value().options());
  }
  if (!alike)
    refuse_trainer(std::string("AsyncTrainer: a replica's ") + kind +
                   " differ from the model's in number, name, shape or type");
}

/// The model's layers count what its replicas' layers do.
void share_counters(const torch::nn::Module& model, const torch::nn::Module& replica) {
  const auto originals = model.modules();
  const auto others = replica.modules();
  for (std::size_t i = 0; i < std::min(originals.size(), others.size()); ++i) {
    const auto original = std::dynamic_pointer_cast<DMoEImpl>(originals[i]);
    const auto other = std::dynamic_pointer_cast<DMoEImpl>(others[i]);
    if (original && other) other->count_with(*original);
  }
}

/// A clone of the model that computes on borrowed weights. Belongs to one thread.
class Replica {
 public:
  explicit Replica(std::shared_ptr<torch::nn::Module> module)
      : module_(std::move(module)), parameters_(module_->parameters()), buffers_(module_->buffers()) {}

  void compute(const std::function<torch::Tensor(torch::nn::Module&)>& step, const Weights& weights,
               Computed& computed) noexcept {
    try {
      borrow(weights);
      const auto loss = step(*module_);
      if (loss.defined()) {
        computed.result.loss = loss.item<double>();
        if (loss.requires_grad()) loss.backward();
      }
      for (auto& parameter : parameters_) computed.gradients.push_back(std::exchange(parameter.mutable_grad(), {}));
      computed.buffers = buffers_of_step();
    } catch (...) {
      computed.failure = std::current_exception();
    }
  }

 private:
  void borrow(const Weights& weights) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].set_data(weights.parameters[i]);
      parameters_[i].mutable_grad().reset();  // A step that failed may have left one.
    }
    // Layers write to buffers in place, so each step has its own.
    for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].set_data(weights.buffers[i].clone());
  }

  Tensors buffers_of_step() const {
    Tensors buffers;
    for (const auto& buffer : buffers_) buffers.push_back(buffer.detach());
    return buffers;
  }

  const std::shared_ptr<torch::nn::Module> module_;  // As `replicate` gave it; nobody else uses it.
  Tensors parameters_;
  Tensors buffers_;
};

}  // namespace

class AsyncTrainerBase::Impl {
 public:
  Impl(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer, AsyncTrainerOptions options,
       const Replicate& replicate);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::future<TrainedStep> submit(AnyStep step);
  void drain();
  AsyncTrainerStats stats() const;

 private:
  struct Task {
    AnyStep step;
    std::promise<TrainedStep> promise;
  };
  using Lock = std::unique_lock<std::mutex>;

  static AsyncTrainerOptions checked(AsyncTrainerOptions options);
  std::size_t capacity() const noexcept;
  bool waits() const noexcept { return options_.late() == LateStep::kWait; }
  bool may_begin() const;
  void work(Replica& replica);
  void settle_computed(Lock& lock);
  std::optional<Computed> next_to_settle();
  void settle(Lock& lock, Computed computed);
  void count(const Computed& computed);
  std::exception_ptr update(Computed& computed);
  void copy_weights(Lock& lock);

  const std::shared_ptr<torch::nn::Module> model_;  // The caller's, too.
  torch::optim::Optimizer& optimizer_;
  const AsyncTrainerOptions options_;
  Tensors parameters_;  // Of model_.
  Tensors buffers_;     // Of model_.

  mutable std::mutex mutex_;
  std::condition_variable may_begin_;       // For threads that wait for a step.
  std::condition_variable ended_;           // For those that wait in submit and drain.
  std::deque<Task> tasks_;                  // Guarded by mutex_. Not begun.
  std::vector<Computed> computed_;          // Guarded by mutex_. Not settled.
  std::size_t in_flight_ = 0;               // Guarded by mutex_. Submitted and not settled.
  StalenessBound bound_;                    // Guarded by mutex_.
  std::shared_ptr<const Weights> weights_;  // Guarded by mutex_; null when the model is the caller's. Shared with
                                            // the steps that see it.
  bool updating_ = false;                   // Guarded by mutex_. One thread has model_ and optimizer_.
  bool stopping_ = false;                   // Guarded by mutex_.
  AsyncTrainerStats stats_;                 // Guarded by mutex_; mean_staleness is their sum.

  std::deque<Replica> replicas_;      // One per thread.
  std::vector<std::thread> threads_;  // Last: use the members above.
};

AsyncTrainerOptions AsyncTrainerBase::Impl::checked(AsyncTrainerOptions options) {
  if (options.in_flight() < 1)
    refuse_trainer("AsyncTrainer: in_flight must be above 0, not " + std::to_string(options.in_flight()));
  if (options.compute_threads() < 1) refuse_trainer("AsyncTrainer: compute_threads must be above 0");
  if (options.max_staleness() < -1)
    refuse_trainer("AsyncTrainer: max_staleness must be 0 or more, or -1 for the default");
  if (options.max_staleness() == -1) options.max_staleness(4 * options.in_flight());
  return options;
}

AsyncTrainerBase::Impl::Impl(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer,
                             AsyncTrainerOptions options, const Replicate& replicate)
    : model_(std::move(model)),
      optimizer_(optimizer),
      options_(checked(std::move(options))),
      bound_(static_cast<std::uint64_t>(options_.max_staleness())) {
  if (!model_) refuse_trainer("AsyncTrainer: the model is null");
  parameters_ = model_->parameters();
  buffers_ = model_->buffers();
  for (std::size_t i = 0; i < capacity(); ++i) {
    auto module = replicate();
    if (!module) refuse_trainer("AsyncTrainer: no replica was made");
    check_alike(model_->named_parameters(), module->named_parameters(), "parameters");
    check_alike(model_->named_buffers(), module->named_buffers(), "buffers");
    share_counters(*model_, *module);
    replicas_.emplace_back(std::move(module));
  }
  for (auto& replica : replicas_) threads_.emplace_back([this, &replica] { work(replica); });
}

AsyncTrainerBase::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  may_begin_.notify_all();
  for (auto& thread : threads_) thread.join();
}

/// Steps at once. Of more than that the last could not be applied within the bound.
std::size_t AsyncTrainerBase::Impl::capacity() const noexcept {
  const auto wanted = waits() ? std::min(options_.in_flight(), options_.max_staleness() + 1) : options_.in_flight();
  return static_cast<std::size_t>(wanted);
}

std::future<TrainedStep> AsyncTrainerBase::Impl::submit(AnyStep step) {
  Task task{std::move(step), {}};
  auto future = task.promise.get_future();
  Lock lock(mutex_);
  ended_.wait(lock, [this] { return in_flight_ < capacity() && (weights_ || !updating_); });
  ++in_flight_;
  tasks_.push_back(std::move(task));
  if (!weights_) {
    copy_weights(lock);
    ended_.notify_all();  // Other submitters waited for the weights.
  }
  lock.unlock();
  may_begin_.notify_one();
  return future;
}

void AsyncTrainerBase::Impl::drain() {
  Lock lock(mutex_);
  ended_.wait(lock, [this] { return in_flight_ == 0 && !updating_; });
  weights_.reset();
}

AsyncTrainerStats AsyncTrainerBase::Impl::stats() const {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  if (stats.applied > 0) stats.mean_staleness /= static_cast<double>(stats.applied);
  return stats;
}

bool AsyncTrainerBase::Impl::may_begin() const {
  return !tasks_.empty() && weights_ && (!waits() || bound_.may_begin(weights_->version));
}

void AsyncTrainerBase::Impl::work(Replica& replica) {
  set_compute_team(options_.compute_threads());
  Lock lock(mutex_);
  for (;;) {
    may_begin_.wait(lock, [this] { return may_begin() || (stopping_ && tasks_.empty()); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    const auto weights = weights_;
    bound_.begin(weights->version);
    lock.unlock();
    Computed computed{std::move(task.promise), weights->version, {}, {}, {}, {}};
    replica.compute(task.step, *weights, computed);
    task.step = nullptr;  // What it captured goes now, not when the thread has its next step.
    lock.lock();
    computed_.push_back(std::move(computed));
    settle_computed(lock);
  }
}

/// Applies what can be applied, unless another thread is at it: then that one does it.
void AsyncTrainerBase::Impl::settle_computed(Lock& lock) {
  if (updating_) return;
  updating_ = true;
  while (auto next = next_to_settle()) settle(lock, std::move(*next));
  updating_ = false;
  may_begin_.notify_all();
  ended_.notify_all();
}

/// The one with the oldest weights, of those that may end now.
std::optional<Computed> AsyncTrainerBase::Impl::next_to_settle() {
  auto next = computed_.end();
  for (auto it = computed_.begin(); it != computed_.end(); ++it) {
    const bool may_end = it->failure || !waits() || bound_.may_apply(it->seen);
    if (may_end && (next == computed_.end() || it->seen < next->seen)) next = it;
  }
  if (next == computed_.end()) return {};
  std::optional<Computed> taken(std::move(*next));
  computed_.erase(next);
  taken->result.staleness = bound_.staleness(taken->seen);
  taken->result.applied = !taken->failure && !bound_.exceeded(taken->seen);
  if (taken->result.applied) {
    bound_.apply(taken->seen);
  } else {
    bound_.end(taken->seen);
  }
  return taken;
}

void AsyncTrainerBase::Impl::settle(Lock& lock, Computed computed) {
  if (computed.result.applied) {
    lock.unlock();
    computed.failure = update(computed);
    lock.lock();
    copy_weights(lock);
  }
  count(computed);
  --in_flight_;
  lock.unlock();
  may_begin_.notify_all();
  ended_.notify_all();
  if (computed.failure) {
    computed.promise.set_exception(computed.failure);
  } else {
    computed.promise.set_value(computed.result);
  }
  lock.lock();
}

void AsyncTrainerBase::Impl::count(const Computed& computed) {
  if (computed.failure) {
    ++stats_.failed;
    stats_.last_failure = failure_text(computed.failure);
  } else if (!computed.result.applied) {
    ++stats_.dropped;
  } else {
    ++stats_.applied;
    stats_.max_staleness = std::max(stats_.max_staleness, computed.result.staleness);
    stats_.mean_staleness += static_cast<double>(computed.result.staleness);
  }
}

/// Gives the model the step's gradients and buffers, and the optimizer its turn.
std::exception_ptr AsyncTrainerBase::Impl::update(Computed& computed) {
  std::exception_ptr failure;
  try {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!computed.gradients[i].defined()) continue;
      auto& gradient = parameters_[i].mutable_grad();
      // A parameter that two modules share comes twice, and in a replica each may have a gradient of its own.
      gradient = gradient.defined() ? gradient + computed.gradients[i] : computed.gradients[i];
    }
    if (options_.before_update()) {
      const torch::AutoGradMode grad_mode(true);
      options_.before_update()();
    }
    optimizer_.step();
    for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(computed.buffers[i]);
  } catch (...) {
    failure = std::current_exception();
  }
  for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  return failure;
}

/// Makes the model's present weights those that steps begin with. Copies without the lock.
void AsyncTrainerBase::Impl::copy_weights(Lock& lock) {
  const bool mine = !std::exchange(updating_, true);
  auto weights = std::make_shared<Weights>();
  weights->version = bound_.version();
  lock.unlock();
  weights->parameters = copies(parameters_);
  weights->buffers = copies(buffers_);
  lock.lock();
  weights_ = std::move(weights);
  if (mine) updating_ = false;
}

AsyncTrainerBase::AsyncTrainerBase(std::shared_ptr<torch::nn::Module> model, torch::optim::Optimizer& optimizer,
                                   AsyncTrainerOptions options, const Replicate& replicate)
    : impl_(std::make_unique<Impl>(std::move(model), optimizer, std::move(options), replicate)) {}

AsyncTrainerBase::~AsyncTrainerBase() = default;
std::future<TrainedStep> AsyncTrainerBase::submit_any(AnyStep step) { return impl_->submit(std::move(step)); }
void AsyncTrainerBase::drain() { impl_->drain(); }
AsyncTrainerStats AsyncTrainerBase::stats() const { return impl_->stats(); }

}  // namespace dmoe
