#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test that CI runs.
#
#   tests/run.sh                  everything, release preset
#   tests/run.sh -R dht           arguments go to ctest
#   PRESET=asan tests/run.sh      under a sanitizer (release, dev, asan, tsan)
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-release}
./deploy/install-deps.sh
./deploy/build.sh "$preset"
cd "build/$preset"
exec ctest --output-on-failure --no-tests=error --parallel "${JOBS:-$(nproc)}" "$@"
