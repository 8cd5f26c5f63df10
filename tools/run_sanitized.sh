#!/usr/bin/env bash
# Runs pytest against the extension of a sanitizer build, without touching the installed or the dev one.
# usage: tools/run_sanitized.sh asan|tsan [pytest arguments]     (default arguments: -q tests)
# Needs `cmake --preset asan|tsan && cmake --build --preset asan|tsan` and an environment with the test dependencies active.
# Leaks are looked for in the C++ test binary only: the interpreter itself never frees everything.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-}
case $kind in
  asan) runtime=libasan.so ;;
  tsan) runtime=libtsan.so ;;
  *) echo "usage: $0 asan|tsan [pytest arguments]" >&2; exit 2 ;;
esac
shift
[ $# -gt 0 ] || set -- -q tests
python=${PYTHON:-python3}
compiler=${CXX:-c++}

extension=$PWD/build/$kind/cpp/bindings/_native$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
[ -f "$extension" ] || { echo "$0: $extension is missing; run: cmake --preset $kind && cmake --build --preset $kind" >&2; exit 1; }

# A copy of the package with the sanitizer build's extension: links would lead child processes back to the source tree.
overlay=build/$kind/python
rm -rf "$overlay"
mkdir -p "$overlay"
cp -r python/kvpool "$overlay/kvpool"
rm -f "$overlay"/kvpool/_native*.so
cp "$extension" "$overlay/kvpool/"

# Symbolic names of the compiler's own runtime; libstdc++ too, or the interceptor of exceptions finds none.
preload="$("$compiler" -print-file-name=$runtime) $("$compiler" -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:strict_string_checks=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1}
export PYTHONMALLOC=malloc PYTHONPATH="$PWD/$overlay${PYTHONPATH:+:$PYTHONPATH}" KVPOOL_SANITIZED=$kind
# Through env, so that only the interpreter is preloaded and not this shell. Tests skip what is not there: see that it is.
env LD_PRELOAD="$preload" "$python" -c 'import kvpool._native'
exec env LD_PRELOAD="$preload" "$python" -m pytest -p no:cacheprovider "$@"
