#include "expert_server/script_expert.hpp"

#include <torch/script.h>

#include <array>
#include <charconv>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace dmoe::expert_server {
namespace {

struct InputDtype {
  std::string_view name;
  at::ScalarType dtype;
};

constexpr std::array<InputDtype, 8> kInputDtypes{{{"float32", at::kFloat},
                                                  {"float64", at::kDouble},
                                                  {"float16", at::kHalf},
                                                  {"bfloat16", at::kBFloat16},
                                                  {"int64", at::kLong},
                                                  {"int32", at::kInt},
                                                  {"uint8", at::kByte},
                                                  {"bool", at::kBool}}};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto end = text.find(separator);
    parts.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  }
  return parts;
}

TensorSpec parse_spec(std::string_view text) {
  const auto colon = text.find(':');
  TensorSpec spec;
  bool known = false;
  for (const auto& item : kInputDtypes) {
    if (item.name != text.substr(0, colon)) continue;
    spec.dtype = item.dtype;
    known = true;
  }
  if (!known) throw std::invalid_argument("inputs: \"" + std::string(text) + "\" is not like float32:64 or bool:-1x64");
  spec.requires_grad = at::isFloatingType(spec.dtype);
  if (colon == std::string_view::npos) return spec;
  for (const auto size_text : split(text.substr(colon + 1), 'x')) {
    std::int64_t size = 0;
    const auto [end, code] = std::from_chars(size_text.data(), size_text.data() + size_text.size(), size);
    if (code != std::errc{} || end != size_text.data() + size_text.size() || size < -1 || size > (1 << 24)) {
      throw std::invalid_argument("inputs: \"" + std::string(size_text) + "\" is no size");
    }
    spec.shape.push_back(size);
  }
  return spec;
}

std::vector<at::Tensor> zeros_for(const std::vector<TensorSpec>& specs, std::int64_t rows, std::int64_t any) {
  std::vector<at::Tensor> inputs;
  for (const auto& spec : specs) {
    std::vector<std::int64_t> sizes{rows};
    for (const auto size : spec.shape) sizes.push_back(size < 0 ? any : size);
    inputs.push_back(at::zeros(sizes, spec.dtype));
  }
  return inputs;
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  if (!value.isTuple()) throw std::runtime_error("forward returns neither tensors nor a tuple or list of them");
  std::vector<at::Tensor> tensors;
  for (const auto& element : value.toTupleRef().elements()) tensors.push_back(element.toTensor());
  return tensors;
}

class ScriptExpert final : public ExpertModule {
 public:
  ScriptExpert(torch::jit::Module module, std::vector<TensorSpec> inputs, bool stochastic)
      : module_(std::move(module)), stochastic_(stochastic) {
    module_.train();
    schema_.inputs = std::move(inputs);
    schema_.outputs = find_outputs();
  }

  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, at::Generator& generator) override {
    std::vector<c10::IValue> arguments(inputs.begin(), inputs.end());
    if (!stochastic_) return tensors_of(module_.forward(std::move(arguments)));
    // TorchScript draws from the process's generator alone.
    auto shared = at::detail::getDefaultCPUGenerator();
    shared.set_current_seed(generator.current_seed());
    return tensors_of(module_.forward(std::move(arguments)));
  }

  const ExpertSchema& schema() const override { return schema_; }
  bool one_task_at_a_time() const override { return stochastic_; }
  bool runs_beside_others() const override { return !stochastic_; }

  std::vector<NamedTensor> parameters() const override {
    std::vector<NamedTensor> found;
    for (const auto& item : module_.named_parameters()) found.push_back({item.name, item.value});
    return found;
  }

  std::vector<NamedTensor> buffers() const override {
    std::vector<NamedTensor> found;
    for (const auto& item : module_.named_buffers()) found.push_back({item.name, item.value});
    return found;
  }

 private:
  /// Sizes that stay the same when rows and open sizes change are fixed.
  std::vector<TensorSpec> find_outputs() {
    const at::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>();
    module_.eval();  // Running statistics must not move.
    const auto small = forward(zeros_for(schema_.inputs, 2, 3), generator);
    const auto large = forward(zeros_for(schema_.inputs, 3, 5), generator);
    module_.train();
    std::vector<TensorSpec> specs;
    for (std::size_t i = 0; i < small.size(); ++i) {
      if (small[i].dim() < 1 || small[i].size(0) != 2 || large.at(i).size(0) != 3) {
        throw std::invalid_argument("output " + std::to_string(i) + " does not have the batch row as dimension 0");
      }
      TensorSpec spec{small[i].scalar_type(), {}, at::isFloatingType(small[i].scalar_type())};
      for (std::int64_t d = 1; d < small[i].dim(); ++d) {
        spec.shape.push_back(small[i].size(d) == large[i].size(d) ? small[i].size(d) : -1);
      }
      specs.push_back(std::move(spec));
    }
    return specs;
  }

  torch::jit::Module module_;
  bool stochastic_;
  ExpertSchema schema_;
};

}  // namespace

std::unique_ptr<ExpertModule> make_script_expert(ArchitectureArguments& arguments) {
  const auto file = arguments.text("file", "");
  const auto inputs = arguments.text("inputs", "float32:" + std::to_string(arguments.hidden_dim()));
  const bool stochastic = arguments.integer("stochastic", 0, 0, 1) == 1;
  if (file.empty()) throw std::invalid_argument("the argument file=PATH names no TorchScript file");
  std::vector<TensorSpec> specs;
  for (const auto part : split(inputs, ';')) specs.push_back(parse_spec(part));
  if (specs.empty()) throw std::invalid_argument("inputs names no tensor");
  return std::make_unique<ScriptExpert>(torch::jit::load(file), std::move(specs), stochastic);
}

}  // namespace dmoe::expert_server
