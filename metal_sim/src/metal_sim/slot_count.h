// Instruction slots of a compiled kernel: what its instructions cost on an Apple GPU, block by
// block, and counters of how often each block runs. Knows LLVM's language as text, and nothing of
// compilers or launches. Slots are not time: they leave out latency, caches and registers.
//
// A slot is one of the 128 that a core has per cycle. Costs:
//   0   what changes no bits or names other ones of a register: casts between widths and to float
//       from half, halves of a word, constant offsets and 32-bit indices of addresses, phi, jumps
//   1   everything that is not listed; all loads or stores of one base within 16 aligned bytes of
//       a block; moves by 16 bits (registers are pairs of 16-bit ones); x << 1, which is x + x
//   4   shifts and rotations, 32-bit multiplications, 64-bit additions and addresses, conversions
//       between integers and floating point
//   8   divisions of floating point and square roots
//   16  64-bit multiplications and shifts
//   32  divisions of integers, which are sequences of instructions
// A call of the simulator (barrier, shuffle, matrix operation) is one instruction.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace metal_sim {

/// A module whose blocks count how often they run.
struct SlotModule {
  /// The module with the variables metal_sim_slot_blocks (i64: how many blocks there are),
  /// metal_sim_slot_costs and metal_sim_slot_runs (i64 of each).
  std::string text;
  std::vector<int64_t> costs;  ///< Slots of a run of each block.
};

/// Functions that the simulator does not instrument cost nothing beyond their calls.
SlotModule CountBlocks(std::string_view module);

/// The variables of a loaded module; null where it has none.
struct SlotVariables {
  const int64_t* blocks = nullptr;
  const int64_t* costs = nullptr;
  int64_t* runs = nullptr;

  /// The slots of all runs since the last call.
  int64_t Take() const;
};

}  // namespace metal_sim
