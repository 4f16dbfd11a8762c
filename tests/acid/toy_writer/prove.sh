# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# export lists the new format, writes weights that decode to the same bits, and says what the format
# cannot hold.
compile metal-marlin

marlin=$build/bin/metal-marlin
model=examples/tiny-qwen3-moe
"$marlin" export --help | grep -q "toy" || fail "export does not list the format"
"$marlin" quantize "$model" -o "$build/model" --recipe "$addition/recipe.json" --json >/dev/null
"$marlin" export "$build/model" -o "$build/again" --to toy --json >/dev/null
"$marlin" dequantize "$build/model" -o "$build/plain" --dtype fp32 --json >/dev/null
python3 "$addition/check_toy.py" "$build/again" "$build/plain"
rm -rf "$build/model"
"$marlin" quantize "$model" -o "$build/model" --recipe uniform:fp4_e2m1/g32 --json >/dev/null
if "$marlin" export "$build/model" -o "$build/refused" --to toy 2>"$build/refused.log"; then
  fail "export wrote weights that the format cannot hold"
fi
grep -q "toy cannot hold fp4_e2m1 with fp16 scales" "$build/refused.log" ||
  fail "$(cat "$build/refused.log")"
