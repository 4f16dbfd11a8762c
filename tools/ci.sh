#!/usr/bin/env bash
# ci.sh [--record FILE] [STAGE...]: the checks that gate a change, in the order in which they find
# most per minute; without stages: all. At the end, a table of the stages with their times and
# counts. --record also writes the table as JSON.
#
# No stage is left out: one that MARLIN_CI_SECONDS (default: 87 minutes) does not suffice for is
# stopped and fails, and so do those after it. Only integrations and vllm, whose packages are other
# people's, pass without running where they passed before on this machine with the same sources,
# packages and processor.
set -u
cd "$(dirname "$0")/.." || exit 1
export CI=true
stages="test sanitizers fuzz lint acid integrations vllm"
# What reads files and arguments. Nightly sanitizes the kernels, the operations, models and
# simulated GPUs, too.
sanitized='^(unit.(base|c|checkpoint|layout|plan|quantize|recipe|reference)[.]|property|fault|fuzz)'
logs=build-ci
started=$SECONDS
limit=${MARLIN_CI_SECONDS:-5220}
passed=0 failed=0 skipped=0
record="" wanted="" summary=""

command_of() {
  case $1 in
    test) echo "./dev test" ;;
    sanitizers) echo "MARLIN_SANITIZE_KERNELS=OFF tools/sanitize.sh asan '' '$sanitized'" ;;
    fuzz) echo "tools/fuzz.sh ${MARLIN_FUZZ_SECONDS:-15}" ;;
    lint) echo "./dev lint" ;;
    acid) echo "tests/acid/run.sh" ;;
    integrations) echo "./dev test-integrations" ;;
    vllm) echo "./dev test-vllm" ;;
  esac
}

while [ $# -gt 0 ]; do
  case $1 in
    --record)
      record=${2:?ci.sh: --record needs a file}
      shift
      ;;
    *)
      case " $stages " in
        *" $1 "*) wanted="$wanted $1" ;;
        *)
          echo "ci.sh: unknown stage: $1; stages: $stages" >&2
          exit 2
          ;;
      esac
      ;;
  esac
  shift
done

# mark_of STAGE: the file that says that a stage passed with what it reads; nothing for a stage that
# always runs. The versions that pip resolves are part of it, so that a new release of a dependency
# is tested.
mark_of() {
  local environment packages paths
  paths="include src metal_sim python cmake CMakeLists.txt pyproject.toml dev"
  case $1 in
    integrations)
      environment=.venv-integrations
      paths="$paths tests/integrations tests/examples tools/document_blocks.py tools/extras.py"
      paths="$paths README.md docs examples"
      ;;
    vllm) environment=$(ls -d .venv-vllm-* 2>/dev/null | tail -n 1) paths="$paths tests/vllm" ;;
    *) return ;;
  esac
  git diff --quiet HEAD 2>/dev/null || return
  packages=$("$environment/bin/python" -m pip list --format=freeze 2>/dev/null) || return
  # shellcheck disable=SC2086
  printf '%s/metal-marlin/ci/%s-%s\n' "${XDG_CACHE_HOME:-$HOME/.cache}" "$1" "$(
    { git ls-tree -r HEAD -- $paths; echo "$packages"; grep -m 2 -E 'model name|flags' /proc/cpuinfo
    } | sha256sum | cut -c1-32)"
}

# add_stage NAME OUTCOME SECONDS COUNTS: a row of the table.
add_stage() {
  summary+="$(printf '%-12s %-8s %5d s  %s' "$@")"$'\n'
  [ -z "$record" ] || python3 -B tools/nightly_record.py "$record" add "$1" \
    "$([ "$2" = FAILED ] && echo FAILED || echo ok)" "$3" "$commit" "$4"
}

# stage NAME: runs it, logs its output, and adds the counts of its last line to the totals. A
# command without counts is one test.
stage() {
  local name=$1 began=$SECONDS rc=0 counts="" left mark
  left=$((limit - SECONDS + started))
  mark=$(mark_of "$name")
  if [ -n "$mark" ] && [ -e "$mark" ]; then
    passed=$((passed + 1))
    add_stage "$name" "as before" 0 "passed with the same sources and packages: $(cat "$mark")"
    return
  fi
  echo "== [$((SECONDS - started)) s] $name" >&2
  if [ "$left" -gt 0 ]; then
    timeout -k 10 "$left" bash -c "$(command_of "$name")" </dev/null 2>&1 |
      tee "$logs/$name.log" >&2
    rc=${PIPESTATUS[0]}
  else
    rc=124
    : >"$logs/$name.log"
  fi
  counts=$(sed -n 's/^\([0-9]* passed, [0-9]* failed.*\)$/\1/p' "$logs/$name.log" | tail -n 1)
  if [ -n "$counts" ]; then
    # shellcheck disable=SC2086
    set -- ${counts//[^0-9]/ }
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + ${3:-0}))
    if [ "$rc" != 0 ] && [ "$2" = 0 ]; then failed=$((failed + 1)); fi
  elif [ "$rc" = 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
  fi
  [ "$rc" != 124 ] || counts="error: not done after $limit s of all stages"
  add_stage "$name" "$([ "$rc" = 0 ] && echo ok || echo FAILED)" "$((SECONDS - began))" "$counts"
  mark=$(mark_of "$name")
  if [ "$rc" = 0 ] && [ -n "$mark" ]; then
    mkdir -p "$(dirname "$mark")" && echo "$counts" >"$mark"
  fi
}

mkdir -p "$logs"
if [ -n "$record" ]; then
  commit=$(git log -1 --format=%H -- . ":(exclude)$record")
  git diff --quiet HEAD -- . ":(exclude)$record" || commit=$commit-dirty
  # shellcheck disable=SC2086
  python3 -B tools/nightly_record.py "$record" begin --device \
    "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) processors" $stages
fi
for name in ${wanted:-$stages}; do stage "$name"; done

# Last, so that the end of a long log names what failed.
failures=$(grep -h -E '\((Failed|Timeout|SEGFAULT|Subprocess aborted)\)$|^(FAILED|ERROR) |error:' \
  "$logs"/*.log | sort -u | head -n 40)
if [ "$failed" != 0 ] && [ -n "$failures" ]; then printf '\nfailed:\n%s\n' "$failures" >&2; fi
printf '\n%s' "$summary" >&2
echo "$passed passed, $failed failed, $skipped skipped in $(((SECONDS - started) / 60)) min"
[ "$failed" = 0 ]
