// `dmoe dht put` and `dmoe dht get`: records of the DHT, by hand and for scripts.
#include "cli/dht_client.hpp"
#include "cli/dht_subcommands.hpp"
#include "cli/options.hpp"
#include "cli/record_text.hpp"

#include "net/identity.hpp"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <system_error>

namespace dmoe::cli {
namespace {

struct PutOptions {
  std::string key;
  std::string value;
  std::string file;
  std::string subkey;
  std::string ttl = "1h";
  std::string identity;
  double timeout = 10;
  bool json = false;
};

struct GetOptions {
  std::string key;
  std::string subkey;
  std::string publisher;
  double timeout = 10;
  bool all = false;
  bool json = false;
};

/// What `--file` names; "-" is stdin. Reads one byte more than a record takes, so that too much is noticed.
Result<std::vector<std::uint8_t>> read_value_file(const std::string& file) {
  const auto refused = [&](int number) {
    return Error{Errc::kUnavailable,
                 "cannot read --file '" + file + "': " + std::generic_category().message(number) +
                     "; name a file that this user may read, or - for stdin",
                 {}};
  };
  const bool from_stdin = file == "-";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> owned(from_stdin ? nullptr : std::fopen(file.c_str(), "rb"),
                                                              [](std::FILE* stream) { return std::fclose(stream); });
  std::FILE* stream = from_stdin ? stdin : owned.get();
  if (stream == nullptr) return refused(errno);
  std::vector<std::uint8_t> value(dht::kMaxValueBytes + 1);
  value.resize(std::fread(value.data(), 1, value.size(), stream));
  if (std::ferror(stream) != 0) return refused(errno);
  return value;
}

/// A client that has joined.
Result<std::unique_ptr<DhtClient>> joined_client(const net::Identity& identity, const NetworkOptions& network,
                                                 double timeout) {
  auto client = DhtClient::start(identity, to_endpoints(network.initial_peers), to_milliseconds(timeout));
  if (!client) return client.error();
  if (auto joined = (*client)->join(); !joined) return joined.error();
  return client;
}

Outcome no_peers_given() {
  return wrong_use("--initial-peers is required: the address of any node of the network, for example 127.0.0.1:4040");
}

void report_stored(const PutOptions& options, const net::Identity& identity, const dht::StoreReport& report,
                   std::chrono::milliseconds ttl) {
  if (!options.json) {
    std::printf("stored on %zu node%s for %s\n", report.replicas, report.replicas == 1 ? "" : "s",
                duration_text(ttl).c_str());
    return;
  }
  const nlohmann::ordered_json json{{"key", options.key},
                                    {"subkey", options.subkey},
                                    {"publisher", net::to_string(identity.peer_id())},
                                    {"sequence", report.sequence},
                                    {"ttl_seconds", static_cast<double>(ttl.count()) / 1'000},
                                    {"nodes", report.replicas}};
  std::puts(json_line(json).c_str());
}

Outcome put_record(const PutOptions& options, const NetworkOptions& network, bool value_given) {
  if (value_given == !options.file.empty()) {
    return wrong_use(value_given ? "VALUE and --file were both given; give one of them"
                                 : "nothing to store: give a VALUE, or --file FILE (- for stdin)");
  }
  if (network.initial_peers.empty()) return no_peers_given();
  dht::StoreRequest request{dht::Key::of(options.key), options.subkey, {}, {}, false, false};
  request.value.assign(options.value.begin(), options.value.end());
  if (!options.file.empty()) {
    auto read = read_value_file(options.file);
    if (!read) return failed(read.error().message);
    request.value = *std::move(read);
  }
  if (request.value.size() > dht::kMaxValueBytes) {
    return wrong_use((options.file.empty() ? std::string("VALUE") : "--file '" + options.file + "'") +
                     " is larger than a record can be (64 KiB); store a part, or the address of where it lies");
  }
  const auto ttl = parse_duration(options.ttl);
  if (!ttl) return wrong_use("--ttl: " + ttl.error().message);
  request.ttl = *ttl;
  auto identity = options.identity.empty() ? Result<net::Identity>(net::Identity::generate())
                                           : net::Identity::load_or_create(options.identity);
  if (!identity) return failed("cannot use the key of --identity", identity.error());
  auto client = joined_client(*identity, network, options.timeout);
  if (!client) return failed("cannot reach the network", client.error());
  const auto stored = (*client)->store(std::move(request));
  if (!stored) return failed("stored on 0 nodes", stored.error());
  if (stored->replicas == 0) return failed("stored on 0 nodes: no node acknowledged the record; try again");
  report_stored(options, *identity, *stored, *ttl);
  return done();
}

/// The bytes as they are. A terminal gets a newline after them, a pipe or file nothing that was not stored.
Outcome write_value(const std::vector<std::uint8_t>& value) {
  const bool written = std::fwrite(value.data(), 1, value.size(), stdout) == value.size();
  if (written && isatty(STDOUT_FILENO) == 1) std::putchar('\n');
  if (written && std::fflush(stdout) == 0) return done();
  return failed("cannot write the value to stdout: " + std::generic_category().message(errno));
}

Outcome get_record(const GetOptions& options, const NetworkOptions& network) {
  if (network.initial_peers.empty()) return no_peers_given();
  const auto client = joined_client(net::Identity::generate(), network, options.timeout);
  if (!client) return failed("cannot reach the network", client.error());
  const auto found = (*client)->find_all(dht::Key::of(options.key));
  if (!found) return failed("cannot look up '" + options.key + "'", found.error());
  std::vector<FoundRecord> records = describe_records(found->records, std::chrono::steady_clock::now());
  std::erase_if(records, [&](const FoundRecord& record) {
    return (!options.subkey.empty() && record.subkey != options.subkey) ||
           (!options.publisher.empty() && !record.publisher.starts_with(options.publisher));
  });
  if (options.json) std::puts(json_line(to_json(options.key, records)).c_str());
  if (records.empty()) {
    return failed("nothing lies under the key '" + options.key + "'" +
                  (options.subkey.empty() && options.publisher.empty() ? "" : " with this --subkey and --publisher") +
                  "; check its spelling, and whether it has expired: a record lives as long as its --ttl");
  }
  if (options.json) return done();
  if (options.all) {
    for (const FoundRecord& record : records) std::puts(to_line(record).c_str());
    return done();
  }
  if (records.size() > 1) {
    std::fprintf(stderr, "%zu records lie under this key; this is the newest, --all lists them\n", records.size());
  }
  return write_value(records.front().value);
}

void add_timeout(CLI::App& command, double& timeout) {
  command.add_option("--timeout", timeout, "How long to wait for the network, in seconds")
      ->type_name("SECONDS")
      ->capture_default_str()
      ->check(decimal_number(0.05, 3'600, "10"));
}

void add_put(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection) {
  auto options = std::make_shared<PutOptions>();
  CLI::App* put = dht.add_subcommand("put", "Store a value in the DHT under a key");
  put->add_option("key,--key", options->key, "Name to find it by: any text")->type_name("KEY")->required();
  const CLI::Option* value =
      put->add_option("value,--value", options->value, "What to store, at most 64 KiB; or use --file")
          ->type_name("VALUE");
  put->add_option("--file", options->file, "Store what this file holds; - reads stdin")->type_name("FILE");
  put->add_option("--subkey", options->subkey, "Tells several records of one publisher under one key apart")
      ->type_name("TEXT")
      ->check(short_text(dht::kMaxSubkeyBytes, "--subkey worker-3"));
  put->add_option("--ttl", options->ttl,
                  "How long the record lives, at most 24h: 90s, 15m, 1h; a number alone is seconds")
      ->type_name("DURATION")
      ->capture_default_str()
      ->check(duration(std::chrono::seconds{1}, dht::kMaxTtl, "1h"));
  put->add_option("--identity", options->identity,
                  "Key file that signs the record, made if missing: who has it can replace the record. Default: a new "
                  "key each time, so that nobody can")
      ->type_name("FILE");
  add_initial_peers(*put, network->initial_peers);
  add_timeout(*put, options->timeout);
  put->add_flag("--json", options->json, "Print one JSON object");
  put->footer(
      "Example: dmoe dht put greeting 'hello world' --ttl 1h --initial-peers 203.0.113.5:4040\n"
      "Who publishes: this command signs the record, hands it to the (at most 8) nodes nearest to the key, and ends. "
      "Those nodes hold it, and hand it on as nodes come and go, until its --ttl is over; nobody renews it. To keep a "
      "record, put it again in time, with the same --identity.");
  put->callback([options, network, value, &selection] {
    selection.command = "dht put";
    selection.run = [options, network, given = value->count() > 0] { return put_record(*options, *network, given); };
  });
}

void add_get(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection) {
  auto options = std::make_shared<GetOptions>();
  CLI::App* get = dht.add_subcommand("get", "Print what lies in the DHT under a key");
  get->add_option("key,--key", options->key, "Name that it was stored under")->type_name("KEY")->required();
  get->add_option("--subkey", options->subkey, "Only records with this subkey")
      ->type_name("TEXT")
      ->check(short_text(dht::kMaxSubkeyBytes, "--subkey worker-3"));
  get->add_option("--publisher", options->publisher, "Only records that this peer signed: its ID, or how it begins")
      ->type_name("PEER_ID")
      ->check(hexadecimal(64, "a66edcaa"));
  add_initial_peers(*get, network->initial_peers);
  add_timeout(*get, options->timeout);
  get->add_flag("--all", options->all, "List every record: subkey, publisher, remaining life and value, a line each");
  get->add_flag("--json", options->json, "Print all of them as one JSON object");
  get->footer(
      "Example: dmoe dht get greeting --initial-peers 203.0.113.5:4040\n"
      "Without --all and --json the newest value is written as it was stored, without a newline. Anybody can publish "
      "under any key: --publisher says whose record you trust. Exit status 1: there is none.");
  get->callback([options, network, &selection] {
    selection.command = "dht get";
    selection.run = [options, network] { return get_record(*options, *network); };
  });
}

}  // namespace

void add_dht_records(CLI::App& dht, const std::shared_ptr<NetworkOptions>& network, Selection& selection) {
  add_put(dht, network, selection);
  add_get(dht, network, selection);
}

}  // namespace dmoe::cli
