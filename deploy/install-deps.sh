#!/usr/bin/env bash
# Installs what dmoe needs to build, run and test on Debian 12 or 13. Does nothing where all is there.
#
#   deploy/install-deps.sh            install what is missing
#   deploy/install-deps.sh --list     print the packages, one a line
#   deploy/install-deps.sh --check    exit 1 and name what is missing; install nothing
set -euo pipefail

die() { printf 'install-deps.sh: %s\n' "$1" >&2; exit "${2:-1}"; }

[ -r /etc/os-release ] || die "this is not Debian (no /etc/os-release); dmoe is built against Debian 12 and 13 packages"
# shellcheck disable=SC1091
. /etc/os-release
for_tests=()
case "${ID:-}:${VERSION_ID:-}" in
  debian:12) boost=libboost1.81-dev ;;  # Replaces the default 1.74 headers, which lack what net/ uses.
  debian:13) boost=libboost-dev for_tests=(python3-safetensors python3-numpy) ;;  # A test reads checkpoints with them.
  *) die "Debian 12 or 13 is needed, this is ${PRETTY_NAME:-unknown}; see README.md, \"Supported systems\"" ;;
esac

packages=(
  # To build. pkg-config: Cap'n Proto's CMake files ask it. ccache makes the second build quick.
  g++ cmake ninja-build pkg-config ccache git ca-certificates
  "$boost" capnproto libcapnp-dev librocksdb-dev libcli11-dev libspdlog-dev nlohmann-json3-dev
  prometheus-cpp-dev libssl-dev libsodium-dev zlib1g-dev catch2
  # Without this BLAS libtorch multiplies matrices more than 50 times slower, on the reference one.
  libtorch-dev libopenblas0-pthread libdnnl-dev
  # What `dmoe demo` trains on.
  dataset-fashion-mnist
  "${for_tests[@]}"
)

absent=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || absent+=("$package")
done

case "${1:-}" in
  --list) printf '%s\n' "${packages[@]}"; exit 0 ;;
  --check)
    [ ${#absent[@]} = 0 ] || die "missing: ${absent[*]}; run deploy/install-deps.sh"
    exit 0 ;;
  "") ;;
  *) die "unknown option '$1'; use --list, --check or nothing" 2 ;;
esac

[ ${#absent[@]} -gt 0 ] || exit 0

sudo=
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || die "not root and no sudo; run as root: apt-get install ${absent[*]}"
  sudo=sudo
fi
printf 'Installing: %s\n' "${absent[*]}"
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${absent[@]}" >/dev/null ||
  die "apt-get could not install: ${absent[*]}"
