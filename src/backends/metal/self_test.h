// What kernels rely on and no document promises, asked of the GPU itself.
#pragma once

#include <string>

#include "backends/metal/driver.h"

namespace marlin::metal {

struct SelfTest {
  /// The elements of matrix fragments lie where kernels::FragmentRow and FragmentColumn say.
  bool known_fragments = false;
  bool right_products = false;    ///< simdgroup_matrix multiplies.
  bool keeps_nans = false;        ///< Else the kernels were compiled with fast math.
  bool keeps_order = false;       ///< Sums are not reassociated.
  bool keeps_subnormals = false;  ///< Does not matter.

  /// Why no kernel may run; empty: they may.
  std::string Wrong() const;
};

/// One launch of kernels/self_test.metal. Errors: of the driver.
Result<SelfTest> RunSelfTest(Driver& driver);

}  // namespace marlin::metal
