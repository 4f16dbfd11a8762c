#include "reference/experts.h"

#include "reference/decoder.h"

namespace marlin::reference {
namespace {

double At(const Product& product, const LinearMap& map, int64_t row, int64_t n) {
  return product.sum[static_cast<size_t>(row * product.n + n)] + map.bias_at(n);
}

}  // namespace

double MlpRun::GateAt(const Mlp& mlp, int64_t row, int64_t i) const {
  return At(gate, mlp.gate, row, i);
}

double MlpRun::UpAt(const Mlp& mlp, int64_t row, int64_t i) const {
  return mlp.up.weights == nullptr ? At(gate, mlp.gate, row, mlp.inner() + i)
                                   : At(up, mlp.up, row, i);
}

double MlpRun::DownAt(const Mlp& mlp, int64_t row, int64_t n) const {
  return At(down, mlp.down, row, n);
}

MlpRun RunMlp(const Mlp& mlp, std::span<const double> x, int64_t rows, const GateOptions& options) {
  MlpRun run;
  run.gate = Multiply(x, rows, *mlp.gate.weights);
  if (mlp.up.weights != nullptr) run.up = Multiply(x, rows, *mlp.up.weights);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < mlp.inner(); ++i) {
      run.inner.push_back(ApplyGate(run.GateAt(mlp, row, i), run.UpAt(mlp, row, i), options));
    }
  }
  run.down = Multiply(run.inner, rows, *mlp.down.weights);
  return run;
}

}  // namespace marlin::reference
