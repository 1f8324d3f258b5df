#!/usr/bin/env bash
# Configures and builds one preset, printing progress. Usage: deploy/build.sh [PRESET] [TARGET…]
# PRESET: release (default), dev, asan, tsan. Programs land in build/PRESET/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
shift || true
log=build/$preset.configure.log
mkdir -p build
if ! cmake --preset "$preset" >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  printf 'build.sh: configuring preset %s failed; the whole output is in %s\n' "$preset" "$log" >&2
  exit 1
fi
exec ninja -C "build/$preset" "$@"
