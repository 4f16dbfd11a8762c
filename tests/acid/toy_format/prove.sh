# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# The new format is in the conformance program, and every subcommand supports it.
compile metal-marlin marlin_conformance
conformance=$(find "$build" -type f -name marlin_conformance -perm -u+x | head -n 1)
"$conformance" --filter '/toy/' | tee "$build/conformance.log"
grep -qE '^[1-9][0-9]* passed, 0 failed' "$build/conformance.log" ||
  fail "the conformance program has no passing case of the toy format"

marlin=$build/bin/metal-marlin
model=examples/tiny-qwen3-moe
"$marlin" quantize "$model" -o "$build/model" --recipe uniform:toy/g32 --json
"$marlin" inspect "$build/model" --json | grep -q '"toy"' || fail "inspect does not show the format"
"$marlin" verify "$build/model" --against "$model"
"$marlin" dequantize "$build/model" -o "$build/plain" --dtype fp32
"$marlin" quantize "$build/plain" -o "$build/again" --recipe uniform:toy/g32 --json
# Weights on the format's grid keep their codes.
"$marlin" verify "$build/again" --against "$build/plain" --max-error 0
