# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# A model of the new family lists, runs, generates, quantizes and exports like the model of another
# family that it was made from, whose tensors and keys have other names.
compile metal-marlin

marlin=$build/bin/metal-marlin
model=examples/tiny-qwen3-moe
python3 "$addition/make_toy.py" "$model" "$build/plain"
perplexity() {
  "$marlin" perplexity "$1" --tokens "$model/validation_tokens.txt" --max-windows 2 --json |
    python3 -c 'import json, sys; print(repr(json.load(sys.stdin)["nll"]))'
}
tokens() {
  head -n 1 "$model/validation_tokens.txt" | cut -d ' ' -f 1-16 |
    "$marlin" generate "$1" --tokens - --max-tokens 16 --temperature 0 --ignore-eos --json |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["token_ids"])'
}
[ "$(perplexity "$build/plain")" = "$(perplexity "$model")" ] ||
  fail "the family's decoder gives a different perplexity"
[ "$(tokens "$build/plain")" = "$(tokens "$model")" ] ||
  fail "the family's decoder generates different tokens"
"$marlin" plan "$build/plain" --json >/dev/null
for recipe in default_moe uniform:u4/g32; do
  rm -rf "$build/model" "$build/again"
  "$marlin" quantize "$build/plain" -o "$build/model" --recipe "$recipe" --json >/dev/null
  "$marlin" quantize "$model" -o "$build/again" --recipe "$recipe" --json >/dev/null
  "$marlin" verify "$build/model" --against "$build/plain" >/dev/null
  [ "$(perplexity "$build/model")" = "$(perplexity "$build/again")" ] ||
    fail "$recipe chooses other formats for the family's tensors"
  [ "$(tokens "$build/model")" = "$(tokens "$build/again")" ] ||
    fail "the quantized model generates different tokens"
done
# Calibration runs the new decoder, too.
rm -rf "$build/model"
"$marlin" quantize "$build/plain" -o "$build/model" --recipe uniform:u4/g32 --method gptq \
  --calibration-ids "$model/validation_tokens.txt" --calibration-tokens 2048 --json \
  >"$build/quantize.json"
"$marlin" verify "$build/model" --against "$build/plain" >/dev/null
"$marlin" export "$build/model" -o "$build/exported" --to compressed-tensors --json >/dev/null
[ "$(perplexity "$build/exported")" = "$(perplexity "$build/model")" ] ||
  fail "the exported model gives a different perplexity"
# A key that the family does not read and that may change results is refused.
sed -i 's/"vocab_size"/"sliding_window": 16, "vocab_size"/' "$build/plain/config.json"
if "$marlin" perplexity "$build/plain" --tokens "$model/validation_tokens.txt" \
  2>"$build/refused.log"; then
  fail "a key that the family does not read was accepted"
fi
grep -q "sliding_window: 16 is not understood in a toy" "$build/refused.log" ||
  fail "$(cat "$build/refused.log")"
