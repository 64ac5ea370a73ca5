#!/bin/sh
# Installs what diffattn's tests, examples and benchmarks need: a C++ compiler, CMake, Ninja, Eigen, xsimd, GoogleTest, Google
# Benchmark, nlohmann-json, CLI11, and two that may be absent: RapidCheck for the property tests, gnuplot for the picture of the
# comparison. Uses apt-get, dnf, pacman or brew. Where all of it is present it does nothing and needs no network.
#
#   sh cmake/install-deps.sh            install what is missing
#   sh cmake/install-deps.sh --check    only say what is missing

set -u

cmake_needed=3.25
check_only=no
case "${1-}" in
  "") ;;
  --check) check_only=yes ;;
  *)
    echo "usage: sh cmake/install-deps.sh [--check]" >&2
    exit 2
    ;;
esac

say() { printf 'install-deps: %s\n' "$*"; }
fail() {
  printf 'install-deps: %s\n' "$*" >&2
  exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# --- What is there? ---------------------------------------------------------------------------------------------------

# Directories that may hold headers, one a line.
include_dirs() {
  printf '%s\n' /usr/include /usr/local/include /opt/homebrew/include /opt/local/include
  if [ -n "${CONDA_PREFIX-}" ]; then printf '%s\n' "$CONDA_PREFIX/include"; fi
  if [ -n "${HOMEBREW_PREFIX-}" ]; then printf '%s\n' "$HOMEBREW_PREFIX/include"; fi
  printf '%s\n' "${CMAKE_PREFIX_PATH-}" | tr ';' ':' | tr ':' '\n' | while read -r prefix; do
    if [ -n "$prefix" ]; then printf '%s\n' "$prefix/include"; fi
  done
  printf '%s\n' "${CPLUS_INCLUDE_PATH-}:${CPATH-}" | tr ':' '\n' | while read -r directory; do
    if [ -n "$directory" ]; then printf '%s\n' "$directory"; fi
  done
}
header_dirs=$(include_dirs)

have_header() {
  for name in "$@"; do
    if printf '%s\n' "$header_dirs" | (
      while read -r directory; do
        if [ -f "$directory/$name" ]; then exit 0; fi
      done
      exit 1
    ); then return 0; fi
  done
  return 1
}

cmake_version() { cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9.]*\).*/\1/p'; }

# at_least 3.25.1 3.25
at_least() {
  have_major=${1%%.*}
  have_rest=${1#*.}
  have_minor=${have_rest%%.*}
  need_major=${2%%.*}
  need_minor=${2#*.}
  [ "${have_major:-0}" -gt "$need_major" ] || { [ "${have_major:-0}" -eq "$need_major" ] && [ "${have_minor:-0}" -ge "$need_minor" ]; }
}

have_compiler() { { [ -n "${CXX-}" ] && have "${CXX%% *}"; } || have c++ || have g++ || have clang++; }
have_cmake() { have cmake && at_least "$(cmake_version)" "$cmake_needed"; }

present() {
  case "$1" in
    compiler) have_compiler ;;
    cmake) have_cmake ;;
    ninja) have ninja || have ninja-build ;;
    eigen) have_header eigen3/unsupported/Eigen/CXX11/Tensor unsupported/Eigen/CXX11/Tensor ;;
    xsimd) have_header xsimd/xsimd.hpp ;;
    googletest) have_header gtest/gtest.h ;;
    benchmark) have_header benchmark/benchmark.h ;;
    json) have_header nlohmann/json.hpp ;;
    cli11) have_header CLI/CLI.hpp ;;
    gnuplot) have gnuplot ;;
    rapidcheck) have_header rapidcheck/gtest.h ;;
  esac
}

describe() {
  case "$1" in
    compiler) echo "a C++17 compiler (g++ or clang++)" ;;
    cmake)
      if have cmake; then
        echo "CMake >= $cmake_needed (found $(cmake_version); newer ones: https://cmake.org/download)"
      else
        echo "CMake >= $cmake_needed"
      fi
      ;;
    ninja) echo "Ninja" ;;
    eigen) echo "Eigen >= 3.4" ;;
    xsimd) echo "xsimd" ;;
    googletest) echo "GoogleTest" ;;
    benchmark) echo "Google Benchmark" ;;
    json) echo "nlohmann-json" ;;
    cli11) echo "CLI11" ;;
    gnuplot) echo "gnuplot (optional: draws the picture of the comparison)" ;;
    rapidcheck) echo "RapidCheck (optional: the property tests)" ;;
  esac
}

required="compiler cmake ninja eigen xsimd googletest benchmark json cli11"

missing_of() {
  for item in "$@"; do
    if ! present "$item"; then printf '%s ' "$item"; fi
  done
}

list() {
  for item in "$@"; do printf '  - %s\n' "$(describe "$item")"; done
}

# shellcheck disable=SC2086 # lists of words
missing=$(missing_of $required)
optional=$(missing_of gnuplot rapidcheck)

if [ -z "$missing$optional" ]; then
  say "everything is present"
  exit 0
fi
if [ "$check_only" = yes ]; then
  say "missing:"
  # shellcheck disable=SC2086
  list $missing $optional
  [ -z "$missing" ]
  exit
fi

# --- Install it -------------------------------------------------------------------------------------------------------

manager=none
for candidate in apt-get dnf pacman brew; do
  if have "$candidate"; then
    manager=$candidate
    break
  fi
done

package() {
  case "$manager:$1" in
    apt-get:compiler) echo g++ ;;
    apt-get:cmake) echo cmake ;;
    apt-get:ninja) echo ninja-build ;;
    apt-get:eigen) echo libeigen3-dev ;;
    apt-get:xsimd) echo libxsimd-dev ;;
    apt-get:googletest) echo libgtest-dev ;;
    apt-get:benchmark) echo libbenchmark-dev ;;
    apt-get:json) echo nlohmann-json3-dev ;;
    apt-get:cli11) echo libcli11-dev ;;
    apt-get:gnuplot) echo gnuplot-nox ;;
    apt-get:rapidcheck) echo librapidcheck-dev ;;
    dnf:compiler) echo gcc-c++ ;;
    dnf:cmake) echo cmake ;;
    dnf:ninja) echo ninja-build ;;
    dnf:eigen) echo eigen3-devel ;;
    dnf:xsimd) echo xsimd-devel ;;
    dnf:googletest) echo gtest-devel ;;
    dnf:benchmark) echo google-benchmark-devel ;;
    dnf:json) echo json-devel ;;
    dnf:rapidcheck) echo rapidcheck-devel ;;
    dnf:cli11) echo cli11-devel ;;
    dnf:gnuplot) echo gnuplot ;;
    pacman:compiler) echo gcc ;;
    pacman:googletest) echo gtest ;;
    pacman:json) echo nlohmann-json ;;
    brew:compiler) ;; # comes with Apple's command line tools
    brew:benchmark) echo google-benchmark ;;
    brew:json) echo nlohmann-json ;;
    *) echo "$1" ;; # the other names in pacman and brew are the words used here
  esac
}

packages_of() {
  for item in "$@"; do printf '%s ' "$(package "$item")"; done
}

root=""
can_install=yes
case $manager in
  none) can_install=no ;;
  brew) ;; # refuses to run as root
  *)
    if [ "$(id -u)" -ne 0 ]; then
      if have sudo; then root=sudo; else can_install=no; fi
    fi
    ;;
esac

install() {
  case $manager in
    apt-get) $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ;;
    dnf) $root dnf install -y "$@" ;;
    pacman) $root pacman -S --needed --noconfirm "$@" ;;
    brew) brew install "$@" ;;
  esac
}

# Package lists: apt's are absent from fresh containers and grow stale; pacman's are fetched only if absent, since new lists
# without an upgrade of the system are not supported there.
refresh() {
  case $manager in
    apt-get) $root apt-get update || say "apt-get update failed; trying with the lists at hand" ;;
    pacman)
      for database in /var/lib/pacman/sync/*.db; do
        if [ -f "$database" ]; then return 0; fi
      done
      $root pacman -Sy
      ;;
  esac
}

if [ "$can_install" = no ]; then
  say "missing:" >&2
  # shellcheck disable=SC2086
  list $missing $optional >&2
  if [ -z "$missing" ]; then exit 0; fi
  if [ "$manager" = none ]; then
    fail "none of apt-get, dnf, pacman and brew is here: install the above by hand, or all but compiler, CMake and Ninja with" \
      "cmake -DDIFFATTN_FETCH_DEPS=ON"
  fi
  # shellcheck disable=SC2086
  fail "not root and no sudo: as root, run: $manager install $(packages_of $missing $optional)"
fi

# shellcheck disable=SC2086
wanted=$(packages_of $missing $optional)
say "installing by $manager: $wanted"
refresh
# shellcheck disable=SC2086
if ! install $wanted; then
  # One unknown package must not keep the others away.
  for item in $missing $optional; do
    name=$(package "$item")
    if [ -n "$name" ]; then install "$name" || say "$manager could not install $name"; fi
  done
fi
if ! present gnuplot; then say "no gnuplot: the comparison will be printed but not drawn"; fi
if ! present rapidcheck; then say "no RapidCheck: the property tests will not be built"; fi

# --- Is it enough? ----------------------------------------------------------------------------------------------------

# Brew on another prefix, and commands that the shell has looked up before.
hash -r 2>/dev/null
if have brew; then header_dirs=$(printf '%s\n%s/include\n' "$header_dirs" "$(brew --prefix)"); fi

# shellcheck disable=SC2086
missing=$(missing_of $required)
if [ -n "$missing" ]; then
  say "still missing:" >&2
  # shellcheck disable=SC2086
  list $missing >&2
  case " $missing" in
    *" compiler "*) if [ "$manager" = brew ]; then say "for the compiler run: xcode-select --install" >&2; fi ;;
  esac
  case " $missing" in
    *" eigen "* | *" xsimd "* | *" googletest "* | *" benchmark "*)
      say "libraries can also be fetched while configuring: -DDIFFATTN_FETCH_DEPS=ON" >&2
      ;;
  esac
  exit 1
fi
say "done"
