# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# A directory of the new quant_method is listed and verified, runs and dequantizes to the same bits
# as the directory that it was made from, and is not quantized again.
compile metal-marlin

marlin=$build/bin/metal-marlin
model=examples/tiny-qwen3-moe
"$marlin" quantize "$model" -o "$build/model" --recipe "$addition/recipe.json" --json
python3 "$addition/make_toy.py" "$build/model" "$build/plain"
"$marlin" inspect "$build/plain" --json >"$build/inspect.json"
python3 - "$build/inspect.json" <<'PROOF'
import json, sys
tensors = json.load(open(sys.argv[1]))["tensors"]
assert any(t["format"] == "s4" and "q_proj" in t["name"] for t in tensors), tensors
assert not any("_toy" in t["name"] for t in tensors), tensors
PROOF
perplexity() {
  "$marlin" perplexity "$1" --tokens "$model/validation_tokens.txt" --max-windows 2 --json |
    python3 -c 'import json, sys; print(repr(json.load(sys.stdin)["nll"]))'
}
[ "$(perplexity "$build/plain")" = "$(perplexity "$build/model")" ] ||
  fail "the reader's weights give a different perplexity"
"$marlin" verify "$build/plain" >/dev/null
"$marlin" dequantize "$build/plain" -o "$build/again" --dtype fp32 --json >/dev/null
"$marlin" verify "$build/model" --against "$build/again" --max-error 0 >/dev/null
if "$marlin" quantize "$build/plain" -o "$build/twice" 2>"$build/refused.log"; then
  fail "quantize accepted a directory of the new method"
fi
grep -q "is quantized already, with toy" "$build/refused.log" || fail "$(cat "$build/refused.log")"
