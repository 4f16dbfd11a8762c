// The contract between host and kernels for the products per head of MLA. Compiles as C++20 and as
// Metal Shading Language.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_PARAMETERS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_PARAMETERS_H_

#include "backends/metal/kernels/attention/attend_parameters.h"

namespace marlin {
namespace kernels {

MARLIN_SHARED int kProductOutputs = 64;  ///< Outputs of a threadgroup: 8 per simdgroup.
MARLIN_SHARED int kExpandRows = 32;      ///< Latents of a threadgroup.

struct HeadProductParameters {
  MARLIN_INT64 input_stride;  ///< Strides in elements.
  MARLIN_INT64 input_head_stride;
  MARLIN_INT64 weight_stride;
  MARLIN_INT64 weight_head_stride;
  MARLIN_INT64 out_stride;
  MARLIN_INT64 out_head_stride;
  MARLIN_INT32 rows;
  MARLIN_INT32 inputs;
  MARLIN_INT32 outputs;
  MARLIN_INT32 first_tile;  ///< The launch's first tile of rows.
};

/// Errors of a call of latent_expand: a report {error, a, b, 0}, of which a is
/// the value at place b.
enum LatentError { kLatentsAreRight, kNoLatentPage, kWrongPageTokens };

struct ExpandParameters {
  // The weights' strides in elements: from latent feature or value feature to the next, and from
  // head to head.
  MARLIN_INT64 key_weight_stride;
  MARLIN_INT64 key_weight_head_stride;
  MARLIN_INT64 value_weight_stride;
  MARLIN_INT64 value_weight_head_stride;
  MARLIN_INT64 page_stride;    ///< Elements from page to page of the heads.
  MARLIN_INT64 first_element;  ///< Where the heads begin in a page.
  MARLIN_INT32 heads;
  MARLIN_INT32 latent;      ///< Features that the products add up.
  MARLIN_INT32 rope;        ///< Features of a latent key after them.
  MARLIN_INT32 nope;        ///< Features of a head's key before its RoPE part.
  MARLIN_INT32 value_dim;   ///< Features of a head's value.
  MARLIN_INT32 key_blocks;  ///< Threadgroups for a head's keys; its values follow.
  MARLIN_INT32 row_tiles;   ///< Tiles of rows per page.
  MARLIN_INT32 first_page;
  MARLIN_INT32 checks;  ///< The first threadgroup checks pages and tokens.
  PagedRows pages;      ///< The latents' pages; `rows` is the number of pages of the call.
};

// Indices of the buffers, besides MARLIN_BUFFER_ROW_ERROR.
#define MARLIN_BUFFER_PRODUCT_INPUT 0
#define MARLIN_BUFFER_KEY_WEIGHTS 1
#define MARLIN_BUFFER_VALUE_WEIGHTS 2
#define MARLIN_BUFFER_PRODUCT_OUT 3
#define MARLIN_BUFFER_LATENT_PAGES 4   // i32 [pages]
#define MARLIN_BUFFER_LATENT_TOKENS 5  // i32 [pages]

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ATTENTION_HEAD_PRODUCT_PARAMETERS_H_
