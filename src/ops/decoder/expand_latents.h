// The keys and values of heads from the latents that MLA caches.
#pragma once

#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"

namespace marlin {

/// Writes what kv_b makes of cached latents: page i of `heads` gets the keys (W_k c, the RoPE part)
/// and the values W_v c of the first tokens[i] tokens of page pages[i] of `latents`, for every KV
/// head of `heads`. `latents` has its values in its keys: c is a value. key_weights are [heads, c,
/// key without RoPE], value_weights [heads, v, c], as the weights of HeadProduct; pages and tokens
/// are contiguous i32 [count]. `heads` is one slab with as many tokens a page as `latents`, not of
/// f8_e4m3. Sums are fp32, of products that are exact or fp32, and round once to the type of
/// `heads`. Errors: as in marlin/decoder.h; kInvalidArgument for a page
/// that is not allocated and for more tokens than a page has, reported as for ids.
Status ExpandLatents(const Device& device, const PagedCache& latents, const TensorView& pages,
                     const TensorView& tokens, const TensorView& key_weights,
                     const TensorView& value_weights, const PagedCache& heads,
                     void* stream = nullptr);

}  // namespace marlin
