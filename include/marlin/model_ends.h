// The matrices at the ends of a model.
#pragma once

#include <string>

#pragma GCC visibility push(default)
namespace marlin {

/// The formats of the embedding and the head of a model.
struct ModelEnds {
  struct Matrix {
    std::string format;          ///< "int6/g64", or a type: "bf16". Empty: there is none.
    double bits_per_weight = 0;  ///< Scales included.
  };
  Matrix embedding;
  Matrix head;        ///< The embedding if that is the head, too.
  bool tied = false;  ///< The embedding is the head, too.
};

}  // namespace marlin
#pragma GCC visibility pop
