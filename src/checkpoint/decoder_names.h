// The tensors of a decoder under the names that everything else uses.
#pragma once

#include <string>
#include <string_view>

#include "checkpoint/files/tensor_store.h"

namespace marlin {

/// A name without "model." in front where that is one too many, or with it where it lacks one:
/// "layers.0.x" of a base model is "model.layers.0.x". Other names stay.
std::string FullDecoderName(std::string_view name);

/// The name that NameDecoderTensors gave what is stored under `name`, and the inverse for tensors
/// of a multimodal checkpoint's text model, which output directories store under the source's
/// names.
std::string DecoderName(const TensorStore& store, std::string_view name);
std::string StoredName(const TensorStore& store, std::string_view name);

/// Gives the tensors of a decoder of a known type the names of decoder_tensors.h, as transformers
/// does when it loads them: FullDecoderName, unless one of these names is taken. In a directory of
/// this project the names are its modules' and its other tensors', as in the checkpoint
/// that it dequantizes to; `full_names` says that modules are to be renamed, too.
///
/// In a multimodal checkpoint, the text model's tensors get the names of a text model
/// (text_config.h); the store's notes name the other parts.
///
/// Stacks of unquantized experts, as mlx-lm stores them in "switch_mlp", become one matrix per
/// expert under the name that transformers gives it.
///
/// Where config.json ties the head to the embedding table: a head stored in place of the table
/// becomes the table; a copy of the table is dropped; a head with other values is kept, and the
/// config in the store no longer ties it. Scales of KV caches and RoPE frequencies are dropped.
/// What was done is added to the store's notes. Errors: kMalformedFile for names of two tensors,
/// and for more experts than a file may hold tensors.
///
/// Precondition: the tensors are sorted and none is computed; the store has no checksums yet.
Status NameDecoderTensors(TensorStore* store);

}  // namespace marlin
