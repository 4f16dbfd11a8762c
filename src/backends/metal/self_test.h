// Probes the undocumented GPU behaviour that the kernels rely on.
#pragma once

#include <string>

#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

struct SelfTest {
  /// simdgroup_matrix has the element layout of kernels::FragmentRow and FragmentColumn.
  bool known_fragments = false;
  bool right_products = false;  ///< simdgroup_matrix multiplies correctly.
  bool right_shuffles = false;  ///< So do shuffles and sums of a simdgroup.
  /// Kernels find memory through an address in a buffer, or the driver gives no addresses.
  bool follows_addresses = false;
  bool keeps_nans = false;        ///< false: the kernels were compiled with fast math.
  bool keeps_order = false;       ///< Sums are not reassociated.
  bool keeps_subnormals = false;  ///< For information: not required.

  /// The reason why kernels must not run; empty: they may.
  std::string Wrong() const;
};

/// One launch of kernels/self_test.metal. Errors: of the driver.
Result<SelfTest> RunSelfTest(Driver& driver);

}  // namespace marlin::metal
