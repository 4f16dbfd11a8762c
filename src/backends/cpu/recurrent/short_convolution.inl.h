// The kernel of ShortConvolutionBlock. Included inside the namespace of a simd_*.h.
#pragma once
#include "backends/cpu/recurrent/recurrent.inl.h"

/// The inputs of the convolution are products. Scratch has the products of some rows at a time,
/// after the kept ones.
class ShortConvolutionRunner {
 public:
  explicit ShortConvolutionRunner(const ShortConvolutionBlock& block)
      : block_(block),
        kept_(block.conv.width - 1),
        padded_(Padded(block.features)),
        scratch_(block.scratch),
        weights_(scratch_.Transpose(block.weights, block.features, block.conv.width, padded_)),
        bias_(scratch_.Take(padded_)),
        sums_(scratch_.Take(padded_)),
        inputs_(scratch_.Take((kept_ + kShortConvolutionRows) * padded_)) {
    for (int64_t c = 0; block.bias != nullptr && c < block.features; ++c) bias_[c] = block.bias[c];
    for (int64_t i = 0; block.before != nullptr && i < kept_; ++i) {
      Widen(block.before + i * block.conv.channels, DType::kF32, block.features, Input(i));
    }
  }

  void Run() {
    for (int64_t first = 0; first < block_.conv.count; first += kShortConvolutionRows) {
      const int64_t rest = block_.conv.count - first;
      const int64_t count = rest < kShortConvolutionRows ? rest : kShortConvolutionRows;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = block_.conv.rows[first + i];
        Multiply(row, Input(kept_ + i));
        Write(i, row);
      }
      // Ascending: what is read has not been written.
      for (int64_t i = 0; i < kept_; ++i) {
        for (int64_t c = 0; c < padded_; c += kLanes) {
          Store(Input(i) + c, Load(Input(count + i) + c));
        }
      }
    }
    for (int64_t i = 0; i < kept_; ++i) {
      Narrow(Input(i), block_.features, DType::kF32, block_.after + i * block_.conv.channels);
    }
  }

 private:
  float* Input(int64_t index) const { return inputs_ + index * padded_; }

  void Multiply(int64_t row, float* out) const {
    const float* const x = block_.values.At(row);
    const float* const gate = block_.in_gates.At(row);
    for (int64_t c = 0; c < block_.features; c += kLanes) {
      const int64_t rest = block_.features - c;
      Store(out + c, Mul(LoadFirst(gate + c, rest), LoadFirst(x + c, rest)));
    }
  }

  /// The result of a row whose input is the one at kept_ + index.
  void Write(int64_t index, int64_t row) {
    const float* const gate = block_.out_gates.At(row);
    for (int64_t c = 0; c < block_.features; c += kLanes) {
      F sum = Load(bias_ + c);
      for (int64_t tap = 0; tap <= kept_; ++tap) {
        sum = Fma(Load(Input(index + tap) + c), Load(weights_ + tap * padded_ + c), sum);
      }
      Store(sums_ + c, Mul(LoadFirst(gate + c, block_.features - c), sum));
    }
    Narrow(sums_, block_.features, block_.out.type, block_.out.At(row));
  }

  const ShortConvolutionBlock& block_;
  int64_t kept_;
  int64_t padded_;
  ScratchVectors scratch_;
  const float* weights_;
  float* bias_;
  float* sums_;
  float* inputs_;
};

void RunShortConvolution(const ShortConvolutionBlock& block) {
  ShortConvolutionRunner(block).Run();
}
