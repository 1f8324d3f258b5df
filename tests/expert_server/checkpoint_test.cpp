// d15 (a donor that leaves while a newcomer downloads its state) does not fit: parameters never leave a server, and a
// newcomer begins with weights of its own or with a checkpoint on its own disk.
#include "expert_server/checkpoint_store.hpp"

#include "expert_server/architectures.hpp"
#include "expert_server/checkpoint_files.hpp"
#include "expert_server/expert_factory.hpp"
#include "expert_server/expert_host.hpp"
#include "expert_server/safetensors.hpp"
#include "tests/expert_server/fixtures.hpp"
#include "tests/support/captured_log.hpp"
#include "tests/support/catch.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <random>
#include <thread>

using namespace dmoe;
using namespace dmoe::expert_server;
using namespace dmoe::expert_server::test;
using dmoe::test::CapturedLog;

namespace fs = std::filesystem;

namespace {

ExpertOptions small_ffn() {
  ExpertOptions options;
  options.hidden_dim = 8;
  return options;
}

std::unique_ptr<ExpertBackend> made(CheckpointStore* store, const ExpertOptions& options = small_ffn(),
                                    std::uint64_t seed = 1) {
  return make_expert(uid("ffn.0.1"), options, store, false, seed).value();
}

void teach(ExpertBackend& backend, int steps) {
  for (int i = 0; i < steps; ++i) {
    const auto x = torch::randn({4, 8});
    REQUIRE(backend.backward({x}, {torch::randn({4, 8})}, 0).has_value());
  }
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void flip_bit(const fs::path& path, std::uint64_t place) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(place));
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(static_cast<std::streamoff>(place));
  file.put(byte);
}

/// As many saves as a server makes in as many periods: what is on disk must not grow.
void save_periodically(int periods) {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto snapshot = made(&store)->snapshot();
  std::uintmax_t bytes = 0;
  for (int i = 1; i <= periods; ++i) {
    REQUIRE(store.save(snapshot).has_value());
    if (i > 3 && i % 100 != 0) continue;
    const auto files = files_of(folder.path());
    REQUIRE(files.size() == static_cast<std::size_t>(std::min(i, 3)));
    if (i == 1) bytes = fs::file_size(files.back());
    for (const auto& file : files) CHECK(fs::file_size(file) == bytes);
  }
  const auto digits = std::to_string(periods);
  CHECK(files_of(folder.path()).back().filename() ==
        "checkpoint-" + std::string(10 - digits.size(), '0') + digits + ".safetensors");
}

/// Kills a process that saves for ever, at random moments, and looks at what is left each time.
void kill_while_saving(int kills) {
  const TemporaryFolder folder;
  std::mt19937_64 random(dmoe::test::seed());
  const auto snapshot = builtin("ffn", 64, plain_sgd())->snapshot();
  const auto name = snapshot.description.uid;
  std::uint64_t least = 0;
  for (int round = 0; round < kills; ++round) {
    int channel[2];
    REQUIRE(::pipe(channel) == 0);
    const pid_t child = ::fork();
    if (child == 0) {  // Saves for ever, and tells the number of each completed save.
      CheckpointStore store(folder.path(), 2);
      auto next = snapshot;
      for (next.updates = least + 1;; ++next.updates) {
        if (!store.save(next)) ::_exit(1);
        if (::write(channel[1], &next.updates, sizeof(next.updates)) < 0) ::_exit(2);
      }
    }
    ::close(channel[1]);
    std::uint64_t completed = 0;
    const auto rounds = 1 + random() % 4;
    for (std::uint64_t i = 0; i < rounds; ++i) {
      REQUIRE(::read(channel[0], &completed, sizeof(completed)) == sizeof(completed));
    }
    const auto spin = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 1'500);
    while (std::chrono::steady_clock::now() < spin) {
    }
    ::kill(child, SIGKILL);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));
    while (::read(channel[0], &completed, sizeof(completed)) == sizeof(completed)) {
    }
    ::close(channel[0]);
    CheckpointStore store(folder.path(), 2);
    const auto loaded = store.load(name);
    REQUIRE(loaded.has_value());
    REQUIRE(loaded->has_value());
    CHECK((*loaded)->updates >= completed);
    CHECK((*loaded)->updates <= completed + 1);
    CHECK(same_bits((*loaded)->parameters, snapshot.parameters));
    least = (*loaded)->updates;
    for (const auto& file : files_of(folder.path())) CHECK_FALSE(is_temporary_name(file.filename().string()));
  }
}

}  // namespace

TEST_CASE("an expert goes on from its checkpoint with the same bits", "[checkpoint]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto original = made(&store);
  teach(*original, 3);
  REQUIRE(store.save(original->snapshot()).has_value());
  const auto restored = made(&store, small_ffn(), /*seed=*/99);
  CHECK(restored->updates() == 3);
  const auto x = torch::randn({5, 8});
  const auto gradient = torch::randn({5, 8});
  CHECK(same_bits(original->forward({x}, 0).value()[0], restored->forward({x}, 0).value()[0]));
  REQUIRE(original->backward({x}, {gradient}, 0).has_value());
  REQUIRE(restored->backward({x}, {gradient}, 0).has_value());
  CHECK(same_bits(original->snapshot().parameters, restored->snapshot().parameters));
  CHECK(same_bits(original->snapshot().optimizer_state, restored->snapshot().optimizer_state));
}

TEST_CASE("d9 only the newest files are kept", "[checkpoint][d9]") { save_periodically(200); }

TEST_CASE("d9 only the newest files are kept after 10000 periods", "[.long][d9]") { save_periodically(10'000); }

TEST_CASE("d3 a damaged newest checkpoint falls back to the one before it", "[checkpoint][d3]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto backend = made(&store);
  teach(*backend, 1);
  REQUIRE(store.save(backend->snapshot()).has_value());
  const auto first = backend->snapshot();
  teach(*backend, 1);
  REQUIRE(store.save(backend->snapshot()).has_value());
  const auto newest = files_of(folder.path()).back();
  flip_bit(newest, fs::file_size(newest) - 9);
  const CapturedLog log;
  const auto loaded = store.load(uid("ffn.0.1"));
  CHECK(log.warned_of(newest.string()));  // Loudly: which file, and what is wrong with it.
  CHECK(log.warned_of("checksum"));
  REQUIRE(loaded.has_value());
  REQUIRE(loaded->has_value());
  CHECK((*loaded)->updates == 1);
  CHECK(same_bits((*loaded)->parameters, first.parameters));
}

TEST_CASE("d3 when all checkpoints are damaged nothing is deleted and the error says what to do", "[checkpoint][d3]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto backend = made(&store);
  REQUIRE(store.save(backend->snapshot()).has_value());
  REQUIRE(store.save(backend->snapshot()).has_value());
  for (const auto& file : files_of(folder.path())) flip_bit(file, fs::file_size(file) / 2);
  const auto loaded = make_expert(uid("ffn.0.1"), small_ffn(), &store, false, 1);
  REQUIRE(loaded.has_error());
  CHECK(loaded.error().code == Errc::kInvalidArgument);
  CHECK(loaded.error().message.find("backup") != std::string::npos);
  CHECK(files_of(folder.path()).size() == 2);
}

TEST_CASE("d4 a checkpoint of another width or expert or architecture is refused", "[checkpoint][d4]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  REQUIRE(store.save(made(&store)->snapshot()).has_value());
  auto wider = small_ffn();
  wider.hidden_dim = 16;
  const auto width = make_expert(uid("ffn.0.1"), wider, &store, false, 1);
  REQUIRE(width.has_error());
  CHECK(width.error().message.find("8") != std::string::npos);
  CHECK(width.error().message.find("16") != std::string::npos);
  auto other = small_ffn();
  other.architecture = "nop";
  CHECK(make_expert(uid("ffn.0.1"), other, &store, false, 1).has_error());
  fs::create_directories(folder.path() / "ffn.0.2");
  fs::copy(files_of(folder.path()).front(), folder.path() / "ffn.0.2" / "checkpoint-0000000001.safetensors");
  const auto renamed = make_expert(uid("ffn.0.2"), small_ffn(), &store, false, 1);
  REQUIRE(renamed.has_error());
  CHECK(renamed.error().message.find("ffn.0.1") != std::string::npos);
  CHECK(renamed.error().message.find("ffn.0.2") != std::string::npos);
}

TEST_CASE("d4 shapes are compared even when the metadata lies", "[checkpoint][d4]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  auto lying = made(&store)->snapshot();
  lying.description.hidden_dim = 16;
  REQUIRE(store.save(lying).has_value());
  auto wider = small_ffn();
  wider.hidden_dim = 16;
  const auto refused = make_expert(uid("ffn.0.1"), wider, &store, false, 1);
  REQUIRE(refused.has_error());
  CHECK(refused.error().message.find("[32, 8]") != std::string::npos);
  CHECK(refused.error().message.find("[64, 16]") != std::string::npos);
}

TEST_CASE("d5 the file gives what the options leave open and the options win otherwise", "[checkpoint][d5]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  auto trained = small_ffn();
  trained.learning_rate = 0.123;
  trained.weight_decay = 0.01;
  trained.clip_grad_norm = 0.5;
  const auto backend = made(&store, trained);
  teach(*backend, 7);
  REQUIRE(store.save(backend->snapshot()).has_value());
  const auto by_default = made(&store)->snapshot();
  CHECK(by_default.optimizer == backend->snapshot().optimizer);
  CHECK(by_default.optimizer.learning_rate == 0.123);
  CHECK(by_default.updates == 7);
  auto flag = small_ffn();
  flag.learning_rate = 0.5;
  CHECK(made(&store, flag)->snapshot().optimizer.learning_rate == 0.5);
  CHECK(made(&store, flag)->snapshot().optimizer.weight_decay == 0.01);
}

TEST_CASE("another optimizer is refused unless its state may be lost", "[checkpoint]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto backend = made(&store);
  teach(*backend, 1);
  REQUIRE(store.save(backend->snapshot()).has_value());
  auto options = small_ffn();
  options.optimizer = "sgd";
  CHECK(make_expert(uid("ffn.0.1"), options, &store, false, 1).has_error());
  const auto reset = make_expert(uid("ffn.0.1"), options, &store, true, 1);
  REQUIRE(reset.has_value());
  CHECK(same_bits((*reset)->snapshot().parameters, backend->snapshot().parameters));
}

TEST_CASE("d7 a checkpoint without optimizer state loads", "[checkpoint][d7]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto backend = made(&store);
  REQUIRE(store.save(backend->snapshot()).has_value());  // Before the first step.
  CHECK(made(&store)->snapshot().optimizer_state.empty());
  teach(*backend, 2);
  auto stripped = backend->snapshot();
  stripped.optimizer_state.clear();
  REQUIRE(store.save(stripped).has_value());
  const CapturedLog log;
  const auto restored = made(&store);
  CHECK(log.warned_of("no optimizer state"));
  CHECK(restored->updates() == 2);
  CHECK(same_bits(restored->snapshot().parameters, backend->snapshot().parameters));
  teach(*restored, 1);
}

TEST_CASE("d7 an expert of which only a part learns loads with what its optimizer keeps of that part",
          "[checkpoint][d7]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto with_frozen_layer = [] {
    const auto frozen = torch::ones({3});
    const auto learned = torch::ones({3}).requires_grad_(true);
    OptimizerSettings adam;
    adam.kind = OptimizerKind::kAdam;
    return std::make_unique<ExpertBackend>(ExpertDescription{uid("test.0"), "partly-frozen", 3, {}},
                                           std::make_unique<FunctionExpert>(
                                               3, [=](const at::Tensor& x) { return x * frozen + learned; },
                                               std::vector<NamedTensor>{{"frozen", frozen}, {"learned", learned}}),
                                           adam, 16);
  };
  const auto before = with_frozen_layer();
  for (int i = 0; i < 2; ++i) {
    const auto x = torch::randn({4, 3});
    REQUIRE(before->backward({x}, {x}, 0).has_value());
  }
  REQUIRE(store.save(before->snapshot()).has_value());
  const auto after = with_frozen_layer();
  REQUIRE(after->restore(store.load(uid("test.0")).value().value()).has_value());
  CHECK(same_bits(after->snapshot().parameters, before->snapshot().parameters));
  const auto x = torch::randn({4, 3});
  REQUIRE(before->backward({x}, {x}, 0).has_value());
  REQUIRE(after->backward({x}, {x}, 0).has_value());
  CHECK(same_bits(after->snapshot().parameters, before->snapshot().parameters));
  CHECK(same_bits(after->snapshot().parameters.at(0).tensor, torch::ones({3})));
}

TEST_CASE("d17 the folder of one expert loads in another store", "[checkpoint][d17]") {
  const TemporaryFolder here;
  const TemporaryFolder there;
  CheckpointStore store(here.path(), 3);
  const auto backend = made(&store);
  teach(*backend, 1);
  REQUIRE(store.save(backend->snapshot()).has_value());
  fs::copy(here.path() / "ffn.0.1", there.path() / "ffn.0.1", fs::copy_options::recursive);
  CheckpointStore moved(there.path(), 3);
  CHECK((moved.stored() == std::vector<ExpertUid>{uid("ffn.0.1")}));
  CHECK(same_bits(made(&moved)->snapshot().parameters, backend->snapshot().parameters));
}

TEST_CASE("d1 a disk that takes no more bytes leaves the process and the last checkpoint alone", "[checkpoint][d1]") {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {  // The limit is the whole process's, and cannot be raised again.
    (void)std::signal(SIGXFSZ, SIG_IGN);
    CheckpointStore store(folder.path(), 3);
    const auto backend = builtin("ffn", 8, plain_sgd());
    const auto snapshot = backend->snapshot();
    if (!store.save(snapshot)) ::_exit(1);
    const struct rlimit limit { 4'096, RLIM_INFINITY };
    ::setrlimit(RLIMIT_FSIZE, &limit);
    for (int period = 0; period < 3; ++period) {
      const auto refused = store.save(snapshot);
      if (refused || refused.error().code != Errc::kUnavailable) ::_exit(2);
    }
    const struct rlimit freed { RLIM_INFINITY, RLIM_INFINITY };
    ::setrlimit(RLIMIT_FSIZE, &freed);
    ::_exit(store.load(snapshot.description.uid) && store.save(snapshot) ? 0 : 3);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(files_of(folder.path()).size() == 2);  // No temporary files are left.
}

TEST_CASE("d2 a process killed while it saves leaves the last complete checkpoint", "[checkpoint][d2]") {
  kill_while_saving(30);
}

TEST_CASE("d2 a process killed 200 times while it saves leaves the last complete checkpoint", "[.long][d2]") {
  kill_while_saving(200);
}

TEST_CASE("d11 a snapshot never mixes two steps", "[checkpoint][d11]") {
  const TemporaryFolder folder;
  net::Metrics registry;
  ServerMetrics metrics(registry);
  // One weight that starts at 0 and grows by exactly 1 a step: rate 1, gradient -1, no clipping.
  register_architecture("counting", [](ArchitectureArguments&) -> std::unique_ptr<ExpertModule> {
    const auto weight = torch::zeros({1}).requires_grad_(true);
    return std::make_unique<FunctionExpert>(
        1, [weight](const at::Tensor& x) { return x + weight; }, std::vector<NamedTensor>{{"weight", weight}});
  });
  ExpertHostOptions options;
  options.expert.architecture = "counting";
  options.expert.optimizer = "sgd";
  options.expert.learning_rate = 1;
  options.expert.clip_grad_norm = 0;
  options.pool.max_batch_rows = 1;
  options.pool.max_queued_batches = 64;
  options.checkpoints = folder.path();
  options.compute_threads = 1;
  ExpertHost host(options, metrics);
  REQUIRE(host.load(uid("count.0")).has_value());
  const auto expert = host.table().find("count.0");
  std::atomic<bool> done{false};
  std::thread trainer([&] {
    while (!done) {
      Answers answers(1);
      auto task = answers.task(0, {torch::zeros({1, 1})}, {torch::full({1, 1}, -1.0)});
      if (host.runtimes().of(*expert).submit(expert, Direction::kBackward, task)) answers.wait_all();
    }
  });
  CheckpointStore reader(folder.path(), 3);
  std::uint64_t last = 0;
  for (int i = 0; i < 20; ++i) {
    const bool written = host.checkpoint().has_value();
    const auto loaded = reader.load(uid("count.0"));
    if (!written || !loaded || !*loaded) continue;
    CHECK((*loaded)->parameters.at(0).tensor.item<float>() == float((*loaded)->updates));
    CHECK((*loaded)->updates >= last);
    last = (*loaded)->updates;
  }
  done = true;
  trainer.join();
  CHECK(last > 0);
  host.stop(std::chrono::seconds{1});
}

TEST_CASE("a8 weights keep the dtype of their file", "[checkpoint][a8]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path(), 3);
  const auto weight = torch::randn({3}, at::kDouble).requires_grad_(true);
  const auto table = torch::ones({3}, at::kHalf);
  const auto backend =
      backend_of(std::make_unique<FunctionExpert>(
                     3, [=](const at::Tensor& x) { return x * weight.to(at::kFloat) + table; },
                     std::vector<NamedTensor>{{"weight", weight}}, std::vector<NamedTensor>{{"table", table}}),
                 "test.0");
  REQUIRE(store.save(backend->snapshot()).has_value());
  const auto loaded = store.load(uid("test.0")).value().value();
  CHECK(loaded.parameters.at(0).tensor.scalar_type() == at::kDouble);
  CHECK(loaded.buffers.at(0).tensor.scalar_type() == at::kHalf);
  REQUIRE(backend->restore(loaded).has_value());
  CHECK(weight.scalar_type() == at::kDouble);
  CHECK(same_bits(weight.detach(), loaded.parameters.at(0).tensor));
}

TEST_CASE("e17 checkpoints stay below their share of the disk and an experts newest is never deleted",
          "[checkpoint][e17]") {
  const TemporaryFolder folder;
  auto first = made(nullptr)->snapshot();
  auto second = first;
  second.description.uid = uid("ffn.0.2");
  CheckpointStore unlimited(folder.path(), 100);
  REQUIRE(unlimited.save(first).has_value());
  const auto one_file = fs::file_size(files_of(folder.path()).front());
  const auto total = [&] {
    std::uint64_t bytes = 0;
    for (const auto& file : files_of(folder.path())) bytes += fs::file_size(file);
    return bytes;
  };
  const auto limit = 5 * one_file;
  CheckpointStore store(folder.path(), 100, limit);
  for (int i = 0; i < 20; ++i) {  // Three times as much as fits.
    first.updates = second.updates = static_cast<std::uint64_t>(i);
    REQUIRE(store.save(i % 4 == 0 ? second : first).has_value());
    CHECK(total() <= limit);
    REQUIRE(store.load(first.description.uid).has_value());
  }
  CHECK(store.load(first.description.uid).value()->updates == 19);
  CHECK(store.load(second.description.uid).value()->updates == 16);
  CheckpointStore tight(folder.path(), 100, 2 * one_file);
  const auto refused = tight.save(first);
  REQUIRE(refused.has_error());
  CHECK(refused.error().code == Errc::kUnavailable);
  CHECK(refused.error().message.find("max_disk") != std::string::npos);
  CHECK(tight.load(first.description.uid).value()->updates == 19);
  CHECK(tight.load(second.description.uid).value()->updates == 16);
  CHECK(files_of(folder.path()).size() == 2);
}

TEST_CASE("checkpoint files are listed and shown and verified and exported", "[checkpoint]") {
  const TemporaryFolder folder;
  CheckpointStore store(folder.path() / "checkpoints", 3);
  const auto backend = made(&store);
  teach(*backend, 2);
  REQUIRE(store.save(backend->snapshot()).has_value());
  const auto files = find_checkpoints(folder.path());
  REQUIRE(files.has_value());
  REQUIRE(files->size() == 1);
  const auto shown = show_checkpoint(files->front());
  REQUIRE(shown.has_value());
  CHECK(shown->metadata.at("uid") == "ffn.0.1");
  CHECK(shown->metadata.at("updates") == "2");
  CHECK(verify_checkpoint(files->front()).has_value());
  const auto exported = folder.path() / "weights.safetensors";
  REQUIRE(export_checkpoint(files->front(), exported).has_value());
  CHECK(export_checkpoint(files->front(), exported).error().code == Errc::kUnavailable);
  const auto weights = read_safetensors(exported);
  REQUIRE(weights.has_value());
  CHECK(weights->tensors.size() == backend->snapshot().parameters.size());
  flip_bit(files->front(), fs::file_size(files->front()) - 1);
  CHECK(verify_checkpoint(files->front()).has_error());
  CHECK(find_checkpoints(folder.path() / "none").error().code == Errc::kNotFound);
}
