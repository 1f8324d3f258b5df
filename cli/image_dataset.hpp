// Labelled images for training: Fashion-MNIST, or any data set in the same four IDX files.
#pragma once

#include "net/error.hpp"

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace dmoe::cli {

/// Where Debian's package dataset-fashion-mnist puts its files.
inline constexpr const char* kDefaultDataDirectory = "/usr/share/datasets/fashion-mnist";

/// Images as they lie in the file; `batch` scales them.
struct LabelledImages {
  torch::Tensor pixels;  ///< [N, height * width], uint8, CPU.
  torch::Tensor labels;  ///< [N], int64, CPU; each in [0, classes).

  std::int64_t size() const { return labels.numel(); }
};

struct ImageDataset {
  LabelledImages train;
  LabelledImages test;
  std::int64_t classes = 0;  ///< Largest label + 1.

  std::int64_t features() const { return train.pixels.size(1); }
};

/// A batch as the model takes it.
struct Batch {
  torch::Tensor inputs;  ///< [B, features], float32 in about [-1, 1].
  torch::Tensor labels;  ///< [B], int64
};

/// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, each plain or with `.gz`, from `directory`.
/// kNotFound names the missing file, the Debian package and --data; kInvalidArgument: a damaged file, or images and
/// labels that do not belong together.
Result<ImageDataset> load_images(const std::filesystem::path& directory);

/// The rows named by `rows` ([B], int64).
Batch batch_of(const LabelledImages& images, const torch::Tensor& rows);

/// Endless shuffled batches: every row once per pass over the data. Not thread-safe.
class BatchSampler {
 public:
  BatchSampler(const LabelledImages& images, std::int64_t batch_size, std::uint64_t seed);
  Batch next();

 private:
  const LabelledImages& images_;
  std::int64_t batch_size_;
  torch::Generator generator_;
  torch::Tensor order_;
  std::int64_t position_ = 0;
};

}  // namespace dmoe::cli
