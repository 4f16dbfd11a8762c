# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# A file of the new container, alone or in a directory, is listed, quantized and run like the
# directory that it was made from.
compile metal-marlin

marlin=$build/bin/metal-marlin
model=examples/tiny-qwen3-moe
mkdir -p "$build/plain"
python3 "$addition/make_toy.py" "$model" "$build/plain/model.toy"
perplexity() {
  "$marlin" perplexity "$1" --tokens "$model/validation_tokens.txt" --max-windows 2 --json |
    python3 -c 'import json, sys; print(repr(json.load(sys.stdin)["nll"]))'
}
[ "$(perplexity "$build/plain/model.toy")" = "$(perplexity "$model")" ] ||
  fail "the container's weights give a different perplexity"
count() {
  "$marlin" inspect "$1" --json |
    python3 -c 'import json, sys; print(len(json.load(sys.stdin)["tensors"]))'
}
for path in "$build/plain/model.toy" "$build/plain"; do
  [ "$(count "$path")" = "$(count "$model")" ] || fail "inspect $path lists other tensors"
done
"$marlin" quantize "$build/plain/model.toy" -o "$build/model" --recipe default_moe --json \
  >"$build/quantize.json"
"$marlin" verify "$build/model" --against "$build/plain/model.toy" >/dev/null
# Two files are ambiguous and other content is malformed: both are refused.
cp "$build/plain/model.toy" "$build/plain/other.toy"
if "$marlin" inspect "$build/plain" 2>"$build/refused.log"; then fail "accepted both files"; fi
grep -q "holds both model.toy and other.toy" "$build/refused.log" ||
  fail "$(cat "$build/refused.log")"
echo "other" >"$build/plain/other.toy"
if "$marlin" inspect "$build/plain/other.toy" 2>"$build/refused.log"; then fail "took any bytes"; fi
grep -q "does not begin with TOYC" "$build/refused.log" || fail "$(cat "$build/refused.log")"
