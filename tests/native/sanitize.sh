#!/usr/bin/env bash
# Builds the native core with AddressSanitizer and UndefinedBehaviorSanitizer beside the sources, and runs the tests that
# call it. Uses the project's .venv, or the interpreter in $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
export PATH="$(dirname "$python"):$PATH"
work=build/sanitize
mkdir -p build
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" \
  -DCMAKE_CXX_FLAGS="$flags" -DCMAKE_SHARED_LINKER_FLAGS="$flags" -DCMAKE_MODULE_LINKER_FLAGS="$flags" \
  -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$PWD/$work/lowprec/kernels" > "$work.log" 2>&1 || { cat "$work.log"; exit 1; }
# the package as it is, with the instrumented module in place of the usual one
mkdir -p "$work/lowprec"
cp -r lowprec "$work/"
rm -f "$work"/lowprec/kernels/_native*.so
cmake --build "$work/build" -j "${JOBS:-2}" > "$work.log" 2>&1 || { cat "$work.log"; exit 1; }
libasan=$(g++ -print-file-name=libasan.so)
libubsan=$(g++ -print-file-name=libubsan.so)
export PYTHONPATH="$PWD/$work" LD_PRELOAD="$libasan $libubsan"
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/kernels/test_native_*.py tests/native/test_*.py)
"$python" -c "import lowprec.kernels as k; assert '$work' in k.native_core().__file__, k.native_core().__file__"
exec "$python" -m pytest -q -p no:cacheprovider -m "not long" --rootdir="$PWD" "${tests[@]}"
