// moe_sort_experts: one block of selections in one threadgroup. moe_rank_selections, then
// moe_scan_experts, then moe_scatter_selections: any number (sort_experts.h).
#include "backends/metal/kernels/moe/sort_experts.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void moe_sort_experts(device const ExpertMatrix* experts
                                 [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                 device int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                 device int2* tiles [[buffer(MARLIN_BUFFER_TILES)]],
                                 device int* tokens [[buffer(MARLIN_BUFFER_TOKENS)]],
                                 device const int* ids [[buffer(MARLIN_BUFFER_INPUT)]],
                                 device int2* error [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                 device int* slot_of [[buffer(MARLIN_BUFFER_SLOT_OF)]],
                                 device int* ranks [[buffer(MARLIN_BUFFER_RANKS)]],
                                 device int* counts [[buffer(MARLIN_BUFFER_COUNTS)]],
                                 constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                 ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup SortScratch scratch[1];
  const SortMemory memory = {experts, ids, ranks, counts, begin, tiles, tokens, slot_of, error};
  RankSelections(memory, scratch, 0, thread_index, p);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  ScanExperts(memory, scratch, thread_index, p);
  ReportWrongSelection(memory, scratch, thread_index, p);
  threadgroup_barrier(mem_flags::mem_device);
  ScatterSelections(memory, thread_index, kSortThreads, p);
}

[[kernel]] void moe_rank_selections(device const ExpertMatrix* experts
                                    [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                    device const int* ids [[buffer(MARLIN_BUFFER_INPUT)]],
                                    device int* ranks [[buffer(MARLIN_BUFFER_RANKS)]],
                                    device int* counts [[buffer(MARLIN_BUFFER_COUNTS)]],
                                    constant ExpertParameters& p
                                    [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                    uint block [[threadgroup_position_in_grid]],
                                    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup SortScratch scratch[1];
  const SortMemory memory = {experts, ids, ranks, counts};
  RankSelections(memory, scratch, int(block), thread_index, p);
}

[[kernel]] void moe_scan_experts(device const int* ids [[buffer(MARLIN_BUFFER_INPUT)]],
                                 device int2* error [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                 device int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                 device int* counts [[buffer(MARLIN_BUFFER_COUNTS)]],
                                 constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                 ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup SortScratch scratch[1];
  const SortMemory memory = {nullptr, ids,     nullptr, counts, begin,
                             nullptr, nullptr, nullptr, error};
  ScanExperts(memory, scratch, thread_index, p);
  ReportWrongSelection(memory, scratch, thread_index, p);
}

[[kernel]] void moe_scatter_selections(device const ExpertMatrix* experts
                                       [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                       device int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                       device int2* tiles [[buffer(MARLIN_BUFFER_TILES)]],
                                       device int* tokens [[buffer(MARLIN_BUFFER_TOKENS)]],
                                       device const int* ids [[buffer(MARLIN_BUFFER_INPUT)]],
                                       device int* slot_of [[buffer(MARLIN_BUFFER_SLOT_OF)]],
                                       device int* ranks [[buffer(MARLIN_BUFFER_RANKS)]],
                                       device int* counts [[buffer(MARLIN_BUFFER_COUNTS)]],
                                       constant ExpertParameters& p
                                       [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                       uint thread_index [[thread_position_in_grid]],
                                       uint threads [[threads_per_grid]]) {
  const SortMemory memory = {experts, ids, ranks, counts, begin, tiles, tokens, slot_of, nullptr};
  ScatterSelections(memory, int(thread_index), int(threads), p);
}
