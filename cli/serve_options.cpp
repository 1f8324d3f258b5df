#include "cli/serve_options.hpp"

#include "cli/options.hpp"
#include "cli/size_estimate.hpp"

#include <algorithm>
#include <filesystem>
#include <utility>

namespace dmoe::cli {
namespace {

constexpr const char* kPurpose = "serve";
constexpr std::int64_t kMaxHiddenDim = 65'536;       ///< As expert_server has it.
constexpr std::int64_t kMaxBatchRows = 1'000'000;    ///< As expert_server has it.
constexpr std::uint64_t kMostWithoutNumber = 4'096;  ///< Experts of a pattern that is hosted whole.
constexpr double kMaxSeconds = 30.0 * 24 * 3'600;

CLI::Validator seconds(const char* example) { return decimal_number(0, kMaxSeconds, example); }

CLI::Validator uid_pattern() {
  return {[](std::string& text) -> std::string {
            const auto pattern = parse_uid_pattern(text);
            return pattern ? std::string{} : pattern.error().message;
          },
          "", ""};
}

CLI::Validator name_and_value() {
  return {[](std::string& text) -> std::string {
            const std::size_t equals = text.find('=');
            if (equals != std::string::npos && equals > 0) return {};
            return "'" + text + "' is not NAME=VALUE; for example num_heads=8";
          },
          "", ""};
}

CLI::Validator device_name() {
  return {[](std::string& text) -> std::string {
            const bool indexed = text.starts_with("cuda:") && text.size() > 5 && text.size() < 9 &&
                                 text.find_first_not_of("0123456789", 5) == std::string::npos;
            if (text == "cpu" || text == "cuda" || indexed) return {};
            return "'" + text + "' is no device; for example cpu, cuda or cuda:1";
          },
          "", ""};
}

/// "ffn|nop|transformer"
std::string any_of(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : "|") + word;
  return text;
}

void add_expert_options(CLI::App& command, ServeOptions& options) {
  command.option_defaults()->group("Experts");
  command
      .add_option("pattern,--pattern", options.pattern,
                  "Which experts to host; a range [first:end] excludes its end. Quote it for the shell")
      ->type_name("PATTERN")
      ->capture_default_str()
      ->check(uid_pattern());
  command
      .add_option("--num-experts", options.num_experts,
                  "How many of the pattern's experts to host, claimed at random among the free ones; 0: all")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(0, kMostAskedFor, "16"));
  command.add_option("--expert", options.expert.architecture, "Kind of expert")
      ->type_name(any_of(expert_server::architectures()))
      ->capture_default_str()
      ->check(one_of(expert_server::architectures()));
  command
      .add_option(
          "--expert-script", options.expert_script,
          "A TorchScript file to host instead (torch.jit.save); its parameters are trained. Its inputs, unless one "
          "of --hidden-dim floats, are said with --expert-arg 'inputs=float32:64;bool:-1'")
      ->type_name("FILE");
  command.add_option("--hidden-dim", options.expert.hidden_dim, "Features of one input row (or token)")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, kMostAskedFor, "1024"));
  command.add_option("--expert-arg", options.expert_arguments, "Further setting of the kind of expert; repeatable")
      ->type_name("NAME=VALUE ...")
      ->check(name_and_value());
  command.add_option("--max-batch-size", options.expert.max_batch_size, "Largest batch of one expert, in rows")
      ->type_name("ROWS")
      ->capture_default_str()
      ->check(whole_number(1, kMostAskedFor, "4096"));
}

/// None of these has a default here: an unset one is taken from the expert's checkpoint.
void add_learning_options(CLI::App& command, ServeOptions& options) {
  command.option_defaults()->group("Learning");
  command.add_option("--optimizer", options.expert.optimizer, "How experts learn; default: the checkpoint's, or adam")
      ->type_name("adam|adamw|sgd")
      ->check(one_of({"adam", "adamw", "sgd"}));
  command
      .add_option("--learning-rate", options.expert.learning_rate,
                  "Step size of the optimizer; default: the checkpoint's, or 0.001")
      ->type_name("RATE")
      ->check(decimal_number(0, 1'000, "0.001"));
  command
      .add_option("--schedule", options.expert.schedule,
                  "How the learning rate falls; default: the checkpoint's, or constant")
      ->type_name("constant|linear|cosine")
      ->check(one_of({"constant", "linear", "cosine"}));
  command
      .add_option("--warmup-steps", options.expert.warmup_steps,
                  "Updates over which the learning rate rises from 0; default: the checkpoint's, or 0")
      ->type_name("COUNT")
      ->check(whole_number(0, 1'000'000'000, "1000"));
  command
      .add_option("--total-steps", options.expert.total_steps,
                  "Linear and cosine: the update at which the learning rate reaches 0; default: the checkpoint's")
      ->type_name("COUNT")
      ->check(whole_number(1, 1'000'000'000'000, "100000"));
  command.add_option("--amsgrad", options.expert.amsgrad, "For adam and adamw; default: the checkpoint's, or true")
      ->type_name("true|false")
      ->type_size(1)
      ->expected(1)
      ->check(one_of({"true", "false"}));
  command
      .add_option("--nesterov", options.expert.nesterov, "For sgd with momentum; default: the checkpoint's, or false")
      ->type_name("true|false")
      ->type_size(1)
      ->expected(1)
      ->check(one_of({"true", "false"}));
  command.add_flag("--freeze,--frozen", options.expert.frozen, "Serve without learning: backward changes nothing");
  command.add_option("--momentum", options.expert.momentum, "Momentum of sgd; default: the checkpoint's, or 0")
      ->type_name("FACTOR")
      ->check(decimal_number(0, 1, "0.9"));
  command
      .add_option("--weight-decay", options.expert.weight_decay,
                  "L2 penalty (adamw: decoupled); default: the checkpoint's, or 0")
      ->type_name("FACTOR")
      ->check(decimal_number(0, 1'000, "0.0001"));
  command
      .add_option("--clip-grad-norm", options.expert.clip_grad_norm,
                  "Largest norm of one update's gradients, 0: no limit; default: the checkpoint's, or 1")
      ->type_name("NORM")
      ->check(decimal_number(0, 1e9, "1"));
}

void add_network_options(CLI::App& command, ServeOptions& options) {
  command.option_defaults()->group("Network");
  add_node_options(command, options.network);
  command.add_option("--heartbeat", options.heartbeat, "Time between announcements of the experts, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.1, 3'600, "15"));
  command
      .add_option("--announcement-ttl", options.announcement_ttl,
                  "How long an announcement is valid, in seconds; more than the heartbeat")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.2, 86'400, "60"));
  command.add_option("--max-message", options.max_message, "Largest message accepted or sent, in MiB")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(whole_number(1, 4'095, "256"));
  command.add_option("--max-connections", options.max_connections, "Most open connections")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 1'000'000, "4096"));
}

void add_storage_options(CLI::App& command, ServeOptions& options) {
  command.option_defaults()->group("Storage");
  add_keeping_options(command, options.network, kPurpose);
  command
      .add_option("--checkpoint-period", options.checkpoint_period,
                  "Time between checkpoints in seconds; 0: only when the server ends")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(seconds("300"));
  command.add_option("--keep-checkpoints", options.keep_checkpoints, "Newest checkpoints kept per expert")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 1'000, "3"));
  command
      .add_option(
          "--max-disk", options.max_disk,
          "What all checkpoints may take together, in MiB; beyond it the oldest go, never an expert's newest; 0: "
          "no limit")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(whole_number(0, 1LL << 40, "10240"));
  command.add_flag("--reset-optimizer", options.reset_optimizer,
                   "Accept checkpoints of another optimizer and start its state afresh");
}

void add_running_options(CLI::App& command, ServeOptions& options) {
  command.option_defaults()->group("Running");
  command
      .add_option(
          "--device", options.devices,
          "Where experts are computed; repeatable, also with one device: experts are spread over them, one thread "
          "each")
      ->type_name("cpu|cuda[:INDEX] ...")
      ->capture_default_str()
      ->delimiter(',')
      ->check(device_name());
  command
      .add_option("--threads", options.threads, "Threads of one computation; 0: as many as other processes leave free")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(0, 1'024, "2"));
  command.add_option("--io-threads", options.io_threads, "Threads for sockets and the DHT")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 256, "1"));
  command
      .add_option("--queue-batches", options.queue_batches,
                  "Full batches that may wait per expert and direction; beyond it callers are told to come back")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 1'000'000, "4"));
  command.add_option("--queue-tasks", options.queue_tasks, "Calls that may wait per expert and direction")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(1, 1'000'000, "1024"));
  command
      .add_option("--batch-timeout", options.batch_timeout,
                  "How long a call may wait for others to share its batch, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0, 60, "0.005"));
  command
      .add_option("--max-memory", options.max_memory,
                  "What queued calls, their computation and connections may hold together, in MiB, beside the experts; "
                  "beyond it callers are told to come back; 0: a quarter of the machine's memory")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(whole_number(0, 1LL << 40, "4096"));
  command
      .add_option("--max-resident-experts", options.max_resident_experts,
                  "Experts in memory; the others lie in --data-dir and come back when they are called; 0: all")
      ->type_name("COUNT")
      ->capture_default_str()
      ->check(whole_number(0, kMostAskedFor, "64"));
  command
      .add_option("--trace-file", options.trace_file,
                  "Write when each call waited, was computed and was answered to this file, which Perfetto and "
                  "chrome://tracing open; replaces it")
      ->type_name("FILE");
  command
      .add_option("--max-trace-size", options.max_trace_size,
                  "Largest size of the trace and of the older FILE.old together, in MiB")
      ->type_name("MIB")
      ->capture_default_str()
      ->check(whole_number(1, 1'000'000, "64"));
  command.add_option("--shutdown-grace", options.shutdown_grace, "Time to finish queued calls at the end, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0, 3'600, "5"));
  command.add_option("--seed", options.seed, "Of initial weights and of random claims; 0: from the operating system")
      ->type_name("NUMBER")
      ->capture_default_str()
      ->check(whole_number(0, INT64_MAX, "42"));
  add_ready_fd(command, options.network);
}

Error invalid_option(std::string message) { return {Errc::kInvalidArgument, std::move(message), {}}; }

/// How many experts are to be hosted.
Result<std::uint64_t> expert_count(const ServeOptions& options) {
  const auto pattern = parse_uid_pattern(options.pattern);
  if (!pattern) return pattern.error();
  const std::string names = "pattern " + options.pattern + " names " + std::to_string(pattern->size()) + " experts";
  if (options.num_experts > pattern->size()) {
    return invalid_option("--num-experts " + std::to_string(options.num_experts) + ", but " + names +
                          "; lower it, or widen the pattern");
  }
  if (options.num_experts == 0 && pattern->size() > kMostWithoutNumber) {
    return invalid_option(names + ", more than " + std::to_string(kMostWithoutNumber) +
                          "; say with --num-experts how many of them to host");
  }
  return options.num_experts == 0 ? pattern->size() : options.num_experts;
}

/// --expert-script is short for --expert script with the file as its argument.
Result<void> take_script(const std::string& file, expert_server::ExpertOptions& expert) {
  if (file.empty()) return {};
  if (expert.architecture != expert_server::ExpertOptions{}.architecture && expert.architecture != "script") {
    return invalid_option("--expert-script " + file + " and --expert " + expert.architecture +
                          ": give only one of them");
  }
  std::error_code code;
  if (!std::filesystem::is_regular_file(file, code)) {
    return invalid_option("--expert-script " + file + ": there is no such file");
  }
  expert.architecture = "script";
  expert.arguments["file"] = std::filesystem::absolute(file, code).string();
  return {};
}

Result<void> check_sizes(const ServeOptions& options, const expert_server::ExpertOptions& expert) {
  const auto count = expert_count(options);
  if (!count) return count.error();
  const auto resident =
      options.max_resident_experts == 0 ? *count : std::min<std::uint64_t>(*count, options.max_resident_experts);
  const std::string what = std::to_string(resident) + " experts of kind " + expert.architecture +
                           " with --hidden-dim " + std::to_string(expert.hidden_dim) + " and --max-batch-size " +
                           std::to_string(expert.max_batch_size);
  if (auto fits = check_fits(what, size_of_experts(expert, static_cast<double>(resident)), memory_limit(),
                             "lower one of these, host fewer with --num-experts, keep fewer in memory with "
                             "--max-resident-experts, or serve without learning (--freeze)");
      !fits) {
    return fits;
  }
  if (expert.hidden_dim > kMaxHiddenDim) {
    return invalid_option("--hidden-dim " + std::to_string(expert.hidden_dim) + " is above the largest, " +
                          std::to_string(kMaxHiddenDim) + "; lower it");
  }
  if (expert.max_batch_size > kMaxBatchRows) {
    return invalid_option("--max-batch-size " + std::to_string(expert.max_batch_size) + " is above the largest, " +
                          std::to_string(kMaxBatchRows) + "; lower it");
  }
  return {};
}

}  // namespace

void add_serve_options(CLI::App& command, ServeOptions& options) {
  add_expert_options(command, options);
  add_learning_options(command, options);
  add_network_options(command, options);
  add_storage_options(command, options);
  add_running_options(command, options);
}

Result<expert_server::ServerOptions> to_server_options(const ServeOptions& options) {
  expert_server::ServerOptions server;
  auto network = to_settings(options.network, kPurpose);
  if (!network) return network.error();
  if (options.announcement_ttl < 2 * options.heartbeat) {
    return invalid_option(
        "--announcement-ttl must be at least twice --heartbeat, or experts vanish when one announcement is lost; raise "
        "it, or lower --heartbeat");
  }
  server.listen = network->listen;
  server.announce = std::move(network->announce);
  server.initial_peers = std::move(network->initial_peers);
  server.allow_alone = options.network.allow_alone;
  server.join_timeout = network->join_timeout;
  server.expert_pattern = options.pattern;
  server.num_experts = options.num_experts;
  server.expert = options.expert;
  for (const std::string& argument : options.expert_arguments) {
    const std::size_t equals = argument.find('=');
    server.expert.arguments[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  if (auto script = take_script(options.expert_script, server.expert); !script) return script.error();
  if (auto sizes = check_sizes(options, server.expert); !sizes) return sizes.error();
  server.data_dir = std::move(network->data_dir);
  server.identity_file = std::move(network->identity_file);
  server.checkpoint_period = to_milliseconds(options.checkpoint_period);
  server.keep_checkpoints = options.keep_checkpoints;
  server.reset_optimizer = options.reset_optimizer;
  server.max_disk = options.max_disk * 1024 * 1024;
  server.devices = options.devices;
  server.compute_threads = options.threads;
  server.io_threads = options.io_threads;
  server.seed = options.seed;
  server.max_queued_batches = options.queue_batches;
  server.max_queued_tasks = options.queue_tasks;
  server.max_memory = options.max_memory * 1024 * 1024;
  if (!options.trace_file.empty()) server.trace_file = options.trace_file;
  server.max_trace_bytes = options.max_trace_size * 1024 * 1024;
  server.max_resident_experts = options.max_resident_experts;
  server.batch_timeout = to_milliseconds(options.batch_timeout);
  server.heartbeat = to_milliseconds(options.heartbeat);
  server.announcement_ttl = to_milliseconds(options.announcement_ttl);
  server.shutdown_grace = to_milliseconds(options.shutdown_grace);
  server.max_frame_bytes = options.max_message * 1024 * 1024;
  server.max_connections = options.max_connections;
  return server;
}

}  // namespace dmoe::cli
