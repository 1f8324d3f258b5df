#include "cli/image_dataset.hpp"

#include "cli/idx_file.hpp"

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace dmoe::cli {
namespace {

Result<IdxArray> read_part(const std::filesystem::path& directory, const std::string& name) {
  std::error_code error;
  for (const std::string& file : {name, name + ".gz"}) {
    if (std::filesystem::exists(directory / file, error)) return read_idx(directory / file);
  }
  return Error{Errc::kNotFound,
               "no data set in " + directory.string() + ": " + name +
                   " (or .gz) is missing; install the Debian package dataset-fashion-mnist, or name a directory with "
                   "the four IDX files with --data DIR",
               {}};
}

torch::Tensor to_tensor(const IdxArray& array, std::vector<std::int64_t> shape) {
  torch::Tensor tensor = torch::empty(shape, torch::kUInt8);
  std::memcpy(tensor.data_ptr(), array.data.data(), array.data.size());
  return tensor;
}

Result<LabelledImages> read_set(const std::filesystem::path& directory, const std::string& set) {
  const auto images = read_part(directory, set + "-images-idx3-ubyte");
  if (!images) return images.error();
  const auto labels = read_part(directory, set + "-labels-idx1-ubyte");
  if (!labels) return labels.error();
  if (images->shape.size() != 3 || labels->shape.size() != 1 || images->shape[0] != labels->shape[0]) {
    return Error{Errc::kInvalidArgument,
                 directory.string() + ": the " + set + " images and labels do not belong together; fetch them again",
                 {}};
  }
  const std::int64_t rows = images->shape[0];
  const std::int64_t features = std::int64_t{images->shape[1]} * images->shape[2];
  return LabelledImages{to_tensor(*images, {rows, features}), to_tensor(*labels, {rows}).to(torch::kInt64)};
}

}  // namespace

Result<ImageDataset> load_images(const std::filesystem::path& directory) {
  auto train = read_set(directory, "train");
  if (!train) return train.error();
  auto test = read_set(directory, "t10k");
  if (!test) return test.error();
  if (train->pixels.size(1) != test->pixels.size(1)) {
    return Error{
        Errc::kInvalidArgument, directory.string() + ": training and test images differ in size; fetch them again", {}};
  }
  const std::int64_t classes =
      1 + std::max(train->labels.max().item<std::int64_t>(), test->labels.max().item<std::int64_t>());
  return ImageDataset{*std::move(train), *std::move(test), classes};
}

Batch batch_of(const LabelledImages& images, const torch::Tensor& rows) {
  const torch::Tensor pixels = images.pixels.index_select(0, rows).to(torch::kFloat32);
  return {pixels.mul_(2.0 / 255).sub_(1), images.labels.index_select(0, rows)};
}

BatchSampler::BatchSampler(const LabelledImages& images, std::int64_t batch_size, std::uint64_t seed)
    : images_(images),
      batch_size_(std::min(batch_size, images.size())),
      generator_(at::detail::createCPUGenerator(seed)) {}

Batch BatchSampler::next() {
  if (!order_.defined() || position_ + batch_size_ > order_.numel()) {
    order_ = torch::randperm(images_.size(), generator_, torch::kInt64);
    position_ = 0;
  }
  const torch::Tensor rows = order_.narrow(0, position_, batch_size_);
  position_ += batch_size_;
  return batch_of(images_, rows);
}

}  // namespace dmoe::cli
