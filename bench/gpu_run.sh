#!/usr/bin/env bash
# All that needs a GPU, in three commands of at most ten minutes each, for a machine with a GPU, e.g. one borrowed for
# half an hour. It needs no network, but make, cmake, nvcc, and the Python that GPU_PYTHON of the Makefile stands for.
#
#   bench/gpu_run.sh a    builds, runs make test-gpu, and measures what the design leans on (gpu_probe.cu)
#   bench/gpu_run.sh b    compute-sanitizer over all kernels; the twin: the tests on torch's own operations; the demo
#   bench/gpu_run.sh c    make bench-gpu; what follows the letter goes to the bench, such as --gib 4
#
# Each part has a limit of its own and a log, and ends with one line: ok, FAILED, CUT, or NOT RUN and why. The next ones
# run all the same, and in the end the command fails. These lines, and of what machine and commit they are, are in
# $OUT/<letter>.txt beside the logs; OUT is build/gpu-results unless set. COMMIT names the commit where git does not.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
letter=${1:-}
case $letter in
  a | b | c) shift ;;
  *) grep '^#   ' "$0" >&2; exit 2 ;;
esac

export GPU_PYTHON=${GPU_PYTHON:-python3} PATH=$PATH:/usr/local/cuda/bin PYTHONUNBUFFERED=1 ASYNCCKPT_CUDA=1
SECONDS_MAX=${SECONDS_MAX:-570} # Of all parts together.
OUT=${OUT:-build/gpu-results}
mkdir -p "$OUT" build || exit
failed=0
why_not= # Why the parts that follow cannot run.

say() { echo "$*" | tee -a "$OUT/$letter.txt"; }

not_run() {
  say "NOT RUN  $1: $2"
  failed=1
}

# part NAME SECONDS COMMAND...: how it ended is its status.
part() {
  local name=$1 limit=$2 begun=$SECONDS left=$((SECONDS_MAX - SECONDS)) log=$OUT/$letter-$1.log status
  shift 2
  ((left < limit)) && limit=$left
  ((limit > 0)) || local why_not=${why_not:-no time is left}
  if [[ -n $why_not ]]; then
    not_run "$name" "$why_not"
    return 1
  fi
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
  status=$?
  tail -n 30 "$log"
  case $status in
    0) say "ok       $name, $((SECONDS - begun)) s" ;;
    124 | 137) say "CUT      $name after $limit s: $log is what it had said" ;;
    *) say "FAILED   $name with status $status: $log says why" ;;
  esac
  ((status == 0)) || failed=1
  return "$status"
}

has() { command -v "$1" >/dev/null; }

build() { part build 200 make gpu-package || why_not=${why_not:-the build has failed}; }

device=$("$GPU_PYTHON" -m tests.gpu.device 2>&1) || why_not=$(tail -n 1 <<<"$device")
has make || why_not="make is not found"
{
  echo "date     $(date -u +%FT%TZ)"
  echo "commit   ${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"
  echo "device   $(tail -n 4 <<<"$device")"
  has nvidia-smi && nvidia-smi --format=csv,noheader \
    --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max | sed 's/^/driver   /'
  has nvcc && echo "nvcc     $(nvcc --version | tail -n 1)"
  echo "host     $(nproc) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 2 ^ 20}' /proc/meminfo), Linux $(uname -r)"
} | tee "$OUT/$letter.txt"
no_device=$why_not
workers=
"$GPU_PYTHON" -c 'import xdist' 2>/dev/null && workers="-n 6"

case $letter in
  a)
    build
    part tests 240 make test-gpu ARGS="-v --ignore=tests/gpu/test_table_suites.py \
      --ignore=tests/gpu/test_sanitizer.py --ignore=tests/gpu/test_torch_kernels.py"
    part table-suites 120 make test-gpu ARGS="-k test_table_suites $workers"
    why_not=$no_device
    has nvcc || why_not=${why_not:-nvcc is not found}
    part probe 120 bash -c 'nvcc -O3 -std=c++17 -arch=sm_80 -o build/gpu-probe bench/gpu_probe.cu && build/gpu-probe'
    ;;
  b)
    build
    (
      has compute-sanitizer || why_not=${why_not:-compute-sanitizer is not found}
      part sanitizer 430 make test-gpu ARGS="-v -k test_sanitizer $workers"
    ) &
    part twin 300 make test-gpu ARGS="-v -k test_torch_kernels"
    wait $! || failed=1
    part demo 240 make demo ARGS="--gpu --out $OUT/demo"
    ;;
  c)
    build
    part bench 480 make bench-gpu ARGS="--gib 8 --rounds 4 --out $OUT/gpu $*"
    ;;
esac
say "results  $OUT"
exit "$failed"
