#include "cli/commands/sensitivity_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/printable.h"
#include "base/text_table.h"
#include "marlin/recipe.h"

namespace marlin::cli {
namespace {

constexpr int kBarWidth = 30;

/// Matrices that are shown together.
struct Sum {
  int64_t matrices = 0;
  int64_t weights = 0;
  std::vector<double> kl;  ///< By format.
};

void Add(const Sensitivity::Matrix& matrix, Sum* sum) {
  ++sum->matrices;
  sum->weights += matrix.experts * matrix.k * matrix.n;
  sum->kl.resize(matrix.kl.size());
  for (size_t i = 0; i < matrix.kl.size(); ++i) sum->kl[i] += matrix.kl[i];
}

/// "model.layers.3.mlp.experts.7.up_proj.weight" is 3 and "experts.up_proj": what remains of the
/// name without numbers, the part that all matrices of the layer's half share, and ".weight".
std::pair<int64_t, std::string> PlaceOf(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  int64_t layer = -1;
  if (at != std::string_view::npos) {
    name.remove_prefix(at + kLayers.size());
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), layer);
    name.remove_prefix(static_cast<size_t>(parsed.ptr - name.data()));
  }
  std::string rest;
  for (size_t i = 0; i < name.size();) {
    const size_t dot = std::min(name.find('.', i), name.size());
    const std::string_view part = name.substr(i, dot - i);
    i = dot + 1;
    const bool number = part.find_first_not_of("0123456789") == std::string_view::npos;
    if (number || part == "weight" || part == "self_attn" || part == "mlp") continue;
    if (!rest.empty()) rest += '.';
    rest += part;
  }
  return {layer, rest};
}

std::string Colour(double fraction) {
  // From white to dark red.
  const double f = std::clamp(fraction, 0.0, 1.0);
  const auto channel = [f](double from, double to) {
    return static_cast<int>(std::lround(from + f * (to - from)));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(255, 150), channel(250, 0), channel(240, 20));
}

/// Text in an SVG document.
std::string Escaped(std::string_view text) {
  std::string escaped;
  for (const char c : Printable(text)) {
    if (c == '<') {
      escaped += "&lt;";
    } else if (c == '&') {
      escaped += "&amp;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

/// Cells of one format's map.
using Cells = std::map<std::pair<int64_t, std::string>, Sum>;

/// Cost per weight, as an exponent of 10.
double Level(const Sum& sum, size_t format) {
  return std::log10(std::max(sum.kl[format], 1e-300) / static_cast<double>(sum.weights));
}

/// The rows and columns of the maps, and the range of their colours.
struct Axes {
  std::vector<int64_t> layers;
  std::vector<std::string> projections;  ///< In the order of their first appearance.
  double least = 1e300;
  double most = -1e300;
};

constexpr int kCell = 14;
constexpr int kLeft = 34;
constexpr int kTop = 40;

std::string Map(const Cells& cells, const Axes& axes, size_t format, int left) {
  std::string svg;
  for (const auto& [place, sum] : cells) {
    const auto row =
        std::find(axes.layers.begin(), axes.layers.end(), place.first) - axes.layers.begin();
    const auto column = std::find(axes.projections.begin(), axes.projections.end(), place.second) -
                        axes.projections.begin();
    const double level = Level(sum, format);
    svg += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>layer {}, {}: KL "
        "{:.3g}</title></rect>\n",
        left + column * kCell, kTop + row * kCell, kCell - 1, kCell - 1,
        Colour((level - axes.least) / std::max(axes.most - axes.least, 1e-9)), place.first,
        Escaped(place.second), sum.kl[format]);
  }
  const auto bottom = kTop + static_cast<int>(axes.layers.size()) * kCell;
  for (size_t i = 0; i < axes.projections.size(); ++i) {
    const int x = left + static_cast<int>(i) * kCell + kCell - 4;
    svg += fmt::format(
        "<text x=\"{0}\" y=\"{1}\" transform=\"rotate(-90 {0} {1})\" "
        "text-anchor=\"end\">{2}</text>\n",
        x, bottom + 4, Escaped(axes.projections[i]));
  }
  return svg;
}

}  // namespace

std::string SensitivityTable(const Sensitivity& sensitivity) {
  std::map<std::pair<int64_t, LayerClass>, Sum> sums;
  for (const Sensitivity::Matrix& matrix : sensitivity.matrices) {
    Add(matrix, &sums[{PlaceOf(matrix.name).first, ClassifyTensor(matrix.name)}]);
  }
  double most = 0;
  for (const auto& [place, sum] : sums) most = std::max(most, sum.kl.front());
  std::vector<std::string> header = {"layer", "class", "matrices", "weights"};
  for (const FormatChoice& choice : sensitivity.formats) header.push_back(choice.ToString());
  header.emplace_back("");
  Table table(header, 2);
  for (const auto& [place, sum] : sums) {
    std::vector<std::string> row = {std::to_string(place.first),
                                    std::string(LayerClassName(place.second)),
                                    FormatInteger(sum.matrices), FormatCount(sum.weights)};
    for (const double kl : sum.kl) row.push_back(fmt::format("{:.2e}", kl));
    const auto bar = most > 0 ? std::lround(kBarWidth * sum.kl.front() / most) : 0;
    row.push_back(fmt::format("{:<{}}", std::string(static_cast<size_t>(bar), '#'), kBarWidth));
    table.AddRow(row);
  }
  return fmt::format("KL of {} when the matrices are quantized one at a time, summed\n\n{}",
                     FormatCounted(sensitivity.tokens, "token"), table.ToString());
}

std::string SensitivityPlot(const Sensitivity& sensitivity) {
  Cells cells;
  Axes axes;
  for (const Sensitivity::Matrix& matrix : sensitivity.matrices) {
    const auto place = PlaceOf(matrix.name);
    if (std::find(axes.layers.begin(), axes.layers.end(), place.first) == axes.layers.end()) {
      axes.layers.push_back(place.first);
    }
    if (std::find(axes.projections.begin(), axes.projections.end(), place.second) ==
        axes.projections.end()) {
      axes.projections.push_back(place.second);
    }
    Add(matrix, &cells[place]);
  }
  for (const auto& [place, sum] : cells) {
    for (size_t format = 0; format < sum.kl.size(); ++format) {
      if (sum.kl[format] <= 0.0) continue;
      axes.least = std::min(axes.least, Level(sum, format));
      axes.most = std::max(axes.most, Level(sum, format));
    }
  }
  size_t longest = 0;
  for (const std::string& name : axes.projections) longest = std::max(longest, name.size());
  const int panel = std::max(static_cast<int>(axes.projections.size()) * kCell, 96) + 16;
  const int width = kLeft + panel * static_cast<int>(sensitivity.formats.size());
  const int height =
      kTop + static_cast<int>(axes.layers.size()) * kCell + static_cast<int>(longest) * 7 + 12;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
      "{1}\" font-family=\"sans-serif\" font-size=\"10\">\n<rect width=\"{0}\" height=\"{1}\" "
      "fill=\"#ffffff\"/>\n<text x=\"4\" y=\"14\" font-size=\"12\">{2}: KL per weight, {3:.1e} "
      "(white) to {4:.1e} (red), logarithmic</text>\n",
      width, height, Escaped(sensitivity.model_type), std::pow(10.0, axes.least),
      std::pow(10.0, axes.most));
  for (size_t row = 0; row < axes.layers.size(); ++row) {
    svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kLeft - 4,
                       kTop + static_cast<int>(row) * kCell + 10, axes.layers[row]);
  }
  for (size_t format = 0; format < sensitivity.formats.size(); ++format) {
    const int left = kLeft + static_cast<int>(format) * panel;
    svg += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n", left, kTop - 6,
                       sensitivity.formats[format].ToString());
    svg += Map(cells, axes, format, left);
  }
  return svg + "</svg>\n";
}

}  // namespace marlin::cli
