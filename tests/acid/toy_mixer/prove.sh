# Sourced by tests/acid/run.sh inside the changed copy, with the build in $build.
# A model of the new type, with the new mixer, computes what the mixer's definition says, generates,
# and is planned, quantized and calibrated as any other.
compile unit.engine metal-marlin
"$build/tests/unit.engine" toy_mean_test.cc

marlin=$build/bin/metal-marlin
python3 "$addition/make_toy.py" "$build/model"
printf '%s ' 3 1 4 1 5 9 2 6 >"$build/prompt.txt"
"$marlin" generate "$build/model" --tokens "$build/prompt.txt" --max-tokens 16 --json \
  >"$build/generated.json"
"$marlin" quantize "$build/model" -o "$build/plain" --format u8 --group-size 16 --method gptq \
  --calibration-ids "$build/model/text.txt" --json >"$build/quantized.json"
perplexity() {
  "$marlin" perplexity "$1" --tokens "$build/model/text.txt" --json |
    python3 -c 'import json, sys; print(repr(json.load(sys.stdin)["nll"]))'
}
python3 - "$build" "$(perplexity "$build/model")" "$(perplexity "$build/plain")" <<'PROOF'
import json, sys
from pathlib import Path
build = Path(sys.argv[1])
original, quantized = map(float, sys.argv[2:])
assert abs(original - quantized) < 0.02 * original, (original, quantized)
print(json.dumps(json.loads((build / "generated.json").read_text()))[:200])
PROOF
