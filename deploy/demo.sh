#!/usr/bin/env bash
# Installs what is missing, builds, and runs `dmoe demo`: trains Fashion-MNIST across four expert servers, one of which
# is killed half way. Arguments go to `dmoe demo` (see `build/release/bin/dmoe demo --help`).
set -euo pipefail
cd "$(dirname "$0")/.."
./deploy/install-deps.sh
./deploy/build.sh release dmoe
exec ./build/release/bin/dmoe demo "$@"
