#include "bench/size_table.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/text_table.h"

namespace marlin::bench {
namespace {

using Rows = std::vector<const SizeRow*>;

/// The columns that the rows of one table have values for.
struct SizeColumns {
  bool chain = false;
  bool active = false;
  bool operations = false;
  std::vector<std::string> peers;

  explicit SizeColumns(const Rows& rows) {
    for (const SizeRow* row : rows) {
      chain = chain || row->chain;
      active = active || row->active;
      operations = operations || row->operations > 0;
      for (const BaselineTiming& peer : row->peers) {
        if (std::find(peers.begin(), peers.end(), peer.name) == peers.end()) {
          peers.push_back(peer.name);
        }
      }
    }
  }

  std::vector<std::string> Header(const std::string& size) const {
    std::vector<std::string> header = {"weights"};
    if (!size.empty()) header.insert(header.begin(), size);
    if (active) header.emplace_back("active");
    header.insert(header.end(), {"us", "spread"});
    if (chain) header.emplace_back("us in a chain");
    header.emplace_back("GB/s");
    if (operations) header.emplace_back("TFLOP/s");
    header.emplace_back("roofline");
    for (const std::string& peer : peers) header.push_back(peer + " us");
    return header;
  }
};

std::string Percent(double fraction) { return fmt::format("{:.0f} %", 100 * fraction); }

/// "246.80 (2.00x)": the peer's time, and how many times slower it is, isolated and back-to-back.
std::string PeerCell(const SizeRow& row, const std::string& name) {
  for (const BaselineTiming& peer : row.peers) {
    if (peer.name != name) continue;
    const std::string chain =
        row.chain
            ? fmt::format(", {:.2f}x", peer.chain.value_or(peer.timing).median / row.chain->median)
            : "";
    return fmt::format("{} ({:.2f}x{})", MicrosecondsText(peer.timing.median),
                       peer.timing.median / row.timing.median, chain);
  }
  return {};
}

std::vector<std::string> SizeCells(const SizeRow& row, const SizeColumns& columns, bool sized) {
  const double seconds = row.timing.median;
  std::vector<std::string> cells = {row.weights};
  if (sized) cells.insert(cells.begin(), std::to_string(row.m));
  if (columns.active) cells.push_back(fmt::format("{:.1f}", row.active.value_or(0)));
  cells.push_back(MicrosecondsText(seconds));
  cells.push_back(Percent((row.timing.p90 - row.timing.p10) / seconds));
  if (columns.chain) {
    cells.push_back(row.chain ? fmt::format("{} ({})", MicrosecondsText(row.chain->median),
                                            Percent(row.fraction * seconds / row.chain->median))
                              : "");
  }
  cells.push_back(fmt::format("{:.1f}", row.bytes / seconds * 1e-9));
  if (columns.operations) {
    const double rate = row.operations / seconds * 1e-12;
    cells.push_back(rate < 10 ? fmt::format("{:.3f}", rate) : fmt::format("{:.1f}", rate));
  }
  cells.push_back(Percent(row.fraction));
  for (const std::string& peer : columns.peers) cells.push_back(PeerCell(row, peer));
  return cells;
}

/// A line for each kernel: "marlin_gemm_avx512: fp4_e2m1 m = 1, 4; u4 m = 1".
std::string KernelLines(const Rows& rows, const std::string& size) {
  std::vector<std::pair<std::string, std::string>> lines;  // Kernel, its rows.
  std::string weights;
  for (const SizeRow* row : rows) {
    if (row->kernel.empty()) continue;
    const auto same = [&](const auto& line) { return line.first == row->kernel; };
    auto line = std::find_if(lines.begin(), lines.end(), same);
    if (line == lines.end()) line = lines.insert(line, {row->kernel, ""});
    const std::string m = size.empty() ? "" : fmt::format(" {} = {}", size, row->m);
    // The last weights of this kernel go on with another m.
    const std::string last = fmt::format("{} {} = ", row->weights, size);
    const size_t begin = line->second.rfind("; ");
    const std::string_view tail =
        std::string_view(line->second).substr(begin == std::string::npos ? 0 : begin + 2);
    if (!size.empty() && tail.starts_with(last)) {
      line->second += fmt::format(", {}", row->m);
    } else {
      line->second += (line->second.empty() ? "" : "; ") + row->weights + m;
    }
  }
  std::string text;
  for (const auto& [kernel, where] : lines) text += fmt::format("{}: {}\n", kernel, where);
  return text;
}

std::string OneSizeTable(Rows rows, const std::string& size) {
  const auto by_m = [](const SizeRow* a, const SizeRow* b) { return a->m < b->m; };
  const auto by_weights = [](const SizeRow* a, const SizeRow* b) {
    return a->weights < b->weights;
  };
  const bool sized = !size.empty();
  std::stable_sort(rows.begin(), rows.end(), by_m);
  const SizeColumns columns(rows);
  Table table(columns.Header(size), sized ? 2 : 1);
  for (const SizeRow* row : rows) table.AddRow(SizeCells(*row, columns, sized));
  std::stable_sort(rows.begin(), rows.end(), by_weights);
  const std::string title = rows.front()->matrix;
  const std::string kernels = KernelLines(rows, size);
  return fmt::format("{}{}{}{}{}", title, title.empty() ? "" : "\n\n", table.ToString(),
                     kernels.empty() ? "" : "\n", kernels);
}

}  // namespace

std::string MicrosecondsText(double seconds) {
  const double us = seconds * 1e6;
  return fmt::format("{:.{}f}", us, us < 1000 ? 2 : us < 1e5 ? 1 : 0);
}

std::string SizeTables(std::span<const SizeRow> rows, const std::string& size) {
  std::vector<std::pair<std::string, Rows>> tables;
  for (const SizeRow& row : rows) {
    const auto same = [&](const auto& table) { return table.first == row.matrix; };
    auto table = std::find_if(tables.begin(), tables.end(), same);
    if (table == tables.end()) table = tables.insert(table, {row.matrix, {}});
    table->second.push_back(&row);
  }
  std::string text;
  for (auto& [matrix, of_matrix] : tables) {
    text += (text.empty() ? "" : "\n") + OneSizeTable(std::move(of_matrix), size);
  }
  return text;
}

}  // namespace marlin::bench
