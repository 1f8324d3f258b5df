#include "tests/dmoe/expert_host.hpp"

#include "net/tensor_codec.hpp"

#include <torch/autograd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>

#include <future>
#include <limits>
#include <stdexcept>

namespace dmoe::test {
namespace {

void require(const Result<void>& result) {
  if (result.has_error()) throw std::runtime_error(describe(result.error()));
}

void reply_with(net::IncomingCall& call, const Tensors& tensors, bool backward) {
  call.reply([&](net::schema::Reply::Builder builder, net::Attachments& attachments) {
    const auto count = static_cast<unsigned>(tensors.size());
    require(
        net::encode_tensors(tensors, backward ? builder.initBackward(count) : builder.initForward(count), attachments));
  });
}

Tensors filled(const Tensors& like, double value) {
  Tensors result;
  for (const auto& tensor : like) result.push_back(torch::full_like(tensor, value));
  return result;
}

Tensors backward_of(const ExpertFunction& function, const Tensors& inputs, const Tensors& grads) {
  Tensors leaves;
  Tensors wanted;
  for (const auto& input : inputs) {
    leaves.push_back(input.is_floating_point() ? input.clone().requires_grad_() : input);
    if (input.is_floating_point()) wanted.push_back(leaves.back());
  }
  const torch::AutoGradMode grad(true);
  Tensors outputs;
  Tensors grad_outputs;
  const auto all = function(leaves);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].requires_grad()) continue;
    outputs.push_back(all[i]);
    grad_outputs.push_back(grads.at(i));
  }
  const auto found = torch::autograd::grad(outputs, wanted, grad_outputs, {}, false, true);
  Tensors result;
  std::size_t next = 0;
  for (const auto& input : inputs) {
    if (!input.is_floating_point()) {
      result.push_back(torch::empty({0}));
    } else {
      const auto& gradient = found[next++];
      result.push_back(gradient.defined() ? gradient : torch::zeros_like(input));
    }
  }
  return result;
}

}  // namespace

ExpertHost::ExpertHost(std::uint8_t number) : number_(number) {
  server_.emplace(io_, net::RpcServerOptions{}, [this](net::IncomingCall call) { handle(std::move(call)); });
  require(server_->listen());
  port_ = server_->port();
  thread_ = std::thread([this] {
    const auto work = boost::asio::make_work_guard(io_);
    io_.run();
  });
}

ExpertHost::~ExpertHost() {
  kill();
  io_.stop();
  thread_.join();
  held_.clear();
  silent_.clear();
}

void ExpertHost::host(const ExpertUid& uid, ExpertFunction expert) {
  const std::lock_guard lock(mutex_);
  experts_[uid].function = std::move(expert);
}

void ExpertHost::describe(const ExpertUid& uid, std::vector<std::vector<std::int64_t>> inputs,
                          std::vector<std::vector<std::int64_t>> outputs, std::vector<torch::Dtype> input_types) {
  const std::lock_guard lock(mutex_);
  auto& expert = experts_[uid];
  input_types.resize(inputs.size(), torch::kFloat32);
  expert.input_shapes = std::move(inputs);
  expert.output_shapes = std::move(outputs);
  expert.input_types = std::move(input_types);
}

void ExpertHost::set_fault(const ExpertUid& uid, Fault forward, Fault backward) {
  const std::lock_guard lock(mutex_);
  experts_.at(uid).forward_fault = forward;
  experts_.at(uid).backward_fault = backward;
}

void ExpertHost::set_fault(Fault forward, Fault backward) {
  const std::lock_guard lock(mutex_);
  for (auto& [uid, expert] : experts_) {
    expert.forward_fault = forward;
    expert.backward_fault = backward;
  }
}

void ExpertHost::hang(bool on) {
  const std::lock_guard lock(mutex_);
  hangs_ = on;
}

void ExpertHost::lose_calls(std::size_t count) {
  const std::lock_guard lock(mutex_);
  calls_to_lose_ = count;
}

void ExpertHost::lose_questions(std::size_t count) {
  const std::lock_guard lock(mutex_);
  questions_to_lose_ = count;
}

void ExpertHost::wait_for_held(std::size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return held_.size() >= count; });
}

void ExpertHost::release_held() {
  std::vector<net::IncomingCall> held;
  {
    const std::lock_guard lock(mutex_);
    held.swap(held_);
  }
  for (auto& call : held) answer(std::move(call));
}

void ExpertHost::kill() {
  if (!server_) return;
  std::promise<void> closed;
  server_->stop(std::chrono::milliseconds(0), [&] { closed.set_value(); });
  closed.get_future().wait();
  server_.reset();
}

dht::ServerAddress ExpertHost::address(std::uint64_t announced) const {
  dht::ServerAddress server;
  server.peer.bytes.fill(number_);
  server.endpoints = {{"127.0.0.1", port_}};
  server.announced = announced;
  return server;
}

std::size_t ExpertHost::forwards(const ExpertUid& uid) const {
  const std::lock_guard lock(mutex_);
  return experts_.at(uid).forwards;
}

std::size_t ExpertHost::backwards(const ExpertUid& uid) const {
  const std::lock_guard lock(mutex_);
  return experts_.at(uid).backwards;
}

std::size_t ExpertHost::frames() const {
  const std::lock_guard lock(mutex_);
  return frames_.size();
}

std::size_t ExpertHost::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::size_t ExpertHost::questions() const {
  const std::lock_guard lock(mutex_);
  return questions_;
}

Tensors ExpertHost::last_grads(const ExpertUid& uid) const {
  const std::lock_guard lock(mutex_);
  return experts_.at(uid).grads;
}

Tensors ExpertHost::last_inputs(const ExpertUid& uid) const {
  const std::lock_guard lock(mutex_);
  return experts_.at(uid).inputs;
}

/// Whether nobody will ever answer `call`, which then is kept.
bool ExpertHost::swallows(net::IncomingCall& call) {
  const bool question = call.reader().isInfo();
  const std::lock_guard lock(mutex_);
  if (question) ++questions_;
  auto& to_lose = question ? questions_to_lose_ : calls_to_lose_;
  if (!hangs_ && to_lose == 0) return false;
  if (!hangs_) --to_lose;
  silent_.push_back(std::move(call));
  return true;
}

void ExpertHost::handle(net::IncomingCall call) {
  if (swallows(call)) return;
  const auto reader = call.reader();
  if (reader.isInfo()) {
    return answer_info(call, *parse_expert_uid(reader.getInfo().getUid().cStr()));
  }
  const bool backward = reader.isBackward();
  const auto uid =
      parse_expert_uid(backward ? reader.getBackward().getUid().cStr() : reader.getForward().getUid().cStr());
  {
    const std::lock_guard lock(mutex_);
    frames_.insert(call.frame());
    ++calls_;
    const auto it = experts_.find(*uid);
    if (it != experts_.end()) {
      const auto fault = backward ? it->second.backward_fault : it->second.forward_fault;
      if (fault == Fault::kHold || fault == Fault::kSilent) {
        (fault == Fault::kHold ? held_ : silent_).push_back(std::move(call));
        changed_.notify_all();
        return;
      }
    }
  }
  answer(std::move(call));
}

void ExpertHost::answer(net::IncomingCall call) {
  const auto reader = call.reader();
  const bool backward = reader.isBackward();
  const auto uid =
      *parse_expert_uid(backward ? reader.getBackward().getUid().cStr() : reader.getForward().getUid().cStr());
  ExpertFunction function;
  Fault fault = Fault::kNone;
  {
    const std::lock_guard lock(mutex_);
    const auto it = experts_.find(uid);
    if (it == experts_.end()) return call.fail({Errc::kNotFound, to_string(uid) + " is not hosted here", {}});
    function = it->second.function;
    fault = backward ? it->second.backward_fault : it->second.forward_fault;
  }
  if (fault == Fault::kError) return call.fail({Errc::kInternal, "this expert is broken", {}});
  if (fault == Fault::kRefuse) return call.fail({Errc::kInvalidArgument, "not to this expert's taste", {}});
  auto inputs =
      *net::decode_tensors(backward ? reader.getBackward().getInputs() : reader.getForward().getInputs(), call.frame());
  Tensors grads;
  if (backward) grads = *net::decode_tensors(reader.getBackward().getGradOutputs(), call.frame());
  Tensors result;
  try {
    const torch::NoGradGuard no_grad;
    result = backward ? backward_of(function, inputs, grads) : function(inputs);
  } catch (const std::exception& error) {
    return call.fail({Errc::kInvalidArgument, error.what(), {}});
  }
  if (fault == Fault::kNaN) {
    result =
        filled(result, backward ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN());
  }
  {
    const std::lock_guard lock(mutex_);
    auto& expert = experts_[uid];
    ++(backward ? expert.backwards : expert.forwards);
    expert.inputs = inputs;
    if (backward) expert.grads = grads;
  }
  reply_with(call, result, backward);
}

void ExpertHost::answer_info(net::IncomingCall& call, const ExpertUid& uid) {
  const std::lock_guard lock(mutex_);
  const auto it = experts_.find(uid);
  if (it == experts_.end()) return call.fail({Errc::kNotFound, to_string(uid) + " is not hosted here", {}});
  const auto& expert = it->second;
  call.reply([&](net::schema::Reply::Builder builder, net::Attachments&) {
    auto info = builder.initInfo();
    info.setUid(to_string(uid));
    info.setArchitecture("test");
    info.setMaxBatchSize(4096);
    info.setUpdates(expert.backwards);
    const auto write = [](auto specs, const auto& shapes, const auto& types) {
      for (unsigned i = 0; i < shapes.size(); ++i) {
        specs[i].setDtype(*net::to_wire(types.empty() ? torch::kFloat32 : types[i]));
        auto sizes = specs[i].initShape(static_cast<unsigned>(shapes[i].size()));
        for (unsigned d = 0; d < shapes[i].size(); ++d) sizes.set(d, shapes[i][d]);
      }
    };
    write(info.initInputs(static_cast<unsigned>(expert.input_shapes.size())), expert.input_shapes, expert.input_types);
    write(info.initOutputs(static_cast<unsigned>(expert.output_shapes.size())), expert.output_shapes,
          std::vector<torch::Dtype>{});
  });
}

}  // namespace dmoe::test
